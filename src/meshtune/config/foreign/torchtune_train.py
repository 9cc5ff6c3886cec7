"""A torchtune config as a recipe: its components by name."""

from __future__ import annotations

from typing import Any

from meshtune.config.foreign.draft import Draft
from meshtune.config.foreign.trainer import TRACKERS, batch_settings

COMPONENT = "_component_"
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
FUSED_FAMILIES = ("phi3", "phi4")


def train(draft: Draft) -> None:
    """Translates a config. Raises nothing: what cannot be done is refused in `draft`."""
    if any(key in draft.given for key in OTHER_VERBS):
        return  # refused by the table
    component = str(_component(draft, "model"))
    _start(draft, component)
    kind = _stage(draft)
    _method(draft, component)
    draft.apply()
    validation = _data(draft, kind, component)
    batch_settings(draft, "batch_size")
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


def _component(draft: Draft, key: str) -> str:
    return str((draft.get(key) or {}).get(COMPONENT, ""))


def _refuse_unread(draft: Draft, key: str, config: dict[str, Any], *harmless: str) -> None:
    """Refuses `key` for what is left in it that nothing has read."""
    unread = [
        name for name, value in config.items() if name not in (COMPONENT, *harmless) and value not in (None, False)
    ]
    if unread:
        draft.refuse(key, f"{', '.join(unread)} in it: nothing here does that", f"leave out {', '.join(unread)}")


def _start(draft: Draft, component: str) -> None:
    checkpointer = dict(draft.get("checkpointer") or {})
    if not checkpointer.get("checkpoint_dir"):
        draft.refuse("checkpointer", "it names no checkpoint_dir", "give the folder of the model")
        return
    if "Meta" in str(checkpointer.get(COMPONENT)):
        draft.refuse("checkpointer", "Meta's own files are not read", "use the Hugging Face files of the same model")
    if "vision" in component or "clip" in component:
        draft.refuse("model", f"{component} is a model of images", "use a model of text")
    draft.put("model.path", checkpointer.pop("checkpoint_dir"), "checkpointer", note="checkpoint_dir")
    _refuse_unread(
        draft, "checkpointer", checkpointer, "checkpoint_files", "output_dir", "model_type", "safe_serialization",
        "keep_last_n_checkpoints",
    )  # fmt: skip


def _stage(draft: Draft) -> str:
    loss = dict(draft.get("loss") or {})
    name = str(loss.get(COMPONENT, "")).rpartition(".")[2]
    if name == "DPOLoss":
        draft.put("stage.kind", "dpo", "loss")
        draft.put("stage.beta", float(loss.pop("beta", 0.1)), "loss")
        if smoothing := loss.pop("label_smoothing", 0):
            draft.put("stage.label_smoothing", smoothing, "loss")
        _refuse_unread(draft, "loss", loss, "label_smoothing")
        return "dpo"
    if name not in LOSSES:
        draft.refuse("loss", f"{name or 'no loss'}: there is no such loss here", f"use DPOLoss or {LOSSES[0]}")
    text = _component(draft, "dataset").rpartition(".")[2]
    kind = "pt" if text in ("text_completion_dataset", "wikitext_dataset") else "sft"
    draft.put("stage.kind", kind, "loss", note="plain text" if kind == "pt" else "")
    _refuse_unread(draft, "loss", loss, "num_output_chunks", "ignore_index", "tp_enabled", "mask_ignored_tokens")
    return kind


