"""OLMo 3: OLMo 2 with a sliding window in three of four layers, which the scaling of rotary embeddings leaves out
(https://arxiv.org/abs/2512.13961)."""

from __future__ import annotations

import dataclasses
from typing import Any

from meshtune.families import olmo2
from meshtune.families.config_fields import ConfigFields, read_ropes
from meshtune.families.family import Family
from meshtune.families.llama import decoder_spec, head_sizes, mlp_spec
from meshtune.families.olmo2 import tensors
from meshtune.model.layer import LayerSpec
from meshtune.model.spec import ModelSpec

__all__ = ["model_spec", "tensors"]

KINDS = ("full_attention", "sliding_attention")
THETA = 500_000.0

DESCRIPTIONS = {
    "olmo3": Family(
        title="OLMo 3",
        special="OLMo 2 with windows in three of four layers; YaRN in the others alone",
        models=("allenai/Olmo-3-7B-Instruct", "allenai/Olmo-3-1125-32B"),
    )
}


def model_spec(config: dict[str, Any], where: str) -> ModelSpec:
    """Olmo3Config -> ModelSpec, with transformers' defaults for fields that are absent."""
    fields = ConfigFields({"sliding_window": 4096} | config, where)
    # transformers 5 reads rope_theta for full attention alone, transformers 4 for all layers: one value means the same.
    fields.only("rope_theta", THETA, int(THETA))
    thetas: dict[str, tuple[str, float | None]] = dict.fromkeys(KINDS, ("rope_theta", THETA))
    ropes = read_ropes(fields, head_sizes(fields)[2], thetas, scaled=("full_attention",))
    full = olmo2.attention_without_window(fields, ropes["full_attention"])
    mlp, norm = mlp_spec(fields), olmo2.norm_spec(fields)
    kinds = fields.layer_types(KINDS, default=_every_fourth)
    layers = {"full_attention": LayerSpec(full, mlp, norm, "post")}
    if "sliding_attention" in kinds:
        window = fields.integer("sliding_window")
        sliding = dataclasses.replace(full, rope=ropes["sliding_attention"], window=window)
        layers["sliding_attention"] = LayerSpec(sliding, mlp, norm, "post")
    fields.get("sliding_window")
    return decoder_spec(fields, "olmo3", "Olmo3ForCausalLM", [layers[kind] for kind in kinds])


def _every_fourth(index: int) -> str:
    return "sliding_attention" if (index + 1) % 4 else "full_attention"
