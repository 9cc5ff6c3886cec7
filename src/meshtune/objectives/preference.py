"""Losses of single pairs, as functions of log-probabilities, and what every stage of pairs has in common."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from meshtune.objectives.answers import Answers
from meshtune.objectives.score import Score

Each = Float[Array, "*pairs"]


def smoothed(logits: Each, smoothing: float = 0.0) -> Each:
    """-log sigmoid, or with `smoothing` e the loss of a label that is wrong with probability e: conservative DPO."""
    right = -jax.nn.log_sigmoid(logits)
    return right if not smoothing else (1 - smoothing) * right - smoothing * jax.nn.log_sigmoid(-logits)


def robust(logits: Each, smoothing: float) -> Each:
    """An unbiased estimate of the loss without wrong labels (https://arxiv.org/abs/2403.00409)."""
    right, wrong = -jax.nn.log_sigmoid(logits), -jax.nn.log_sigmoid(-logits)
    return ((1 - smoothing) * right - smoothing * wrong) / (1 - 2 * smoothing)


def hinge(logits: Each) -> Each:
    """https://arxiv.org/abs/2305.10425."""
    return jax.nn.relu(1 - logits)


def squared(margins: Each, beta: float) -> Each:
    """IPO: the squared distance of a margin from 1 / (2 beta) (https://arxiv.org/abs/2310.12036)."""
    return (margins - 1 / (2 * beta)) ** 2


def log_odds(chosen: Each, rejected: Each) -> Each:
    """The log odds ratio of two average log-probabilities (https://arxiv.org/abs/2403.07691)."""
    return (chosen - rejected) - (_log1mexp(chosen) - _log1mexp(rejected))


def _log1mexp(x: Each) -> Each:
    """log(1 - exp(x)) for x < 0, without cancellation on either side of -ln 2."""
    low = x < -0.6931471805599453
    return jnp.where(low, jnp.log1p(-jnp.exp(x)), jnp.log(-jnp.expm1(jnp.where(low, -1.0, x))))


def scored(found: Answers, losses: Each, rewards: tuple[Each, Each], sft_weight: float = 0.0, **metrics: Each) -> Score:
    """The sums over pairs that are there, of `losses` and of the metrics people watch; `rewards` are of both sides."""

    def total(each: Array) -> Array:
        return jnp.sum(jnp.where(found.there > 0, each, 0.0))

    chosen, rejected = (jax.lax.stop_gradient(reward) for reward in rewards)
    watched = {
        "rewards/chosen": chosen,
        "rewards/rejected": rejected,
        "rewards/margins": chosen - rejected,
        "rewards/accuracies": (chosen > rejected).astype(jnp.float32),
        "logps/chosen": found.first,
        "logps/rejected": found.second,
        **metrics,
    }
    sums = {name: total(jax.lax.stop_gradient(each)) for name, each in watched.items()}
    loss = total(losses)
    if sft_weight:
        loss = loss + sft_weight * found.nll
        sums["nll"] = jax.lax.stop_gradient(found.nll)
    return Score(loss, jnp.sum(found.there), sums)
