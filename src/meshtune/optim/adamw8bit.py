"""AdamW whose moments are kept in 8 bits, block by block (https://arxiv.org/abs/2110.02861).

Each block of numbers is kept relative to its largest as one of 256 values that lie denser near zero; the first moment's
have signs, the second's have none. As in bitsandbytes, small matrices and all vectors keep float32 moments; so does the
embedding, as in the paper and in transformers' Trainer.
"""

from __future__ import annotations

import functools

import jax.numpy as jnp
from jaxtyping import Array, Float, UInt8

from meshtune.arrays.spec import ArraySpec
from meshtune.optim.adam import adamw, direction, moments
from meshtune.optim.config import OptimizerConfig
from meshtune.optim.rule import At, Rule, Rules, State, descent
from meshtune.quantize.scales import dynamic_map, nearest_codes

BLOCK = 256  # numbers a block at most; a block never crosses a row
SHORTEST = 32  # a row that divides into blocks shorter than this only is kept in float32
SMALLEST = 4096  # numbers of a matrix that is worth it


def adamw8bit(config: OptimizerConfig) -> Rules:
    """State: m and v as uint8 codes in the parameter's shape, and the largest of each block, [out, in / block]."""
    full, short = adamw(config), Rule(_specs, functools.partial(_update, config), sequential=True, by_rows=True)

    def choose(path: str, parameter: ArraySpec) -> Rule:
        large = len(parameter.shape) == 2 and parameter.size >= SMALLEST and not path.startswith("embed/")
        return short if large and block(parameter.shape[1]) >= SHORTEST else full

    return choose


def block(width: int) -> int:
    """The longest block that divides a row."""
    return max(size for size in range(1, min(BLOCK, width) + 1) if width % size == 0)


def encoded(numbers: Float[Array, "o i"], *, signed: bool) -> tuple[UInt8[Array, "o i"], Float[Array, "o n"]]:
    """(codes, the largest of each block)."""
    rows, width = numbers.shape
    blocks = numbers.reshape(rows, -1, block(width))
    largest = jnp.abs(blocks).max(axis=-1)
    shares = blocks * jnp.where(largest > 0, 1 / jnp.where(largest > 0, largest, 1), 0)[..., None]
    return nearest_codes(shares, signed=signed).reshape(rows, width), largest


def decoded(codes: UInt8[Array, "o i"], largest: Float[Array, "o n"], *, signed: bool) -> Float[Array, "o i"]:
    """The numbers, but for what `encoded` rounded."""
    shares = jnp.asarray(dynamic_map(signed))[codes.astype(jnp.int32)]
    return (shares.reshape(*largest.shape, -1) * largest[..., None]).reshape(codes.shape)


def _specs(parameter: ArraySpec) -> State:
    rows, width = parameter.shape
    codes = ArraySpec(parameter.shape, "uint8", parameter.axes, "zeros")
    largest = ArraySpec((rows, width // block(width)), "float32", parameter.axes, "zeros")
    return {"m": codes, "m_largest": largest, "v": codes, "v_largest": largest}


def _update(config: OptimizerConfig, gradient: Array, state: State, parameter: Array, at: At) -> tuple[Array, State]:
    wide = {name: decoded(state[name], state[f"{name}_largest"], signed=name == "m") for name in ("m", "v")}
    m, v = moments(config, gradient, wide)
    change = descent(at, direction(config, m, v, at), parameter)
    new = {}
    for name, moment in (("m", m), ("v", v)):
        new[name], new[f"{name}_largest"] = encoded(moment, signed=name == "m")
    return change, new
