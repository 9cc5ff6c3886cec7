"""transformers' TrainingArguments, which LLaMA-Factory and TRL share: its keys, defaults and what they come to here."""

from __future__ import annotations

from meshtune.config.foreign.draft import Draft
from meshtune.config.foreign.optimizers import optimizer
from meshtune.config.foreign.rules import (
    ABSENT,
    Table,
    anything,
    direct,
    flag,
    idle,
    integer,
    mapping,
    names,
    number,
    part,
    refused,
    refused_keys,
    text,
)

MESH = "how devices share the work is chosen here, or said in mesh (docs/meshes.md)"
LOADER = "data are prepared once, before training, and read from there"
MEMORY = "it changes memory and speed, not numbers; compute.* has such settings, chosen here by what fits"
LOGGING = "it changes what is printed or logged, not what is learned"
UPLOAD = "how a result is pushed is said in hub (docs/hub.md); its token is that of huggingface_hub"

TRAINER: Table = {
    "output_dir": direct("output", text, "trainer_output"),
    "per_device_train_batch_size": part("train.micro_batch", integer, 8),
    "gradient_accumulation_steps": part("train.batch_size", integer, 1),
    "num_train_epochs": part("train.epochs", number, 3.0, "max_steps says how long the run is"),
    "max_steps": part("train.steps", integer, -1, "-1: num_train_epochs says how long the run is"),
    "learning_rate": direct("optimizer.learning_rate", number, 5e-5),
    "lr_scheduler_type": part("optimizer.schedule", text, "linear"),
    "lr_scheduler_kwargs": part("optimizer.min_lr_ratio", mapping),
    "warmup_ratio": part("optimizer.warmup_ratio", number, 0.0, "warmup_steps is given, or the schedule has none"),
    "warmup_steps": part("optimizer.warmup_steps", number, 0, "0, or the schedule has none"),
    "optim": part("optimizer.name", text, "adamw_torch_fused", "another key chooses the optimizer"),
    "optim_args": refused("optimizers take no free-form arguments here", "write them as keys of optimizer"),
    "optim_target_modules": refused("galore and apollo project all matrices here", "leave it out", ("all-linear",)),
    "weight_decay": direct("optimizer.weight_decay", number, 0.0),
    "adam_beta1": part("optimizer.beta1", number, 0.9, "the optimizer has no such setting"),
    "adam_beta2": part("optimizer.beta2", number, 0.999, "the optimizer has no such setting"),
    "adam_epsilon": part("optimizer.eps", number, 1e-8, "the optimizer has no such setting"),
    "max_grad_norm": part("optimizer.max_grad_norm", number, 1.0),
    "neftune_noise_alpha": part("stage.neftune_alpha", number, ABSENT, "only supervised tuning adds noise"),
    "label_smoothing_factor": part("stage.label_smoothing", number, 0.0, "0, or not supervised tuning"),
    "bf16": part("compute.precision", flag, ABSENT, "another key says the precision"),
    "fp16": part("compute.precision", flag, ABSENT, "another key says the precision"),
    "eval_strategy": part("eval.every", text, "no"),
    "evaluation_strategy": part("eval.every", text, ABSENT, "eval_strategy is given"),
    "eval_steps": part("eval.every", number, ABSENT, "nothing is evaluated by steps"),
    "eval_on_start": part("eval.at_start", flag, False, "nothing is evaluated at the start"),
    "do_eval": part("eval.every", flag, ABSENT, "eval_strategy says when"),
    "logging_steps": part("log.every", number, 500),
    "report_to": part("log.trackers", names, ABSENT, "no tracker is asked for"),
    "project": direct("log.project", text),
    "save_strategy": part("checkpoint.every", text, "steps"),
    "save_steps": part("checkpoint.every", number, 500, "nothing is saved by steps"),
    "save_total_limit": part("checkpoint.keep", integer),
    "load_best_model_at_end": part("checkpoint.result", flag, False),
    "resume_from_checkpoint": part("resume", anything, ABSENT, "false: nothing is resumed"),
    "overwrite_output_dir": part("overwrite", flag, False, "false: an output that is not empty is an error here too"),
    "push_to_hub": part("hub.repository", flag, False, "false: nothing is pushed"),
    "hub_model_id": part("hub.repository", text, ABSENT, "without push_to_hub nothing is pushed"),
    "hub_private_repo": part("hub.public", flag, ABSENT, "without push_to_hub nothing is pushed"),
    "seed": direct("seed", integer, 42),
    "auto_find_batch_size": refused(
        "the size of a batch is part of what is learned, and never changed here",
        "leave it out; train.micro_batch: auto finds what fits",
    ),
    **refused_keys("a mixture of sampling by length is not here", "leave it out: shuffled data are", "group_by_length"),
    "train_sampling_strategy": part("data.shuffle", text, "random"),
    "dataloader_drop_last": part("train.epochs", flag, False, "false: the last, smaller batch counts here too"),
    **idle(
        MESH,
        "deepspeed fsdp fsdp_config fsdp_min_num_params fsdp_transformer_layer_cls_to_wrap ddp_timeout "
        "ddp_find_unused_parameters ddp_bucket_cap_mb ddp_broadcast_buffers ddp_static_graph ddp_backend local_rank "
        "parallelism_config accelerator_config use_cpu no_cuda use_mps_device tpu_num_cores tpu_metrics_debug "
        "xpu_backend full_determinism average_tokens_across_devices per_gpu_train_batch_size per_gpu_eval_batch_size",
    ),
    **idle(
        LOADER,
        "dataloader_num_workers dataloader_pin_memory dataloader_persistent_workers dataloader_prefetch_factor "
        "dataloader_multiprocessing_context dataloader_in_order remove_unused_columns label_names length_column_name "
        "ignore_data_skip data_seed",
    ),
    **idle(
        MEMORY,
        "gradient_checkpointing gradient_checkpointing_kwargs activation_checkpointing activation_checkpointing_kwargs "
        "tf32 torch_compile torch_compile_backend torch_compile_mode use_liger_kernel liger_kernel_config use_cache "
        "torch_empty_cache_steps bf16_full_eval fp16_full_eval half_precision_backend fp16_opt_level fp16_backend "
        "use_ipex jit_mode_eval torchdynamo ray_scope eval_accumulation_steps per_device_eval_batch_size "
        "enable_jit_checkpoint",
    ),
    **idle(
        LOGGING,
        "logging_strategy logging_first_step logging_dir log_on_each_node logging_nan_inf_filter log_level "
        "log_level_replica disable_tqdm run_name trackio_space_id trackio_bucket_id trackio_static_space_id debug "
        "skip_memory_metrics include_num_input_tokens_seen include_tokens_per_second include_inputs_for_metrics "
        "include_for_metrics batch_eval_metrics eval_do_concat_batches eval_use_gather_object prediction_loss_only "
        "eval_delay metric_for_best_model greater_is_better past_index",
    ),
    **idle(
        UPLOAD,
        "hub_token hub_strategy hub_always_push hub_revision "
        "push_to_hub_model_id push_to_hub_organization push_to_hub_token",
    ),
    **idle(
        "run state is kept in Meshtune's own form, and the result in that of transformers or peft",
        "save_only_model save_on_each_node save_safetensors restore_callback_states_from_checkpoint",
    ),
}
TRACKERS = ("tensorboard", "wandb", "trackio", "mlflow")


