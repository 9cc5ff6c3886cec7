"""Keys and values of a cache in 8 bits: int8 codes, and one bfloat16 scale for each token and key-value head.

A head's numbers are divided by their scale, the largest of them by magnitude over 127, and rounded: none moves by more
than half the scale. Codes are made with the stored scale, so that its rounding adds nothing to that: bfloat16
has the range of float32, and the step is at most 0.4% wider than with a float32 scale.
"""

from __future__ import annotations

import dataclasses

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, BFloat16, Float, Int8

from meshtune.arrays.spec import ArraySpec
from meshtune.arrays.tree import Tree

CODES = "int8"
SCALES = "bfloat16"
LARGEST = 127  # symmetric: the code -128 does not occur
SLOTS = "slots"  # the logical axis that grows with the rows
BY_HEAD = (
    "kv_heads",
    SLOTS,
    "head_dim",
)  # the last logical axes of keys and of values, and of no other array of a cache
SCALE = "_scale"  # how the names of scales end


def scale_name(name: str) -> str:
    """The key of an array's scales in a layer's cache, where the array is coded."""
    return name + SCALE


def code_specs(arrays: Tree) -> Tree:
    """The ArraySpecs of a layer's cache with keys and values as codes and scales; other arrays unchanged."""
    tree: Tree = {}
    for name, spec in arrays.items():
        if isinstance(spec, dict):
            tree[name] = code_specs(spec)
        elif is_key_or_value(spec):
            tree[name] = dataclasses.replace(spec, dtype=CODES)
            tree[scale_name(name)] = ArraySpec(spec.shape[:-1], SCALES, spec.axes[:-1], "zeros")
        else:
            tree[name] = spec
    return tree


def is_key_or_value(spec: ArraySpec) -> bool:
    """Whether an array of a cache holds keys or values, head by head."""
    return spec.axes[-3:] == BY_HEAD


def encode(values: Float[Array, "*n h"]) -> tuple[Int8[Array, "*n h"], BFloat16[Array, "*n"]]:
    """(codes, scales). Where a number is not finite, neither is what the codes decode to."""
    values = values.astype(jnp.float32)
    # Not a cast to bfloat16 and back, which XLA may leave out: codes must be made with the scale that is stored.
    scale = lax.reduce_precision(jnp.max(jnp.abs(values), axis=-1) / LARGEST, exponent_bits=8, mantissa_bits=7)
    divisor = jnp.where(scale > 0, scale, 1)[..., None]
    codes = jnp.clip(jnp.round(values / divisor), -LARGEST, LARGEST)
    return codes.astype(CODES), scale.astype(SCALES)


def decode(codes: Int8[Array, "*n h"], scales: BFloat16[Array, "*n"], dtype: str | jnp.dtype) -> Float[Array, "*n h"]:
    """The numbers of codes: exact in float32, rounded once to a narrower dtype."""
    return (codes.astype(jnp.float32) * scales.astype(jnp.float32)[..., None]).astype(dtype)
