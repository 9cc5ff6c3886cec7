"""axolotl's keys: the rule of each, and the translation of keys that belong together."""

from __future__ import annotations

from meshtune.config.foreign import axolotl_data, models, online, trainer
from meshtune.config.foreign.draft import (
    ABSENT,
    ONE_TEXT,
    OTHER_ORDER,
    Draft,
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
    parts,
    refused,
    refused_keys,
    sources,
    text,
)
from meshtune.config.foreign.models import NotExpandableError, check_model, is_expression, names_of, put_targets

NAME = "axolotl"
ADAPTERS = "lora dora loftq"
CONTEXT_PARALLEL = ("context_parallel_size", "context_parapllel_size", "sequence_parallel_degree")

MODEL: Table = {
    "base_model": part("model.path", text),
    "revision_of_model": direct("model.revision", text),
    "tokenizer_config": direct("model.tokenizer", text),
    **parts("model.chat_template", text, ABSENT, "chat_template chat_template_jinja"),
    "chat_template_kwargs": refused("templates have no further variables in training here", "leave it out", ({},)),
    "default_system_message": direct("data.system", text),
    "special_tokens": part("model.tokenizer", mapping),
    "tokens": part("model.new_tokens", anything),
    "added_tokens_overrides": refused("tokens are not renamed here", "save such a tokenizer first", ()),
    "resize_token_embeddings_to_32x": part("model.pad_vocab_to", flag, False),
    **parts("model", mapping, ABSENT, "model_config overrides_of_model_config"),
    "reinit_weights": refused("a run starts from weights", "save a random model with transformers first"),
    "embedding_lr": refused(models.ONE_RATE, "leave it out", ()),
    "embedding_lr_scale": refused(models.ONE_RATE, "leave it out", ()),
    "lr_groups": part("optimizer", models.rate_groups),
    "unfrozen_parameters": part("method.modules", names),
    "model_quantization_config": part("quantize", text),
    "model_quantization_config_kwargs": part("quantize", mapping),
    **dict.fromkeys(("image_size", "processor_kwargs"), models.PIXELS),
    "role_boundaries": refused("masks follow from the chat template here", "leave it out"),
    "freeze_mm_modules": part("vision.train", flag, False),
    "use_onebitllms": refused("there are no ternary weights here", "leave it out"),
    "rope_scaling": refused("the positions of a model are those of its config.json", "set them there", ()),
    **refused_keys("there is no such attention here", "leave it out", "s2_attention scaling_softmax"),
    **refused_keys("the model is used as it is published", "leave it out", "llama4_linearized_experts use_pose"),
}

ADAPTER: Table = {
    "adapter": part("method", text),
    "lora_model_dir": direct("model.adapter", text, when=ADAPTERS),
    "lora_r": direct("method.rank", integer, 8, when=ADAPTERS),
    "lora_alpha": direct("method.alpha", number, 8, when=ADAPTERS),
    "lora_dropout": part("method.dropout", number, 0.0),
    "lora_target_modules": part("method.targets", name_or_names),
    "lora_target_linear": part("method.targets", flag),
    "lora_target_parameters": part("method.targets", name_or_names),
    "lora_modules_to_save": direct("method.train_modules", names, when=ADAPTERS),
    "lora_rank_pattern": refused("all adapters have one rank here", "leave it out", ({},)),
    "lora_alpha_pattern": refused("all adapters have one alpha here", "leave it out", ({},)),
    "peft": part("method.adapter", mapping),
    "peft_use_dora": part("method.adapter", flag, False),
    "peft_use_rslora": direct("method.rslora", flag, when=ADAPTERS),
    "peft_init_lora_weights": part("method.adapter", anything),
    "peft_layers_to_transform": refused("name layers in lora_target_modules", "such as layers.3.mlp.up_proj", ([],)),
    "peft_layers_pattern": refused("name layers in lora_target_modules", "such as layers.3.mlp.up_proj", ([],)),
    "peft_layer_replication": refused("layers are not repeated", "use method: llama_pro", ([],)),
    "peft_trainable_token_indices": refused("single rows are trained by adding tokens", "use tokens", ([],)),
    "loraplus_lr_ratio": direct("optimizer.lora_plus_ratio", number, when=ADAPTERS),
    "loraplus_lr_embedding": part("optimizer.lora_plus_embedding_rate", number, 1e-6),
    "load_in_4bit": part("quantize.format", flag, False),
    "load_in_8bit": part("quantize.format", flag, False),
    "bnb_config_kwargs": part("quantize.double", mapping),
    **refused_keys("there is no such method here", "leave it out", "relora mora lisa_n_layers dense_mixer spectrum"),
    "jagged_restart_steps": refused("schedules have no restarts here", "leave it out", ()),
}

