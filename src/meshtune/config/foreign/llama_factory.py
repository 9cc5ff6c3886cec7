"""LLaMA-Factory's training arguments: the rule of each key, and the translation of keys that belong together."""

from __future__ import annotations

from meshtune.config.foreign import models, trainer
from meshtune.config.foreign.draft import (
    ABSENT,
    ONE_TEXT,
    OTHER_ORDER,
    Draft,
    Table,
    anything,
    direct,
    flag,
    idle,
    integer,
    names,
    number,
    part,
    parts,
    refused,
    refused_keys,
    text,
)
from meshtune.config.foreign.trainer import LLAMA_FACTORY, TRAINER, stops, stream, template

NAME = "LLaMA-Factory"
ADAPTERS = "lora dora pissa"
SHARING = (
    "tensor_model_parallel_size",
    "pipeline_model_parallel_size",
    "context_parallel_size",
    "hyper_parallel_cp_size",
)

LORA: Table = {
    "lora_rank": direct("method.rank", integer, 8, when=ADAPTERS),
    "lora_alpha": part("method.alpha", integer),
    "lora_dropout": part("method.dropout", number, 0.0),
    "lora_target": part("method.targets", names, "all"),
    "additional_target": direct("method.train_modules", names, when=f"{ADAPTERS} oft"),
    "use_rslora": direct("method.rslora", flag, when=ADAPTERS),
    **parts("method.adapter", flag, False, "use_dora pissa_init"),
    "loraplus_lr_ratio": direct("optimizer.lora_plus_ratio", number, when=ADAPTERS),
    "loraplus_lr_embedding": part("optimizer.lora_plus_embedding_rate", number, 1e-6),
    "pissa_iter": part("method.svd_iterations", integer, 16),
    "pissa_convert": part("method.pissa_convert", flag, False),
    "create_new_adapter": part("model.merge_adapters", flag, False),
    "oft_block_size": direct("method.oft_block_size", integer, 32, when="oft"),
    "oft_rank": part("method.oft_block_size", integer, 0),
    "oft_target": part("method.targets", names, "all"),
    "module_dropout": refused("oft has no dropout here", "leave it out", (0, 0.0)),
    "freeze_trainable_layers": part("method.last_layers", integer, 2),
    "freeze_trainable_modules": part("method.modules", names, "all"),
    "freeze_extra_modules": part("method.modules", names),
    "use_llama_pro": part("method.blocks", flag, False),
}

OPTIMIZER: Table = {
    **parts("optimizer.name", flag, False, "use_galore use_apollo use_badam use_adam_mini use_muon"),
    **parts("optimizer.name", names, "all", "galore_target apollo_target"),
    "galore_rank": direct("optimizer.rank", integer, 16, when="galore"),
    "galore_update_interval": direct("optimizer.update_gap", integer, 200, when="galore"),
    "galore_scale": direct("optimizer.scale", number, 2.0, when="galore"),
    "galore_layerwise": direct("optimizer.in_backward", flag, when="galore"),
    "apollo_rank": direct("optimizer.rank", integer, 16, when="apollo"),
    "apollo_update_interval": direct("optimizer.update_gap", integer, 200, when="apollo"),
    "apollo_scale": direct("optimizer.scale", number, 32.0, when="apollo"),
    "apollo_scale_type": direct("optimizer.scaling", text, "channel", when="apollo"),
    "apollo_layerwise": direct("optimizer.in_backward", flag, when="apollo"),
    "apollo_proj": refused("apollo projects at random here", "use random", ("random",)),
    "galore_proj_type": refused("the projection is chosen by the shape of a matrix", "use std", ("std",)),
    "apollo_proj_type": refused("the projection is chosen by the shape of a matrix", "use std", ("std",)),
    "apollo_scale_front": refused("the norm's growth is limited before the scale here", "leave it out"),
    "badam_mode": refused("badam goes layer by layer here", "use layer", ("layer",)),
    "badam_start_block": refused("badam begins with the first block of its order", "leave it out", ()),
    "badam_switch_mode": direct("optimizer.block_order", text, "ascending", when="badam"),
    "badam_switch_interval": direct("optimizer.switch_every", integer, 50, when="badam"),
}

