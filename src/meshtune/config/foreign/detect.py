"""Which tool a file of keys is for."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from typing import Any

TITLES = {
    "llama_factory": "LLaMA-Factory",
    "llama_factory_v1": "LLaMA-Factory's v1 format",
    "axolotl": "axolotl",
    "torchtune": "torchtune",
    "trl": "TRL",
}
BY_HAND = "write a recipe with the same model, data and settings: `meshtune schema --markdown` lists every key"
# Tools whose recipes are not translated, and what to do instead.
NOT_TRANSLATED = {
    "torchtune": BY_HAND,
    "llama_factory_v1": f"import the file that trains the same in LLaMA-Factory's main format (v0), or {BY_HAND}",
}
OURS = {"model", "data", "output"}
V1 = {"train_dataset", "peft_config", "dist_config", "model_class", "sample_backend", "kernel_config", "quant_config"}
LLAMA_FACTORY = {
    "stage", "finetuning_type", "template", "cutoff_len", "dataset_dir", "infer_backend", "export_dir", "lora_rank",
    "lora_target", "pref_loss", "quantization_bit", "val_size",
}  # fmt: skip
TRL = {
    "dataset_name", "use_peft", "per_device_train_batch_size", "lora_target_modules", "dataset_config", "max_length",
    "lora_r", "load_in_4bit", "loss_type", "torch_dtype", "dtype", "attn_implementation", "datasets",
    "num_train_epochs",
}  # fmt: skip


def detect(raw: Mapping[str, Any]) -> str | None:
    """Returns the tool whose keys these are: one of TITLES, meshtune or accelerate; None for other keys."""
    keys = set(raw)
    if "base_model" in keys:
        return "axolotl"
    if "compute_environment" in keys or "distributed_type" in keys:
        return "accelerate"
    if any(isinstance(value, dict) and "_component_" in value for value in raw.values()):
        return "torchtune"
    if "model_name_or_path" in keys:
        if keys & LLAMA_FACTORY or ("dataset" in keys and "dataset_name" not in keys):
            return "llama_factory"
        return "trl" if keys & TRL else "llama_factory"
    if isinstance(raw.get("model"), str) and keys & V1:
        return "llama_factory_v1"
    if keys & OURS == OURS:
        return "meshtune"
    return None


def is_foreign(raw: Mapping[str, Any]) -> str | None:
    """Returns the title of another tool if a recipe given to one of our commands is that tool's."""
    if set(raw) & {"data", "output"} == {"data", "output"}:
        return None
    return TITLES.get(detect(raw) or "")


def import_fix(raw: Mapping[str, Any], file: str) -> str:
    """Returns the fix for another tool's recipe in `file`."""
    translated = f"translate it: meshtune import {file} --to recipe.yaml, then: meshtune train recipe.yaml"
    return NOT_TRANSLATED.get(detect(raw) or "", translated)


def equivalent_command(raw: Mapping[str, Any]) -> str | None:
    """Returns our command for a file of LLaMA-Factory that exports, predicts or chats; None for one that trains."""
    if raw.get("do_train") or ("dataset" in raw and not (raw.get("do_predict") or raw.get("export_dir"))):
        return None
    model, adapter = str(raw.get("model_name_or_path")), raw.get("adapter_name_or_path")
    adapter = str(adapter[0] if isinstance(adapter, list) and adapter else adapter or "").partition(",")[0]
    if folder := raw.get("export_dir"):
        source = [adapter, "--merge", "--base", model] if adapter else [model]
        return shlex.join(["meshtune", "export", *source, "--to", str(folder)])
    adapted = [model, *(["--adapter", adapter] if adapter else [])]
    if raw.get("do_predict") or raw.get("do_eval"):
        return shlex.join(["meshtune", "predict", *adapted, "--data", "FILE.json"])
    return shlex.join(["meshtune", "chat", *adapted])
