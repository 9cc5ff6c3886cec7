"""Other fine-tuning tools: their keys, what each comes to here, and recipes of theirs translated.

A module holds the table of a tool; `importer` translates. `FOREIGN_KEYS` are suggestions for keys of other tools that
stand in a recipe of ours, from the same tables.
"""

from __future__ import annotations

from meshtune.config.fields import keys
from meshtune.config.foreign import axolotl, llama_factory, llama_factory_v1, torchtune, trl

# Names of peft, unsloth and of keys within sections of other tools' files.
OTHER_NAMES = {
    "model_name": "model.path",
    "tokenizer_name_or_path": "model.tokenizer",
    "train_file": "data.train",
    "max_seq_length": "data.max_length",
    "system_prompt": "data.system",
    "peft": "method",
    "r": "method.rank",
    "target_modules": "method.targets",
    "modules_to_save": "method.train_modules",
    "init_lora_weights": "method.adapter",
    "quantization_config": "quantize",
    "max_seq_len": "data.max_length",
    "train_on_input": "data.train_on_prompt",
    "lr": "optimizer.learning_rate",
    "lora_attn_modules": "method.targets",
    "num_warmup_steps": "optimizer.warmup_steps",
    "gradient_checkpointing": "compute.remat",
    "attn_implementation": "compute.attention",
    "flash_attention": "compute.attention",
    "flash_attn": "compute.attention",
}


def _suggestions() -> dict[str, str]:
    """Foreign key -> ours, for keys that come to one key of ours wherever they stand."""
    tables = (llama_factory.TRAIN, axolotl.AXOLOTL, trl.TRL, torchtune.TORCHTUNE, llama_factory_v1.V1)
    merged: dict[str, str] = {}
    for table in tables:
        for key, rule in table.items():
            if rule.to:
                merged.setdefault(key, rule.to)
    ours = {part for entry in keys() for part in entry.name.split(".")}
    return {key: to for key, to in (OTHER_NAMES | merged).items() if key not in ours}


FOREIGN_KEYS = _suggestions()