STAGE: Table = {
    "rl": part("stage", text),
    "rl_beta": part("stage.beta", number, 0.1),
    "dpo_beta": part("stage.beta", number),
    "orpo_alpha": part("stage.beta", number, 0.1),
    "simpo_gamma": direct("stage.gamma", number, 0.5, when="simpo"),
    "cpo_alpha": direct("stage.sft_weight", number, 1.0, when="simpo"),
    "dpo_label_smoothing": direct("stage.label_smoothing", number, when="dpo"),
    "dpo_loss_type": part("stage.loss", anything),
    "kto_desirable_weight": direct("stage.desirable_weight", number, 1.0, when="kto"),
    "kto_undesirable_weight": direct("stage.undesirable_weight", number, 1.0, when="kto"),
    "rpo_alpha": direct("stage.sft_weight", number, when="dpo"),
    "trl": part("rollout", mapping),
    "reward_model": part("stage", flag, False),
    "num_labels": part("stage", integer),
    "center_rewards_coefficient": direct("stage.centre", number, when="rm"),
    **refused_keys(
        "there is no such loss or trainer here",
        "leave it out",
        "process_reward_model dpo_use_weighting "
        "dpo_norm_loss use_eaft ebft diffusion kd_trainer hatchery nemo_gym_enabled trainer_cls",
    ),
    "dpo_loss_weights": refused("one loss is computed", "leave it out", ([], [1.0])),
}

DATA: Table = {
    "datasets": part("data.train", entries),
    "test_datasets": part("data.validation", entries),
    "pretraining_dataset": part("data.train", sources),
    "val_set_size": part("data.validation", number, 0.0),
    "sequence_len": direct("data.max_length", integer, 512),
    "excess_length_strategy": part("data.overlong", text, "drop"),
    "sample_packing": part("data.packing", flag, False),
    "train_on_inputs": direct("data.train_on_prompt", flag),
    "streaming": part("data.streaming", flag),
    "streaming_multipack_buffer_size": part("data.streaming", integer, 10000),
    "pretrain_multipack_buffer_size": part("data.streaming", integer),
    "shuffle_merged_datasets": part("data.shuffle", flag, True),
    "shuffle_before_merging_datasets": part("data.shuffle", flag, False),
    "min_sample_len": refused("short documents are trained on too", "remove them from the data", (0, 1, 2)),
    "curriculum_sampling": part("data.shuffle", flag, False),
    "group_by_length": refused("rows are not grouped by length", "leave it out: data are shuffled"),
    "dataset_exact_deduplication": refused("all records are used", "remove duplicates from the data"),
    "dataset_shard_num": refused("a source is used completely, or its first records (cap)", "use cap", ()),
    "dataset_shard_idx": refused("a source is used completely, or its first records (cap)", "use cap", ()),
    "max_prompt_len": part("data.max_length", integer),
    "eval_sequence_len": part("data.max_length", integer),
}

