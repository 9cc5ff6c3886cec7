"""Next-token cross-entropy that never holds the logits of more than one chunk of a row.

The loss is a scalar, so its gradient is known up to one factor as soon as the logits are: the forward pass takes a
chunk of positions, makes their logits, and at once turns them into the loss and into the gradients with respect to the
hidden states (and to those head weights that are differentiated). The backward pass only multiplies by the cotangent.
As in Liger (arXiv:2410.10989) and Cut Cross-Entropy (arXiv:2411.09009), but through any head function.

Positions of weight 0 cost nothing: the supervised positions of all rows are brought to the front, and only as many
chunks are computed as they fill. Over a mesh each device does so with its own rows; where the vocabulary is split too,
a device makes its part of the logits, and only sums over the vocabulary are exchanged.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.custom_derivatives import SymbolicZero
from jaxtyping import Array, Float, Int

from meshtune.kernels.loss_split import LossSplit, over_mesh

Head = Callable[[Any, jax.Array], jax.Array]


def cross_entropy(
    head: Head,
    head_params: Any,
    hidden: Float[Array, "B T D"],
    targets: Int[Array, "B T"],
    weights: Float[Array, "B T"],
    *,
    chunk: int,
    split: LossSplit | None = None,
    smoothing: float = 0.0,
) -> tuple[Float[Array, ""], Float[Array, ""]]:
    """The weighted sums of -log p(target) and of correct first guesses: float32 scalars, to be divided by sum(weights).

    `head(head_params, hidden[..,D])` gives float32 logits [..,V]; `chunk` is the number of positions of each row whose
    logits exist at once, so B * chunk * V float32 is the peak. Gradients flow to hidden and to the differentiated
    leaves of head_params, none is computed for the others; weights are data and may not be differentiated (ValueError).
    Positions of weight 0 may hold any target. With a `split` each device of its mesh computes its own rows and its own
    part of the vocabulary: `head` then gets that part of head_params.

    With `smoothing` e the loss of a position is (1 - e) * -log p(target) + e * the mean of -log p over the vocabulary
    (label smoothing, arXiv:1512.00567).
    """
    return _chunked(head, min(chunk, hidden.shape[1]), split, smoothing, head_params, hidden, targets, weights)


def plain_cross_entropy(
    head: Head,
    head_params: Any,
    hidden: Float[Array, "B T D"],
    targets: Int[Array, "B T"],
    weights: Float[Array, "B T"],
    *,
    chunk: int | None = None,
    split: LossSplit | None = None,
    smoothing: float = 0.0,
) -> tuple[Float[Array, ""], Float[Array, ""]]:
    """The same sums as `cross_entropy` from all logits at once, differentiated by JAX: what it must agree with.

    `chunk` and `split` are accepted for the same signature and have no meaning here.
    """
    logits = head(head_params, hidden)
    of_target = jnp.take_along_axis(logits, targets[..., None], axis=-1)[..., 0]
    losses = jax.nn.logsumexp(logits, axis=-1) - (1 - smoothing) * of_target - smoothing * logits.mean(-1)
    # A product alone would turn an infinite loss of weight 0 into NaN.
    losses = jnp.where(weights != 0.0, losses * weights, 0.0)
    return losses.sum(), (weights * (logits.argmax(-1) == targets)).sum()


class Schedule(NamedTuple):
    """Which positions are computed when: all rows' positions in one, those of weight 0 last, in `count` chunks.

    order int32 and sorted_weights [n * chunk]: beyond the end position 0 with weight 0. count: int32, at most n.
    """

    order: jax.Array
    sorted_weights: jax.Array
    count: jax.Array

    @staticmethod
    def of(weights: jax.Array, chunk: int) -> Schedule:
        idle = weights == 0.0
        order = jnp.argsort(idle, stable=True)
        missing = (0, -order.shape[0] % chunk)
        return Schedule(jnp.pad(order, missing), jnp.pad(weights[order], missing), -(-(~idle).sum() // chunk))

    def chunk(self, c: jax.Array, size: int) -> tuple[jax.Array, jax.Array]:
        """The positions of chunk c and their weights, [size] each."""
        start = c * size
        return (
            jax.lax.dynamic_slice_in_dim(self.order, start, size),
            jax.lax.dynamic_slice_in_dim(self.sorted_weights, start, size),
        )


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1, 2, 3))
def _chunked(head: Head, chunk: int, split: LossSplit | None, smoothing: float, head_params, hidden, targets, weights):
    leaves, treedef = jax.tree.flatten(head_params)

    def sums(vocab, leaves, hidden, targets, weights):
        size = chunk * weights.shape[0]
        hidden, targets, weights = joined(hidden, targets, weights)
        schedule, params = Schedule.of(weights, size), jax.tree.unflatten(treedef, leaves)

        def add(c, sums):
            at, chunk_weights = schedule.chunk(c, size)
            loss, correct, _ = _score(head(params, hidden[at]), targets[at], chunk_weights, vocab, smoothing)
            return sums[0] + loss, sums[1] + correct

        return jax.lax.fori_loop(0, schedule.count, add, (jnp.float32(0.0), jnp.float32(0.0)))

    return over_mesh(sums, split, ("sum", "sum"))(leaves, hidden, targets, weights)


def _chunked_forward(
    head: Head, chunk: int, split: LossSplit | None, smoothing: float, head_params, hidden, targets, weights
):
    """The sums, and the gradients of the first: of hidden and of the head's learned leaves (None for the others)."""
    if weights.perturbed:
        raise ValueError("the weights of a cross-entropy are data: they cannot be differentiated")
    leaves, treedef = jax.tree.flatten(head_params)
    learned = [n for n, leaf in enumerate(leaves) if leaf.perturbed]
    learns_hidden = hidden.perturbed

    def sums_and_gradients(vocab, values, hidden, targets, weights):
        size, shape = chunk * weights.shape[0], hidden.shape
        hidden, targets, weights = joined(hidden, targets, weights)
        schedule = Schedule.of(weights, size)

        def logits_of(given):
            mine = list(values)
            for n, value in zip(learned, given["params"], strict=True):
                mine[n] = value
            return head(jax.tree.unflatten(treedef, mine), given["hidden"])

        def add(c, running):
            loss, correct, d_params, d_hidden = running
            at, chunk_weights = schedule.chunk(c, size)
            h = hidden[at]
            given = {"params": [values[n] for n in learned]} | ({"hidden": h} if learns_hidden else {})
            logits, pull = jax.vjp(lambda given: logits_of({"hidden": h} | given), given)
            chunk_loss, chunk_correct, d_logits = _score(logits, targets[at], chunk_weights, vocab, smoothing)
            (pulled,) = pull(d_logits)
            d_params = [
                total + part.astype(total.dtype) for total, part in zip(d_params, pulled["params"], strict=True)
            ]
            if learns_hidden:
                d_hidden = jax.lax.dynamic_update_slice_in_dim(d_hidden, pulled["hidden"], c * size, axis=0)
            return loss + chunk_loss, correct + chunk_correct, d_params, d_hidden

        # A head in bfloat16 still gathers its gradient over the chunks in float32.
        no_gradients = [jnp.zeros(values[n].shape, jnp.promote_types(values[n].dtype, jnp.float32)) for n in learned]
        no_hidden = jnp.zeros((schedule.order.shape[0], shape[2]), hidden.dtype) if learns_hidden else None
        empty = jnp.float32(0.0), jnp.float32(0.0), no_gradients, no_hidden
        loss, correct, d_params, d_hidden = jax.lax.fori_loop(0, schedule.count, add, empty)
        if learns_hidden:
            d_hidden = d_hidden[jnp.argsort(schedule.order[: weights.shape[0]])].reshape(shape)
        return loss, correct, d_params, d_hidden

    values = [leaf.value for leaf in leaves]
    results = ("sum", "sum", [("head", n) for n in learned], "hidden" if learns_hidden else None)
    loss, correct, d_params, d_hidden = over_mesh(sums_and_gradients, split, results)(
        values, hidden.value, targets.value, weights.value
    )
    d_leaves: list[jax.Array | None] = [None] * len(leaves)
    for n, gradient in zip(learned, d_params, strict=True):
        d_leaves[n] = gradient.astype(values[n].dtype)
    return (loss, correct), (jax.tree.unflatten(treedef, d_leaves), d_hidden)


