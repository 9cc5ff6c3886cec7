"""Objectives of pairs of answers (DPO, CPO, ORPO, SimPO): their losses as functions of log-probabilities, and sums."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from meshtune.arrays.tree import Tree
from meshtune.model.compute import Compute
from meshtune.model.spec import ModelSpec
from meshtune.objectives.answers import (
    AnswerLogProbs,
    Batch,
    LossSums,
    Objective,
    answer_log_probs,
    reference_log_probs,
)
from meshtune.objectives.config import CpoConfig, DpoConfig, OrpoConfig, SimpoConfig

PerPair = Float[Array, "*pairs"]


def sigmoid_loss(logits: PerPair, smoothing: float = 0.0) -> PerPair:
    """-log sigmoid(logits). `smoothing` is the probability that a label is wrong, as in conservative DPO."""
    losses = -jax.nn.log_sigmoid(logits)
    return losses if not smoothing else (1 - smoothing) * losses - smoothing * jax.nn.log_sigmoid(-logits)


def robust_loss(logits: PerPair, smoothing: float) -> PerPair:
    """An unbiased estimate of the loss without wrong labels (https://arxiv.org/abs/2403.00409)."""
    right, wrong = -jax.nn.log_sigmoid(logits), -jax.nn.log_sigmoid(-logits)
    return ((1 - smoothing) * right - smoothing * wrong) / (1 - 2 * smoothing)


def hinge_loss(logits: PerPair) -> PerPair:
    """max(0, 1 - logits), as in SLiC (https://arxiv.org/abs/2305.10425)."""
    return jax.nn.relu(1 - logits)


def ipo_loss(margins: PerPair, beta: float) -> PerPair:
    """The squared distance of a margin from 1 / (2 beta), as in IPO (https://arxiv.org/abs/2310.12036)."""
    return (margins - 1 / (2 * beta)) ** 2


def log_odds(chosen: PerPair, rejected: PerPair) -> PerPair:
    """The log odds ratio of two average log-probabilities (https://arxiv.org/abs/2403.07691)."""
    return (chosen - rejected) - (_log1mexp(chosen) - _log1mexp(rejected))


def _log1mexp(x: PerPair) -> PerPair:
    """log(1 - exp(x)) for x < 0, without cancellation on either side of -ln 2."""
    below = x < -0.6931471805599453
    return jnp.where(below, jnp.log1p(-jnp.exp(x)), jnp.log(-jnp.expm1(jnp.where(below, -1.0, x))))


def masked_sum(values: PerPair, unit_mask: PerPair) -> Float[Array, ""]:
    """The sum over units that exist."""
    return jnp.sum(jnp.where(unit_mask > 0, values, 0.0))


def reward_metrics(chosen: PerPair, rejected: PerPair) -> dict[str, PerPair]:
    """The metrics that TRL logs of the rewards of chosen and rejected answers, per pair."""
    return {
        "rewards/chosen": chosen,
        "rewards/rejected": rejected,
        "rewards/margins": chosen - rejected,
        "rewards/accuracies": (chosen > rejected).astype(jnp.float32),
    }


def preference_score(
    answers: AnswerLogProbs,
    losses: PerPair,
    rewards: tuple[PerPair, PerPair],
    sft_weight: float = 0.0,
    **metrics: PerPair,
) -> LossSums:
    """Sums `losses` and the metrics of a preference stage over the pairs that exist.

    `rewards` are those of the chosen and the rejected answers. With `sft_weight` that many times the cross-entropy of
    the chosen answers is added to the loss, and reported as the metric `nll`.
    """
    chosen, rejected = (jax.lax.stop_gradient(reward) for reward in rewards)
    per_pair = {
        **reward_metrics(chosen, rejected),
        "logps/chosen": answers.first,
        "logps/rejected": answers.second,
        **metrics,
    }
    sums = {name: masked_sum(jax.lax.stop_gradient(values), answers.unit_mask) for name, values in per_pair.items()}
    loss = masked_sum(losses, answers.unit_mask)
    if sft_weight:
        loss = loss + sft_weight * answers.nll
        sums["nll"] = jax.lax.stop_gradient(answers.nll)
    return LossSums(loss, jnp.sum(answers.unit_mask), sums, answers.layers)


def dpo(config: DpoConfig) -> Objective:
    """Direct preference optimisation (https://arxiv.org/abs/2305.18290) and variants that use a reference model.

    The mean over pairs of a loss on beta times the difference between the answers' log-ratios to the reference.
    """
    beta, smoothing = config.beta, config.label_smoothing

    def objective(params: Tree, spec: ModelSpec, compute: Compute, batch: Batch, rng: Array | None) -> LossSums:
        answers = answer_log_probs(params, spec, compute, batch, rng, tail=config.ld_alpha)
        reference = reference_log_probs(params, spec, compute, batch, tail=config.ld_alpha)
        chosen, rejected = answers.first - reference[0], answers.second - reference[1]
        logits = beta * (chosen - rejected)
        match config.loss:
            case "sigmoid":
                losses = sigmoid_loss(logits, smoothing)
            case "hinge":
                losses = hinge_loss(logits)
            case "ipo":
                losses = ipo_loss(chosen / answers.lengths[0] - rejected / answers.lengths[1], beta)
            case "robust":
                losses = robust_loss(logits, smoothing)
        return preference_score(answers, losses, (beta * chosen, beta * rejected), config.sft_weight)

    return objective


def cpo(config: CpoConfig) -> Objective:
    """Contrastive preference optimisation, without a reference (https://arxiv.org/abs/2401.08417).

    The mean over pairs of a loss on beta times the difference between the two answers' log-probabilities.
    """
    beta = config.beta

    def objective(params: Tree, spec: ModelSpec, compute: Compute, batch: Batch, rng: Array | None) -> LossSums:
        answers = answer_log_probs(params, spec, compute, batch, rng)
        if config.loss == "ipo":
            per_token = answers.first / answers.lengths[0], answers.second / answers.lengths[1]
            answers = answers._replace(first=per_token[0], second=per_token[1])
        chosen, rejected = answers.first, answers.second
        match config.loss:
            case "sigmoid":
                losses = sigmoid_loss(beta * (chosen - rejected), config.label_smoothing)
            case "hinge":
                losses = hinge_loss(beta * (chosen - rejected))
            case "ipo":
                losses = ipo_loss(chosen - rejected, beta)
        return preference_score(answers, losses, (beta * chosen, beta * rejected), config.sft_weight)

    return objective


def orpo(config: OrpoConfig) -> Objective:
    """Odds ratio preference optimisation, without a reference (https://arxiv.org/abs/2403.07691).

    The chosen answers' cross-entropy per token, plus -beta log sigmoid(log odds ratio) per pair.
    """

    def objective(params: Tree, spec: ModelSpec, compute: Compute, batch: Batch, rng: Array | None) -> LossSums:
        answers = answer_log_probs(params, spec, compute, batch, rng)
        chosen, rejected = answers.first / answers.lengths[0], answers.second / answers.lengths[1]
        odds = log_odds(chosen, rejected)
        losses = -config.beta * jax.nn.log_sigmoid(odds)
        answers = answers._replace(first=chosen, second=rejected)
        rewards = config.beta * chosen, config.beta * rejected
        return preference_score(answers, losses, rewards, sft_weight=1.0, log_odds=odds)

    return objective


def simpo(config: SimpoConfig) -> Objective:
    """Simple preference optimisation, without a reference (https://arxiv.org/abs/2405.14734).

    The mean over pairs of -log sigmoid(beta * difference of average log-probabilities - gamma).
    """
    beta = config.beta

    def objective(params: Tree, spec: ModelSpec, compute: Compute, batch: Batch, rng: Array | None) -> LossSums:
        answers = answer_log_probs(params, spec, compute, batch, rng)
        chosen, rejected = answers.first / answers.lengths[0], answers.second / answers.lengths[1]
        answers = answers._replace(first=chosen, second=rejected)
        losses = sigmoid_loss(beta * (chosen - rejected) - config.gamma, config.label_smoothing)
        return preference_score(answers, losses, (beta * chosen, beta * rejected), config.sft_weight)

    return objective
