"""axolotl's keys: every one, its default, and what it comes to here."""

from __future__ import annotations

from meshtune.config.foreign.rules import (
    ABSENT,
    Table,
    anything,
    direct,
    entries,
    flag,
    idle,
    integer,
    mapping,
    name_or_names,
    names,
    number,
    part,
    refused,
    refused_keys,
    sources,
    text,
)
from meshtune.config.foreign.trainer import LOADER, LOGGING, MEMORY, MESH, UPLOAD

NAME = "axolotl"
NO_ADAPTER = "without adapter: lora or qlora"
NO_STAGE = "another rl does not read it"
KERNELS = "kernels are chosen here by what the device has; compute.attention can force one"
NO_FP8 = "there is no training in fp8, nvfp4 or mxfp4 here"
OWN_CODE = "code of the model's repository is never run; families are built in"
READ_AS_IS = "config and tokenizer are read as they are published"
ONLINE = "online reinforcement learning is not in recipes here"
EXPERTS = "how experts are computed is chosen here by the device"

MODEL: Table = {
    "base_model": part("model.path", text),
    "revision_of_model": direct("model.revision", text),
    "tokenizer_config": direct("model.tokenizer", text),
    "chat_template": part("model.chat_template", text),
    "chat_template_jinja": part("model.chat_template", text, ABSENT, "only chat_template: jinja reads it"),
    "chat_template_kwargs": refused("templates have no further variables in training here", "leave it out", ({},)),
    "eot_tokens": part("model.chat_template", entries),
    "default_system_message": direct("data.system", text),
    "special_tokens": part("model.tokenizer", mapping),
    "tokens": part("model.new_tokens", anything),
    "added_tokens_overrides": refused("tokens are not renamed here", "save such a tokenizer first", ()),
    "resize_token_embeddings_to_32x": part("model.pad_vocab_to", flag, False),
    "model_config": part("model", mapping),
    "overrides_of_model_config": part("model", mapping),
    "reinit_weights": refused("a run starts from weights", "save a random model with transformers first"),
    "embedding_lr": refused("all parameters have one rate here, but for LoRA+", "leave it out", ()),
    "embedding_lr_scale": refused("all parameters have one rate here, but for LoRA+", "leave it out", ()),
    "lr_groups": refused("all parameters have one rate here, but for LoRA+", "leave it out", ([],)),
    "unfrozen_parameters": part("method.modules", names, ABSENT, "all parameters are trained, or adapters"),
    "model_quantization_config": part("quantize", text),
    "model_quantization_config_kwargs": part("quantize", mapping, ABSENT, "without model_quantization_config"),
    "type_of_model": part("model.path", text, ABSENT, "the family is that of config.json"),
    "model_type": part("model.path", text, ABSENT, "the family is that of config.json"),
    "gptq": part("model.path", flag, False, "codes in which a model is published are read as they are"),
    **idle(
        READ_AS_IS,
        "base_model_config cls_model_config tokenizer_use_fast tokenizer_legacy tokenizer_use_mistral_common "
        "tokenizer_type tokenizer_save_jinja_files gptq_groupsize gptq_model_v1 gptq_disable_exllama "
        "is_falcon_derived_model is_llama_derived_model is_mistral_derived_model is_qwen_derived_model strict "
        "overrides_of_model_kwargs base_model_ignore_patterns fix_untrained_tokens mean_resizing_embeddings "
        "shrink_embeddings embeddings_skip_upcast",
    ),
    **idle(OWN_CODE, "trust_remote_code"),
    **refused_keys(
        "it trains on images or sound, and text alone is trained here",
        "leave it out",
        "processor_type image_size processor_kwargs role_boundaries",
    ),
    **idle("it concerns images", "image_resize_algorithm freeze_mm_modules"),
    **refused_keys("there are no ternary weights here", "leave it out", "use_onebitllms"),
    "rope_scaling": refused("the positions of a model are those of its config.json", "set them there", ()),
    **refused_keys("there is no such attention here", "leave it out", "s2_attention scaling_softmax"),
    **idle("only scaling_softmax reads it", "scaling_softmax_factor scaling_softmax_bias"),
    **refused_keys("the model is used as it is published", "leave it out", "llama4_linearized_experts use_pose"),
    **idle("only use_pose reads it", "pose_split_on_token_ids pose_max_context_len pose_num_chunks"),
}

