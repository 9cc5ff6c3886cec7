"""AdamW whose moments are stored in 8 bits, block by block (https://arxiv.org/abs/2110.02861).

Each block of numbers is stored relative to its largest magnitude as one of 256 values that are denser near zero; those
of the first moment are signed, those of the second are not. As in bitsandbytes, small matrices and all vectors have
float32 moments; so has the embedding, as in the paper and in transformers' Trainer, and so have routers and short
convolutions.
"""

from __future__ import annotations

import functools

import jax.numpy as jnp
from jaxtyping import Array, Float, UInt8

from meshtune.arrays.spec import ArraySpec
from meshtune.optim.adam import adamw, direction, moments
from meshtune.optim.config import OptimizerConfig
from meshtune.optim.optimizer import ChooseByRole, ParamOptimizer, State, UpdateContext, apply_decay, refuse_role
from meshtune.quantize.scales import dynamic_map, nearest_codes

BLOCK = 256  # the maximum numbers in a block; a block never crosses a row
SHORTEST = 32  # a matrix whose rows divide only into shorter blocks than this has float32 moments
SMALLEST = 4096  # numbers of the smallest matrix with 8-bit moments


def adamw8bit(config: OptimizerConfig) -> ChooseByRole:
    """State: m and v as uint8 codes in the parameter's shape, and the largest of each block, [out, in / block]."""
    float32 = adamw(config)
    quantised = ParamOptimizer(_specs, functools.partial(_update, config), sequential=True, by_rows=True)

    def choose(path: str, parameter: ArraySpec) -> ParamOptimizer:
        match parameter.role:
            case "matrix" | "experts" | "head":
                large = parameter.size >= SMALLEST and block(parameter.shape[1]) >= SHORTEST
                return quantised if large else float32
            case "router" | "vector" | "table" | "conv":
                return float32
            case _:
                raise refuse_role("adamw8bit", path, parameter)

    return choose


def block(width: int) -> int:
    """The longest block that divides a row."""
    return max(size for size in range(1, min(BLOCK, width) + 1) if width % size == 0)


def encode_moments(numbers: Float[Array, "o i"], *, signed: bool) -> tuple[UInt8[Array, "o i"], Float[Array, "o n"]]:
    """(codes, the largest magnitude of each block)."""
    rows, width = numbers.shape
    blocks = numbers.reshape(rows, -1, block(width))
    largest = jnp.abs(blocks).max(axis=-1)
    shares = blocks * jnp.where(largest > 0, 1 / jnp.where(largest > 0, largest, 1), 0)[..., None]
    return nearest_codes(shares, signed=signed).reshape(rows, width), largest


def decode_moments(codes: UInt8[Array, "o i"], largest: Float[Array, "o n"], *, signed: bool) -> Float[Array, "o i"]:
    """The numbers that `encode_moments` stored, up to its rounding."""
    shares = jnp.asarray(dynamic_map(signed))[codes.astype(jnp.int32)]
    return (shares.reshape(*largest.shape, -1) * largest[..., None]).reshape(codes.shape)


def _specs(parameter: ArraySpec) -> State:
    rows, width = parameter.shape
    codes = ArraySpec(parameter.shape, "uint8", parameter.axes, "zeros")
    largest = ArraySpec((rows, width // block(width)), "float32", parameter.axes, "zeros")
    return {"m": codes, "m_largest": largest, "v": codes, "v_largest": largest}


def _update(
    config: OptimizerConfig, gradient: Array, state: State, parameter: Array, context: UpdateContext
) -> tuple[Array, State]:
    stored = {name: decode_moments(state[name], state[f"{name}_largest"], signed=name == "m") for name in ("m", "v")}
    m, v = moments(config, gradient, stored)
    change = apply_decay(context, direction(config, m, v, context), parameter)
    new = {}
    for name, moment in (("m", m), ("v", v)):
        new[name], new[f"{name}_largest"] = encode_moments(moment, signed=name == "m")
    return change, new
