"""Published configs of hybrids, also in older forms, and what the loader refuses."""

from __future__ import annotations

import math
from typing import Any

import pytest

from families.published_hybrids import PUBLISHED
from meshtune.errors import UserError
from meshtune.families import description, model_spec, tensors
from meshtune.model.delta_net import DeltaNetSpec
from meshtune.model.mamba2 import Mamba2Spec
from meshtune.model.spec import ModelSpec

GRANITE, NEMOTRON = "ibm-granite/granite-4.0-h-1b", "nvidia/Nemotron-H-8B-Base-8K"


def spec_with(name: str, **fields: Any) -> ModelSpec:
    return model_spec({**PUBLISHED[name], **fields})


def blocks(spec: ModelSpec) -> list[str]:
    """The name of the first block of every layer."""
    return [layer.blocks[0].name for stack in spec.stacks for _ in range(stack.repeats) for layer in stack.pattern]


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_published_config_is_accepted(name):
    """With every tensor that its model has, by name."""
    spec = model_spec(PUBLISHED[name])
    assert tensors(spec)
    assert description(spec.family).group == "hybrid"


def test_kinds_of_layers_in_every_form():
    assert blocks(model_spec(PUBLISHED["LiquidAI/LFM2-1.2B"])) == ["conv", "conv", "attn", "conv"]
    assert blocks(model_spec(PUBLISHED[GRANITE])) == ["mamba", "mamba", "attn", "mamba"]
    assert blocks(model_spec(PUBLISHED[NEMOTRON])) == ["mamba", "mlp", "mamba", "attn"]
    assert spec_with(
        NEMOTRON, hybrid_override_pattern=None, layers_block_type=["mamba", "mlp", "mamba", "attention"]
    ) == (model_spec(PUBLISHED[NEMOTRON]))
    assert blocks(spec_with("Qwen/Qwen3.5-27B", layer_types=None, num_hidden_layers=5)) == ["delta"] * 3 + [
        "attn",
        "delta",
    ]


def test_infinity_as_transformers_writes_it():
    limit = [0.5, {"__float__": "Infinity"}]
    (mamba,) = {b for b in spec_with(GRANITE, time_step_limit=limit).blocks if isinstance(b, Mamba2Spec)}
    assert mamba.dt_limit == (0.5, math.inf)


def test_nemotron_h_limits_time_steps_from_below_alone():
    (mamba,) = {b for b in model_spec(PUBLISHED[NEMOTRON]).blocks if isinstance(b, Mamba2Spec)}
    assert mamba.dt_limit == (0.001, math.inf)


def test_the_states_of_a_delta_net_are_float32_whatever_the_dtype():
    (delta,) = {b for b in model_spec(PUBLISHED["Qwen/Qwen3.5-27B"]).blocks if isinstance(b, DeltaNetSpec)}
    assert delta.cache(2, 100, "bfloat16")["state"].dtype == "float32"


@pytest.mark.parametrize(
    ("name", "fields", "message"),
    [
        (GRANITE, {"num_local_experts": 4, "num_experts_per_tok": 5}, "is 5, and there are 4 experts"),
        (GRANITE, {"layer_types": ["mamba"] * 3}, "num_hidden_layers is 4, and 3 layers have a type"),
        (GRANITE, {"time_step_limit": 3}, "time_step_limit must be a list, found 3"),
        (GRANITE, {"mamba_n_heads": 7}, "7 heads of 8 numbers are not the 64 of the mixer"),
        (NEMOTRON, {"hybrid_override_pattern": "MXM*"}, "layers of type 'X' are not implemented for this family"),
        (
            NEMOTRON,
            {"hybrid_override_pattern": "MEM*", "n_routed_experts": 6, "n_group": 4},
            "and there are 6 experts to divide into them",
        ),
        (
            NEMOTRON,
            {"hybrid_override_pattern": "MEM*", "n_routed_experts": 4, "num_experts_per_tok": 5},
            "num_experts_per_tok is 5, and there are 4 experts",
        ),
        (NEMOTRON, {"hybrid_override_pattern": "MEM*", "moe_latent_size": 0}, "moe_latent_size is 0, not a positive"),
        ("Qwen/Qwen3.5-27B", {"linear_num_value_heads": 3}, "3 value heads do not divide over 2 key heads"),
        ("tiiuae/Falcon-H1-1.5B-Instruct", {"ssm_multipliers": [1.0]}, "ssm_multipliers must be 5 numbers"),
    ],
)
def test_what_is_refused_is_named(name, fields, message):
    with pytest.raises(UserError, match=message):
        spec_with(name, **fields)