ADAPTER: Table = {
    "adapter": part("method", text),
    "lora_model_dir": part("model.adapter", text, ABSENT, NO_ADAPTER),
    "lora_r": part("method.rank", integer, 8, NO_ADAPTER),
    "lora_alpha": part("method.alpha", number, 8, NO_ADAPTER),
    "lora_dropout": part("method.dropout", number, 0.0, NO_ADAPTER),
    "lora_target_modules": part("method.targets", name_or_names, ABSENT, NO_ADAPTER),
    "lora_target_linear": part("method.targets", flag, ABSENT, NO_ADAPTER),
    "lora_target_parameters": part("method.targets", name_or_names, ABSENT, NO_ADAPTER),
    "lora_modules_to_save": part("method.train_modules", names, ABSENT, NO_ADAPTER),
    "lora_rank_pattern": refused("all adapters have one rank here", "leave it out", ({},)),
    "lora_alpha_pattern": refused("all adapters have one alpha here", "leave it out", ({},)),
    "lora_fan_in_fan_out": part("method", flag, False, "how a weight lies in its file is known by its family"),
    "peft": part("method.adapter", mapping, ABSENT, NO_ADAPTER),
    "peft_use_dora": part("method.adapter", flag, False, NO_ADAPTER),
    "peft_use_rslora": part("method.rslora", flag, False, NO_ADAPTER),
    "peft_init_lora_weights": part("method.adapter", anything, ABSENT, NO_ADAPTER),
    "peft_layers_to_transform": refused("name layers in lora_target_modules", "such as layers.3.mlp.up_proj", ([],)),
    "peft_layers_pattern": refused("name layers in lora_target_modules", "such as layers.3.mlp.up_proj", ([],)),
    "peft_layer_replication": refused("layers are not repeated", "use method: llama_pro", ([],)),
    "peft_trainable_token_indices": refused("single rows are trained by adding tokens", "use tokens", ([],)),
    **idle("a tied head is one weight here", "peft_ensure_weight_tying"),
    **idle("adapters are kept in float32 here", "peft_autocast_adapter_dtype"),
    "loraplus_lr_ratio": part("optimizer.lora_plus_ratio", number, ABSENT, NO_ADAPTER),
    "loraplus_lr_embedding": part("optimizer.lora_plus_embedding_rate", number, 1e-6, "without loraplus_lr_ratio"),
    "load_in_4bit": part("quantize.format", flag, False, NO_ADAPTER),
    "load_in_8bit": part("quantize.format", flag, False, NO_ADAPTER),
    "bnb_config_kwargs": part("quantize.double", mapping, ABSENT, "without load_in_4bit"),
    "quantize_moe_experts": part("quantize", flag, False, "routed experts are quantised with the base here"),
    **idle("`meshtune export --merge` does that", "merge_lora merge_method lora_on_cpu qlora_sharded_model_loading"),
    **refused_keys("there is no such method here", "leave it out", "relora mora lisa_n_layers dense_mixer spectrum"),
    **idle(
        "only the method that is refused reads it",
        "relora_prune_ratio relora_prune_method relora_cpu_offload lisa_step_interval lisa_layers_attribute "
        "jagged_restart_warmup_steps jagged_restart_anneal_steps spectrum_top_fraction spectrum_model_name",
    ),
    "jagged_restart_steps": refused("schedules have no restarts here", "leave it out", ()),
}

NO_BUFFER = "no stream is drawn from a buffer"

