"""Log-probabilities of single targets, without the logits of more than one chunk of a row.

What is made of them (a sum over an answer, the difference of two answers) is known only after the last, so nothing can
be turned into gradients on the way, as `cross_entropy` does. But once the cotangent of every log-probability is there,
the backward pass is a cross-entropy whose weights are those cotangents: logits are made once more, chunk by chunk.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.custom_derivatives import SymbolicZero
from jaxtyping import Array, Bool, Float, Int

from meshtune.kernels.cross_entropy import Head, Schedule, cross_entropy, joined, of_targets
from meshtune.kernels.loss_split import LossSplit, over_mesh


def log_probs(
    head: Head,
    head_params: Any,
    hidden: Float[Array, "B T D"],
    targets: Int[Array, "B T"],
    wanted: Bool[Array, "B T"],
    *,
    chunk: int,
    split: LossSplit | None = None,
) -> Float[Array, "B T"]:
    """float32 log p(target) where `wanted`, 0 elsewhere; positions that are not wanted cost nothing.

    `head`, `chunk` and `split` as for `cross_entropy`. Gradients flow to hidden and to the differentiated leaves of
    head_params; none is computed for the others, nor for positions whose log-probability nothing depends on.
    """
    wanted = jnp.asarray(wanted, jnp.float32)
    return _log_probs(head, min(chunk, hidden.shape[1]), split, head_params, hidden, targets, wanted)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1, 2))
def _log_probs(head: Head, chunk: int, split: LossSplit | None, head_params, hidden, targets, wanted):
    leaves, treedef = jax.tree.flatten(head_params)

    def each(vocab, leaves, hidden, targets, wanted):
        size, shape = chunk * wanted.shape[0], wanted.shape
        hidden, targets, wanted = joined(hidden, targets, wanted)
        schedule, params = Schedule.of(wanted, size), jax.tree.unflatten(treedef, leaves)

        def add(c, found):
            at, there = schedule.chunk(c, size)
            losses = of_targets(head(params, hidden[at]), targets[at], vocab).losses
            return jax.lax.dynamic_update_slice_in_dim(found, jnp.where(there != 0, -losses, 0.0), c * size, axis=0)

        found = jnp.zeros(schedule.order.shape[0], jnp.float32)
        found = jax.lax.fori_loop(0, schedule.count, add, found)
        return found[jnp.argsort(schedule.order[: wanted.shape[0]])].reshape(shape)

    return over_mesh(each, split, "token")(leaves, hidden, targets, wanted)


def _forward(head: Head, chunk: int, split: LossSplit | None, head_params, hidden, targets, wanted):
    leaves, treedef = jax.tree.flatten(head_params)
    learned = {n: () for n, leaf in enumerate(leaves) if leaf.perturbed}  # keys are structure, so known when traced
    values = jax.tree.unflatten(treedef, [leaf.value for leaf in leaves])
    found = _log_probs(head, chunk, split, values, hidden.value, targets.value, wanted.value)
    return found, (values, hidden.value, targets.value, wanted.value, learned)


def _backward(head: Head, chunk: int, split: LossSplit | None, residuals, cotangent):
    head_params, hidden, targets, wanted, learned = residuals
    leaves, treedef = jax.tree.flatten(head_params)
    if isinstance(cotangent, SymbolicZero):
        return jax.tree.unflatten(treedef, [None] * len(leaves)), None, None, None

    weights = jnp.where(wanted != 0.0, -cotangent, 0.0)

    def loss(some: dict[int, Array], hidden: Array) -> Array:
        mine = [some.get(n, leaf) for n, leaf in enumerate(leaves)]
        params = jax.tree.unflatten(treedef, mine)
        return cross_entropy(head, params, hidden, targets, weights, chunk=chunk, split=split)[0]

    some, d_hidden = jax.grad(loss, argnums=(0, 1))({n: leaves[n] for n in learned}, hidden)
    return jax.tree.unflatten(treedef, [some.get(n) for n in range(len(leaves))]), d_hidden, None, None


_log_probs.defvjp(_forward, _backward, symbolic_zeros=True)
