"""Divergences between the predictions of two models, with the logits of one chunk of positions of both at a time."""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, PyTree

from meshtune.kernels.cross_entropy import Head, LossSharding, chunked_sums

LARGEST_LOG_SUM = -1e-7  # of the probabilities of named tokens, as in trl: something is left to all others


class NamedTokens(NamedTuple):
    """A few different tokens of every position with their log-probabilities, and -1 for no token.

    As a model's prediction they leave open how the rest of the probability is spread over the other tokens.
    """

    ids: Int[Array, "B T K"]
    log_probs: Float[Array, "B T K"]


def named_tokens(params: PyTree, named: Any) -> Any:
    """The head of a teacher of which only some tokens' log-probabilities are known."""
    return named


def divergence(
    heads: tuple[Head, Head],
    student_head: PyTree,
    teacher_head: PyTree,
    student: Float[Array, "B T D"],
    teacher: Float[Array, "B T E"] | NamedTokens,
    weights: Float[Array, "B T"],
    *,
    beta: float,
    chunk: int,
    sharding: LossSharding | None = None,
) -> tuple[Float[Array, ""], Float[Array, ""]]:
    """The weighted sums of the generalised Jensen-Shannon divergence and of equal predictions: float32 scalars.

    With p of the student, q of the teacher and m = (1 - beta) p + beta q, a position's divergence is beta KL(q || m) +
    (1 - beta) KL(p || m), KL(q || p) for beta 0 and KL(p || q) for beta 1, over the whole vocabulary (GKD,
    https://arxiv.org/abs/2306.13649, as trl computes it). Of a teacher of NamedTokens, whose head is `named_tokens`, it
    is over these tokens and all others together as one, which is at most that over the whole vocabulary. Predictions
    are equal where both have the same likeliest token. `heads` make float32 logits [..,V] of each model's head and
    hidden states; at most B * chunk * V of each model exist at a time. `student` and the differentiated leaves of
    `student_head` get gradients, the teacher none. `sharding` is that of the leaves of both heads, the student's first,
    which split the vocabulary alike.
    """
    teacher_head, teacher = jax.lax.stop_gradient((teacher_head, teacher))

    def head(params: tuple[PyTree, PyTree], hidden: jax.Array) -> jax.Array:
        return heads[0](params[0], hidden)

    score = functools.partial(_score_chunk, teacher_head=heads[1], beta=beta)
    size = min(chunk, student.shape[1])
    return chunked_sums(head, score, size, sharding, (student_head, teacher_head), student, teacher, weights)


def _score_chunk(
    vocab_axis: str | None,
    params: tuple[PyTree, PyTree],
    logits: jax.Array,
    teacher: Any,
    weights: jax.Array,
    *,
    teacher_head: Head,
    beta: float,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """The weighted sums of the divergences and of equal predictions of a chunk, and the gradient of the former with
    respect to the student's logits [N, V]."""
    compared = _compare(logits, teacher_head(params[1], teacher), vocab_axis, beta)
    return *compared.sums(weights), compared.gradients * weights[..., None]


class Compared(NamedTuple):
    """The divergences of a chunk of positions, their gradients with respect to the student's logits, and 1 where both
    models have the same likeliest token."""

    losses: Float[Array, "N"]
    gradients: Float[Array, "N V"]
    equal: Float[Array, "N"]

    def sums(self, weights: Float[Array, "N"]) -> tuple[Float[Array, ""], Float[Array, ""]]:
        """The weighted sums of the divergences, of which those of weight 0 may be infinite, and of `equal`."""
        return jnp.where(weights != 0, self.losses * weights, 0.0).sum(), (self.equal * weights).sum()


def _compare(student: jax.Array, teacher: jax.Array | NamedTokens, vocab_axis: str | None, beta: float) -> Compared:
    """Compares logits [N, V] of both models, whose vocabulary may be sharded over `vocab_axis`.

    A teacher of NamedTokens is completed to a whole distribution in which the other tokens have the student's
    proportions. That adds nothing to the divergence of the named tokens and the rest, nor to its gradient.

    The gradient of every divergence is p (g - sum p g), with g = log(p / q) for beta 1 and (1 - beta) log(p / m) below;
    for beta 0 it is p - q.
    """
    if vocab_axis is None:
        max_over_vocab, sum_over_vocab = lambda x: x, lambda x: x
    else:
        max_over_vocab = functools.partial(jax.lax.pmax, axis_name=vocab_axis)
        sum_over_vocab = functools.partial(jax.lax.psum, axis_name=vocab_axis)

    def log_sum_over_vocab(logits: jax.Array) -> jax.Array:
        maximum = max_over_vocab(logits.max(-1, keepdims=True))
        maximum = jnp.where(jnp.isfinite(maximum), maximum, 0.0)
        return maximum + jnp.log(sum_over_vocab(jnp.exp(logits - maximum).sum(-1, keepdims=True)))

    def complete(named: NamedTokens) -> tuple[jax.Array, jax.Array]:
        """The teacher's log-probabilities, and which token is its likeliest."""
        size, exists = student.shape[-1], named.ids >= 0
        local = named.ids - (0 if vocab_axis is None else size * jax.lax.axis_index(vocab_axis))
        places = jnp.arange(len(student))[:, None], jnp.where((local >= 0) & (local < size) & exists, local, size)
        log_probs = jnp.where(exists, named.log_probs, -jnp.inf)
        values = jnp.full_like(student, -jnp.inf).at[places].max(log_probs, mode="drop")
        is_named = jnp.zeros(student.shape, bool).at[places].set(True, mode="drop")
        rest = jnp.where(is_named, -jnp.inf, student)
        sum_of_named = jnp.minimum(jax.nn.logsumexp(log_probs, axis=-1, keepdims=True), LARGEST_LOG_SUM)
        of_rest = jnp.log(-jnp.expm1(sum_of_named)) + student - log_sum_over_vocab(rest)
        return jnp.where(is_named, values, of_rest), is_named & (values == log_probs.max(-1, keepdims=True))

    def predict(logits: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
        maximum = max_over_vocab(logits.max(-1, keepdims=True))
        exponentials = jnp.exp(logits - maximum)
        total = sum_over_vocab(exponentials.sum(-1, keepdims=True))
        return exponentials / total, logits - maximum - jnp.log(total), logits == maximum

    def total(values: jax.Array) -> jax.Array:
        return sum_over_vocab(values.sum(-1, keepdims=True))

    def product(probabilities: jax.Array, logs: jax.Array) -> jax.Array:
        return jnp.where(probabilities > 0, probabilities * logs, 0.0)  # also for a logit of minus infinity

    p, log_p, likeliest = predict(student)
    if isinstance(teacher, NamedTokens):
        completed, teacher_likeliest = complete(teacher)
        q, log_q, _ = predict(completed)
    else:
        q, log_q, teacher_likeliest = predict(teacher)
    equal = sum_over_vocab((likeliest & teacher_likeliest).any(-1).astype(jnp.float32)) > 0
    if beta == 0:
        losses, gradients = total(product(q, log_q - log_p)), p - q
    elif beta == 1:
        losses = total(product(p, log_p - log_q))
        gradients = product(p, log_p - log_q - losses)
    else:
        log_m = jnp.logaddexp(log_p + jnp.log1p(-beta), log_q + jnp.log(beta))
        distance = total(product(p, log_p - log_m))
        losses = beta * total(product(q, log_q - log_m)) + (1 - beta) * distance
        gradients = (1 - beta) * product(p, log_p - log_m - distance)
    return Compared(losses[..., 0], gradients, equal.astype(jnp.float32))
