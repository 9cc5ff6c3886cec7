"""LLaMA-Factory's second schema (v1): keys, defaults, and what they come to here."""

from __future__ import annotations

import pathlib
from typing import Any

from meshtune.config import yaml_text
from meshtune.config.foreign import models
from meshtune.config.foreign.adapted import put_targets
from meshtune.config.foreign.draft import OTHER_ORDER, Draft
from meshtune.config.foreign.llama_factory import IMAGES, KERNELS
from meshtune.config.foreign.llama_factory_train import put_sft_term
from meshtune.config.foreign.rules import (
    ABSENT,
    Reader,
    Table,
    direct,
    flag,
    idle,
    integer,
    mapping,
    names,
    number,
    part,
    refused,
    text,
    two_numbers,
)
from meshtune.config.foreign.trainer import LOADER, MEMORY, MESH, batch_settings
from meshtune.errors import UserError

NAME = "LLaMA-Factory v1"
PREFERENCE = "only stage dpo reads it"
V1: Table = {
    "model": part("model.path", text),
    "custom_chat_template": part("model.chat_template", text),
    "model_class": part("model.path", text, "llm", "llm: a model of text"),
    "trust_remote_code": part("model.path", flag, False, "no code of a repository is ever run; families are built in"),
    "peft_config": part("method", mapping),
    "quant_config": part("quantize", mapping),
    "optim_config": part("optimizer", mapping),
    "lr_scheduler_config": refused("the schedule is constant here, as without it", "leave it out", ()),
    "train_dataset": part("data.train", text),
    "eval_dataset": part("data.validation", text),
    "output_dir": direct("output", text, "outputs/run"),
    "micro_batch_size": part("train.micro_batch", integer, 1),
    "global_batch_size": part("train.batch_size", integer),
    "cp_size": part("train.batch_size", integer, 1, "1: a row is on one device"),
    "cutoff_len": part("data.max_length", integer, 2048),
    "learning_rate": direct("optimizer.learning_rate", number, 1e-4),
    "num_train_epochs": part("train.epochs", number, 3, "max_steps says how long the run is"),
    "max_steps": part("train.steps", integer),
    "max_grad_norm": direct("optimizer.max_grad_norm", number, 1.0),
    "bf16": part("compute.precision", flag, True),
    "batching_strategy": part("data.packing", text, "normal"),
    "seed": direct("seed", integer, 42),
    "resume_from_checkpoint": refused("its checkpoints hold torch's own state", "leave it out", ()),
    "save_steps": direct("checkpoint.every", integer),
    "save_epochs": part("checkpoint.every", number, ABSENT, "checkpoints are about ten a run here"),
    "save_total_limit": direct("checkpoint.keep", integer),
    "logging_steps": direct("log.every", integer, 1),
    "pref_loss": part("stage.loss", text, "sigmoid", PREFERENCE),
    "pref_beta": part("stage.beta", number, 0.1, PREFERENCE),
    "pref_ftx": part("stage.sft_weight", number, 0.0, PREFERENCE),
    "simpo_gamma": part("stage.gamma", number, 0.5, PREFERENCE),
    "dpo_label_smoothing": part("stage.label_smoothing", number, 0.0, PREFERENCE),
    "ld_alpha": part("stage.ld_alpha", number, ABSENT, PREFERENCE),
    **idle(KERNELS, "flash_attn kernel_config"),
    **idle(MEMORY, "enable_activation_checkpointing save_ckpt_as_hf init_config"),
    **idle(LOADER, "batching_workers"),
    **idle(MESH, "dist_config dp_size cp_mode mp_replicate_size mp_shard_size dist_timeout full_determinism"),
    **idle("it is for sampling, which `meshtune chat` and `generate` do", "sample_backend max_new_tokens"),
    **idle(IMAGES, "processor_config"),
}
# Keys within peft_config, quant_config and optim_config, with LLaMA-Factory's defaults.
LORA: dict[str, tuple[Reader, Any]] = {
    "r": (integer, 8), "lora_alpha": (number, 16), "lora_dropout": (number, 0.05), "target_modules": (names, ["all"]),
}  # fmt: skip
EXPORT = ("export_dir", "export_size", "infer_dtype", "export_legacy_format", "export_hub_model_id")
FREEZE = ("freeze_trainable_layers", "freeze_trainable_modules", "freeze_extra_modules")
CONVERTERS = {"alpaca": "alpaca", "sharegpt": "sharegpt", "pair": "preference", None: "messages"}