def trainer_settings(draft: Draft, *, validation: bool, kind: str, sharing: tuple[str, ...] = ()) -> None:
    """Translates what TrainingArguments say. `validation`: whether there are validation data; `kind`: our stage;
    `sharing`: keys of how many devices one row is split over."""
    draft.apply()
    batch_settings(draft, sharing=sharing)
    length(draft, "num_train_epochs")
    optimizer(draft)
    _precision(draft)
    _evaluation(draft, validation)
    _saving(draft)
    _starting(draft)
    if kind == "sft":
        if draft.get("neftune_noise_alpha"):
            draft.put("stage.neftune_alpha", draft.get("neftune_noise_alpha"), "neftune_noise_alpha")
        if draft.get("label_smoothing_factor"):
            draft.put("stage.label_smoothing", draft.get("label_smoothing_factor"), "label_smoothing_factor")
    draft.put("log.every", max(1, int(draft.get("logging_steps"))), "logging_steps")
    trackers(draft, "report_to", draft.get("report_to") or [])
    if draft.get("push_to_hub"):
        upload(draft, "push_to_hub")
    if draft.get("dataloader_drop_last"):
        draft.differ("dataloader_drop_last", "the last, smaller batch of an epoch is filled from the next one here")


def batch_settings(
    draft: Draft,
    per_device: str = "per_device_train_batch_size",
    accumulation: str | None = "gradient_accumulation_steps",
    sharing: tuple[str, ...] = (),
) -> None:
    """Rows an update, counted over devices and accumulation. Devices that one row is split over, whose numbers the keys
    `sharing` give, count as one."""
    rows, steps, split = draft.get(per_device) or 1, (draft.get(accumulation) if accumulation else 1) or 1, 1
    named = [key for key in sharing if (draft.get(key) or 1) > 1]
    for key in named:
        split *= draft.get(key)
    copies, remainder = divmod(draft.devices, split) if draft.devices > 1 else (1, 0)
    if remainder:
        why = f"{draft.devices} devices are not whole groups of {split}, over which a row is split there"
        draft.refuse(named[0], why, f"give --devices a multiple of {split}")
        return
    counted = f"{rows} a device x {steps} accumulated x {copies} device{'s' * (copies != 1)}"
    if split > 1:
        counted = f"{rows} a row's {split} devices x {steps} accumulated x {copies}"
    keys = [per_device, *([accumulation] if accumulation else []), *named]
    draft.put("train.batch_size", rows * steps * copies, *keys, note=counted)
    draft.put("train.micro_batch", rows * copies, per_device, note="rows at once over all devices")


def length(draft: Draft, epochs: str, steps: str = "max_steps") -> None:
    limit = draft.get(steps)
    if limit is not None and limit > 0:
        draft.put("train.steps", limit, steps)
    else:
        draft.put("train.epochs", float(draft.get(epochs)), epochs)


