"""EXAONE 4.0: norms after each block in place of before, normalised queries and keys, and no rotary embedding in
layers that see the whole past, where others have windows (https://arxiv.org/abs/2507.11407)."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

from meshtune.families import qwen3
from meshtune.families.config_fields import ConfigFields
from meshtune.families.family import Family
from meshtune.families.llama import MODULES, OUTSIDE, attention_spec, decoder_spec, mlp_spec
from meshtune.families.tensors import TensorMap, one_to_one
from meshtune.model.attention import AttentionSpec
from meshtune.model.layer import LayerSpec
from meshtune.model.norm import NormSpec
from meshtune.model.spec import ModelSpec

POST_NORMS = {"attn_post_norm": "post_attention_layernorm", "mlp_post_norm": "post_feedforward_layernorm"}
FULL, SLIDING = "full_attention", "sliding_attention"
WINDOW = {"sliding_window": 4096}  # of configs that do not say

DESCRIPTIONS = {
    "exaone4": Family(
        title="EXAONE 4.0",
        special="norms after each block alone, normalised queries and keys; in the 32B windows, and no rotary "
        "embedding in layers without one",
        models=("LGAI-EXAONE/EXAONE-4.0-1.2B", "LGAI-EXAONE/EXAONE-4.0-32B"),
    )
}


def model_spec(config: dict[str, Any], where: str) -> ModelSpec:
    """Exaone4Config -> ModelSpec. sliding_window null means none, which is not the default."""
    fields = ConfigFields(WINDOW | config, where)
    norm, mlp = NormSpec(fields.number("rms_norm_eps", 1e-5)), mlp_spec(fields)
    layers = [LayerSpec(attention, mlp, norm, "post") for attention in exaone_attention(fields, norm)]
    return decoder_spec(fields, "exaone4", "Exaone4ForCausalLM", layers)


def exaone_attention(fields: ConfigFields, norm: NormSpec) -> list[AttentionSpec]:
    """The attention of every layer."""
    window = fields.get("sliding_window")
    kinds = fields.layer_types((FULL, SLIDING), default=_pattern(fields) if window is not None else lambda _: FULL)
    fields.get("sliding_window_pattern")
    if window is None and SLIDING in kinds:
        raise fields.error("sliding_window", "sliding_window is null, and layer_types has layers with one")
    sliding = attention_spec(fields, window=window, qk_norm=norm)
    full = sliding if window is None else dataclasses.replace(sliding, window=None, rope=None)
    return [sliding if kind == SLIDING else full for kind in kinds]


def _pattern(fields: ConfigFields) -> Callable[[int], str]:
    """The layer type by index: of sliding_window_pattern, every n-th layer without a window, or letters L and G."""
    pattern, last = fields.get("sliding_window_pattern", 4), fields.integer("num_hidden_layers") - 1
    if isinstance(pattern, str) and pattern and set(pattern) <= {"L", "G"}:
        return lambda index: FULL if index == last or pattern[index % len(pattern)] == "G" else SLIDING
    count = fields.integer("sliding_window_pattern", 4)
    return lambda index: SLIDING if (index + 1) % count else FULL


def tensors(spec: ModelSpec) -> list[TensorMap]:
    """The table of tensors: each is one leaf, or one layer of it."""
    return one_to_one(spec, MODULES | qwen3.NORMS | POST_NORMS, OUTSIDE)