def _chunked_backward(head: Head, chunk: int, split: LossSplit | None, smoothing: float, gradients, cotangents):
    d_loss = cotangents[0]  # that of the number of correct guesses is no matter: a count has no slope
    if isinstance(d_loss, SymbolicZero):
        d_loss = jnp.float32(0.0)
    d_params, d_hidden = jax.tree.map(lambda x: (x * d_loss).astype(x.dtype), gradients)
    return d_params, d_hidden, None, None


_chunked.defvjp(_chunked_forward, _chunked_backward, symbolic_zeros=True)


def _score(logits, targets, weights, vocab: str | None, smoothing: float):
    """Sums of loss and of correct guesses over a chunk, and the gradient of the first with respect to the logits.

    `vocab` is the mesh axis that splits the vocabulary of logits [.., V], if one does.
    """
    found = of_targets(logits, targets, vocab)
    losses, d_logits = found.losses, found.powers / found.total
    if smoothing:
        # Sums over the whole vocabulary, on whatever devices its parts are.
        everything, size = found.of_all(logits.sum(-1)), found.size
        losses = losses + smoothing * (found.of_target - everything / size)
        d_logits = d_logits - jnp.where(found.is_target, 1.0 - smoothing, 0.0) - smoothing / size
    else:
        d_logits = jnp.where(found.is_target, d_logits - 1.0, d_logits)
    loss = jnp.where(weights != 0.0, losses * weights, 0.0).sum()
    correct = (weights * (found.guess == targets)).sum()
    return loss, correct, d_logits * weights[..., None]


