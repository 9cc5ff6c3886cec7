"""Next-token cross-entropy that never holds the logits of more than one chunk of a row.

The loss is a scalar, so its gradient is known up to one factor as soon as the logits are: the forward pass takes a
chunk of positions, makes their logits, and at once turns them into the loss and into the gradients with respect to the
hidden states (and to those head weights that are differentiated). The backward pass only multiplies by the cotangent.
As in Liger (arXiv:2410.10989) and Cut Cross-Entropy (arXiv:2411.09009), but through any head function.

Positions of weight 0 cost nothing: each row's supervised positions are brought to its front, and only as many chunks
are computed as the fullest row needs. Rows stay where they are, so a batch split over devices stays split. Where all
rows are on one device they can be `joined`: their supervised positions then fill chunks together.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.custom_derivatives import SymbolicZero
from jaxtyping import Array, Float, Int

Head = Callable[[Any, jax.Array], jax.Array]


def cross_entropy(
    head: Head,
    head_params: Any,
    hidden: Float[Array, "B T D"],
    targets: Int[Array, "B T"],
    weights: Float[Array, "B T"],
    *,
    chunk: int,
    joined: bool = False,
) -> tuple[Float[Array, ""], Float[Array, ""]]:
    """The weighted sums of -log p(target) and of correct first guesses: float32 scalars, to be divided by sum(weights).

    `head(head_params, hidden[..,D])` gives float32 logits [..,V]; `chunk` is the number of positions of each row whose
    logits exist at once, so B * chunk * V float32 is the peak. Gradients flow to hidden and to the differentiated
    leaves of head_params, none is computed for the others; weights are data and may not be differentiated (ValueError).
    Positions of weight 0 may hold any target. `joined` treats all rows as one, with chunks of the same size: for one
    device, or inside a shard_map.
    """
    chunk = min(chunk, hidden.shape[1])
    if joined:
        chunk *= hidden.shape[0]
        hidden, targets, weights = (x.reshape(1, -1, *x.shape[2:]) for x in (hidden, targets, weights))
    return _chunked(head, chunk, head_params, hidden, targets, weights)


def plain_cross_entropy(
    head: Head,
    head_params: Any,
    hidden: Float[Array, "B T D"],
    targets: Int[Array, "B T"],
    weights: Float[Array, "B T"],
    *,
    chunk: int | None = None,
    joined: bool = False,
) -> tuple[Float[Array, ""], Float[Array, ""]]:
    """The same sums as `cross_entropy` from all logits at once, differentiated by JAX: what it must agree with.

    `chunk` and `joined` are accepted for the same signature and have no meaning here.
    """
    logits = head(head_params, hidden)
    losses = jax.nn.logsumexp(logits, axis=-1) - jnp.take_along_axis(logits, targets[..., None], axis=-1)[..., 0]
    # A product alone would turn an infinite loss of weight 0 into NaN.
    losses = jnp.where(weights != 0.0, losses * weights, 0.0)
    return losses.sum(), (weights * (logits.argmax(-1) == targets)).sum()


class Schedule(NamedTuple):
    """Which positions are computed when: each row's positions, those of weight 0 last, in `count` chunks.

    order int32 and sorted_weights [B, n * chunk]: beyond a row's end position 0 with weight 0. count: int32, at most n.
    """

    order: jax.Array
    sorted_weights: jax.Array
    count: jax.Array

    @staticmethod
    def of(weights: jax.Array, chunk: int) -> Schedule:
        idle = weights == 0.0
        order = jnp.argsort(idle, axis=1, stable=True)
        missing = [(0, 0), (0, -order.shape[1] % chunk)]
        most = (~idle).sum(1).max()
        return Schedule(jnp.pad(order, missing), jnp.pad(_take(weights, order), missing), -(-most // chunk))

    def chunk(self, c: jax.Array, size: int) -> tuple[jax.Array, jax.Array]:
        """The positions of chunk c and their weights, [B, size] each."""
        start = c * size
        return (
            jax.lax.dynamic_slice_in_dim(self.order, start, size, axis=1),
            jax.lax.dynamic_slice_in_dim(self.sorted_weights, start, size, axis=1),
        )


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _chunked(head: Head, chunk: int, head_params, hidden, targets, weights):
    schedule = Schedule.of(weights, chunk)

    def add(c, sums):
        at, chunk_weights = schedule.chunk(c, chunk)
        loss, correct, _ = _score(head(head_params, _take(hidden, at)), _take(targets, at), chunk_weights)
        return sums[0] + loss, sums[1] + correct

    return jax.lax.fori_loop(0, schedule.count, add, (jnp.float32(0.0), jnp.float32(0.0)))


def _chunked_forward(head: Head, chunk: int, head_params, hidden, targets, weights):
    """The sums, and the gradients of the first: of hidden and of the head's learned leaves (None for the others)."""
    if weights.perturbed:
        raise ValueError("the weights of a cross-entropy are data: they cannot be differentiated")
    leaves, treedef = jax.tree.flatten(head_params)
    values = [leaf.value for leaf in leaves]
    learned = [n for n, leaf in enumerate(leaves) if leaf.perturbed]
    learns_hidden, hidden, targets, weights = hidden.perturbed, hidden.value, targets.value, weights.value
    schedule = Schedule.of(weights, chunk)

    def logits_of(given):
        mine = list(values)
        for n, value in zip(learned, given["params"], strict=True):
            mine[n] = value
        return head(jax.tree.unflatten(treedef, mine), given["hidden"])

    def add(c, running):
        loss, correct, d_params, d_hidden = running
        at, chunk_weights = schedule.chunk(c, chunk)
        h = _take(hidden, at)
        given = {"params": [values[n] for n in learned]} | ({"hidden": h} if learns_hidden else {})
        logits, pull = jax.vjp(lambda given: logits_of({"hidden": h} | given), given)
        chunk_loss, chunk_correct, d_logits = _score(logits, _take(targets, at), chunk_weights)
        (pulled,) = pull(d_logits)
        d_params = [total + part.astype(total.dtype) for total, part in zip(d_params, pulled["params"], strict=True)]
        if learns_hidden:
            d_hidden = jax.lax.dynamic_update_slice_in_dim(d_hidden, pulled["hidden"], c * chunk, axis=1)
        return loss + chunk_loss, correct + chunk_correct, d_params, d_hidden

    # A head in bfloat16 still gathers its gradient over the chunks in float32.
    no_gradients = [jnp.zeros(values[n].shape, jnp.promote_types(values[n].dtype, jnp.float32)) for n in learned]
    no_hidden = jnp.zeros((*schedule.order.shape, hidden.shape[2]), hidden.dtype) if learns_hidden else None
    empty = jnp.float32(0.0), jnp.float32(0.0), no_gradients, no_hidden
    loss, correct, d_params, d_hidden = jax.lax.fori_loop(0, schedule.count, add, empty)

    d_leaves: list[jax.Array | None] = [None] * len(leaves)
    for n, gradient in zip(learned, d_params, strict=True):
        d_leaves[n] = gradient.astype(values[n].dtype)
    if learns_hidden:
        place = jnp.argsort(schedule.order[:, : hidden.shape[1]], axis=1)
        d_hidden = _take(d_hidden, place)
    return (loss, correct), (jax.tree.unflatten(treedef, d_leaves), d_hidden)


