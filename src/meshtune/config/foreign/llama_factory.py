"""LLaMA-Factory's arguments (v0): every key, its default, and what it comes to here."""

from __future__ import annotations

from meshtune.config.foreign.rules import (
    ABSENT,
    Table,
    anything,
    direct,
    flag,
    idle,
    integer,
    names,
    number,
    part,
    refused,
    refused_keys,
    text,
)
from meshtune.config.foreign.trainer import LOADER, LOGGING, MEMORY, MESH, TRAINER

NAME = "LLaMA-Factory"
KERNELS = "kernels are chosen here by what the device has; compute.attention can force one"
IMAGES = "it concerns images, video or sound, and text alone is trained here"
NOT_THIS_METHOD = "another finetuning_type does not read it"
NOT_THIS_STAGE = "another stage does not read it"
PPO = "there is no online reinforcement learning from a recipe here yet"
NO_ADAPTER = "a reference or reward model with adapters is not read"
NUMBERS = "it changes how numbers are rounded; compute.precision: mixed keeps what is trained in float32"

LORA: Table = {
    "lora_rank": part("method.rank", integer, 8, NOT_THIS_METHOD),
    "lora_alpha": part("method.alpha", integer, ABSENT, NOT_THIS_METHOD),
    "lora_dropout": part("method.dropout", number, 0.0, NOT_THIS_METHOD),
    "lora_target": part("method.targets", names, "all", NOT_THIS_METHOD),
    "additional_target": part("method.train_modules", names, ABSENT, NOT_THIS_METHOD),
    "use_rslora": part("method.rslora", flag, False, NOT_THIS_METHOD),
    "use_dora": part("method.adapter", flag, False, NOT_THIS_METHOD),
    "loraplus_lr_ratio": part("optimizer.lora_plus_ratio", number, ABSENT, NOT_THIS_METHOD),
    "loraplus_lr_embedding": part(
        "optimizer.lora_plus_embedding_rate", number, 1e-6, "only loraplus_lr_ratio with additional_target reads it"
    ),
    "pissa_init": part("method.adapter", flag, False, NOT_THIS_METHOD),
    "pissa_iter": part("method.svd_iterations", integer, 16, "without pissa_init"),
    "pissa_convert": part("method.pissa_convert", flag, False, "without pissa_init"),
    "create_new_adapter": part("model.merge_adapters", flag, False, "without adapter_name_or_path"),
    "oft_block_size": part("method.oft_block_size", integer, 32, NOT_THIS_METHOD),
    "oft_rank": part("method.oft_block_size", integer, 0, "0: oft_block_size says the size of a block"),
    "oft_target": part("method.targets", names, "all", NOT_THIS_METHOD),
    "module_dropout": refused("oft has no dropout here", "leave it out", (0, 0.0)),
}

OPTIMIZER: Table = {
    "use_galore": part("optimizer.name", flag, False),
    "galore_target": part("optimizer.name", names, "all", "without use_galore"),
    "galore_rank": part("optimizer.rank", integer, 16, "without use_galore"),
    "galore_update_interval": part("optimizer.update_gap", integer, 200, "without use_galore"),
    "galore_scale": part("optimizer.scale", number, 2.0, "without use_galore"),
    "galore_proj_type": refused("the projection is chosen by the shape of a matrix", "use std", ("std",)),
    "galore_layerwise": part("optimizer.in_backward", flag, False, "without use_galore"),
    "use_apollo": part("optimizer.name", flag, False),
    "apollo_target": part("optimizer.name", names, "all", "without use_apollo"),
    "apollo_rank": part("optimizer.rank", integer, 16, "without use_apollo"),
    "apollo_update_interval": part("optimizer.update_gap", integer, 200, "without use_apollo"),
    "apollo_scale": part("optimizer.scale", number, 32.0, "without use_apollo"),
    "apollo_proj": refused("apollo projects at random here", "use random", ("random",)),
    "apollo_proj_type": refused("the projection is chosen by the shape of a matrix", "use std", ("std",)),
    "apollo_scale_type": part("optimizer.scaling", text, "channel", "without use_apollo"),
    "apollo_layerwise": part("optimizer.in_backward", flag, False, "without use_apollo"),
    "apollo_scale_front": refused("the norm's growth is limited before the scale here", "leave it out"),
    "use_badam": part("optimizer.name", flag, False),
    "badam_mode": refused("badam goes layer by layer here", "use layer", ("layer",)),
    "badam_start_block": refused("badam begins with the first block of its order", "leave it out", ()),
    "badam_switch_mode": part("optimizer.block_order", text, "ascending", "without use_badam"),
    "badam_switch_interval": part("optimizer.switch_every", integer, 50, "without use_badam"),
    **idle("only badam_mode: ratio reads it", "badam_update_ratio badam_mask_mode"),
    **idle(LOGGING, "badam_verbose"),
    "use_adam_mini": part("optimizer.name", flag, False),
    "use_muon": part("optimizer.name", flag, False),
}