DATA: Table = {
    "template": part("model.chat_template", text),
    "dataset": part("data.train", names),
    "eval_dataset": part("data.validation", names),
    "dataset_dir": part("data.registry", anything, "data"),
    "cutoff_len": part("data.max_length", integer, 2048),
    "train_on_prompt": direct("data.train_on_prompt", flag, when="sft pt"),
    "mask_history": direct("data.last_turn_only", flag, when="sft pt"),
    "streaming": part("data.streaming", flag, False),
    "buffer_size": part("data.streaming", integer, 16384),
    "mix_strategy": part("data.mixing", text, "concat"),
    "interleave_probs": part("data.train.N.weight", names),
    "max_samples": part("data.train.N.cap", integer),
    "val_size": part("data.validation", number, 0.0),
    "packing": part("data.packing", flag),
    "neat_packing": part("data.packing", flag, False),
    "default_system": direct("data.system", text),
    "tool_format": part("model.chat_template", text),
    "enable_thinking": part("model.chat_template", flag, True),
    "preserve_thinking": part("model.chat_template", flag, False),
    "tokenized_path": part("data.train", text),
    "ignore_pad_token_for_loss": refused("padding never has a loss here", "use true", (True,)),
    "disable_shuffling": part("data.shuffle", flag, False),
}

MODEL: Table = {
    "model_name_or_path": part("model.path", text),
    "model_revision": part("model.revision", text, "main"),
    "adapter_name_or_path": part("model.adapter", names),
    "adapter_folder": part("model.adapter", text),
    "resize_vocab": part("model.pad_vocab_to", flag, False),
    "add_tokens": direct("model.new_tokens", names),
    "add_special_tokens": direct("model.new_special_tokens", names),
    "new_special_tokens_config": refused(
        "rows of new tokens begin at the mean of the others, not at descriptions", "use add_special_tokens", ()
    ),
    "init_special_tokens": refused(
        "rows of new tokens begin at the mean of the others", "use noise_init", ("noise_init",)
    ),
    "quantization_bit": part("quantize.format", integer),
    "quantization_method": part("quantize.format", text, "bnb"),
    "quantization_type": part("quantize.format", text, "nf4"),
    "double_quantization": part("quantize.double", flag, True),
    "moe_aux_loss_coef": direct("model.router_aux_loss", number),
    "rope_scaling": refused("the positions of a model are those of its config.json", "set rope_scaling there", ()),
    "shift_attn": refused("there is no shifted sparse attention here", "leave it out: exact attention fits as far"),
    "mixture_of_depths": refused("there is no mixture of depths here", "leave it out", ()),
    "split_special_tokens": refused("special tokens in texts are tokens here", "leave it out"),
    "train_from_scratch": refused("a run starts from weights", "save a random model with transformers first"),
    "use_kt": refused("there is no KTransformers backend here", "leave it out: experts are trained on the devices"),
}

