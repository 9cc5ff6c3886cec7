"""Architecture families: a Hugging Face config in, a `ModelSpec` and the names of its tensors out.

A new family is one module with `model_spec(config, where)`, `hf_names(spec)` and `module_names(spec)`, and one line in
FAMILIES.
"""

from __future__ import annotations

import dataclasses
from types import ModuleType
from typing import Any

from meshtune.errors import UserError, nearest
from meshtune.families import llama, mistral, qwen2, qwen3
from meshtune.model.spec import ModelSpec

FAMILIES: dict[str, ModuleType] = {"llama": llama, "mistral": mistral, "qwen2": qwen2, "qwen3": qwen3}


def model_spec(config: dict[str, Any], dtype: str = "float32", where: str = "config.json") -> ModelSpec:
    """The spec of a Hugging Face config.

    Raises UserError for an unsupported model_type and for every field that would change the mathematics in a way that
    is not implemented; `where` names the config in the message.
    """
    kind = config.get("model_type")
    if kind not in FAMILIES:
        raise UserError(
            f"model_type {kind!r} is not supported",
            where=f"{where}, field model_type",
            fix=f"{nearest(str(kind), FAMILIES)}supported: {', '.join(sorted(FAMILIES))}",
        )
    return dataclasses.replace(FAMILIES[kind].model_spec(config, where), dtype=dtype)


def hf_names(spec: ModelSpec) -> dict[str, list[str]]:
    """Tree path -> the Hugging Face tensors it is made of, one a layer in order, or a single one."""
    return FAMILIES[spec.family].hf_names(spec)


def module_names(spec: ModelSpec) -> dict[str, list[str]]:
    """Path of a node (a linear, a norm, the embedding) -> the Hugging Face modules it is made of."""
    return FAMILIES[spec.family].module_names(spec)