STAGE: Table = {
    "rl": part("stage", text),
    "rl_beta": part("stage.beta", number, 0.1, NO_STAGE),
    "dpo_beta": part("stage.beta", number, ABSENT, NO_STAGE),
    "orpo_alpha": part("stage.beta", number, 0.1, NO_STAGE),
    "simpo_gamma": part("stage.gamma", number, 0.5, NO_STAGE),
    "cpo_alpha": part("stage.sft_weight", number, 1.0, NO_STAGE),
    "dpo_label_smoothing": part("stage.label_smoothing", number, 0.0, NO_STAGE),
    "dpo_loss_type": part("stage.loss", anything, ABSENT, NO_STAGE),
    "kto_desirable_weight": part("stage.desirable_weight", number, 1.0, NO_STAGE),
    "kto_undesirable_weight": part("stage.undesirable_weight", number, 1.0, NO_STAGE),
    "rpo_alpha": part("stage.sft_weight", number, ABSENT, NO_STAGE),
    "reward_model": part("stage", flag, False),
    "num_labels": part("stage", integer, ABSENT, "a reward model has one score"),
    "center_rewards_coefficient": part("stage.centre", number, ABSENT, NO_STAGE),
    "precompute_ref_log_probs": part("stage.reference", flag, False, "auto: chosen by the method"),
    **refused_keys(
        "there is no such loss or trainer here",
        "leave it out",
        "process_reward_model dpo_use_weighting "
        "dpo_norm_loss use_eaft ebft diffusion kd_trainer hatchery nemo_gym_enabled trainer_cls",
    ),
    "dpo_loss_weights": refused("one loss is computed", "leave it out", ([], [1.0])),
    **idle(
        "only the trainer that is refused reads it",
        "eaft_alpha eaft_k kd_ce_alpha kd_alpha kd_temperature kd_beta "
        "kd_normalize_topk kd_online_server_base_url kd_online_topk kd_online_server kd_online_timeout "
        "kd_temperature_min nemo_gym_dir nemo_gym_auto_clone nemo_gym_config_paths nemo_gym_head_port "
        "nemo_gym_server_timeout nemo_gym_verify_timeout nemo_gym_run_timeout nemo_gym_datasets nemo_gym_auto_start "
        "nemo_gym_model_name nemo_gym_multi_turn nemo_gym_max_turns trl vllm",
    ),
    **idle(MEMORY, "dpo_use_logits_to_keep dpo_use_liger_kernel dpo_padding_free"),
    **idle(LOGGING, "dpo_generate_during_eval"),
}

DATA: Table = {
    "datasets": part("data.train", entries),
    "test_datasets": part("data.validation", entries),
    "pretraining_dataset": part("data.train", sources),
    "val_set_size": part("data.validation", number, 0.0, "0: nothing is held out"),
    "sequence_len": part("data.max_length", integer, 512),
    "excess_length_strategy": part("data.overlong", text, "drop"),
    "sample_packing": part("data.packing", flag, False),
    "train_on_inputs": part("data.train_on_prompt", flag, False),
    "streaming": part("data.streaming", flag),
    "streaming_multipack_buffer_size": part("data.streaming", integer, 10000, NO_BUFFER),
    "pretrain_multipack_buffer_size": part("data.streaming", integer, ABSENT, NO_BUFFER),
    "shuffle_merged_datasets": part("data.shuffle", flag, True, "the trainer draws records at random in any case"),
    "shuffle_before_merging_datasets": part(
        "data.shuffle", flag, False, "data are shuffled together, or there is one data set"
    ),
    "min_sample_len": refused("short documents are trained on too", "remove them from the data", (0, 1, 2)),
    "curriculum_sampling": part("data.shuffle", flag, False, "the trainer draws records at random"),
    "group_by_length": refused("rows are not grouped by length", "leave it out: data are shuffled"),
    "dataset_exact_deduplication": refused("records are used as they are", "remove duplicates from the data"),
    "dataset_shard_num": refused("a source is used whole, or its first records (cap)", "use cap", ()),
    "dataset_shard_idx": refused("a source is used whole, or its first records (cap)", "use cap", ()),
    "max_prompt_len": part("data.max_length", integer, ABSENT, "pairs are cut by sequence_len alone"),
    "eval_sequence_len": part("data.max_length", integer, ABSENT, "validation rows are as long as training rows"),
    **idle(
        "rows of packed documents: each has an attention of its own, whatever their number",
        "eval_sample_packing pad_to_sequence_len pad_to_multiple_of sample_packing_group_size sample_packing_bin_size "
        "sample_packing_sequentially sample_packing_mp_start_method sample_packing_eff_est multipack_real_batches "
        "batch_flattening pretrain_multipack_attn pretraining_sample_concatenation "
        "sample_packing_seq_len_multiplier max_packed_sequence_len total_num_tokens "
        "total_supervised_tokens",
    ),
    **idle(
        LOADER,
        "dataset_prepared_path skip_prepare_dataset dataset_processes dataset_num_proc dataset_keep_in_memory "
        "num_dataset_shards_to_save dataloader_pin_memory dataloader_num_workers dataloader_prefetch_factor "
        "dataloader_drop_last remove_unused_columns is_preprocess preprocess_iterable",
    ),
}