def _method(draft: Draft, component: str) -> None:
    config, name = dict(draft.get("model") or {}), component.rpartition(".")[2]
    if not name.startswith(("lora_", "qlora_")):
        draft.put("method.kind", "full", "model", note=name)
        _refuse_unread(draft, "model", config)
        return
    draft.put("method.kind", "lora", "model", note=name)
    draft.put("method.adapter", "dora" if config.pop("use_dora", False) else "lora", "model")
    draft.put("method.rank", config.pop("lora_rank", 8), "model", note="lora_rank")
    draft.put("method.alpha", float(config.pop("lora_alpha", 16)), "model", note="lora_alpha")
    draft.put("method.dropout", float(config.pop("lora_dropout", 0.0)), "model", note="lora_dropout")
    attention = config.pop("lora_attn_modules", [])
    modules = [ATTENTION.get(module, module) for module in attention]
    mlp, head = config.pop("apply_lora_to_mlp", False), config.pop("apply_lora_to_output", False)
    everything = set(modules) == set(ATTENTION.values()) and mlp
    if any(family in component for family in FUSED_FAMILIES) and not everything:
        note = "projections of this family are fused in its published files, and some of them alone have adapters"
        draft.refuse("model", note, "give all of q_proj, k_proj, v_proj and output_proj, with apply_lora_to_mlp")
    chosen: object = [*modules, *(MLP if mlp else []), *(["lm_head"] if head else [])]
    draft.put("method.targets", "all-linear" if everything and not head else chosen, "model", note="lora_attn_modules")
    if name.startswith("qlora_") or config.pop("quantize_base", False):
        draft.put("quantize.format", "nf4", "model", note=name)
        draft.put("quantize.double", True, "model", note="NF4 of torchao: scales in 8 bits")
    _refuse_unread(draft, "model", config, "quantize_base")


def _data(draft: Draft, kind: str, model: str) -> bool:
    configs = draft.get("dataset")
    configs = configs if isinstance(configs, list) else [configs]
    for number, config in enumerate(configs):
        if isinstance(config, dict):
            _source(draft, "dataset", f"data.train.{number}", dict(config), kind)
        else:
            draft.refuse("dataset", "it is no component", "give _component_ and its arguments")
    validation = draft.get("dataset_val") if draft.get("run_val_every_n_steps") else None
    if validation:
        _source(draft, "dataset_val", "data.validation.0", dict(validation), kind)
    tokenizer = dict(draft.get("tokenizer") or {})
    longest = tokenizer.pop("max_seq_len", None)
    if longest is None:
        note = "max_seq_len: null cuts nothing; a longer record is an error here, and then this is to be raised"
        draft.put("data.max_length", 4096, "tokenizer", note=note, differs=True)
        draft.put("data.overlong", "error", "tokenizer")
    else:
        draft.put("data.max_length", longest, "tokenizer", note="max_seq_len")
    _refuse_unread(draft, "tokenizer", tokenizer, "path", "merges_file", "vocab_path", "merges_path")
    if kind != "pt":
        llama3 = "llama3" in _component(draft, "tokenizer")
        note = (
            "torchtune also learns an end of text after the last turn" if llama3 else "the tokenizer's own template is "
            "used: compare what is trained with `meshtune data inspect`"
        )  # fmt: skip
        if llama3:
            draft.put("model.chat_template", "llama3", "tokenizer", note=note, differs=True)
        else:
            draft.differ("tokenizer", note)
    return bool(validation)


def _source(draft: Draft, key: str, to: str, config: dict[str, Any], kind: str) -> None:
    name = str(config.pop(COMPONENT, "")).rpartition(".")[2]
    reader = DATASETS.get(name)
    if reader is None or (kind == "dpo") != (name == "preference_dataset"):
        draft.refuse(key, f"{name}: its prompts are not written here", "write records as messages: chat_dataset")
        return
    path, fields, on_prompt = reader(config)
    files = config.pop("data_files", None)
    if path in ("json", "csv", "parquet", "text") and files is not None:
        path = files
    draft.put(f"{to}.path", path, key, note=name)
    for ours, value in fields.items():
        draft.put(f"{to}.{ours}", value, key)
    for theirs, ours in (("split", "split"), ("name", "subset"), ("subset", "subset")):
        if (value := config.pop(theirs, None)) is not None:
            draft.put(f"{to}.{ours}", value, key)
    system = config.pop("new_system_prompt", None)
    if system:
        draft.put("data.system", system, key)
    if kind == "sft":
        draft.put("data.train_on_prompt", bool(config.pop("train_on_input", on_prompt)), key)
    packed = bool(config.pop("packed", False))
    if key == "dataset":
        note = "rows are filled in another order" if packed else "one document a row"
        draft.put("data.packing", packed, key, note=note, differs=packed)
    _refuse_unread(draft, key, config, "train_on_input", "split_across_pack", "add_eos")


