"""The keys of other tools for people: suggestions for keys of theirs in a recipe of ours, and the table of the docs."""

from __future__ import annotations

import functools

from meshtune.config.fields import keys
from meshtune.config.foreign import axolotl, llama_factory, online, trl
from meshtune.config.foreign.draft import Table

TABLES: dict[str, Table] = {
    llama_factory.NAME: llama_factory.TABLE,
    axolotl.NAME: axolotl.TABLE,
    trl.NAME: {**online.TABLE, **trl.TABLE},
}
# Names of peft, unsloth, torchtune and of keys within sections of other tools' files.
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
    "init_kl_coef": "stage.kl_coef",
    "adap_kl_ctrl": "stage.kl_target",
    "target_kl": "stage.kl_target",
    "horizon": "stage.kl_horizon",
}


@functools.cache
def suggestions() -> dict[str, str]:
    """Foreign key -> ours, for keys that mean one key of ours wherever they are written."""
    merged: dict[str, str] = {}
    for table in TABLES.values():
        for key, rule in table.items():
            if rule.to:
                merged.setdefault(key, rule.to)
    ours = {part for entry in keys() for part in entry.name.split(".")}
    return {key: to for key, to in (OTHER_NAMES | merged).items() if key not in ours}


def markdown() -> str:
    """Returns a table of our keys with the tools' keys that are translated to each, and the keys that are refused."""
    order = [entry.name for entry in keys()]
    targets = {rule.to for table in TABLES.values() for rule in table.values() if rule.to}
    lines = [f"| here | {' | '.join(TABLES)} |", "| --- " * (len(TABLES) + 1) + "|"]
    for target in sorted(targets, key=lambda to: (order.index(to) if to in order else -1, to)):
        cells = [[key for key, rule in sorted(table.items()) if rule.to == target] for table in TABLES.values()]
        lines.append(f"| `{target}` | {' | '.join(', '.join(f'`{key}`' for key in cell) for cell in cells)} |")
    lines += ["", "Refused, unless the value asks for nothing (the report says why, and what to do):", ""]
    for title, table in TABLES.items():
        refused = [f"`{key}`" for key, rule in sorted(table.items()) if rule.kind == "refused"]
        lines.append(f"- {title}: {', '.join(refused)}.")
    return "\n".join(lines) + "\n"