TRAIN: Table = {
    "output_dir": direct("output", text, "./model-out"),
    "micro_batch_size": part("train.micro_batch", integer, 1),
    "gradient_accumulation_steps": part("train.batch_size", integer, 1),
    "batch_size": part("train.batch_size", integer, ABSENT, "micro_batch_size and gradient_accumulation_steps say it"),
    "num_epochs": part("train.epochs", number, 1.0, "max_steps says how long the run is"),
    "max_steps": part("train.steps", integer),
    "learning_rate": direct("optimizer.learning_rate", number),
    "lr_scheduler": part("optimizer.schedule", text, "cosine"),
    "lr_scheduler_kwargs": part("optimizer.min_lr_ratio", mapping),
    "cosine_min_lr_ratio": part("optimizer.min_lr_ratio", number, ABSENT, "only cosine reads it"),
    "cosine_constant_lr_ratio": refused("a cosine goes on to the end of the run", "leave it out", (0, 0.0)),
    "lr_quadratic_warmup": refused("warm-up is linear", "leave it out"),
    "lr_div_factor": part("optimizer.schedule", number, ABSENT, "only one_cycle reads it"),
    "warmup_steps": part("optimizer.warmup_steps", number),
    "warmup_ratio": part("optimizer.warmup_ratio", number, ABSENT, "warmup_steps is given"),
    "optimizer": part("optimizer.name", text, "adamw_torch_fused"),
    "optim_args": refused("optimizers take no free-form arguments here", "write them as keys", ({},)),
    "optim_target_modules": refused("galore and apollo project all matrices here", "leave it out", ()),
    "weight_decay": direct("optimizer.weight_decay", number, 0.0),
    "adam_beta1": part("optimizer.beta1", number, 0.9, "the optimizer has no such setting"),
    "adam_beta2": part("optimizer.beta2", number, 0.999, "the optimizer has no such setting"),
    "adam_epsilon": part("optimizer.eps", number, 1e-8, "the optimizer has no such setting"),
    **idle("only the optimizer came_pytorch reads it", "adam_epsilon2 adam_beta3"),
    **idle("only the optimizer dion reads it", "dion_lr dion_momentum dion_rank_fraction dion_rank_multiple_of"),
    **idle(
        "only q_galore reads it",
        "qgalore_rank qgalore_update_proj_gap qgalore_scale qgalore_proj_type "
        "qgalore_proj_quant qgalore_proj_bits qgalore_proj_group_size qgalore_cos_threshold qgalore_gamma_proj "
        "qgalore_queue_size",
    ),
    **refused_keys("gradients are not filtered here", "leave it out", "grokfast_alpha"),
    **idle("only grokfast reads it", "grokfast_lamb"),
    "max_grad_norm": part("optimizer.max_grad_norm", number, 1.0),
    "neftune_noise_alpha": part("stage.neftune_alpha", number),
    "noisy_embedding_alpha": part(
        "stage.neftune_alpha", number, ABSENT, "neftune_noise_alpha is given, or the stage has no noise"
    ),
    "auto_find_batch_size": refused("a batch is part of what is learned", "leave it out"),
    "bf16": part("compute.precision", anything, "auto", "another key says the precision"),
    "fp16": part("compute.precision", flag, ABSENT, "another key says the precision"),
    "bfloat16": part("compute.precision", flag, ABSENT, "another key says the precision"),
    "float16": part("compute.precision", flag, ABSENT, "another key says the precision"),
    "float32": part("compute.precision", flag, ABSENT, "another key says the precision"),
    **refused_keys(NO_FP8, "leave it out", "fp8 qat quantization llmcompressor"),
    **idle(
        "only fp8 or nvfp4 reads it", "fp8_enable_fsdp_float8_all_gather nvfp4_merge_aware nvfp4_merge_aware_start_step"
    ),
    "fp32_norms": part("compute.precision", flag, ABSENT, "what is trained is in float32 here"),
    "fp32_norm_classes": part("compute.precision", anything, ABSENT, "what is trained is in float32 here"),
    "seed": direct("seed", integer, 42),
    "logging_steps": part("log.every", integer),
    "eval_steps": part("eval.every", number, ABSENT, "there are no validation data"),
    "evals_per_epoch": part("eval.every", integer, ABSENT, "there are no validation data"),
    "eval_strategy": part("eval.every", text, ABSENT, "another key says when, or there are no validation data"),
    "evaluation_strategy": part("eval.every", text, ABSENT, "another key says when, or there are no validation data"),
    "early_stopping_patience": part("eval.early_stopping", integer, ABSENT, "there are no validation data"),
    "save_steps": part("checkpoint.every", number),
    "saves_per_epoch": part(
        "checkpoint.every", integer, ABSENT, "checkpoints are about ten a run; results are the same"
    ),
    "save_strategy": part("checkpoint.every", text, ABSENT, "checkpoints are about ten a run; results are the same"),
    "save_first_step": part("checkpoint.every", flag, ABSENT, "checkpoints are about ten a run; results are the same"),
    "save_total_limit": direct("checkpoint.keep", integer),
    "load_best_model_at_end": part("checkpoint.result", flag, False),
    "resume_from_checkpoint": refused("its checkpoints hold torch's own state", "start from its result", ()),
    "auto_resume_from_checkpoints": part("resume", flag, False),
    "wandb_project": part("log.project", text),
    "use_wandb": part("log.trackers", flag),
    "use_tensorboard": part("log.trackers", flag),
    "use_mlflow": part("log.trackers", flag),
    "mlflow_experiment_name": part("log.project", text),
    "use_trackio": part("log.trackers", flag),
    "trackio_project_name": part("log.project", text),
    "use_comet": part("log.trackers", flag),
    "use_swanlab": part("log.trackers", flag),
    "plugins": part("method", entries),
}