def _alpaca(config: dict[str, Any], source: str) -> tuple[str, dict[str, Any], bool]:
    fields: dict[str, Any] = {"format": "stanford_alpaca", "tags": {"turns": "chat"}}
    if columns := config.pop("column_map", None):
        fields["columns"] = columns
    return config.pop("source", source), fields, True


def _chat(config: dict[str, Any], source: str = "", style: str = "") -> tuple[str, dict[str, Any], bool]:
    style = config.pop("conversation_style", style)
    form, field = ("messages", "messages") if style == "openai" else ("sharegpt", "conversations")
    column = config.pop("conversation_column", field)
    columns = {"columns": {field: column}} if column != field else {}
    return config.pop("source", source), {"format": form, **columns}, False


def _instruct(config: dict[str, Any]) -> tuple[str, dict[str, Any], bool]:
    columns = config.pop("column_map", None) or {"input": "input", "output": "output"}
    renamed = {
        "instruction": columns.get("input", "input"),
        "output": columns.get("output", "output"),
        "input": "no_input",
    }
    return config.pop("source", ""), {"format": "alpaca", "columns": renamed}, False


def _preference(config: dict[str, Any]) -> tuple[str, dict[str, Any], bool]:
    columns = config.pop("column_map", None) or {}
    renamed = {side: columns.get(side, f"{side}_conversations") for side in ("chosen", "rejected")}
    return config.pop("source", ""), {"format": "preference", "columns": {"prompt": "no_prompt", **renamed}}, False


def _text(config: dict[str, Any], source: str = "", column: str = "text") -> tuple[str, dict[str, Any], bool]:
    column = config.pop("column", column)
    columns = {"columns": {"text": column}} if column != "text" else {}
    return config.pop("source", source), {"format": "text", **columns}, True


DATASETS = {
    "alpaca_dataset": lambda config: _alpaca(config, "tatsu-lab/alpaca"),
    "alpaca_cleaned_dataset": lambda config: _alpaca(config, "yahma/alpaca-cleaned"),
    "chat_dataset": _chat,
    "slimorca_dataset": lambda config: _chat(config, "Open-Orca/SlimOrca-Dedup", "sharegpt"),
    "instruct_dataset": _instruct,
    "preference_dataset": _preference,
    "text_completion_dataset": _text,
    "wikitext_dataset": lambda config: _text(config, "EleutherAI/wikitext_document_level", "page"),
}


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
    draft.put("optimizer.learning_rate", float(config.pop("lr", 1e-3)), "optimizer", note="lr")
    draft.put("optimizer.weight_decay", config.pop("weight_decay", 0.01), "optimizer", note="0.01 where left out")
    draft.put("optimizer.no_decay", [], note="torch's AdamW decays every parameter")
    beta1, beta2 = config.pop("betas", (0.9, 0.999))
    for name, value in (("beta1", beta1), ("beta2", beta2), ("eps", config.pop("eps", 1e-8))):
        draft.put(f"optimizer.{name}", float(value), "optimizer")
    _refuse_unread(draft, "optimizer", config, "fused", "foreach", "capturable")
    schedule = dict(draft.get("lr_scheduler") or {})
    name = str(schedule.pop(COMPONENT, "")).rpartition(".")[2]
    if not draft.get("lr_scheduler"):
        draft.put("optimizer.schedule", "constant", note="without lr_scheduler")
        draft.put("optimizer.warmup_steps", 0, note="without lr_scheduler")
    elif name != "get_cosine_schedule_with_warmup" or schedule.pop("num_cycles", 0.5) != 0.5:
        draft.refuse("lr_scheduler", f"{name} is not here", "use get_cosine_schedule_with_warmup")
    else:
        draft.put("optimizer.schedule", "cosine", "lr_scheduler")
        draft.put("optimizer.warmup_steps", schedule.pop("num_warmup_steps", 0), "lr_scheduler")
        _refuse_unread(draft, "lr_scheduler", schedule)
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
