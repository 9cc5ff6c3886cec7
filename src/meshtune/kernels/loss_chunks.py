"""The chunks of positions in which losses compute their logits, and the scores of targets within a chunk."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import PyTree

# A function of (head params, hidden [..,D]) that returns float32 logits [..,V].
Head = Callable[[PyTree, jax.Array], jax.Array]


class ChunkSchedule(NamedTuple):
    """The order in which positions are computed: those with weight 0 last, so that only `count` chunks have any weight.

    order int32 and sorted_weights are [n * chunk]; entries past the last position have position 0 and weight 0. count
    is an int32 scalar, at most n.
    """

    order: jax.Array
    sorted_weights: jax.Array
    count: jax.Array

    @staticmethod
    def of(weights: jax.Array, chunk: int) -> ChunkSchedule:
        """The schedule for weights [positions], in chunks of `chunk` positions."""
        is_zero = weights == 0.0
        order = jnp.argsort(is_zero, stable=True)
        padding = (0, -order.shape[0] % chunk)
        return ChunkSchedule(jnp.pad(order, padding), jnp.pad(weights[order], padding), -(-(~is_zero).sum() // chunk))

    def chunk(self, c: jax.Array, size: int) -> tuple[jax.Array, jax.Array]:
        """The positions of chunk c and their weights, [size] each."""
        start = c * size
        return (
            jax.lax.dynamic_slice_in_dim(self.order, start, size),
            jax.lax.dynamic_slice_in_dim(self.sorted_weights, start, size),
        )

    def unsort(self, x: jax.Array, count: int) -> jax.Array:
        """Results [n * chunk, ..] in the schedule's order, as [count, ..] in the order of the positions."""
        return x[jnp.argsort(self.order[:count])]


def flatten_rows(*arrays: jax.Array) -> tuple[jax.Array, ...]:
    """[B, T, ..] as [B * T, ..]."""
    return tuple(jnp.asarray(x).reshape(-1, *x.shape[2:]) for x in arrays)


class TargetScores(NamedTuple):
    """-log p(target) [..] of a chunk of logits [..,V], with the values it was computed from.

    `correct` [..] says whether the target is the first of the largest logits. `exponentials` [..,V] are
    exp(logits - maximum) and `total` [..,1] their sum over the whole vocabulary. `sum_over_vocab` sums over the devices
    that share the vocabulary, whose size is `vocab_size`.
    """

    losses: jax.Array
    target_logits: jax.Array
    correct: jax.Array
    is_target: jax.Array
    exponentials: jax.Array
    total: jax.Array
    sum_over_vocab: Callable[[jax.Array], jax.Array]
    vocab_size: int


def score_targets(logits: jax.Array, targets: jax.Array, vocab_axis: str | None) -> TargetScores:
    """`vocab_axis` is the mesh axis over which the vocabulary of logits [..,V] is sharded, or None."""
    ids = jax.lax.broadcasted_iota(targets.dtype, logits.shape, logits.ndim - 1)
    if vocab_axis is None:
        max_over_vocab, sum_over_vocab, shards = lambda x: x, lambda x: x, 1
    else:
        max_over_vocab = functools.partial(jax.lax.pmax, axis_name=vocab_axis)
        sum_over_vocab = functools.partial(jax.lax.psum, axis_name=vocab_axis)
        shards = jax.lax.axis_size(vocab_axis)
        ids = ids + (jax.lax.axis_index(vocab_axis) * logits.shape[-1]).astype(ids.dtype)
    maximum = max_over_vocab(logits.max(-1, keepdims=True))
    exponentials = jnp.exp(logits - maximum)
    total = sum_over_vocab(exponentials.sum(-1, keepdims=True))
    is_target = ids == targets[..., None]
    target_logits = sum_over_vocab(jnp.where(is_target, logits, 0.0).sum(-1))
    losses = (maximum + jnp.log(total))[..., 0] - target_logits
    # What argmax == targets says, of which compilers for CPUs make a reduction that takes several times as long.
    largest_before = max_over_vocab(jnp.where(ids < targets[..., None], logits, -jnp.inf).max(-1))
    correct = (target_logits == maximum[..., 0]) & (largest_before < target_logits)
    vocab_size = shards * logits.shape[-1]
    return TargetScores(losses, target_logits, correct, is_target, exponentials, total, sum_over_vocab, vocab_size)
