"""A torchtune config as a recipe: its components by name."""

from __future__ import annotations

from meshtune.config.foreign import torchtune_data
from meshtune.config.foreign.draft import Draft
from meshtune.config.foreign.rules import flag, integer, names, number, text, two_numbers
from meshtune.config.foreign.torchtune_data import COMPONENT, component_of
from meshtune.config.foreign.trainer import TRACKERS, batch_settings

ATTENTION = {"q_proj": "q_proj", "k_proj": "k_proj", "v_proj": "v_proj", "output_proj": "o_proj"}
MLP = ["gate_proj", "up_proj", "down_proj"]
LOSSES = ("LinearCrossEntropyLoss", "CEWithChunkedOutputLoss", "CrossEntropyLoss")
OPTIMIZERS = {
    "torch.optim.AdamW": "adamw",
    "bitsandbytes.optim.AdamW": "adamw",
    "bitsandbytes.optim.PagedAdamW": "adamw",
    "bitsandbytes.optim.AdamW8bit": "adamw8bit",
    "bitsandbytes.optim.PagedAdamW8bit": "adamw8bit",
    "torchao.optim.AdamW8bit": "adamw8bit",
    "torchao.prototype.low_bit_optim.AdamW8bit": "adamw8bit",
}
OTHER_VERBS = ("tasks", "prompt", "teacher_model", "policy_model", "orchestration")
TEXT_OF_COMPOSITES = ("llama4_scout_17b_16e", "llama4_maverick_17b_128e")  # with images, of which text alone is trained
FUSED_FAMILIES = ("phi3", "phi4")


def train(draft: Draft) -> None:
    """Translates a config. Raises nothing: what cannot be done is refused in `draft`."""
    if any(key in draft.given for key in OTHER_VERBS):
        return  # refused by the table
    if "quantizer" in draft.given and "dataset" not in draft.given:
        draft.refuse("quantizer", "it is a config of another verb", "quantise as docs/quantize.md says")
        return
    component = str(component_of(draft, "model"))
    _start(draft, component)
    kind = _stage(draft)
    _method(draft, component)
    draft.apply()
    validation = torchtune_data.sources(draft, kind, component)
    batch_settings(draft, "batch_size", sharing=("tensor_parallel_dim", "context_parallel_dim"))
    _length(draft)
    _optimizer(draft)
    precision = {"bf16": "bfloat16", "fp32": "float32"}.get(draft.get("dtype"))
    if precision is None:
        draft.refuse("dtype", f"{draft.get('dtype')} is not computed in", "use bf16 or fp32")
    draft.put("compute.precision", precision, "dtype")
    if validation:
        draft.put("eval.every", draft.get("run_val_every_n_steps"), "run_val_every_n_steps")
    _logger(draft)
    draft.put("checkpoint.keep_best", False)
    if "seed" not in draft.given:
        draft.remark("seed: null draws one; here it is 0.")


def _start(draft: Draft, component: str) -> None:
    checkpointer = dict(draft.get("checkpointer") or {})
    if not checkpointer.get("checkpoint_dir"):
        draft.refuse("checkpointer", "it names no checkpoint_dir", "give the folder of the model")
        return
    if "Meta" in str(checkpointer.get(COMPONENT)):
        draft.refuse("checkpointer", "Meta's own files are not read", "use the Hugging Face files of the same model")
    if "vision" in component or "clip" in component:
        draft.refuse("model", f"{component} is a model of images", "use a model of text")
    draft.put(
        "model.path",
        draft.pop("checkpointer", checkpointer, "checkpoint_dir", text),
        "checkpointer",
        note="checkpoint_dir",
    )
    draft.refuse_unread(
        "checkpointer", checkpointer, "checkpoint_files", "output_dir", "model_type", "safe_serialization",
        "keep_last_n_checkpoints",
    )  # fmt: skip


def _stage(draft: Draft) -> str:
    loss = dict(draft.get("loss") or {})
    name = str(loss.get(COMPONENT, "")).rpartition(".")[2]
    if name == "DPOLoss":
        draft.put("stage.kind", "dpo", "loss")
        draft.put("stage.beta", float(draft.pop("loss", loss, "beta", number, 0.1)), "loss")
        if smoothing := draft.pop("loss", loss, "label_smoothing", number, 0):
            draft.put("stage.label_smoothing", smoothing, "loss")
        reference, start = (
            dict(draft.get("ref_checkpointer") or {}).get("checkpoint_dir"),
            draft.settings.get("model.path"),
        )
        if reference is not None and start is not None and reference != start.value:
            draft.put("stage.reference", reference, "ref_checkpointer", note="checkpoint_dir")
        draft.refuse_unread("loss", loss, "label_smoothing")
        return "dpo"
    if name not in LOSSES:
        draft.refuse("loss", f"{name or 'no loss'}: there is no such loss here", f"use DPOLoss or {LOSSES[0]}")
    written = component_of(draft, "dataset").rpartition(".")[2]
    kind = "pt" if written in ("text_completion_dataset", "wikitext_dataset") else "sft"
    draft.put("stage.kind", kind, "loss", note="plain text" if kind == "pt" else "")
    draft.refuse_unread("loss", loss, "num_output_chunks", "ignore_index", "tp_enabled", "mask_ignored_tokens")
    return kind