TRAIN: Table = {
    "output_dir": direct("output", text, "./model-out"),
    "micro_batch_size": part("train.micro_batch", integer, 1),
    "gradient_accumulation_steps": part("train.batch_size", integer, 1),
    "batch_size": part("train.batch_size", integer),
    "num_epochs": part("train.epochs", number, 1.0),
    "max_steps": part("train.steps", integer),
    "learning_rate": direct("optimizer.learning_rate", number),
    "lr_scheduler": part("optimizer.schedule", text, "cosine"),
    "lr_scheduler_kwargs": part("optimizer.min_lr_ratio", mapping),
    "cosine_min_lr_ratio": part("optimizer.min_lr_ratio", number),
    "cosine_constant_lr_ratio": refused("a cosine schedule has no constant tail here", "leave it out", (0, 0.0)),
    "lr_quadratic_warmup": refused("warm-up is linear", "leave it out"),
    "warmup_steps": part("optimizer.warmup_steps", number),
    "warmup_ratio": part("optimizer.warmup_ratio", number),
    "optimizer": part("optimizer.name", text, "adamw_torch_fused"),
    "optim_args": refused("optimizers take no free-form arguments here", "write them as keys", ({},)),
    "optim_target_modules": refused("galore and apollo project all matrices here", "leave it out", ()),
    "weight_decay": direct("optimizer.weight_decay", number, 0.0),
    "adam_beta1": part("optimizer.beta1", number, 0.9),
    "adam_beta2": part("optimizer.beta2", number, 0.999),
    "adam_epsilon": part("optimizer.eps", number, 1e-8),
    "grokfast_alpha": refused("gradients are not filtered here", "leave it out"),
    "max_grad_norm": part("optimizer.max_grad_norm", number, 1.0),
    **parts("stage.neftune_alpha", number, ABSENT, "neftune_noise_alpha noisy_embedding_alpha"),
    "auto_find_batch_size": refused("the size of a batch changes the result", "leave it out"),
    "bf16": part("compute.precision", anything, "auto"),
    **parts("compute.precision", flag, ABSENT, "fp16 bfloat16 float16 float32"),
    **refused_keys(
        "there is no training in fp8, nvfp4 or mxfp4 here", "leave it out", "fp8 qat quantization llmcompressor"
    ),
    "seed": direct("seed", integer, 42),
    "logging_steps": part("log.every", integer),
    "eval_steps": part("eval.every", number),
    "evals_per_epoch": part("eval.every", integer),
    **parts("eval.every", text, ABSENT, "eval_strategy evaluation_strategy"),
    "early_stopping_patience": part("eval.early_stopping", integer),
    "save_steps": part("checkpoint.every", number),
    "saves_per_epoch": part("checkpoint.every", integer),
    "save_total_limit": direct("checkpoint.keep", integer),
    "load_best_model_at_end": part("checkpoint.result", flag, False),
    "resume_from_checkpoint": refused("its checkpoints hold torch's own state", "start from its result", ()),
    "auto_resume_from_checkpoints": part("resume", flag, False),
    **parts("log.project", text, ABSENT, "wandb_project mlflow_experiment_name trackio_project_name"),
    **parts("log.trackers", flag, ABSENT, "use_wandb use_tensorboard use_mlflow use_trackio use_comet use_swanlab"),
    "plugins": part("method", entries),
    "hub_model_id": part("hub.repository", text),
    **parts("train.batch_size", integer, 1, "tensor_parallel_size context_parallel_size context_parapllel_size"),
    "sequence_parallel_degree": part("train.batch_size", integer, 1),
}

