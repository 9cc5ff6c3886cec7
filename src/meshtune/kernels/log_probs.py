"""Log-probabilities of targets, holding the logits of only one chunk of each row at a time.

The loss made of them (the sum over an answer, the difference of two answers) is known only after the last chunk, so
the forward pass cannot compute gradients as `cross_entropy` does. But given the cotangents of all log-probabilities,
the backward pass is a cross-entropy with these cotangents as weights: it recomputes the logits chunk by chunk.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from jax.custom_derivatives import SymbolicZero
from jaxtyping import Array, Bool, Float, Int, PyTree

from meshtune.kernels.cross_entropy import (
    ChunkSchedule,
    Head,
    LossSharding,
    cross_entropy,
    flatten_rows,
    run_over_mesh,
    score_targets,
)


def log_probs(
    head: Head,
    head_params: PyTree,
    hidden: Float[Array, "B T D"],
    targets: Int[Array, "B T"],
    mask: Bool[Array, "B T"],
    *,
    chunk: int,
    sharding: LossSharding | None = None,
) -> Float[Array, "B T"]:
    """float32 log p(target) where `mask` is True, and 0 elsewhere; masked positions cost nothing.

    `head`, `chunk` and `sharding` as for `cross_entropy`. hidden and the differentiated leaves of head_params get
    gradients; none is computed for the other leaves, nor for positions whose cotangent is 0.
    """
    mask = jnp.asarray(mask, jnp.float32)
    return _log_probs(head, min(chunk, hidden.shape[1]), sharding, head_params, hidden, targets, mask)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1, 2))
def _log_probs(head: Head, chunk: int, sharding: LossSharding | None, head_params, hidden, targets, mask):
    leaves, treedef = jax.tree.flatten(head_params)

    def local_log_probs(vocab_axis, leaves, hidden, targets, mask):
        size, shape = chunk * mask.shape[0], mask.shape
        hidden, targets, mask = flatten_rows(hidden, targets, mask)
        schedule, params = ChunkSchedule.of(mask, size), jax.tree.unflatten(treedef, leaves)

        def add_chunk(c, results):
            positions, chunk_mask = schedule.chunk(c, size)
            losses = score_targets(head(params, hidden[positions]), targets[positions], vocab_axis).losses
            chunk_results = jnp.where(chunk_mask != 0, -losses, 0.0)
            return jax.lax.dynamic_update_slice_in_dim(results, chunk_results, c * size, axis=0)

        results = jnp.zeros(schedule.order.shape[0], jnp.float32)
        results = jax.lax.fori_loop(0, schedule.count, add_chunk, results)
        return schedule.unsort(results, mask.shape[0]).reshape(shape)

    return run_over_mesh(local_log_probs, sharding, "token", leaves, hidden, targets, mask)


def _forward(head: Head, chunk: int, sharding: LossSharding | None, head_params, hidden, targets, mask):
    leaves, treedef = jax.tree.flatten(head_params)
    trainable = {n: () for n, leaf in enumerate(leaves) if leaf.perturbed}  # keys are static: known while tracing
    params = jax.tree.unflatten(treedef, [leaf.value for leaf in leaves])
    results = _log_probs(head, chunk, sharding, params, hidden.value, targets.value, mask.value)
    return results, (params, hidden.value, targets.value, mask.value, trainable)


def _backward(head: Head, chunk: int, sharding: LossSharding | None, residuals, cotangent):
    head_params, hidden, targets, mask, trainable = residuals
    leaves, treedef = jax.tree.flatten(head_params)
    if isinstance(cotangent, SymbolicZero):
        return jax.tree.unflatten(treedef, [None] * len(leaves)), None, None, None

    weights = jnp.where(mask != 0.0, -cotangent, 0.0)

    def loss(trained_leaves: dict[int, Array], hidden: Array) -> Array:
        params = jax.tree.unflatten(treedef, [trained_leaves.get(n, leaf) for n, leaf in enumerate(leaves)])
        return cross_entropy(head, params, hidden, targets, weights, chunk=chunk, sharding=sharding)[0]

    d_leaves, d_hidden = jax.grad(loss, argnums=(0, 1))({n: leaves[n] for n in trainable}, hidden)
    return jax.tree.unflatten(treedef, [d_leaves.get(n) for n in range(len(leaves))]), d_hidden, None, None


_log_probs.defvjp(_forward, _backward, symbolic_zeros=True)