STAGE: Table = {
    "stage": part("stage", text, "sft"),
    "finetuning_type": part("method", text, "lora"),
    "pure_bf16": part("compute.precision", flag, False),
    "pref_beta": direct("stage.beta", number, 0.1, when="dpo orpo simpo kto"),
    "pref_loss": part("stage.loss", text, "sigmoid"),
    "pref_ftx": part("stage.sft_weight", number, 0.0),
    "pref_bco_weight": refused("there is no binary classifier optimisation here", "leave it out", (0, 0.0)),
    "dpo_label_smoothing": direct("stage.label_smoothing", number, when="dpo"),
    "ld_alpha": direct("stage.ld_alpha", number, when="dpo"),
    "simpo_gamma": direct("stage.gamma", number, 0.5, when="simpo"),
    "kto_chosen_weight": direct("stage.desirable_weight", number, 1.0, when="kto"),
    "kto_rejected_weight": direct("stage.undesirable_weight", number, 1.0, when="kto"),
    "ref_model": direct("stage.reference", text, when="dpo kto"),
    "ppo_epochs": direct("rollout.iterations", integer, 4, when="ppo"),
    "ppo_buffer_size": part("rollout.updates", integer, 1),
    "ppo_target": part("stage.kl_target", number, 6.0),
    "ppo_whiten_rewards": direct("stage.whiten_rewards", flag, False, when="ppo"),
    "ppo_score_norm": part("rewards", flag, False),
    "reward_model": part("rewards", text),
    "reward_model_type": part("rewards", text, "lora"),
    "temperature": direct("rollout.temperature", number, 0.95, when="ppo"),
    "top_p": direct("rollout.top_p", number, 0.7, when="ppo"),
    "top_k": direct("rollout.top_k", integer, 50, when="ppo"),
    "max_new_tokens": direct("rollout.max_tokens", integer, 1024, when="ppo"),
    "use_dft_loss": part("stage.loss", flag, False),
    "early_stopping_steps": direct("eval.early_stopping", integer),
    **refused_keys(
        "a reference or reward model with adapters is not read",
        "merge it first",
        "ref_model_adapters reward_model_adapters",
    ),
    "ref_model_quantization_bit": refused("a reference is read as it is published", "leave it out"),
    **refused_keys("there is no such loss here", "leave it out, or use use_dft_loss", "use_asft_loss use_eaft_loss"),
    "fp8": refused("there is no training in fp8 here", "leave it out: bf16 (compute.precision: mixed)"),
    **parts("vision.train", flag, True, "freeze_vision_tower freeze_multi_modal_projector"),
    "freeze_language_model": part("vision.freeze_language", flag, False),
    "image_max_pixels": part("vision.max_pixels", integer, 768 * 768),
    "image_min_pixels": part("vision.min_pixels", integer, 32 * 32),
    "crop_to_patches": part("vision.crops", flag, False),
    "image_do_pan_and_scan": part("vision", flag, False),
    "media_dir": part("vision.media_dir", text),
    **parts("train.batch_size", integer, 1, " ".join(SHARING)),
}

WITHOUT_EFFECT = idle(
    """account_for_embedding_in_pipeline_split account_for_loss_in_pipeline_split apply_rope_fusion asft_alpha
    audio_sampling_rate badam_mask_mode badam_update_ratio badam_verbose bias_activation_fusion cache_dir
    calculate_per_token_loss compute_accuracy cross_entropy_loss_fusion data_shared_file_system
    device_map disable_gradient_checkpointing do_predict do_sample do_train eaft_alpha enable_liger_kernel
    enable_torch_profiler eval_num_beams eval_on_each_dataset expert_model_parallel_size export_device export_dir
    export_hf_on_finish export_hub_model_id export_legacy_format export_quantization_bit export_quantization_dataset
    export_quantization_maxlen export_quantization_nsamples export_size extra_config flash_attn fp8_backend
    fp8_enable_fsdp_float8_all_gather generation_config generation_max_length generation_num_beams hf_hub_token
    hyper_parallel_args include_effective_tokens_per_second
    infer_backend infer_dtype kt_config kt_cpu_activation kt_expert_checkpoint_path kt_lora_expert_intermediate_size
    kt_lora_expert_num kt_non_expert_weight_path kt_use_lora_experts kt_weight_path length_penalty low_cpu_mem_usage
    masked_softmax_fusion master_addr master_port max_length megatron_bridge_args
    megatron_pretrained_checkpoint mixed_precision moe_grouped_gemm moe_token_dispatcher_type ms_hub_token num_beams
    offload_folder om_hub_token overlap_grad_reduce overlap_param_gather overwrite_cache plot_loss
    predict_with_generate preprocessing_batch_size
    preprocessing_num_workers print_param_status profile_modules profiler_active_steps profiler_output_dir
    profiler_profile_memory profiler_record_shapes profiler_repeat profiler_wait_steps profiler_warmup_steps
    profiler_with_stack quantization_device_map ray_init_kwargs ray_num_workers recompute_granularity recompute_method
    recompute_num_layers repetition_penalty reward_model_quantization_bit
    sequence_parallel sglang_config sglang_lora_backend sglang_maxlen sglang_mem_fraction sglang_tp_size
    skip_special_tokens sortish_sampler swanlab_api_key swanlab_lark_secret swanlab_lark_webhook_url swanlab_logdir
    swanlab_mode swanlab_project swanlab_run_name swanlab_workspace trust_remote_code
    upcast_layernorm upcast_lmhead_output use_audio_in_video use_distributed_optimizer use_fast_tokenizer
    use_hyper_parallel use_kv_cache use_mca use_megatron_bridge use_packed_sequences use_reentrant_gc use_swanlab
    use_unsloth use_unsloth_gc use_v1_kernels video_fps video_max_pixels video_maxlen video_min_pixels
    virtual_pipeline_model_parallel_size vllm_config vllm_enforce_eager vllm_gpu_util vllm_max_lora_rank vllm_maxlen"""
)

