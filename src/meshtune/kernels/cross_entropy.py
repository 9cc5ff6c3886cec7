"""Next-token cross-entropy that holds the logits of only one chunk of each row at a time.

The loss is a scalar, so its gradient is known up to one factor as soon as the logits are. The forward pass computes the
logits of a chunk of positions and turns them at once into the loss and into the gradients of the hidden states and of
those head weights that are differentiated. The backward pass only multiplies by the cotangent. As in Liger
(arXiv:2410.10989) and Cut Cross-Entropy (arXiv:2411.09009), but for any head function.

Positions of weight 0 cost nothing: the supervised positions of all rows are sorted to the front, and only the chunks
that contain some are computed. On a mesh each device does this with its own rows. If the vocabulary is sharded too, a
device computes its shard of the logits, and only sums over the vocabulary are exchanged.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.custom_derivatives import SymbolicZero
from jaxtyping import Array, Float, Int, PyTree

from meshtune.kernels.loss_chunks import ChunkSchedule, Head, flatten_rows, score_targets
from meshtune.kernels.loss_sharding import LossSharding, over_mesh


def cross_entropy(
    head: Head,
    head_params: PyTree,
    hidden: Float[Array, "B T D"],
    targets: Int[Array, "B T"],
    weights: Float[Array, "B T"],
    *,
    chunk: int,
    sharding: LossSharding | None = None,
    smoothing: float = 0.0,
    by_probability: bool = False,
) -> tuple[Float[Array, ""], Float[Array, ""]]:
    """The weighted sums of -log p(target) and of correct predictions: float32 scalars, to be divided by sum(weights).

    `head(head_params, hidden[..,D])` gives float32 logits [..,V]; `chunk` is the number of positions of each row whose
    logits exist at a time, so the peak is B * chunk * V float32 numbers. hidden and the differentiated leaves of
    head_params get gradients; none is computed for the other leaves. Positions of weight 0 may have any target.
    With a `sharding` each device of its mesh computes its own rows and its own shard of the vocabulary: `head` then
    gets that shard of head_params.

    With `smoothing` e the loss of a position is (1 - e) * -log p(target) + e * the mean of -log p over the vocabulary
    (label smoothing, arXiv:1512.00567). With `by_probability` it is multiplied by p(target), through which no gradient
    flows (dynamic fine-tuning, arXiv:2508.05629).
    Raises: ValueError if the weights are differentiated.
    """
    terms = Terms(smoothing, by_probability)
    return _cross_entropy(head, min(chunk, hidden.shape[1]), sharding, terms, head_params, hidden, targets, weights)


class Terms(NamedTuple):
    """What the loss of a position is, beside -log p(target)."""

    smoothing: float
    by_probability: bool


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1, 2, 3))
def _cross_entropy(
    head: Head, chunk: int, sharding: LossSharding | None, terms: Terms, head_params, hidden, targets, weights
):
    leaves, treedef = jax.tree.flatten(head_params)

    def local_sums(vocab_axis, leaves, hidden, targets, weights):
        size = chunk * weights.shape[0]
        hidden, targets, weights = flatten_rows(hidden, targets, weights)
        schedule, params = ChunkSchedule.of(weights, size), jax.tree.unflatten(treedef, leaves)

        def add_chunk(c, sums):
            positions, chunk_weights = schedule.chunk(c, size)
            logits = head(params, hidden[positions])
            loss, correct, _ = _chunk_sums(logits, targets[positions], chunk_weights, vocab_axis, terms)
            return sums[0] + loss, sums[1] + correct

        return jax.lax.fori_loop(0, schedule.count, add_chunk, (jnp.float32(0.0), jnp.float32(0.0)))

    return over_mesh(local_sums, sharding, ("sum", "sum"))(leaves, hidden, targets, weights)


def _cross_entropy_forward(
    head: Head, chunk: int, sharding: LossSharding | None, terms: Terms, head_params, hidden, targets, weights
):
    """The sums, and the gradients of the loss: of hidden and of the differentiated leaves (None for the others)."""
    if weights.perturbed:
        raise ValueError("the weights of a cross-entropy are data: they cannot be differentiated")
    leaves, treedef = jax.tree.flatten(head_params)
    trainable = [n for n, leaf in enumerate(leaves) if leaf.perturbed]
    hidden_grad = hidden.perturbed

    def local_sums_and_grads(vocab_axis, values, hidden, targets, weights):
        size, shape = chunk * weights.shape[0], hidden.shape
        hidden, targets, weights = flatten_rows(hidden, targets, weights)
        schedule = ChunkSchedule.of(weights, size)

        def logits_of(variables):
            params = list(values)
            for n, value in zip(trainable, variables["params"], strict=True):
                params[n] = value
            return head(jax.tree.unflatten(treedef, params), variables["hidden"])

        def add_chunk(c, running):
            loss, correct, d_params, d_hidden = running
            positions, chunk_weights = schedule.chunk(c, size)
            h = hidden[positions]
            variables = {"params": [values[n] for n in trainable]} | ({"hidden": h} if hidden_grad else {})
            logits, vjp = jax.vjp(lambda variables: logits_of({"hidden": h} | variables), variables)
            chunk_loss, chunk_correct, d_logits = _chunk_sums(
                logits, targets[positions], chunk_weights, vocab_axis, terms
            )
            (grads,) = vjp(d_logits)
            d_params = [total + grad.astype(total.dtype) for total, grad in zip(d_params, grads["params"], strict=True)]
            if hidden_grad:
                d_hidden = jax.lax.dynamic_update_slice_in_dim(d_hidden, grads["hidden"], c * size, axis=0)
            return loss + chunk_loss, correct + chunk_correct, d_params, d_hidden

        # The gradient of a bfloat16 head is accumulated over the chunks in float32.
        zero_grads = [jnp.zeros(values[n].shape, jnp.promote_types(values[n].dtype, jnp.float32)) for n in trainable]
        zero_hidden = jnp.zeros((schedule.order.shape[0], shape[2]), hidden.dtype) if hidden_grad else None
        zeros = jnp.float32(0.0), jnp.float32(0.0), zero_grads, zero_hidden
        loss, correct, d_params, d_hidden = jax.lax.fori_loop(0, schedule.count, add_chunk, zeros)
        if hidden_grad:
            d_hidden = schedule.unsort(d_hidden, weights.shape[0]).reshape(shape)
        return loss, correct, d_params, d_hidden

    values = [leaf.value for leaf in leaves]
    results = ("sum", "sum", [("head", n) for n in trainable], "hidden" if hidden_grad else None)
    loss, correct, d_params, d_hidden = over_mesh(local_sums_and_grads, sharding, results)(
        values, hidden.value, targets.value, weights.value
    )
    d_leaves: list[jax.Array | None] = [None] * len(leaves)
    for n, grad in zip(trainable, d_params, strict=True):
        d_leaves[n] = grad.astype(values[n].dtype)
    return (loss, correct), (jax.tree.unflatten(treedef, d_leaves), d_hidden)


def _cross_entropy_backward(head: Head, chunk: int, sharding: LossSharding | None, terms: Terms, grads, cotangents):
    d_loss = cotangents[0]  # the other cotangent is irrelevant: the number of correct predictions has no gradient
    if isinstance(d_loss, SymbolicZero):
        d_loss = jnp.float32(0.0)
    d_params, d_hidden = jax.tree.map(lambda x: (x * d_loss).astype(x.dtype), grads)
    return d_params, d_hidden, None, None


_cross_entropy.defvjp(_cross_entropy_forward, _cross_entropy_backward, symbolic_zeros=True)


def _chunk_sums(
    logits: jax.Array, targets: jax.Array, weights: jax.Array, vocab_axis: str | None, terms: Terms
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """The weighted sums of losses and of correct predictions over a chunk, and the gradient of the former with respect
    to the logits [..,V], whose vocabulary may be sharded over `vocab_axis`."""
    scores = score_targets(logits, targets, vocab_axis)
    losses, d_logits = scores.losses, scores.exponentials / scores.total
    correct = (weights * scores.correct).sum()
    if terms.by_probability:
        weights = weights * jnp.exp(-losses)
    if smoothing := terms.smoothing:
        logits_sum = scores.sum_over_vocab(logits.sum(-1))
        losses = losses + smoothing * (scores.target_logits - logits_sum / scores.vocab_size)
        d_logits = d_logits - jnp.where(scores.is_target, 1.0 - smoothing, 0.0) - smoothing / scores.vocab_size
    else:
        d_logits = jnp.where(scores.is_target, d_logits - 1.0, d_logits)
    # A product alone would turn an infinite loss of weight 0 into NaN.
    loss = jnp.where(weights != 0.0, losses * weights, 0.0).sum()
    return loss, correct, d_logits * weights[..., None]