WITHOUT_EFFECT = idle(
    """accelerator_config activation_offloading adam_beta3 adam_eps adam_epsilon2 attn_implementation
    axolotl_config_path base_model_config base_model_ignore_patterns batch_flattening bench_dataset bench_split
    capabilities chunked_cross_entropy chunked_cross_entropy_num_chunks cls_model_config comet_api_key
    comet_experiment_config comet_experiment_key comet_mode comet_online comet_project_name comet_workspace
    cut_cross_entropy dataloader_drop_last dataloader_num_workers dataloader_pin_memory dataloader_prefetch_factor
    dataset_keep_in_memory dataset_num_proc dataset_prepared_path dataset_processes ddp ddp_broadcast_buffers
    ddp_bucket_cap_mb ddp_find_unused_parameters ddp_timeout debug deepcompile deepspeed device device_map dion_lr
    dion_momentum dion_rank_fraction dion_rank_multiple_of do_bench_eval do_causal_lm_eval dp_replicate_size
    dp_shard_size dpo_generate_during_eval dpo_padding_free dpo_use_liger_kernel dpo_use_logits_to_keep dsv4_bf16_all
    dsv4_fp4_grouped_mode dsv4_fp8_lora_kernel dsv4_fp8_nonexpert_mode dsv4_shared_mlp_lora_kernel dynamic_checkpoint
    eaft_alpha eaft_k eager_attention embeddings_skip_upcast env_capabilities eot_tokens eta_min eval_batch_size
    eval_causal_lm_metrics eval_max_new_tokens eval_sample_packing eval_table_size experimental_skip_move_to_device
    expert_backend expert_parallel_backend expert_parallel_fallback_on_unsupported expert_parallel_num_nvl_bytes
    expert_parallel_num_rdma_bytes expert_parallel_size expert_parallel_token_capacity experts_implementation
    fix_untrained_tokens flash_attention flash_attn_cross_entropy flash_attn_d512 flash_attn_fuse_mlp
    flash_attn_rms_norm flash_optimum flex_attention flex_attn_compile_kwargs fp32_norm_classes fp32_norms
    fp8_enable_fsdp_float8_all_gather fsdp fsdp_config fsdp_final_state_dict_type fsdp_version
    full_finetune fused_attn_kernel gc_collect_steps gc_steps gemma4_fp8_nonexpert gemma4_hybrid_attn_impl
    gemma4_nf4_nonexpert generate_samples generation_do_sample generation_max_new_tokens generation_prompt_ratio
    generation_temperature generation_top_k generation_top_p gptq gptq_disable_exllama gptq_groupsize gptq_model_v1
    gpu_memory_limit gradient_checkpointing gradient_checkpointing_kwargs gradio_max_new_tokens gradio_server_name
    gradio_server_port gradio_share gradio_temperature gradio_title greater_is_better grokfast_lamb heads_k_stride
    hf_mlflow_log_artifacts hf_use_auth_token hub_revision hub_strategy image_resize_algorithm include_tkps
    include_tokens_per_second is_falcon_derived_model is_llama_derived_model is_mistral_derived_model is_preprocess
    is_qwen_derived_model jagged_restart_anneal_steps jagged_restart_warmup_steps kd_alpha kd_beta kd_ce_alpha
    kd_normalize_topk kd_online_server kd_online_server_base_url kd_online_timeout kd_online_topk kd_temperature
    kd_temperature_min large_head_attention layer_offloading liger_cross_entropy liger_fused_linear_cross_entropy
    liger_glu_activation liger_layer_norm liger_rms_norm liger_rms_norm_gated liger_rope liger_swiglu
    liger_use_token_scaling lisa_layers_attribute lisa_step_interval lm_eval_batch_size lm_eval_model
    lm_eval_post_train lm_eval_tasks local_rank lora_embedding_kernel lora_fan_in_fan_out lora_mlp_kernel lora_o_kernel
    lora_on_cpu lora_qkv_kernel loss_watchdog_patience loss_watchdog_threshold low_cpu_mem_usage lr_div_factor
    max_memory max_packed_sequence_len mean_resizing_embeddings merge_lora merge_method metric_for_best_model
    mlflow_run_name mlflow_tracking_uri model_type moe_bnb_fast moe_dequant_chunk_size moe_grouped_backend
    multipack_real_batches nemo_gym_auto_clone nemo_gym_auto_start nemo_gym_config_paths nemo_gym_datasets nemo_gym_dir
    nemo_gym_head_port nemo_gym_max_turns nemo_gym_model_name nemo_gym_multi_turn nemo_gym_run_timeout
    nemo_gym_server_timeout nemo_gym_verify_timeout nonexpert_quantization num_dataset_shards_to_save
    num_generation_samples nvfp4_merge_aware nvfp4_merge_aware_start_step otel_metrics_host otel_metrics_port
    overrides_of_model_kwargs pad_to_multiple_of pad_to_sequence_len peft_autocast_adapter_dtype
    peft_ensure_weight_tying pose_max_context_len pose_num_chunks pose_split_on_token_ids precompute_ref_log_probs
    preprocess_iterable pretrain_multipack_attn pretraining_sample_concatenation profiler_steps profiler_steps_start
    push_dataset_to_hub qgalore_cos_threshold qgalore_gamma_proj qgalore_proj_bits qgalore_proj_group_size
    qgalore_proj_quant qgalore_proj_type qgalore_queue_size qgalore_rank qgalore_scale qgalore_update_proj_gap
    qlora_sharded_model_loading quantize_moe_experts ray_num_workers ray_run_name relora_cpu_offload
    relora_prune_method relora_prune_ratio remove_unused_columns resources_per_worker ring_attn_func sage_attention
    sample_packing_bin_size sample_packing_eff_est sample_packing_group_size sample_packing_mp_start_method
    sample_packing_seq_len_multiplier sample_packing_sequentially save_first_step save_only_model save_safetensors
    save_strategy scaling_softmax_bias scaling_softmax_factor sdp_attention sdpa_varlen selective_checkpointing
    shrink_embeddings skip_prepare_dataset spectrum_model_name spectrum_top_fraction strict swanlab_api_host
    swanlab_api_key swanlab_completion_log_interval swanlab_completion_max_buffer swanlab_description
    swanlab_experiment_name swanlab_lark_secret swanlab_lark_webhook_url swanlab_log_completions swanlab_log_model
    swanlab_mode swanlab_project swanlab_web_host swanlab_workspace test_value tf32 tiled_mlp tiled_mlp_num_shards
    tiled_mlp_use_original_mlp tokenizer_legacy tokenizer_save_jinja_files tokenizer_type tokenizer_use_fast
    tokenizer_use_mistral_common torch_compile torch_compile_backend torch_compile_mode torch_compile_options
    torch_dtype torch_empty_cache_steps torchdistx_path total_num_tokens total_supervised_tokens trackio_run_name
    trackio_space_id trust_remote_code type_of_model use_dsv4_kernels use_glm_dsa_kernels use_kernels
    use_otel_metrics use_ray use_scattermoe use_sonicmoe vllm wandb_entity wandb_log_model wandb_mode wandb_name
    wandb_run_id wandb_watch world_size xformers_attention processor_type"""
)