TOOLS_WRITTEN = (
    "that template must also write the tools and calls of the data: where it does not, set model.chat_template"
)

TABLE: Table = {**TRAINER, **MODEL, **DATA, **STAGE, **LORA, **OPTIMIZER, **WITHOUT_EFFECT}


def train(draft: Draft) -> None:
    """Translates a training file. Raises nothing: what cannot be done is refused in `draft`."""
    _model(draft)
    kind = _stage(draft)
    _method(draft, kind)
    _vision(draft)
    _quantize(draft)
    _optimizer(draft)
    validation = _sources(draft, kind)
    trainer.trainer_settings(draft, validation=validation, sharing=SHARING)
    if kind == "ppo" and draft.value("train.steps"):
        updates = draft.get("ppo_buffer_size") * draft.get("ppo_epochs")
        draft.put("train.steps", draft.get("max_steps") * updates, "max_steps", note=f"{updates} updates a step")
    stream(draft, "streaming", "buffer_size")
    _precision(draft)
    draft.remark(OTHER_ORDER)
    draft.remark(ONE_TEXT)


def _model(draft: Draft) -> None:
    path = draft.get("model_name_or_path")
    if path is None:
        draft.refuse("model_name_or_path", "the file names no model", "add model_name_or_path")
        return
    models.check_model(draft, "model_name_or_path", path)
    draft.put("model.path", path, "model_name_or_path")
    if draft.get("model_revision") != "main":
        draft.put("model.revision", draft.get("model_revision"), "model_revision")
    if draft.get("resize_vocab"):
        draft.put("model.pad_vocab_to", 64, "resize_vocab", note="rows are rounded up to a multiple of 64")
    if draft.get("adapter_folder"):
        draft.refuse("adapter_folder", "an adapter is named by its own path", "join it with adapter_name_or_path")
    adapters = draft.get("adapter_name_or_path")
    if adapters:
        merged = adapters if draft.get("create_new_adapter") else adapters[:-1]
        if merged:
            draft.put("model.merge_adapters", merged, "adapter_name_or_path", "create_new_adapter")
        if not draft.get("create_new_adapter"):
            draft.put("model.adapter", adapters[-1], "adapter_name_or_path", note="its training continues")


def _stage(draft: Draft) -> str:
    """Writes the stage, and returns our name of it."""
    name, loss = str(draft.get("stage")), str(draft.get("pref_loss"))
    if name not in ("sft", "pt", "rm", "dpo", "kto", "ppo"):
        draft.refuse("stage", f"there is no stage {name} in recipes here", "use sft, pt, rm, dpo, kto or ppo")
        return "sft"
    kind = loss if name == "dpo" and loss in ("orpo", "simpo") else name
    draft.put("stage.kind", kind, "stage", *(["pref_loss"] if kind != name else []))
    if kind == "sft" and draft.get("use_dft_loss"):
        draft.put("stage.loss", "dft", "use_dft_loss")
    if kind == "dpo" and loss not in ("sigmoid", "hinge", "ipo"):
        draft.refuse("pref_loss", f"there is no loss {loss} here", "use sigmoid, hinge, ipo, orpo or simpo")
    elif kind == "dpo":
        note = "" if loss == "sigmoid" else "release 0.9.5 with trl 0.24 computes sigmoid, whatever the loss"
        draft.put("stage.loss", loss, "pref_loss", note=note, differs=bool(note))
    if kind in ("dpo", "orpo", "simpo"):
        _put_sft_term(draft, kind)
    if kind == "ppo":
        _ppo(draft)
    return kind


