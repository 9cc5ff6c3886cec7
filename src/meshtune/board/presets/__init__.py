"""Presets: what a kind of training sets, without model, data and output. One is a file here."""

from __future__ import annotations

import functools
import pathlib
from typing import Any

from meshtune.config import yaml_text

# In the order of the page; the page's texts name them (recipe.preset).
NAMES = ("lora", "qlora", "full", "dora", "low-memory", "dpo", "simpo", "orpo", "kto", "reward", "grpo", "pretrain")
# What a preset replaces: other keys of the recipe stay.
SECTIONS = ("stage", "rollout", "rewards", "method", "quantize", "optimizer", "compute")


@functools.cache
def presets() -> dict[str, Any]:
    """The content of every preset by name."""
    folder = pathlib.Path(__file__).parent
    return {
        name: yaml_text.read((folder / f"{name}.yaml").read_text(encoding="utf-8"), f"{name}.yaml").value
        for name in NAMES
    }