SHARDED = ("deepspeed", "fsdp", "fsdp_config", "dp_shard_size")
KNOWN_PLUGINS = ("cut_cross_entropy", "liger", "kernels", "expert_parallel", "swanlab", "lm_eval")
HARMLESS_CONFIG = {"output_router_logits"}

TABLE: Table = {**MODEL, **ADAPTER, **STAGE, **DATA, **TRAIN, **WITHOUT_EFFECT}


def train(draft: Draft) -> None:
    """Translates an axolotl file. Raises nothing: what cannot be done is refused in `draft`."""
    _model(draft)
    kind = _stage(draft)
    _method(draft)
    models.put_vision(draft, "base_model", "freeze_mm_modules")
    models.put_part_rates(draft, "lr_groups")
    _quantize(draft)
    validation = axolotl_data.data(draft, kind)
    draft.apply()
    _plugins(draft)
    _batch(draft)
    trainer.length(draft, "num_epochs")
    axolotl_data.put_streaming(draft)
    trainer.optimizer_name(draft, "optimizer")
    _schedule(draft)
    trainer.moments(draft, ("adam_beta1", "beta1"), ("adam_beta2", "beta2"), ("adam_epsilon", "eps"))
    trainer.clipping(draft, "max_grad_norm")
    _precision(draft)
    if validation:
        _evaluation(draft)
    _saving(draft)
    _logging(draft)
    if "optimizer.learning_rate" not in draft.settings:
        draft.refuse("learning_rate", "the file names no learning rate", "add learning_rate")
    draft.remark(OTHER_ORDER)
    draft.remark(ONE_TEXT)


def _model(draft: Draft) -> None:
    path = draft.get("base_model")
    if path is None:
        draft.refuse("base_model", "the file names no model", "add base_model")
        return
    check_model(draft, "base_model", path)
    draft.put("model.path", path, "base_model")
    tokens = draft.get("tokens")
    if isinstance(tokens, list) and tokens:
        draft.put("model.new_tokens", list(map(str, tokens)), "tokens")
    special = {**(tokens if isinstance(tokens, dict) else {}), **(draft.get("special_tokens") or {})}
    extra = special.pop("additional_special_tokens", None)
    if extra:
        draft.put("model.new_special_tokens", extra, "special_tokens")
    renamed = {name: token for name, token in special.items() if name != "pad_token" and token is not None}
    for key in ("special_tokens", "tokens"):
        if renamed and isinstance(draft.given.get(key), dict):
            listed = ", ".join(f"{name} {token}" for name, token in renamed.items())
            draft.differ(
                key, f"the tokenizer's own are used: see that they are {listed}, or save a tokenizer that says so"
            )
    if draft.get("resize_token_embeddings_to_32x"):
        draft.put("model.pad_vocab_to", 32, "resize_token_embeddings_to_32x")
    for key in ("model_config", "overrides_of_model_config"):
        changes = set(draft.get(key) or {}) - HARMLESS_CONFIG
        if changes:
            draft.refuse(key, f"{', '.join(changes)}: a model is computed as its config.json says", "change that file")
        elif draft.get(key):
            draft.differ(key, "no loss balances the load of experts unless model.router_aux_loss asks for one")
    options = draft.get("model_quantization_config_kwargs") or {}
    if draft.get("model_quantization_config") is not None and options.get("dequantize"):
        draft.put("quantize.format", "none", "model_quantization_config", "model_quantization_config_kwargs")