REWARD_MODEL = (
    "the head of LLaMA-Factory's reward models is not read: import their file too, train it, and give that run"
)


def _ppo(draft: Draft) -> None:
    """Writes the rollouts and the reward of PPO. A step there is a buffer and all updates made of it."""
    buffer = draft.get("ppo_buffer_size")
    update = (draft.get("per_device_train_batch_size") or 1) * (draft.get("gradient_accumulation_steps") or 1)
    update *= max(draft.devices, 1)
    draft.put("rollout.prompts", update * buffer, "ppo_buffer_size", note="one completion of each")
    draft.put("rollout.samples", 1)
    draft.put("rollout.updates", buffer, "ppo_buffer_size")
    draft.put("stage.kl_coef", 0.2, note="trl's start, which LLaMA-Factory leaves")
    draft.put("stage.kl_target", draft.get("ppo_target"), "ppo_target")
    draft.put("stage.kl_mean", "completions", "ppo_target", note="trl's controller, with its horizon of 10000")
    draft.remark("The temperature divides the logits in the loss too; in LLaMA-Factory only those of the sampler.")
    if draft.get("ppo_score_norm"):
        draft.refuse("ppo_score_norm", "rewards are not divided by a running deviation here", "use ppo_whiten_rewards")
    if draft.get("reward_model_type") == "api":
        fix = "write a function that asks it, rewards: [reward.py:score], or a server for {url: ...} (docs/rl.md)"
        draft.refuse("reward_model_type", "a url gets {prompts, completions, columns} here, not chats", fix)
    elif draft.get("reward_model") is None:
        draft.refuse("reward_model", "ppo needs a reward, and the file names none", "add reward_model")
    else:
        draft.put("rewards.0.kind", "model", "reward_model_type")
        draft.put("rewards.0.model", draft.get("reward_model"), "reward_model", note=REWARD_MODEL, differs=True)


def _put_sft_term(draft: Draft, kind: str) -> None:
    """Writes the cross-entropy of the chosen answers, which LLaMA-Factory averages over pairs."""
    weight = draft.get("pref_ftx")
    if kind == "orpo":
        if weight:
            draft.refuse("pref_ftx", "orpo has a cross-entropy term of weight 1", "leave it out, or use simpo")
        draft.put("stage.sft_mean", "pairs", note="an answer's loss is its own mean, whatever its length")
    elif weight:
        draft.put("stage.sft_weight", weight, "pref_ftx")
        draft.put("stage.sft_mean", "pairs", "pref_ftx", note="an answer's loss is its own mean, whatever its length")


def _method(draft: Draft, kind: str) -> None:
    name = draft.get("finetuning_type")
    if name == "full":
        draft.put("method.kind", "full", "finetuning_type")
    elif name == "freeze":
        _freeze(draft)
    elif name in ("lora", "oft"):
        if draft.get("use_llama_pro"):
            draft.refuse("use_llama_pro", "adapters on new layers alone are not here", "use method: llama_pro")
        draft.put("method.kind", "lora", "finetuning_type")
        _oft(draft) if name == "oft" else _lora(draft, kind)
    else:
        draft.refuse("finetuning_type", f"there is no method {name} here", "use lora, oft, freeze or full")


def _vision(draft: Draft) -> None:
    """Writes how pictures are read and what of the model is frozen, for models that see; of others these keys have no
    effect."""
    path = draft.get("model_name_or_path")
    if path is None or not models.sees(path):
        return
    keys = {"projector": "freeze_multi_modal_projector", "tower": "freeze_vision_tower"}
    trained = [name for name, key in keys.items() if not draft.get(key)]
    draft.put("vision.train", trained, *keys.values())
    if trained and draft.value("method.kind") == "lora":
        for name in trained:
            note = f"LLaMA-Factory puts adapters on the {name}, which is trained in full here"
            draft.refuse(keys[name], note, "use true, and name its modules in method.targets; or train it in full")
    if draft.get("freeze_language_model"):
        draft.put("vision.freeze_language", True, "freeze_language_model")
    for to, key in (("max_pixels", "image_max_pixels"), ("min_pixels", "image_min_pixels")):
        draft.put(f"vision.{to}", draft.get(key), key)
    if "internvl" in path.lower() and not draft.get("crop_to_patches"):
        draft.put("vision.crops", 1, "crop_to_patches", note="pictures are not cut into tiles")
    if draft.get("image_do_pan_and_scan"):
        draft.refuse("image_do_pan_and_scan", "pictures are not panned and scanned here", "leave it out")
    folder = draft.get("media_dir") or draft.get("dataset_dir")
    if isinstance(folder, str) and folder != "ONLINE":
        draft.put("vision.media_dir", folder, "media_dir", "dataset_dir")


