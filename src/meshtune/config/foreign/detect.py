"""Which tool a file of keys is for."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

Tool = Literal["llama_factory", "llama_factory_v1", "axolotl", "torchtune", "trl", "meshtune", "accelerate"]
TITLES: dict[str, str] = {
    "llama_factory": "LLaMA-Factory",
    "llama_factory_v1": "LLaMA-Factory v1",
    "axolotl": "axolotl",
    "torchtune": "torchtune",
    "trl": "TRL",
    "meshtune": "Meshtune",
    "accelerate": "accelerate",
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


def detect(raw: Mapping[str, Any]) -> Tool | None:
    """The tool whose keys these are, None where they are of none that is known."""
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
    """The title of another tool where a recipe given to a command of ours is that tool's."""
    if set(raw) & {"data", "output"} == {"data", "output"}:
        return None
    tool = detect(raw)
    return None if tool in (None, "meshtune", "accelerate") else TITLES[tool]