def _method(draft: Draft, component: str) -> None:
    config, name = dict(draft.get("model") or {}), component.rpartition(".")[2]
    if name.endswith(TEXT_OF_COMPOSITES) and config.get("decoder_trainable", "lora") == "lora":
        for part in ("decoder_trainable", "encoder_trainable", "fusion_trainable", "image_size"):
            config.pop(part, None)  # the others are of images, and data sets with images are refused
    if not name.startswith(("lora_", "qlora_")):
        draft.put("method.kind", "full", "model", note=name)
        draft.refuse_unread("model", config)
        return
    draft.put("method.kind", "lora", "model", note=name)
    draft.put("method.adapter", "dora" if config.pop("use_dora", False) else "lora", "model")
    draft.put("method.rank", draft.pop("model", config, "lora_rank", integer, 8), "model", note="lora_rank")
    draft.put("method.alpha", float(draft.pop("model", config, "lora_alpha", number, 16)), "model", note="lora_alpha")
    draft.put(
        "method.dropout", float(draft.pop("model", config, "lora_dropout", number, 0.0)), "model", note="lora_dropout"
    )
    attention = draft.pop("model", config, "lora_attn_modules", names, [])
    modules = [ATTENTION.get(module, module) for module in attention]
    mlp = draft.pop("model", config, "apply_lora_to_mlp", flag, False)
    head = draft.pop("model", config, "apply_lora_to_output", flag, False)
    everything = set(modules) == set(ATTENTION.values()) and mlp
    if any(family in component for family in FUSED_FAMILIES) and not everything:
        note = "projections of this family are fused in its published files, and some of them alone have adapters"
        draft.refuse("model", note, "give all of q_proj, k_proj, v_proj and output_proj, with apply_lora_to_mlp")
    chosen: object = [*modules, *(MLP if mlp else []), *(["lm_head"] if head else [])]
    draft.put("method.targets", "all-linear" if everything and not head else chosen, "model", note="lora_attn_modules")
    if name.startswith("qlora_") or config.pop("quantize_base", False):
        draft.put("quantize.format", "nf4", "model", note=name)
        draft.put("quantize.double", True, "model", note="NF4 of torchao: scales in 8 bits")
    draft.refuse_unread("model", config, "quantize_base")


def _length(draft: Draft) -> None:
    epochs, steps = draft.get("epochs"), draft.get("max_steps_per_epoch")
    if steps:
        note = "fewer where an epoch is shorter" if epochs == 1 else "an epoch's end is not waited for"
        draft.put("train.steps", int(epochs * steps), "max_steps_per_epoch", "epochs", note=note, differs=True)
    else:
        draft.put("train.epochs", float(epochs), "epochs")


def _optimizer(draft: Draft) -> None:
    config = dict(draft.get("optimizer") or {})
    component = str(config.pop(COMPONENT, ""))
    if component not in OPTIMIZERS:
        draft.refuse("optimizer", f"{component}: there is no such optimizer here", "use torch.optim.AdamW")
        return
    draft.put("optimizer.name", OPTIMIZERS[component], "optimizer", note=component)
    draft.put(
        "optimizer.learning_rate", float(draft.pop("optimizer", config, "lr", number, 1e-3)), "optimizer", note="lr"
    )
    draft.put(
        "optimizer.weight_decay",
        draft.pop("optimizer", config, "weight_decay", number, 0.01),
        "optimizer",
        note="0.01 where left out",
    )
    draft.put("optimizer.no_decay", [], note="torch's AdamW decays every parameter")
    beta1, beta2 = draft.pop("optimizer", config, "betas", two_numbers, (0.9, 0.999))
    for name, value in (
        ("beta1", beta1),
        ("beta2", beta2),
        ("eps", draft.pop("optimizer", config, "eps", number, 1e-8)),
    ):
        draft.put(f"optimizer.{name}", float(value), "optimizer")
    draft.refuse_unread("optimizer", config, "fused", "foreach", "capturable")
    schedule = dict(draft.get("lr_scheduler") or {})
    name = str(schedule.pop(COMPONENT, "")).rpartition(".")[2]
    if not draft.get("lr_scheduler"):
        draft.put("optimizer.schedule", "constant", note="without lr_scheduler")
        draft.put("optimizer.warmup_steps", 0, note="without lr_scheduler")
    elif name != "get_cosine_schedule_with_warmup" or schedule.pop("num_cycles", 0.5) != 0.5:
        draft.refuse("lr_scheduler", f"{name} is not here", "use get_cosine_schedule_with_warmup")
    else:
        draft.put("optimizer.schedule", "cosine", "lr_scheduler")
        draft.put(
            "optimizer.warmup_steps",
            draft.pop("lr_scheduler", schedule, "num_warmup_steps", integer, 0),
            "lr_scheduler",
        )
        draft.refuse_unread("lr_scheduler", schedule)
    if draft.get("optimizer_in_bwd"):
        draft.put("optimizer.in_backward", True, "optimizer_in_bwd")
    draft.put("optimizer.max_grad_norm", draft.get("clip_grad_norm"), "clip_grad_norm", note="null: never clipped")


def _logger(draft: Draft) -> None:
    config = draft.get("metric_logger") or {}
    name = str(config.get(COMPONENT, "")).rpartition(".")[2].removesuffix("Logger").lower()
    if name in TRACKERS:
        draft.put("log.trackers", [name], "metric_logger")
        if config.get("project"):
            draft.put("log.project", config["project"], "metric_logger")
    else:
        draft.idle("metric_logger", "metrics.jsonl has every number")