def _freeze(draft: Draft) -> None:
    layers, modules = draft.get("freeze_trainable_layers"), draft.get("freeze_trainable_modules")
    chosen = [] if modules in ("all", ["all"]) else list(modules)
    draft.put("method.kind", "freeze", "finetuning_type")
    if draft.get("use_llama_pro"):
        _new_layers(draft, layers, chosen)
        return
    side = "last_layers" if layers > 0 else "first_layers"
    draft.put(f"method.{side}", abs(layers), "freeze_trainable_layers")
    extra = draft.get("freeze_extra_modules") or []
    if chosen or extra:
        draft.put("method.modules", [*chosen, *extra], "freeze_trainable_modules", "freeze_extra_modules")


def _new_layers(draft: Draft, blocks: int, modules: list[str]) -> None:
    """LLaMA Pro in LLaMA-Factory trains every nth layer of a model that a script has expanded before."""
    total = models.layers_of(str(draft.get("model_name_or_path")))
    if total is None or modules or total % blocks:
        draft.refuse(
            "use_llama_pro",
            "the model has been expanded by a script, and which layers are new follows from their number in its "
            "config.json, which is not on this disk",
            f"set model.path to the model before that, and method: {{kind: llama_pro, blocks: {blocks}}}",
        )
        return
    new = [f"layers.{layer}" for layer in range(total // blocks - 1, total, total // blocks)]
    keys = ("freeze_trainable_layers", "use_llama_pro", "freeze_trainable_modules")
    draft.put("method.modules", new, *keys, note="the layers that the script has added")


def _lora(draft: Draft, kind: str) -> None:
    alpha = draft.get("lora_alpha")
    adapter = "dora" if draft.get("use_dora") else "pissa" if draft.get("pissa_init") else "lora"
    draft.put("method.adapter", adapter, "use_dora", "pissa_init")
    note = "" if alpha is not None else "twice the rank"
    draft.put("method.alpha", float(2 * draft.get("lora_rank") if alpha is None else alpha), "lora_alpha", note=note)
    trainer.dropout(draft, compared=kind in ("dpo", "orpo", "simpo", "kto"))
    _targets(draft, "lora_target")
    if adapter == "pissa":
        iterations = draft.get("pissa_iter")
        draft.put("method.svd_iterations", None if iterations < 0 else iterations, "pissa_iter")
        draft.put("method.pissa_convert", bool(draft.get("pissa_convert")), "pissa_convert")
        if not draft.get("pissa_convert") and iterations >= 0:
            note = "a plain LoRA is written, since peft could not repeat a randomised decomposition"
            draft.put("method.pissa_convert", True, "pissa_convert", note=note, differs=True)
    if draft.get("loraplus_lr_ratio") and draft.get("additional_target"):
        rate = draft.get("loraplus_lr_embedding")
        draft.put("optimizer.lora_plus_embedding_rate", rate, "loraplus_lr_embedding")


def _oft(draft: Draft) -> None:
    draft.put("method.adapter", "oft", "finetuning_type")
    if draft.get("oft_rank"):
        draft.refuse("oft_rank", "oft is sized by its blocks here", "give oft_block_size: inputs / oft_rank")
    _targets(draft, "oft_target")


def _targets(draft: Draft, key: str) -> None:
    chosen = draft.get(key)
    everything = chosen in ("all", ["all"], "all-linear", ["all-linear"])
    models.put_targets(draft, None if everything else chosen, key, by_class=True, converts=False)


def _quantize(draft: Draft) -> None:
    bits = draft.get("quantization_bit")
    if bits is None:
        return
    method, kind = draft.get("quantization_method"), draft.get("quantization_type")
    if method not in ("bnb", "bitsandbytes") or bits not in (4, 8):
        key = "quantization_method" if method not in ("bnb", "bitsandbytes") else "quantization_bit"
        draft.refuse(key, f"{draft.given.get(key)} is not a way to quantise a base here", "use bnb with 4 or 8 bits")
    elif bits == 4 and kind != "nf4":
        draft.refuse("quantization_type", f"{kind} is not written here", "use nf4")
    elif bits == 8:
        trainer.quantize_to_8_bits(draft, "quantization_bit", "quantization_method")
    else:
        keys = ("quantization_bit", "quantization_method", "quantization_type")
        trainer.quantize(draft, *keys, double="double_quantization")


def _optimizer(draft: Draft) -> None:
    """Writes the optimizer that a `use_` switch chooses; at most one, as in LLaMA-Factory."""
    name = next((name for name in ("galore", "apollo", "badam", "adam_mini", "muon") if draft.get(f"use_{name}")), None)
    if name is None:
        return
    note = "matrices by Muon at the RMS of AdamW's updates, all else by AdamW, in both" if name == "muon" else ""
    draft.put("optimizer.name", name, f"use_{name}", note=note)
    if name in ("galore", "apollo") and draft.get(f"{name}_target") not in ("all", ["all"]):
        draft.refuse(f"{name}_target", "all matrices are projected here", "use all")


def _precision(draft: Draft) -> None:
    if draft.get("pure_bf16"):
        draft.put("compute.precision", "bfloat16", "pure_bf16")
    elif "compute.precision" not in draft.settings and draft.table["bf16"].default is ABSENT:
        note = "neither bf16 nor fp16 is asked for, and what is trained is kept in float32"
        draft.put("compute.precision", "mixed", note=note)
    elif draft.given.get("bf16") is False and not draft.get("fp16"):
        note = (
            "LLaMA-Factory computes in the checkpoint's dtype; here in bfloat16, with float32 copies of what is trained"
        )
        draft.put("compute.precision", "mixed", "bf16", note=note, differs=True)


def _sources(draft: Draft, kind: str) -> bool:
    """Translates the data of stage `kind`. Returns whether there are validation data."""
    names = draft.get("dataset")
    if not names:
        draft.refuse("dataset", "the file names no data set", "add dataset")
    _put_datasets(draft, "data.train", "dataset", names or [])
    _registry(draft)
    _mixing(draft, len(names or []))
    _lengths(draft, kind)
    if kind != "pt":
        _chat_template(draft)
    if draft.get("tool_format"):
        draft.differ("tool_format", "tools are written as the chat template writes them")
    if not draft.get("enable_thinking"):
        draft.differ("enable_thinking", "the template's own default: see data.reasoning, and compare what is trained")
    if draft.get("preserve_thinking"):
        draft.differ("preserve_thinking", "reasoning of earlier turns is kept as data.reasoning says")
    if draft.get("streaming"):
        _put_streaming(draft)
    elif draft.get("disable_shuffling"):
        draft.put("data.shuffle", False, "disable_shuffling")
    if draft.get("tokenized_path"):
        draft.differ(
            "tokenized_path", "training prepares its data and keeps them; LLaMA-Factory stops when they are written"
        )
    held_out = _validation(draft)
    if held_out and kind == "ppo":
        key = "eval_dataset" if draft.get("eval_dataset") else "val_size"
        draft.refuse(key, "LLaMA-Factory's ppo evaluates nothing, and stops", "leave it out")
    return held_out


def _put_streaming(draft: Draft) -> None:
    """Translates and refuses keys that belong to a stream."""
    if draft.get("max_samples"):
        stops(draft, "max_samples", "leave it out")
    if 0 < (draft.get("val_size") or 0) < 1:
        stops(draft, "val_size", "give a whole number of records")
    if "data.registry" in draft.settings:
        draft.remark("A stream there does not read num_samples of dataset_info.json, which counts here.")


def _put_datasets(draft: Draft, to: str, key: str, names: list[str]) -> None:
    hub = draft.get("dataset_dir") == "ONLINE"
    for index, name in enumerate(names):
        draft.put(f"{to}.{index}.{'path' if hub else 'name'}", name, key)
        if draft.get("max_samples"):
            draft.put(f"{to}.{index}.cap", draft.get("max_samples"), "max_samples")


def _registry(draft: Draft) -> None:
    folder = draft.get("dataset_dir")
    if not isinstance(folder, str):
        draft.refuse("dataset_dir", "a registry is a file or the folder that holds it", "give its folder")
    elif folder.startswith("REMOTE:"):
        repository = folder.removeprefix("REMOTE:")
        draft.refuse(
            "dataset_dir",
            f"the registry lies in the hub's {repository}, and registries are read from disk",
            f"download it: hf download {repository} --repo-type dataset --local-dir data, and set dataset_dir: data",
        )
    elif folder != "ONLINE":
        draft.put("data.registry", folder, "dataset_dir", note="its dataset_info.json is read as it is")


def _mixing(draft: Draft, count: int) -> None:
    strategy = draft.get("mix_strategy")
    if strategy == "interleave_once":
        ordered = bool(draft.get("streaming") or draft.get("disable_shuffling"))
        note = "each record once an epoch, shuffled over all sources"
        note += "; there the shares decide the order" if ordered else ", whatever the shares"
        keys = ("mix_strategy", "interleave_probs")
        draft.put("data.mixing", "concat", *keys, note=note, differs=ordered)
        return
    if strategy not in ("concat", "interleave_under", "interleave_over"):
        draft.refuse("mix_strategy", f"there is no mixture {strategy} here", "use concat or interleave_under")
        return
    draft.put("data.mixing", strategy, "mix_strategy")
    shares = draft.get("interleave_probs")
    if strategy != "concat" and shares:
        if len(shares) != count:
            draft.refuse("interleave_probs", f"{len(shares)} shares for {count} data sets", "give one a data set")
            return
        for number, share in enumerate(shares):
            draft.put(f"data.train.{number}.weight", float(share), "interleave_probs")


def _lengths(draft: Draft, kind: str) -> None:
    note = "documents go on in the next row" if kind == "pt" else ""
    if kind == "ppo":
        note = "prompts and completions; longer prompts are left out, where LLaMA-Factory cuts them"
        room = draft.get("cutoff_len") + draft.get("max_new_tokens")
        draft.put("data.max_length", room, "cutoff_len", "max_new_tokens", note=note, differs=True)
        return
    draft.put("data.max_length", draft.get("cutoff_len"), "cutoff_len", note=note)
    if kind != "pt":
        draft.put("data.train_on_tail", True, "template", note="the line break after a turn's end is trained on")
        draft.put("data.overlong", "turns", "cutoff_len", note="prompt and answer of a turn are cut in proportion")
    packing = draft.get("packing")
    packing = kind == "pt" if packing is None else packing
    if draft.get("neat_packing"):
        draft.put("data.packing", True, "neat_packing", "packing")
    elif packing and kind == "pt":
        note = "documents do not see each other in a row; LLaMA-Factory joins all text and cuts it into rows"
        draft.put("data.packing", True, "packing", note=note, differs=True)
    elif packing:
        note = "documents do not see each other in a row; in LLaMA-Factory they do, without neat_packing"
        draft.put("data.packing", True, "packing", note=note, differs=True)
    else:
        draft.put("data.packing", False, "packing", note="one document a row, so that a batch holds as many")


def _chat_template(draft: Draft) -> None:
    name = draft.get("template")
    if name is None:
        draft.remark("no template is named: the tokenizer's own is used, as by LLaMA-Factory")
        return
    entry = template(draft, "template", name, LLAMA_FACTORY)
    if entry is None:
        draft.differ("template", TOOLS_WRITTEN)
    if entry and entry.system and not draft.get("default_system"):
        draft.put("data.system", entry.system, "template", note="the template's own")


def _validation(draft: Draft) -> bool:
    names, share = draft.get("eval_dataset"), draft.get("val_size")
    if names:
        _put_datasets(draft, "data.validation", "eval_dataset", names)
        return True
    if share and share > 0:
        draft.put("data.validation", share if share < 1 else int(share), "val_size")
        return True
    return False