class OfTargets(NamedTuple):
    """-log p(target) [..] of a chunk of logits, and what it was made from."""

    losses: jax.Array
    of_target: jax.Array
    guess: jax.Array
    is_target: jax.Array
    powers: jax.Array
    total: jax.Array
    of_all: Callable[[jax.Array], jax.Array]
    size: int


def of_targets(logits, targets, vocab: str | None) -> OfTargets:
    local_top = logits.max(-1, keepdims=True)
    guess = logits.argmax(-1).astype(targets.dtype)
    ids = jax.lax.broadcasted_iota(targets.dtype, logits.shape, logits.ndim - 1)
    if vocab is None:
        top, of_all, parts = local_top, lambda x: x, 1
    else:
        first = (jax.lax.axis_index(vocab) * logits.shape[-1]).astype(targets.dtype)
        top, of_all = jax.lax.pmax(local_top, vocab), functools.partial(jax.lax.psum, axis_name=vocab)
        ids, parts = ids + first, jax.lax.axis_size(vocab)
        # Of equal logits the first counts, as argmax has it.
        none = jnp.iinfo(targets.dtype).max
        guess = jax.lax.pmin(jnp.where(local_top == top, (guess + first)[..., None], none), vocab)[..., 0]
    powers = jnp.exp(logits - top)
    total = of_all(powers.sum(-1, keepdims=True))
    is_target = ids == targets[..., None]
    of_target = of_all(jnp.where(is_target, logits, 0.0).sum(-1))
    losses = (top + jnp.log(total))[..., 0] - of_target
    return OfTargets(losses, of_target, guess, is_target, powers, total, of_all, parts * logits.shape[-1])


def joined(*arrays):
    """[B, T, ..] as [B * T, ..]."""
    return tuple(jnp.asarray(x).reshape(-1, *x.shape[2:]) for x in arrays)
