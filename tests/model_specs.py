"""Specs of small models made by hand, for tests that need no config."""

from __future__ import annotations

import dataclasses
from typing import Any

from meshtune.model.attention import AttentionSpec
from meshtune.model.layer import LayerSpec
from meshtune.model.mlp import MlpSpec
from meshtune.model.norm import NormSpec
from meshtune.model.rope import RopeSpec
from meshtune.model.spec import ModelSpec, Stack, stacks_of


def llama_layer(width: int, heads: int, kv_heads: int, head_dim: int, window: int | None = None) -> LayerSpec:
    """One layer of a Llama."""
    attention = AttentionSpec(heads, kv_heads, head_dim, rope=RopeSpec(1e4, head_dim), window=window)
    return LayerSpec(attention, MlpSpec(width), NormSpec(1e-5))


def llama_spec(vocab: int, embed: int, layer: LayerSpec, layers: int, **changes: Any) -> ModelSpec:
    """A Llama of equal layers."""
    return ModelSpec("llama", vocab, embed, (Stack((layer,), layers),), layer.norm, **changes)


def split_stacks(spec: ModelSpec, at: int) -> ModelSpec:
    """The same model with a stack boundary before layer `at`, so that the layers on either side are separate arrays."""
    flat = [layer for stack in spec.stacks for _ in range(stack.repeats) for layer in stack.pattern]
    assert 0 <= at <= len(flat), (at, len(flat))
    parts = [part for part in (flat[:at], flat[at:]) if part]
    return dataclasses.replace(spec, stacks=tuple(s for part in parts for s in stacks_of(part)))