def _stage(draft: Draft) -> str:
    rl = draft.get("rl")
    if draft.get("reward_model"):
        draft.put("stage.kind", "rm", "reward_model", "num_labels")
        return "rm"
    if rl is None:
        texts = [entry.get("type") for entry in draft.get("datasets") or [] if isinstance(entry, dict)]
        plain = draft.get("pretraining_dataset") is not None or (
            texts and all(prompts == "completion" for prompts in texts)
        )
        draft.put("stage.kind", "pt" if plain else "sft", "" if plain else "rl")
        return "pt" if plain else "sft"
    if rl == "grpo":
        draft.put("stage.kind", rl, "rl")
        online.put_section(draft, "trl", "micro_batch_size", {"sequence_len": part("data.max_length", integer)})
        return rl
    if rl not in ("dpo", "ipo", "orpo", "simpo", "kto"):
        draft.refuse("rl", f"there is no stage {rl} in recipes here", "use dpo, ipo, orpo, simpo, kto or grpo")
        return "dpo"
    kind = "dpo" if rl == "ipo" else rl
    draft.put("stage.kind", kind, "rl")
    beta = "orpo_alpha" if kind == "orpo" and not draft.given.get("rl_beta") else "rl_beta"
    beta = "dpo_beta" if "dpo_beta" in draft.given and kind == "dpo" else beta
    note = "the answers' loss is weighed by token here, by pair there" if kind == "orpo" else ""
    draft.put("stage.beta", float(draft.get(beta)), beta, note=note, differs=bool(note))
    if kind == "dpo":
        losses = draft.get("dpo_loss_type") or ("ipo" if rl == "ipo" else "sigmoid")
        losses = losses if isinstance(losses, list) else [losses]
        if len(losses) > 1 or losses[0] not in ("sigmoid", "hinge", "ipo", "robust"):
            draft.refuse("dpo_loss_type", f"{losses} is not computed here", "use sigmoid, hinge, ipo or robust")
        else:
            draft.put("stage.loss", losses[0], "dpo_loss_type", *(["rl"] if rl == "ipo" else []))
    return kind


def _plugins(draft: Draft) -> None:
    unknown = [
        str(name) for name in draft.get("plugins") or [] if not any(known in str(name) for known in KNOWN_PLUGINS)
    ]
    if unknown:
        draft.refuse("plugins", f"{', '.join(unknown)}: what it does is not here", "leave it out")


def _batch(draft: Draft) -> None:
    """Rows an update. Devices that share a row (tensor or context parallelism) have one batch together."""
    trainer.batch_settings(draft, "micro_batch_size", sharing=("tensor_parallel_size", *CONTEXT_PARALLEL))
    total, rows = draft.get("batch_size"), (draft.get("micro_batch_size") or 1)
    if draft.get("gradient_accumulation_steps") > 1 and not draft.get("rl"):
        note = "axolotl weighs the micro-batches of an update alike, whatever their tokens; here each token counts once"
        draft.differ("gradient_accumulation_steps", note)
    if total and "gradient_accumulation_steps" not in draft.given and total != rows:
        note = f"an update has {rows} a device there too, whose run ends after 1/{total // rows} of num_epochs"
        draft.differ("batch_size", f"gradient_accumulation_steps is 1 where left out: {note}")


def _schedule(draft: Draft) -> None:
    key = "lr_scheduler"
    ratio, name = draft.get("cosine_min_lr_ratio"), draft.get(key)
    if not trainer.schedule_options(draft, name):
        return
    if name not in trainer.SCHEDULES:
        draft.refuse(key, f"there is no schedule {name} here", f"use {', '.join(trainer.SCHEDULES)}")
        return
    draft.put("optimizer.schedule", trainer.SCHEDULES[name], key)
    if ratio and name == "cosine":
        draft.put("optimizer.min_lr_ratio", ratio, "cosine_min_lr_ratio")
    if name == "constant":
        draft.put("optimizer.warmup_steps", 0, note="transformers' constant schedule has no warm-up")
        return
    steps, share, total = draft.get("warmup_steps"), draft.get("warmup_ratio"), draft.get("max_steps")
    if steps is None and share is not None and total:
        warm = int(share * total)
        note = f"of {total} steps, as axolotl rounds it"
        draft.put("optimizer.warmup_steps", 2 if warm == 1 else warm, "warmup_ratio", note=note)
    elif steps is not None and steps >= 1:
        draft.put("optimizer.warmup_steps", max(2, int(steps)), "warmup_steps", note="" if steps > 1 else "1 becomes 2")
    elif steps:
        draft.put("optimizer.warmup_ratio", steps, "warmup_steps", note="below 1 it is a share of the steps")
    elif steps is not None or share is not None:
        note = "rounded up to whole steps, there down" if share else ""
        draft.put("optimizer.warmup_ratio", share or 0.0, "warmup_ratio", "warmup_steps", note=note)
    elif total:
        warm = min(int(0.03 * total), 100)
        draft.put("optimizer.warmup_steps", 2 if warm == 1 else warm, note="3% of max_steps, at most 100")
    else:
        draft.put("optimizer.warmup_ratio", 0.03, note="axolotl stops at 100 steps: see the run's number of steps")