def verb(draft: Draft) -> str:
    peft = draft.get("peft_config") or {}
    return "export" if "export_dir" in peft and not draft.get("train_dataset") else "train"


def export(draft: Draft) -> None:
    peft = dict(draft.get("peft_config"))
    path = _model(draft)
    draft.put("SOURCE", peft.pop("adapter_name_or_path", None), "peft_config")
    draft.put("--merge", True, "peft_config")
    draft.put("--base", path, "model")
    draft.put("--to", peft.pop("export_dir"), "peft_config")
    draft.put("--max-shard-size", f"{peft.pop('export_size', 5)}GB", "peft_config")
    if (dtype := peft.pop("infer_dtype", "auto")) in ("float32", "bfloat16"):
        draft.put("--dtype", dtype, "peft_config")
    draft.refuse_unread("peft_config", peft, "name", "export_legacy_format", *LORA)


def train(draft: Draft) -> None:
    draft.put("model.path", _model(draft), "model")
    if template := draft.get("custom_chat_template"):
        draft.files[".jinja"] = template
        draft.put("model.chat_template", ".jinja", "custom_chat_template")
    kind = _data(draft)
    _stage(draft, kind)
    _method(draft)
    _quantize(draft)
    draft.apply()
    _optimizer(draft)
    batch_settings(draft, "micro_batch_size", None, sharing=("cp_size",))
    if draft.get("global_batch_size"):
        draft.put("train.batch_size", draft.get("global_batch_size"), "global_batch_size")
    if draft.get("max_steps"):
        draft.put("train.steps", draft.get("max_steps"), "max_steps")
    else:
        draft.put("train.epochs", float(draft.get("num_train_epochs")), "num_train_epochs")
    draft.put("compute.precision", "mixed" if draft.get("bf16") else "float32", "bf16")
    draft.put("checkpoint.keep_best", False)
    draft.remark(OTHER_ORDER)


def _model(draft: Draft) -> str:
    path = draft.get("model") or ""
    models.check_model(draft, "model", path)
    if draft.get("model_class") != "llm":
        draft.refuse("model_class", f"{draft.get('model_class')} is not a model of text", "use llm")
    return path


def _data(draft: Draft) -> str:
    """The data, and whether they are preference or not: the schema does not name the stage."""
    listed = {}
    if (name := draft.get("train_dataset")) is None:
        draft.refuse("train_dataset", "the file names no data", "add train_dataset")
    else:
        listed = _listing(draft, "train_dataset", name)
    for index, (title, entry) in enumerate(listed.items()):
        _source(draft, f"data.train.{index}", "train_dataset", title, dict(entry))
    if (name := draft.get("eval_dataset")) is not None:
        for index, (title, entry) in enumerate(_listing(draft, "eval_dataset", name).items()):
            _source(draft, f"data.validation.{index}", "eval_dataset", title, dict(entry))
        draft.put("eval.every", None, note="LLaMA-Factory evaluates at the end alone")
    strategy = draft.get("batching_strategy")
    packed = strategy in ("dynamic_batching", "dynamic_padding_free")
    note = "rows are filled with whole documents; LLaMA-Factory counts tokens of a batch" if packed else ""
    draft.put("data.packing", packed, "batching_strategy", note=note, differs=packed)
    draft.put("data.max_length", draft.get("cutoff_len"), "cutoff_len")
    return "dpo" if any(entry.get("converter") == "pair" for entry in listed.values()) else "sft"


