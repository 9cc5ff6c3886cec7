"""The curvature that an optimizer may ask a train step for: the diagonal of the Gauss-Newton matrix of its loss."""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Int, Key

from meshtune.arrays.tree import Tree
from meshtune.model.compute import Compute
from meshtune.model.decoder import head_logits, head_params, hidden_states
from meshtune.model.spec import ModelSpec
from meshtune.objectives.score import Batch
from meshtune.objectives.sft import score

_DRAWN = 0x736F7068  # keeps its random numbers apart from those of dropout


def curvature(
    learned: Tree, params: Callable[[Tree], Tree], spec: ModelSpec, compute: Compute, micro: Batch, key: Key[Array, ""]
) -> Tree:
    """An estimate of the diagonal, float32, as a tree like `learned`, from one micro-batch of [B, T] arrays.

    n g^2, where g is the gradient of the mean loss of n targets that are drawn from what the model predicts: without
    bias for the Gauss-Newton diagonal (Gauss-Newton-Bartlett, https://arxiv.org/abs/2305.14342, section 2.3).
    """
    drawn = drawn_targets(params(learned), spec, compute, micro, jax.random.fold_in(key, _DRAWN))

    def loss(learned: Tree) -> Array:
        return score(params(learned), spec, compute, micro | {"targets": drawn}, None).loss

    count = jnp.maximum(jnp.sum(micro["weights"]), 1.0)
    return jax.tree.map(lambda g: g.astype(jnp.float32) ** 2 / count, jax.grad(loss)(learned))


def drawn_targets(
    params: Tree, spec: ModelSpec, compute: Compute, micro: Batch, key: Key[Array, ""]
) -> Int[Array, "B T"]:
    """A token for every position, drawn from the model's prediction; logits exist for a chunk of a row at a time."""
    hidden = hidden_states(params, spec, compute, micro["tokens"], micro["positions"], micro["segment_ids"])
    head, length = head_params(params, spec), hidden.shape[1]
    chunk = min(compute.loss_chunk, length)

    def some(number: Array, drawn: Array) -> Array:
        start = jnp.minimum(number * chunk, length - chunk)  # the last may draw again what the one before has drawn
        logits = head_logits(head, lax.dynamic_slice_in_dim(hidden, start, chunk, axis=1))
        tokens = jax.random.categorical(jax.random.fold_in(key, number), logits).astype(drawn.dtype)
        return lax.dynamic_update_slice_in_dim(drawn, tokens, start, axis=1)

    return lax.fori_loop(0, -(-length // chunk), some, jnp.zeros_like(micro["targets"]))