def _precision(draft: Draft) -> None:
    bf16 = draft.given.get("bf16", "auto")
    if draft.get("fp16") or draft.get("float16"):
        key = "fp16" if draft.get("fp16") else "float16"
        draft.put("compute.precision", "float16", key)
    elif draft.get("bfloat16"):
        draft.put("compute.precision", "bfloat16", "bfloat16")
    elif draft.get("float32") or bf16 in (False, "false"):
        draft.put("compute.precision", "float32", "float32", "bf16")
    elif draft.get("adapter") is None and not any(draft.given.get(key) for key in SHARDED):
        note = "weights and optimizer are in bfloat16 there without deepspeed or fsdp"
        draft.put("compute.precision", "bfloat16", "bf16", note=note)
    elif bf16 == "auto":
        draft.put("compute.precision", "auto", "bf16")
    else:
        draft.put("compute.precision", "mixed", "bf16")


def _method(draft: Draft) -> None:
    adapter = draft.get("adapter")
    if adapter is None:
        if draft.get("unfrozen_parameters"):
            _unfrozen(draft)
        else:
            draft.put("method.kind", "full", note="no adapter is named")
        return
    if adapter not in ("lora", "qlora"):
        draft.refuse("adapter", f"there is no adapter {adapter} here", "use lora or qlora")
        return
    draft.put("method.kind", "lora", "adapter")
    kind = "dora" if draft.get("peft_use_dora") else "lora"
    if (draft.get("peft") or {}).get("loftq_config"):
        kind = "loftq"
    if draft.get("peft_init_lora_weights") not in (None, True):
        draft.refuse(
            "peft_init_lora_weights", "write the kind of adapter itself", "use peft_use_dora or method.adapter"
        )
    draft.put("method.adapter", kind, *({"dora": ["peft_use_dora"], "loftq": ["peft"]}.get(kind, [])))
    trainer.dropout(draft, compared=bool(draft.get("rl") or draft.get("reward_model")))
    _targets(draft)
    if draft.get("loraplus_lr_ratio") and (draft.get("lora_modules_to_save") or "loraplus_lr_embedding" in draft.given):
        rate = draft.get("loraplus_lr_embedding")
        draft.put("optimizer.lora_plus_embedding_rate", rate, "loraplus_lr_embedding")


def _targets(draft: Draft) -> None:
    chosen, linear = draft.get("lora_target_modules"), draft.get("lora_target_linear")
    names = list(chosen) if isinstance(chosen, list) else []
    if isinstance(chosen, str):
        try:
            names = names_of(chosen) if is_expression(chosen) else [chosen]
        except NotExpandableError as problem:
            draft.refuse("lora_target_modules", f"the expression: {problem}", "list the modules' names instead")
            return
    towers = [name for name in names if "vision" in name]
    if towers:
        draft.refuse(
            "lora_target_modules", f"{', '.join(towers)} is of a vision tower, which stays as it is", "leave it out"
        )
        return
    parameters = draft.get("lora_target_parameters")
    if not names and not linear and not parameters:
        draft.refuse("lora_target_modules", "the file names no modules", "add lora_target_linear: true")
        return
    keys = ["lora_target_linear"] if linear else []
    keys += ["lora_target_modules", "lora_target_parameters"]
    put_targets(draft, None if linear else names, *keys, by_class=True, converts=True, experts=bool(parameters))


def _unfrozen(draft: Draft) -> None:
    """Patterns over parameters: the modules that they begin with."""
    patterns = [str(pattern) for pattern in draft.get("unfrozen_parameters")]
    try:
        names = [name for pattern in patterns for name in names_of(pattern.removesuffix(".*"))]
    except NotExpandableError as problem:
        draft.refuse("unfrozen_parameters", f"the expression: {problem}", "use method: freeze with names of modules")
        return
    if any("[" in pattern and ":" in pattern for pattern in patterns):
        draft.refuse("unfrozen_parameters", "single rows of a weight are not trained", "name whole modules")
        return
    names = [name.removesuffix(".weight").removesuffix("*").removesuffix(".") for name in names]
    all_of_it = {"model", "model.language_model", "", "language_model"} & set(names)
    if all_of_it:
        note = "the language model is all that is trained here; towers beside it stay as they are"
        draft.put("method.kind", "full", "unfrozen_parameters", note=note)
    else:
        draft.put("method.kind", "freeze", "unfrozen_parameters")
        draft.put("method.modules", list(dict.fromkeys(names)), "unfrozen_parameters")