def _listing(draft: Draft, key: str, name: str) -> dict[str, dict[str, Any]]:
    """The data sets that a file names, by name."""
    from meshtune.config.load import recipe_file_text  # which imports this module

    if not name.endswith((".yaml", ".yml")):
        return {name: {"path": name}}
    file = pathlib.Path(name).expanduser()
    if not file.is_file():
        draft.refuse(key, f"{name}, which lists the data, cannot be read", "run this where that file lies")
        return {}
    try:
        value = yaml_text.read(recipe_file_text(file), name).value
    except UserError as problem:
        draft.refuse(key, f"{name}: {problem}", "correct that file")
        return {}
    if not isinstance(value, dict) or not all(isinstance(entry, dict) and "path" in entry for entry in value.values()):
        draft.refuse(key, f"{name} does not list data sets, each with its path", "correct that file")
        return {}
    return value


def _source(draft: Draft, to: str, key: str, name: str, entry: dict[str, Any]) -> None:
    if "multimodal" in name:
        draft.refuse(key, f"{name}: {IMAGES}", "leave that data set out")
    draft.put(f"{to}.path", entry.pop("path"), key)
    converter = entry.pop("converter", None)
    if converter not in CONVERTERS:
        draft.refuse(key, f"{name}: there is no converter {converter} here", "use alpaca, sharegpt or pair")
        return
    draft.put(f"{to}.format", CONVERTERS[converter], key)
    for theirs, ours in (("split", "split"), ("size", "cap"), ("weight", "weight")):
        if entry.get(theirs) is not None:
            draft.put(f"{to}.{ours}", entry.pop(theirs), key)
    if entry.pop("streaming", False):
        draft.refuse(key, f"{name}: {draft.tool} stops at streaming, which it does not have yet", "leave it out")
    draft.refuse_unread(key, entry, "source")


def _stage(draft: Draft, kind: str) -> None:
    loss = draft.get("pref_loss")
    if kind == "sft":
        draft.put("stage.kind", "sft", note="the file names no stage, and its data hold no pairs")
        return
    kind = loss if loss in ("orpo", "simpo") else "dpo"
    draft.put("stage.kind", kind, "pref_loss" if kind != "dpo" else "", note="the data hold pairs")
    draft.put("stage.beta", draft.get("pref_beta"), "pref_beta")
    if kind == "dpo":
        draft.put("stage.loss", loss, "pref_loss")
        if draft.get("ld_alpha") is not None:
            draft.put("stage.ld_alpha", draft.get("ld_alpha"), "ld_alpha")
    if kind == "simpo":
        draft.put("stage.gamma", draft.get("simpo_gamma"), "simpo_gamma")
    if kind != "orpo" and draft.get("dpo_label_smoothing"):
        draft.put("stage.label_smoothing", draft.get("dpo_label_smoothing"), "dpo_label_smoothing")
    put_sft_term(draft, kind)


def _method(draft: Draft) -> None:
    peft = dict(draft.get("peft_config") or {})
    name = peft.pop("name", None)
    if not draft.get("peft_config"):
        draft.put("method.kind", "full", note="without peft_config all weights are trained")
    elif name == "lora":
        draft.put("method.kind", "lora", "peft_config")
        values = {key: draft.pop("peft_config", peft, key, read, default) for key, (read, default) in LORA.items()}
        draft.put("method.adapter", "dora" if peft.pop("use_dora", False) else "lora", "peft_config")
        draft.put("method.rank", values["r"], "peft_config", note="r")
        draft.put("method.alpha", float(values["lora_alpha"]), "peft_config", note="lora_alpha")
        draft.put("method.dropout", values["lora_dropout"], "peft_config", note="lora_dropout, 0.05 where left out")
        chosen = values["target_modules"]
        everything = chosen in ("all", ["all"])
        put_targets(draft, None if everything else chosen, "peft_config", by_class=True, converts=False)
        if peft.pop("use_rslora", False):
            draft.put("method.rslora", True, "peft_config")
        if saved := peft.pop("modules_to_save", None):
            draft.put("method.train_modules", saved, "peft_config")
        if adapter := peft.pop("adapter_name_or_path", None):
            draft.put("model.adapter", adapter, "peft_config")
        draft.refuse_unread("peft_config", peft, *EXPORT)
    elif name == "freeze":
        layers = draft.pop("peft_config", peft, "freeze_trainable_layers", integer, 2)
        draft.put("method.kind", "freeze", "peft_config")
        draft.put(f"method.{'last' if layers > 0 else 'first'}_layers", abs(layers), "peft_config")
        chosen = [*_names(peft.pop("freeze_trainable_modules", None)), *_names(peft.pop("freeze_extra_modules", None))]
        if chosen:
            draft.put("method.modules", chosen, "peft_config")
        draft.refuse_unread("peft_config", peft, *FREEZE, "cast_trainable_params_to_fp32")
    else:
        draft.refuse("peft_config", f"there is no method {name} here", "use lora or freeze")


