"""Small files of other tools, and what became of their keys."""

from __future__ import annotations

from typing import Any

from meshtune.config.foreign.draft import Finding
from meshtune.config.foreign.importer import Translation

LLAMA_FACTORY: dict[str, Any] = {
    "model_name_or_path": "some/model",
    "stage": "sft",
    "do_train": True,
    "finetuning_type": "lora",
    "dataset": "first, second",
    "template": "qwen",
    "output_dir": "saves/x",
}
AXOLOTL: dict[str, Any] = {
    "base_model": "some/model",
    "datasets": [{"path": "tatsu-lab/alpaca", "type": "alpaca"}],
    "learning_rate": "2e-5",
    "output_dir": "out",
}
QLORA: dict[str, Any] = {
    "adapter": "qlora",
    "load_in_4bit": True,
    "lora_r": 16,
    "lora_alpha": 32,
    "lora_target_linear": True,
}


def verdicts(translation: Translation) -> dict[str, str]:
    return {finding.key: finding.verdict for finding in translation.findings}


def finding_of(translation: Translation, key: str) -> Finding:
    return next(finding for finding in translation.findings if finding.key == key)