def _quantize(draft: Draft) -> None:
    if draft.get("adapter") is None or "quantize.format" in draft.settings:
        return
    loftq = (draft.get("peft") or {}).get("loftq_config")
    if loftq and not draft.get("load_in_4bit") and not draft.get("load_in_8bit"):
        note = "the base in the codes whose errors the adapters begin with; there in the numbers that they stand for"
        draft.put("quantize.format", "nf4", "peft", note=note, differs=True)
    elif draft.get("load_in_4bit"):
        draft.put("quantize.format", "nf4", "load_in_4bit")
        draft.put("quantize.block_size", 64, note="bitsandbytes' block")
        options = dict(draft.get("bnb_config_kwargs") or {})
        double = options.pop("bnb_4bit_use_double_quant", True)
        if options:
            draft.refuse("bnb_config_kwargs", f"{', '.join(options)}: nothing here does that", "leave it out")
        draft.put("quantize.double", double, "bnb_config_kwargs")
    elif draft.get("load_in_8bit"):
        trainer.quantize_to_8_bits(draft, "load_in_8bit")


def _evaluation(draft: Draft) -> None:
    strategy = draft.given.get("eval_strategy", draft.given.get("evaluation_strategy"))
    steps, times = draft.get("eval_steps"), draft.get("evals_per_epoch")
    if steps is not None and steps >= 1:
        draft.put("eval.every", int(steps), "eval_steps")
    elif times or steps or strategy == "epoch":
        key = "evals_per_epoch" if times else "eval_steps" if steps else "eval_strategy"
        note = "" if times == 1 or strategy == "epoch" else "once an epoch: steps of an epoch are not known before data"
        draft.put("eval.every", "epoch", key, note=note, differs=bool(note))
    else:
        draft.put("eval.every", None, "evals_per_epoch", "eval_strategy", note="evaluated at the end alone")
    if draft.settings["eval.every"].value is not None:
        draft.put("eval.at_start", True, note="axolotl evaluates before the first step")
    if draft.get("early_stopping_patience"):
        draft.put("eval.early_stopping", draft.get("early_stopping_patience"), "early_stopping_patience")


def _loads_best(draft: Draft) -> bool:
    """Whether the result is the best checkpoint: by default too, where each is saved with an evaluation."""
    asked_for = draft.given.get("load_best_model_at_end", True) or draft.get("early_stopping_patience")
    held_out = bool(draft.get("val_set_size")) != bool(draft.get("test_datasets"))
    if not asked_for or not held_out or draft.get("rl") is not None or draft.get("reward_model"):
        return False
    saved, evaluated = (
        _interval(draft, *keys) for keys in (("save_steps", "saves_per_epoch"), ("eval_steps", "evals_per_epoch"))
    )
    return bool(saved and evaluated and saved % evaluated == 0)


def _interval(draft: Draft, steps: str, times: str) -> float | None:
    """Steps, or the share of the run, between two saves or evaluations."""
    if draft.get(times) and draft.get("num_epochs"):
        share = 1.0 / (draft.get(times) * draft.get("num_epochs"))
        return share if share < 1 else None
    return draft.get(steps)


def _saving(draft: Draft) -> None:
    """Checkpoints, resuming and the upload of the result."""
    if (steps := draft.get("save_steps")) and steps >= 1:
        draft.put("checkpoint.every", int(steps), "save_steps")
    best = _loads_best(draft)
    draft.put("checkpoint.keep_best", best, "load_best_model_at_end")
    if best:
        draft.put("checkpoint.result", "best", "load_best_model_at_end", note="the best of all evaluations")
    if draft.get("hub_model_id"):
        trainer.upload(draft)
    if draft.get("auto_resume_from_checkpoints"):
        draft.put("resume", True, "auto_resume_from_checkpoints", note="from a checkpoint of Meshtune's in output")


def _logging(draft: Draft) -> None:
    """How often a step is logged, and the trackers."""
    draft.put("log.every", max(1, draft.get("logging_steps") or 1), "logging_steps")
    for name in ("wandb", "mlflow", "trackio", "tensorboard"):
        project = {"wandb": "wandb_project", "mlflow": "mlflow_experiment_name", "trackio": "trackio_project_name"}.get(
            name
        )
        enabled = draft.get(f"use_{name}") if f"use_{name}" in draft.given else project and draft.get(project)
        if enabled:
            key = f"use_{name}" if f"use_{name}" in draft.given else str(project)
            known = draft.settings["log.trackers"].value if "log.trackers" in draft.settings else []
            trainer.trackers(draft, key, [*known, name])
            if project and draft.get(project):
                draft.put("log.project", draft.get(project), project)
    for name in ("use_comet", "use_swanlab"):
        if draft.get(name):
            draft.differ(name, "there is no such tracker here; metrics.jsonl has every number")