DATA: Table = {
    "template": part("model.chat_template", text, ABSENT, "plain text has no template"),
    "dataset": part("data.train", names),
    "eval_dataset": part("data.validation", names, ABSENT, "there is nothing to evaluate"),
    "dataset_dir": part("data.registry", anything, "data"),
    "cutoff_len": part("data.max_length", integer, 2048),
    "train_on_prompt": part("data.train_on_prompt", flag, False, NOT_THIS_STAGE),
    "mask_history": part("data.last_turn_only", flag, False, NOT_THIS_STAGE),
    "streaming": part("data.streaming", flag, False),
    "buffer_size": part("data.streaming", integer, 16384, "without streaming nothing is drawn from a buffer"),
    "mix_strategy": part("data.mixing", text, "concat"),
    "interleave_probs": part("data.train.N.weight", names, ABSENT, "mix_strategy: concat does not read it"),
    "max_samples": part("data.train.N.cap", integer),
    "val_size": part("data.validation", number, 0.0, "0: nothing is held out"),
    "packing": part("data.packing", flag),
    "neat_packing": part("data.packing", flag, False, "packing: false, or nothing is packed"),
    "default_system": part("data.system", text),
    "tool_format": part("model.chat_template", text, ABSENT, "the template's own form of tools is used"),
    "enable_thinking": part("model.chat_template", flag, True, "the template's own default"),
    "preserve_thinking": part("model.chat_template", flag, False, "the template's own default"),
    "tokenized_path": part("data.train", text),
    "ignore_pad_token_for_loss": refused("padding never has a loss here", "use true", (True,)),
    "eval_on_each_dataset": part("data.validation", flag, False, "false: one number for all validation data"),
    "disable_shuffling": part("data.shuffle", flag, False, "false: data are shuffled"),
    **idle(
        LOADER,
        "overwrite_cache preprocessing_batch_size preprocessing_num_workers data_shared_file_system cache_dir",
    ),
    **idle(IMAGES, "media_dir"),
    "eval_num_beams": refused("answers are not searched by beams here", "use 1", (1,)),
}

