"""The logits of whole texts."""

from __future__ import annotations

import functools
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike
from jaxtyping import Float, Int

from meshtune.arrays.tree import Tree
from meshtune.errors import UserError
from meshtune.generate.programs import length_bucket
from meshtune.mesh.layout import constrain
from meshtune.model.compute import Compute
from meshtune.model.decoder import forward, logits
from meshtune.model.inputs import Inputs
from meshtune.model.spec import ModelSpec


def every_logit(
    params: Tree, spec: ModelSpec, compute: Compute, ids: Int[np.ndarray, "B T"]
) -> Float[np.ndarray, "B T V"]:
    """The float32 logits of every position, computed over rows of a bucketed length."""
    B, T = ids.shape
    tokens = np.zeros((B, length_bucket(T)), np.int32)
    tokens[:, :T] = ids
    return np.array(_logits(params, tokens, np.int32(T), spec=spec, compute=compute)[:, :T])


@functools.partial(jax.jit, static_argnames=("spec", "compute"))
def _logits(params: Tree, tokens: jax.Array, length: jax.Array, *, spec: ModelSpec, compute: Compute) -> jax.Array:
    positions = jnp.broadcast_to(jnp.arange(tokens.shape[1], dtype=jnp.int32), tokens.shape)
    real = positions < length
    inputs = Inputs(tokens, jnp.where(real, positions, 0), real.astype(jnp.int32))
    scores = logits(params, spec, forward(params, spec, compute, inputs).hidden)
    return constrain(scores, compute.layout, *("whole",) * scores.ndim)


def token_rows(token_ids: ArrayLike | Sequence[object], vocab: int) -> np.ndarray:
    """Token ids as rows [B, T]. Raises UserError for rows of different lengths and ids outside the vocabulary."""
    try:
        ids = np.asarray(token_ids)
    except ValueError as problem:
        raise UserError(
            "rows of token ids differ in length", where="token_ids", fix="give one row at a time"
        ) from problem
    if ids.ndim == 1:
        ids = ids[None]
    if ids.ndim != 2 or ids.size == 0 or not np.issubdtype(ids.dtype, np.integer):
        raise UserError(
            f"token_ids has shape {ids.shape} and dtype {ids.dtype}",
            where="token_ids",
            fix="give a row of whole numbers, or several rows of one length",
        )
    wrong = ids[(ids < 0) | (ids >= vocab)]
    if wrong.size:
        raise UserError(f"token id {wrong[0]} is outside the model's vocabulary of {vocab}", where="token_ids")
    return ids