def _chunked_backward(head: Head, chunk: int, gradients, cotangents):
    d_loss = cotangents[0]  # that of the number of correct guesses is no matter: a count has no slope
    if isinstance(d_loss, SymbolicZero):
        d_loss = jnp.float32(0.0)
    d_params, d_hidden = jax.tree.map(lambda x: (x * d_loss).astype(x.dtype), gradients)
    return d_params, d_hidden, None, None


_chunked.defvjp(_chunked_forward, _chunked_backward, symbolic_zeros=True)


def _score(logits, targets, weights):
    """Sums of loss and of correct guesses over a chunk, and the gradient of the first with respect to the logits."""
    top = logits.max(-1, keepdims=True)
    powers = jnp.exp(logits - top)
    total = powers.sum(-1, keepdims=True)
    vocab = jax.lax.broadcasted_iota(targets.dtype, logits.shape, logits.ndim - 1)
    is_target = vocab == targets[..., None]
    of_target = jnp.where(is_target, logits, 0.0).sum(-1)
    losses = (top + jnp.log(total))[..., 0] - of_target
    loss = jnp.where(weights != 0.0, losses * weights, 0.0).sum()
    correct = (weights * (logits.argmax(-1) == targets)).sum()
    d_logits = jnp.where(is_target, powers / total - 1.0, powers / total) * weights[..., None]
    return loss, correct, d_logits


def _take(x, at):
    """x[b, at[b, i]] for x [B,T] or [B,T,D] and at [B,C]: a gather inside each row."""
    return jnp.take_along_axis(x, at if x.ndim == 2 else at[..., None], axis=1)
