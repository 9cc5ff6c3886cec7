"""ERNIE 4.5, dense: Llama's layout with a rotary embedding of pairs of neighbours."""

from __future__ import annotations

from typing import Any

from meshtune.families.config_fields import ConfigFields, read_rope
from meshtune.families.family import Family
from meshtune.families.llama import attention_spec, decoder_spec, head_sizes, mlp_spec, tensors
from meshtune.model.layer import LayerSpec
from meshtune.model.norm import NormSpec
from meshtune.model.spec import ModelSpec

__all__ = ["model_spec", "tensors"]

# Ernie4_5Config's, where they are not those of the other families.
DEFAULTS = {"num_key_value_heads": 2, "head_dim": 128, "tie_word_embeddings": True}

DESCRIPTIONS = {
    "ernie4_5": Family(
        title="ERNIE 4.5 (dense)",
        special="pairs of neighbours are rotated",
        models=("baidu/ERNIE-4.5-0.3B-PT", "baidu/ERNIE-4.5-0.3B-Base-PT"),
    )
}


def model_spec(config: dict[str, Any], where: str) -> ModelSpec:
    """Ernie4_5Config -> ModelSpec. The published configs name code of before transformers had the model."""
    fields = ConfigFields(DEFAULTS | config, where)
    fields.harmless("auto_map")
    bias = bool(fields.get("use_bias", False))
    rope = read_rope(fields, head_sizes(fields)[2], theta=500_000.0, interleaved=True)
    attention = attention_spec(fields, rope=rope, qkv_bias=bias, out_bias=bias)
    layer = LayerSpec(attention, mlp_spec(fields, bias=bias), NormSpec(fields.number("rms_norm_eps", 1e-5)))
    layers = [layer] * fields.integer("num_hidden_layers")
    return decoder_spec(fields, "ernie4_5", ("Ernie4_5ForCausalLM", "Ernie4_5_ForCausalLM"), layers)