MODEL: Table = {
    "model_name_or_path": part("model.path", text),
    "model_revision": part("model.revision", text, "main", "main: the default"),
    "adapter_name_or_path": part("model.adapter", names),
    "adapter_folder": part("model.adapter", text, ABSENT, "without adapter_name_or_path"),
    "resize_vocab": part("model.pad_vocab_to", flag, False, "no tokens are added"),
    "add_tokens": part("model.new_tokens", names),
    "add_special_tokens": part("model.new_special_tokens", names),
    "new_special_tokens_config": refused(
        "rows of new tokens begin at the mean of the others, not at descriptions", "use add_special_tokens", ()
    ),
    "init_special_tokens": refused(
        "rows of new tokens begin at the mean of the others", "use noise_init", ("noise_init",)
    ),
    "quantization_bit": part("quantize.format", integer),
    "quantization_method": part("quantize.format", text, "bnb", "without quantization_bit"),
    "quantization_type": part("quantize.format", text, "nf4", "without quantization_bit: 4"),
    "double_quantization": part("quantize.double", flag, True, "without quantization_bit: 4"),
    "moe_aux_loss_coef": direct("model.router_aux_loss", number),
    "rope_scaling": refused(
        "the positions of a model are those of its config.json", "set rope_scaling in the model's config.json", ()
    ),
    "shift_attn": refused("there is no shifted sparse attention here", "leave it out: exact attention fits as far"),
    "mixture_of_depths": refused("there is no mixture of depths here", "leave it out", ()),
    "split_special_tokens": refused("special tokens in texts are tokens here", "leave it out"),
    "train_from_scratch": refused("a run starts from weights", "save a random model with transformers first"),
    "use_fast_tokenizer": part("model.tokenizer", flag, True, "tokenizers are fast ones here"),
    "use_kt": refused("there is no KTransformers backend here", "leave it out: experts are trained on the devices"),
    **idle(
        "only use_kt reads it",
        "kt_config kt_cpu_activation kt_weight_path kt_non_expert_weight_path kt_expert_checkpoint_path "
        "kt_use_lora_experts kt_lora_expert_num kt_lora_expert_intermediate_size",
    ),
    "trust_remote_code": part("model.path", flag, False, "no code of a repository is ever run; families are built in"),
    **idle(KERNELS, "flash_attn use_unsloth enable_liger_kernel use_v1_kernels"),
    **idle(
        MEMORY,
        "use_unsloth_gc disable_gradient_checkpointing use_reentrant_gc low_cpu_mem_usage offload_folder "
        "quantization_device_map device_map",
    ),
    **idle(NUMBERS, "upcast_layernorm upcast_lmhead_output"),
    **idle("tokens are those of huggingface_hub: HF_TOKEN", "hf_hub_token ms_hub_token om_hub_token"),
    **idle(LOGGING, "print_param_status"),
    **idle(
        IMAGES,
        "image_max_pixels image_min_pixels image_do_pan_and_scan crop_to_patches video_max_pixels video_min_pixels "
        "video_fps video_maxlen use_audio_in_video audio_sampling_rate",
    ),
}

STAGE: Table = {
    "stage": part("stage", text, "sft"),
    "finetuning_type": part("method", text, "lora"),
    "pure_bf16": part("compute.precision", flag, False),
    "pref_beta": part("stage.beta", number, 0.1, NOT_THIS_STAGE),
    "pref_loss": part("stage.loss", text, "sigmoid", NOT_THIS_STAGE),
    "pref_ftx": part("stage.sft_weight", number, 0.0, NOT_THIS_STAGE),
    "pref_bco_weight": refused("there is no binary classifier optimisation here", "leave it out", (0, 0.0)),
    "dpo_label_smoothing": part("stage.label_smoothing", number, 0.0, NOT_THIS_STAGE),
    "ld_alpha": part("stage.ld_alpha", number, ABSENT, NOT_THIS_STAGE),
    "simpo_gamma": part("stage.gamma", number, 0.5, NOT_THIS_STAGE),
    "kto_chosen_weight": part("stage.desirable_weight", number, 1.0, NOT_THIS_STAGE),
    "kto_rejected_weight": part("stage.undesirable_weight", number, 1.0, NOT_THIS_STAGE),
    "ref_model": part("stage.reference", text, ABSENT, NOT_THIS_STAGE),
    **refused_keys(NO_ADAPTER, "merge it first", "ref_model_adapters reward_model_adapters"),
    **refused_keys("a reference is read as it is", "leave it out", "ref_model_quantization_bit"),
    **idle(
        PPO,
        "ppo_buffer_size ppo_epochs ppo_score_norm ppo_target ppo_whiten_rewards reward_model reward_model_type "
        "reward_model_quantization_bit",
    ),
    "freeze_trainable_layers": part("method.last_layers", integer, 2, NOT_THIS_METHOD),
    "freeze_trainable_modules": part("method.modules", names, "all", NOT_THIS_METHOD),
    "freeze_extra_modules": part("method.modules", names, ABSENT, NOT_THIS_METHOD),
    "use_llama_pro": part("method.blocks", flag, False),
    "use_dft_loss": part("stage.loss", flag, False, NOT_THIS_STAGE),
    **refused_keys("there is no such loss here", "leave it out, or use use_dft_loss", "use_asft_loss use_eaft_loss"),
    **idle("without the loss that reads it", "asft_alpha eaft_alpha"),
    **refused_keys("there is no training in fp8 here", "leave it out: bf16 (compute.precision: mixed)", "fp8"),
    **idle("only fp8 reads it", "fp8_backend fp8_enable_fsdp_float8_all_gather"),
    "freeze_vision_tower": refused("vision towers stay as they are here", "use true", (True,)),
    "freeze_multi_modal_projector": refused("projectors stay as they are here", "use true", (True,)),
    "freeze_language_model": refused("the language model is what is trained here", "leave it out"),
    "early_stopping_steps": part("eval.early_stopping", integer),
    **idle(
        LOGGING,
        "plot_loss compute_accuracy include_effective_tokens_per_second use_swanlab swanlab_project swanlab_workspace "
        "swanlab_run_name swanlab_mode swanlab_api_key swanlab_logdir swanlab_lark_webhook_url swanlab_lark_secret "
        "enable_torch_profiler profiler_output_dir profiler_wait_steps profiler_warmup_steps profiler_active_steps "
        "profiler_repeat profiler_record_shapes profiler_profile_memory profiler_with_stack profile_modules",
    ),
    "do_train": part("stage", flag, ABSENT, "which verb is meant follows from the other keys"),
    "do_predict": part("stage", flag, ABSENT, "which verb is meant follows from the other keys"),
    "predict_with_generate": part("stage", flag, ABSENT, "only predictions are generated"),
}