ONE_ROW = "1: a row is on one device"
IGNORED = "axolotl has no such key, and ignores it"

IDLE: Table = {
    "tensor_parallel_size": part("train.batch_size", integer, 1, ONE_ROW),
    "context_parallel_size": part("train.batch_size", integer, 1, ONE_ROW),
    "context_parapllel_size": part("train.batch_size", integer, 1, ONE_ROW),
    "sequence_parallel_degree": part("train.batch_size", integer, 1, ONE_ROW),
    **idle(IGNORED, "adam_eps eta_min full_finetune test_value torch_dtype"),
    **idle(
        MESH,
        "deepspeed deepcompile fsdp fsdp_config fsdp_version fsdp_final_state_dict_type dp_shard_size "
        "dp_replicate_size heads_k_stride "
        "ring_attn_func expert_parallel_size expert_parallel_backend "
        "expert_parallel_num_nvl_bytes expert_parallel_num_rdma_bytes expert_parallel_token_capacity "
        "expert_parallel_fallback_on_unsupported accelerator_config device device_map world_size local_rank ddp "
        "ddp_timeout ddp_bucket_cap_mb ddp_broadcast_buffers ddp_find_unused_parameters torchdistx_path max_memory "
        "gpu_memory_limit low_cpu_mem_usage experimental_skip_move_to_device use_ray ray_run_name ray_num_workers "
        "resources_per_worker env_capabilities capabilities",
    ),
    **idle(
        KERNELS,
        "attn_implementation flash_attention xformers_attention sdp_attention flex_attention flex_attn_compile_kwargs "
        "flash_attn_cross_entropy flash_attn_fuse_mlp flash_attn_rms_norm flash_optimum sage_attention eager_attention "
        "gemma4_hybrid_attn_impl large_head_attention flash_attn_d512 sdpa_varlen fused_attn_kernel use_kernels "
        "lora_mlp_kernel lora_qkv_kernel lora_o_kernel lora_embedding_kernel cut_cross_entropy liger_rope "
        "liger_rms_norm liger_rms_norm_gated liger_layer_norm liger_swiglu liger_glu_activation liger_cross_entropy "
        "liger_fused_linear_cross_entropy liger_use_token_scaling use_glm_dsa_kernels use_dsv4_kernels "
        "dsv4_fp8_nonexpert_mode dsv4_fp8_lora_kernel dsv4_shared_mlp_lora_kernel dsv4_bf16_all dsv4_fp4_grouped_mode "
        "gemma4_fp8_nonexpert gemma4_nf4_nonexpert",
    ),
    **idle(
        EXPERTS,
        "experts_implementation expert_backend nonexpert_quantization moe_grouped_backend moe_dequant_chunk_size "
        "moe_bnb_fast use_scattermoe use_sonicmoe",
    ),
    **idle(
        MEMORY,
        "gradient_checkpointing gradient_checkpointing_kwargs selective_checkpointing activation_offloading "
        "layer_offloading chunked_cross_entropy chunked_cross_entropy_num_chunks tiled_mlp tiled_mlp_num_shards "
        "tiled_mlp_use_original_mlp torch_compile torch_compile_backend torch_compile_mode torch_compile_options tf32 "
        "gc_steps gc_collect_steps torch_empty_cache_steps eval_batch_size",
    ),
    **idle(
        LOGGING,
        "wandb_name wandb_run_id wandb_mode wandb_entity wandb_watch wandb_log_model mlflow_tracking_uri "
        "mlflow_run_name hf_mlflow_log_artifacts trackio_run_name trackio_space_id comet_api_key comet_workspace "
        "comet_project_name comet_experiment_key comet_mode comet_online comet_experiment_config swanlab_project "
        "swanlab_experiment_name swanlab_description swanlab_mode swanlab_workspace swanlab_api_key swanlab_log_model "
        "swanlab_web_host swanlab_api_host swanlab_lark_webhook_url swanlab_lark_secret swanlab_log_completions "
        "swanlab_completion_log_interval swanlab_completion_max_buffer use_otel_metrics otel_metrics_host "
        "otel_metrics_port profiler_steps profiler_steps_start include_tokens_per_second include_tkps "
        "do_causal_lm_eval eval_causal_lm_metrics do_bench_eval bench_dataset bench_split metric_for_best_model "
        "greater_is_better eval_table_size eval_max_new_tokens generate_samples num_generation_samples "
        "generation_max_new_tokens generation_temperature generation_top_p generation_top_k generation_prompt_ratio "
        "generation_do_sample loss_watchdog_threshold loss_watchdog_patience debug axolotl_config_path lm_eval_tasks "
        "lm_eval_batch_size lm_eval_post_train lm_eval_model dynamic_checkpoint gradio_title gradio_share "
        "gradio_server_name gradio_server_port gradio_max_new_tokens gradio_temperature",
    ),
    "hub_model_id": part("hub.repository", text),
    **idle(UPLOAD, "hub_strategy hub_revision push_dataset_to_hub hf_use_auth_token"),
    **idle(
        "run state is kept in Meshtune's own form, the result in transformers' or peft's",
        "save_only_model save_safetensors",
    ),
}

AXOLOTL: Table = {**MODEL, **ADAPTER, **STAGE, **DATA, **TRAIN, **IDLE}
