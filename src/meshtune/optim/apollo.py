"""APOLLO: gradients scaled as AdamW scales a random projection of them (https://arxiv.org/abs/2412.05270)."""

from __future__ import annotations

import functools
import math

import jax
import jax.numpy as jnp
from jaxtyping import Array

from meshtune.arrays.spec import ArraySpec
from meshtune.optim.adam import adamw, corrections, moments
from meshtune.optim.config import OptimizerConfig
from meshtune.optim.projection import is_narrowed, narrow_spec, narrowed, projector_spec, tall
from meshtune.optim.rule import At, Rule, Rules, State, descent

GROWTH = 1.01  # of an update's norm from one update to the next at most (https://arxiv.org/abs/2410.01623)
TINY = 1e-8


def apollo(config: OptimizerConfig) -> Rules:
    """State of a matrix: the narrow gradient's moments, and the norm of its last update. The projector is drawn again
    whenever it is needed, from a seed that changes every `update_gap` updates."""
    low = Rule(functools.partial(_specs, config), functools.partial(_update, config), sequential=True)
    full = adamw(config)

    def choose(path: str, parameter: ArraySpec) -> Rule:
        return low if is_narrowed(path, parameter, config.rank) else full

    return choose


def drawn(config: OptimizerConfig, parameter: Array, at: At) -> Array:
    """The random projector of a matrix at an update, normal with variance 1 / rank."""
    shape = projector_spec(ArraySpec(parameter.shape, "float32", ("whole", "whole")), config.rank, "float32").shape
    return jax.random.normal(at.key(config.seed, at.count // config.update_gap), shape) / math.sqrt(config.rank)


def _specs(config: OptimizerConfig, parameter: ArraySpec) -> State:
    moment = narrow_spec(parameter, config.rank, config.state_dtype or parameter.dtype)
    return {"m": moment, "v": moment, "norm": ArraySpec((), "float32", (), "zeros")}


def _update(config: OptimizerConfig, gradient: Array, state: State, parameter: Array, at: At) -> tuple[Array, State]:
    narrow = narrowed(gradient, drawn(config, parameter, at))
    m, v = moments(config, narrow, state)
    scaled = m / (jnp.sqrt(v) + config.eps)
    axis = None if config.scaling == "tensor" else 1 if tall(parameter.shape) else 0
    keep = config.scaling == "channel"
    factor = _norm(scaled, axis, keep) / (_norm(narrow, axis, keep) + TINY)
    found = gradient * factor
    norm = jnp.linalg.norm(found)
    limit = jnp.where(at.count == 0, 1.0, jnp.maximum(norm / (state["norm"] + TINY), GROWTH) / GROWTH)
    first, second = corrections(config, at)
    scale = math.sqrt(1.0 if config.scale is None else config.scale)
    change = descent(at, scale * jnp.sqrt(second) / first * (found / limit), parameter)
    return change, {"m": m, "v": v, "norm": norm / limit}


def _norm(x: Array, axis: int | None, keep: bool) -> Array:
    return jnp.sqrt(jnp.sum(x * x, axis=axis, keepdims=keep))