MEGATRON = "Megatron's layouts are not needed: devices are shared out by mesh (docs/meshes.md)"
SHARING = (
    "tensor_model_parallel_size",
    "pipeline_model_parallel_size",
    "context_parallel_size",
    "hyper_parallel_cp_size",
)
PARALLEL: Table = {
    **{key: part("train.batch_size", integer, 1, "1: a row is on one device") for key in SHARING},
    **idle(MESH, "ray_num_workers ray_init_kwargs master_addr master_port use_hyper_parallel"),
    **idle(
        MEGATRON,
        "use_mca use_megatron_bridge megatron_bridge_args hyper_parallel_args "
        "expert_model_parallel_size "
        "virtual_pipeline_model_parallel_size sequence_parallel recompute_granularity recompute_method "
        "recompute_num_layers account_for_embedding_in_pipeline_split account_for_loss_in_pipeline_split "
        "bias_activation_fusion apply_rope_fusion masked_softmax_fusion cross_entropy_loss_fusion moe_grouped_gemm "
        "moe_token_dispatcher_type calculate_per_token_loss use_distributed_optimizer overlap_param_gather "
        "overlap_grad_reduce use_packed_sequences mixed_precision megatron_pretrained_checkpoint export_hf_on_finish "
        "extra_config",
    ),
}

GENERATE: Table = {
    **idle(
        "only answers are generated with it",
        "do_sample temperature top_p top_k num_beams max_length max_new_tokens repetition_penalty length_penalty "
        "skip_special_tokens generation_max_length generation_num_beams generation_config sortish_sampler",
    ),
    **idle(
        "only inference reads it",
        "infer_backend infer_dtype use_kv_cache vllm_maxlen vllm_gpu_util vllm_enforce_eager vllm_max_lora_rank "
        "vllm_config sglang_maxlen sglang_mem_fraction sglang_tp_size sglang_config sglang_lora_backend",
    ),
    **idle(
        "only an export reads it",
        "export_dir export_size export_device export_quantization_bit export_quantization_dataset "
        "export_quantization_nsamples export_quantization_maxlen export_legacy_format export_hub_model_id",
    ),
}

TRAIN: Table = {**TRAINER, **MODEL, **DATA, **STAGE, **LORA, **OPTIMIZER, **PARALLEL, **GENERATE}