def _quantize(draft: Draft) -> None:
    config = dict(draft.get("quant_config") or {})
    if not config:
        return
    name, bits = config.pop("name", "auto"), config.pop("quantization_bit", 4)
    if name not in ("bnb", "auto") or bits not in (4, 8) or config.pop("quantization_type", "nf4") != "nf4":
        draft.refuse("quant_config", f"{draft.get('quant_config')} is not written here", "use bnb with 4 or 8 bits")
        return
    draft.put("quantize.format", "nf4" if bits == 4 else "int8", "quant_config")
    if bits == 4:
        draft.put("quantize.double", config.pop("double_quantization", True), "quant_config")
    draft.refuse_unread("quant_config", config, "compute_dtype")


def _optimizer(draft: Draft) -> None:
    config = dict(draft.get("optim_config") or {})
    name = config.pop("name", "adamw")
    draft.put("optimizer.schedule", "constant", note="LLaMA-Factory's rate is constant")
    draft.put("optimizer.warmup_steps", 0, note="LLaMA-Factory has no warm-up")
    if name == "muon":
        draft.put("optimizer.name", "muon", "optim_config")
        draft.put("optimizer.momentum", draft.pop("optim_config", config, "momentum", number, 0.95), "optim_config")
        draft.put(
            "optimizer.weight_decay", draft.pop("optim_config", config, "wd", number, 0.1), "optim_config", note="wd"
        )
        beta1, beta2 = draft.pop("optim_config", config, "adamw_betas", two_numbers, (0.9, 0.95))
        draft.put(
            "optimizer.eps",
            draft.pop("optim_config", config, "adamw_eps", number, 1e-8),
            "optim_config",
            note="adamw_eps",
        )
        if config.pop("ns_steps", 5) != 5 or config.pop("nesterov", True) is not True:
            draft.refuse(
                "optim_config", "muon takes five Newton-Schulz steps and Nesterov's momentum here", "use those"
            )
    elif name == "adamw":
        draft.put("optimizer.name", "adamw", "optim_config", note="torch's AdamW")
        draft.put(
            "optimizer.weight_decay",
            draft.pop("optim_config", config, "weight_decay", number, 0.01),
            "optim_config",
            note="torch's 0.01",
        )
        beta1, beta2 = draft.pop("optim_config", config, "betas", two_numbers, (0.9, 0.999))
        draft.put("optimizer.eps", draft.pop("optim_config", config, "eps", number, 1e-8), "optim_config")
        draft.put("optimizer.no_decay", [], note="torch's AdamW decays every parameter")
    else:
        draft.refuse("optim_config", f"there is no optimizer {name} in this schema here", "use muon, or leave it out")
        return
    draft.put("optimizer.beta1", beta1, "optim_config")
    draft.put("optimizer.beta2", beta2, "optim_config")
    draft.refuse_unread("optim_config", config, "lr", "ns_steps", "nesterov")


def _names(value: object) -> list[str]:
    if value in (None, "all", ["all"]):
        return []
    return [str(entry) for entry in value] if isinstance(value, list) else [n.strip() for n in str(value).split(",")]
