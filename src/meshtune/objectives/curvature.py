"""A stochastic estimate of the diagonal of the loss's Gauss-Newton matrix, for optimizers that need curvature."""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Int, Key

from meshtune.arrays.tree import Tree
from meshtune.model.compute import Compute
from meshtune.model.decoder import forward, head_logits, head_params
from meshtune.model.inputs import inputs_of
from meshtune.model.spec import ModelSpec
from meshtune.objectives.answers import Batch
from meshtune.objectives.sft import sft_objective

_SAMPLING = 0x736F7068  # folded into the key, so that its random numbers differ from those of dropout


def curvature(
    trainable: Tree,
    params: Callable[[Tree], Tree],
    spec: ModelSpec,
    compute: Compute,
    micro: Batch,
    key: Key[Array, ""],
) -> Tree:
    """Estimates the diagonal from one micro-batch of [B, T] arrays, as a float32 tree like `trainable`.

    `params(trainable)` gives all parameters. The estimate is n g^2, where g is the gradient of the mean loss over n
    targets sampled from the model's own predictions; it is unbiased for the Gauss-Newton diagonal
    (Gauss-Newton-Bartlett, https://arxiv.org/abs/2305.14342, section 2.3).
    """
    targets = sample_targets(params(trainable), spec, compute, micro, jax.random.fold_in(key, _SAMPLING))

    def loss(trainable: Tree) -> Array:
        return sft_objective(params(trainable), spec, compute, micro | {"targets": targets}, None).loss

    count = jnp.maximum(jnp.sum(micro["weights"]), 1.0)
    return jax.tree.map(lambda g: g.astype(jnp.float32) ** 2 / count, jax.grad(loss)(trainable))


def sample_targets(
    params: Tree, spec: ModelSpec, compute: Compute, micro: Batch, key: Key[Array, ""]
) -> Int[Array, "B T"]:
    """Samples a token from the model's prediction at every position, computing the logits of one chunk at a time."""
    inputs = inputs_of(micro)
    hidden = forward(params, spec, compute, inputs).hidden
    head, length = head_params(params, spec, hidden), hidden.shape[1]
    chunk = min(compute.loss_chunk, length)

    def sample_chunk(index: Array, targets: Array) -> Array:
        start = jnp.minimum(index * chunk, length - chunk)  # the last chunk may overlap the one before
        logits = head_logits(head, lax.dynamic_slice_in_dim(hidden, start, chunk, axis=1), spec)
        tokens = jax.random.categorical(jax.random.fold_in(key, index), logits).astype(targets.dtype)
        return lax.dynamic_update_slice_in_dim(targets, tokens, start, axis=1)

    return lax.fori_loop(0, -(-length // chunk), sample_chunk, jnp.zeros_like(micro["targets"]))