def _precision(draft: Draft) -> None:
    if draft.get("fp16"):
        note = "bfloat16 in place of float16, which needs no scaled loss: a little coarser, never overflowing"
        draft.put("compute.precision", "mixed", "fp16", note=note, differs=True)
    elif draft.get("bf16") is not None:
        draft.put("compute.precision", "mixed" if draft.get("bf16") else "float32", "bf16")


def _evaluation(draft: Draft, validation: bool) -> None:
    strategy = str(draft.given.get("eval_strategy", draft.given.get("evaluation_strategy", "no"))).lower()
    key = "eval_strategy" if "eval_strategy" in draft.given else "evaluation_strategy"
    if not validation:
        for name in ("eval_strategy", "evaluation_strategy", "eval_steps", "eval_on_start", "do_eval"):
            draft.idle(name, "there are no validation data")
        return
    if strategy == "epoch":
        draft.put("eval.every", "epoch", key)
    elif strategy == "steps":
        steps = draft.get("eval_steps") or draft.get("logging_steps")
        interval = int(steps) if steps >= 1 else "epoch"
        note = "" if steps >= 1 else "a share of the run is not counted in steps here: once an epoch"
        draft.put("eval.every", interval, "eval_steps", key, note=note, differs=bool(note))
    else:
        draft.put("eval.every", None, key, note="evaluated at the end alone")
    if draft.get("eval_on_start"):
        draft.put("eval.at_start", True, "eval_on_start")


def _saving(draft: Draft) -> None:
    strategy, steps = draft.get("save_strategy"), draft.get("save_steps")
    if strategy == "steps" and steps >= 1:
        draft.put("checkpoint.every", int(steps), "save_steps", "save_strategy")
    else:
        draft.differ("save_strategy", "checkpoints are about ten a run and one at the end; the result is the same")
        draft.idle("save_steps", "checkpoints are about ten a run")
    if draft.get("save_total_limit"):
        draft.put("checkpoint.keep", draft.get("save_total_limit"), "save_total_limit")
    if draft.get("load_best_model_at_end"):
        draft.put("checkpoint.keep_best", True, "load_best_model_at_end")
        if "eval.every" in draft.settings and draft.settings["eval.every"].value is not None:
            note = "the best of all evaluations"
            draft.put("checkpoint.result", "best", "load_best_model_at_end", note=note)
    else:
        draft.put("checkpoint.keep_best", False, "load_best_model_at_end")


def _starting(draft: Draft) -> None:
    resume = draft.get("resume_from_checkpoint")
    if resume not in (None, False, "false"):
        if resume in (True, "true"):
            draft.put("resume", True, "resume_from_checkpoint", note="from a checkpoint of Meshtune's in output")
        else:
            draft.refuse(
                "resume_from_checkpoint",
                f"a checkpoint of {draft.tool} holds torch's own state, which is not read here",
                "leave it out and start from its adapter (model.adapter) or model (model.path)",
            )
    elif draft.get("overwrite_output_dir"):
        draft.put("overwrite", True, "overwrite_output_dir", note="the old run is moved aside")
    if draft.get("train_sampling_strategy") == "sequential":
        draft.put("data.shuffle", False, "train_sampling_strategy")
    elif draft.get("train_sampling_strategy") != "random":
        draft.refuse("train_sampling_strategy", "rows are drawn at random here, or in order", "leave it out")


def trackers(draft: Draft, key: str, chosen: list[str]) -> None:
    """Trackers that are here; unsupported are named."""
    known = [name for name in chosen if name in TRACKERS]
    unsupported = [name for name in chosen if name not in (*TRACKERS, "none")]
    if known:
        draft.put("log.trackers", known, key)
    if unsupported:
        draft.differ(key, f"there is no tracker {', '.join(unsupported)} here; metrics.jsonl has every number")


def upload(draft: Draft, *keys: str) -> None:
    """The repository of the hub to which the result goes; private, unless the file says public."""
    repository = draft.get("hub_model_id")
    if not repository:
        folder = str(draft.get("output_dir")).rstrip("/").rpartition("/")[2]
        note = (
            f"nothing is pushed without the name of an account: meshtune push {draft.get('output_dir')} USER/{folder}"
        )
        draft.differ("push_to_hub", note)
        return
    draft.put("hub.repository", repository, "hub_model_id", *keys, note="at the end of the run")
    if "hub_private_repo" in draft.given:
        draft.put("hub.public", not draft.get("hub_private_repo"), "hub_private_repo")
    else:
        draft.remark(f"The repository is private unless hub.public says otherwise; {draft.tool} makes it public.")


def dropout(draft: Draft, *, compared: bool) -> None:
    """The dropout of adapters. TRL's trainers that compare answers (`compared`) set every dropout of the model to 0."""
    rate = 0.0 if compared else float(draft.get("lora_dropout"))
    note = "the trainer of this stage switches dropout off, that of adapters too" if compared else ""
    draft.put("method.dropout", rate, "lora_dropout", note=note)
