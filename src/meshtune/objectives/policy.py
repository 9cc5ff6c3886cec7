"""Losses of completions that the model generated, as trl 1.16 has them: policy gradients, those of GRPO and its
relatives, RLOO and PPO (trl 1.12), and online DPO.

A completion is a segment of a row. Everything that depends on more than one completion (advantages, and the weights
that make a mean of a sum) is in the batch, made by rollout/advantages.py, so neither packing nor the split into
micro-batches changes a result. Formulas: trl's GRPOTrainer._compute_loss and RLOOTrainer._compute_loss.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from meshtune.arrays.tree import Tree
from meshtune.model.block import Sums
from meshtune.model.compute import Compute
from meshtune.model.spec import ModelSpec
from meshtune.objectives.answers import (
    Batch,
    Largest,
    LossSums,
    Metric,
    Objective,
    Smallest,
    WeightedMetric,
    max_segments,
    segment_sum,
    to_tokens,
    token_log_probs,
    without_adapters,
    without_critic,
)
from meshtune.objectives.config import CLIPPED_LOSSES, GrpoConfig, OnlineDpoConfig, PpoConfig, RlooConfig
from meshtune.objectives.critic import critic_values
from meshtune.objectives.preference import ipo_loss, reward_metrics, sigmoid_loss

PerToken = Float[Array, "B T"]
LEAST_LOG_WEIGHT, LARGEST_LOG_WEIGHT = math.log(1e-8), 20.0  # of VESPO's weights of sequences


class Completions(NamedTuple):
    """Completions of a micro-batch, by token.

    `mask` is 1 on the tokens that are trained on; log-probabilities are 0 elsewhere. `old` are those before the first
    update, without gradient. `sum_over_completion` gives every token the sum of values over its completion, and
    `length` is that of the mask, at least 1.
    """

    mask: PerToken
    log_probs: PerToken
    old: PerToken
    entropies: PerToken
    length: PerToken
    sum_over_completion: Callable[[PerToken], PerToken]
    layers: Sums

    @property
    def log_ratio(self) -> PerToken:
        return self.log_probs - self.old


def grpo(config: GrpoConfig, temperature: float = 1.0) -> Objective:
    """The mean over completions of sum_t weights * (policy_weights * policy + beta * KL), minus the entropy bonus.

    `temperature` is the sampler's: it divides the logits. Without `old` in the batch the model is its own, so that
    every ratio is 1; without `reference_tokens` the reference is the model without its adapters.
    """

    def objective(params: Tree, spec: ModelSpec, compute: Compute, batch: Batch, rng: Array | None) -> LossSums:
        completions = _completions(params, spec, compute, batch, rng, temperature)
        mask, advantages = completions.mask, batch["advantages"]
        log_weights = completions.log_ratio
        if config.ratio == "sequence":
            log_weights = completions.sum_over_completion(log_weights) / completions.length
        ratio = jnp.exp(log_weights)
        losses = _policy_losses(config, completions, ratio, batch)
        if config.off_policy_mask_threshold is not None:
            fall = completions.sum_over_completion((batch["sampled"] - completions.log_probs) * mask)
            mean_fall = jax.lax.stop_gradient(fall) / completions.length
            losses = jnp.where((advantages >= 0) | (mean_fall <= config.off_policy_mask_threshold), losses, 0.0)
        if "policy_weights" in batch and config.loss != "vespo":
            losses = losses * batch["policy_weights"]
        shares = mask / completions.length if config.ratio == "sequence" else mask
        metrics = _metrics(config, completions, ratio, shares, batch)
        if config.beta:
            reference = _reference(params, spec, compute, batch, temperature)
            kl = _divergence(config.kl_estimator, reference * mask - completions.log_probs)
            kl = kl * ratio if config.kl_correction else kl
            losses = losses + config.beta * kl
            metrics["kl"] = _mean(kl, mask)
        loss = _masked_sum(losses, batch["weights"])
        if config.entropy_coef:
            loss = loss - config.entropy_coef * _masked_sum(completions.entropies, batch["entropy_weights"])
        return LossSums(loss, jnp.sum(batch["units"]), metrics, completions.layers)

    return objective


def rloo(config: RlooConfig, temperature: float = 1.0) -> Objective:
    """The mean over completions of the clipped loss of the ratio of their probabilities as wholes.

    The KL divergence from the reference is in the rewards. `temperature` and `old` as for `grpo`.
    """

    def objective(params: Tree, spec: ModelSpec, compute: Compute, batch: Batch, rng: Array | None) -> LossSums:
        completions = _completions(params, spec, compute, batch, rng, temperature)
        ratio = jnp.exp(completions.sum_over_completion(completions.log_ratio))
        losses = _ppo_losses(ratio, batch["advantages"], 1 - config.epsilon, 1 + config.upper_epsilon)
        if "policy_weights" in batch:
            losses = losses * batch["policy_weights"]
        metrics = _metrics(config, completions, ratio, completions.mask / completions.length, batch)
        return LossSums(_masked_sum(losses, batch["weights"]), jnp.sum(batch["units"]), metrics, completions.layers)

    return objective


def ppo(config: PpoConfig, temperature: float = 1.0) -> Objective:
    """The clipped loss of the policy plus `vf_coef` times that of the critic, means over the tokens of an update.

    `advantages` and `returns` are every token's, and `values_old` the critic's values before the first update.
    `temperature` and `old` as for `grpo`.
    """

    def objective(params: Tree, spec: ModelSpec, compute: Compute, batch: Batch, rng: Array | None) -> LossSums:
        completions = _completions(without_critic(params), spec, compute, batch, rng, temperature)
        mask, weights, ratio = completions.mask, batch["weights"], jnp.exp(completions.log_ratio)
        losses = _ppo_losses(ratio, batch["advantages"], 1 - config.epsilon, 1 + config.upper_epsilon)
        if "policy_weights" in batch:
            losses = losses * batch["policy_weights"]
        values, old, returns = critic_values(params, spec, compute, batch, rng), batch["values_old"], batch["returns"]
        clipped = jnp.clip(values, old - config.cliprange_value, old + config.cliprange_value)
        squares, clipped_squares = (values - returns) ** 2, (clipped - returns) ** 2
        critic_losses = jnp.maximum(squares, clipped_squares) / 2
        loss = _masked_sum(losses, weights) + config.vf_coef * _masked_sum(critic_losses, weights)
        metrics = _metrics(config, completions, ratio, mask, batch)
        metrics["loss/policy_avg"] = _mean(losses, mask)
        metrics["loss/value_avg"] = _mean(critic_losses, mask)
        metrics["val/clipfrac_avg"] = _mean(clipped_squares > squares, mask)
        return LossSums(loss, jnp.sum(batch["units"]), metrics, completions.layers)

    return objective


def online_dpo(config: OnlineDpoConfig, temperature: float = 1.0) -> Objective:
    """The mean over pairs of the DPO loss of a prompt's two completions, as in trl's OnlineDPOTrainer.

    `advantages` are 1 on the tokens of the chosen completion and -1 on those of the other, which are neighbours in a
    row; log-probabilities are of logits divided by `temperature`.
    """

    def objective(params: Tree, spec: ModelSpec, compute: Compute, batch: Batch, rng: Array | None) -> LossSums:
        completions = _completions(params, spec, compute, batch, rng, temperature)
        advantages, segments, count = batch["advantages"], batch["segment_ids"], max_segments(batch, 1)
        pairs = batch["units"] * (jnp.cumsum(batch["units"], axis=1) % 2)  # at the first completion of each

        def sum_over_pair(values: PerToken) -> Array:
            by_segment = segment_sum(values, segments, count)
            return by_segment + jnp.roll(by_segment, -1, axis=1)

        difference = completions.log_probs - batch["reference_tokens"] * completions.mask
        chosen, rejected = (
            sum_over_pair(jnp.where(side, difference, 0.0)) for side in (advantages > 0, advantages < 0)
        )
        margins = chosen - rejected
        losses = sigmoid_loss(config.beta * margins) if config.loss == "sigmoid" else ipo_loss(margins, config.beta)
        log_probs = jax.lax.stop_gradient(completions.log_probs)
        per_pair = {
            **reward_metrics(*(config.beta * jax.lax.stop_gradient(side) for side in (chosen, rejected))),
            "logps/chosen": sum_over_pair(jnp.where(advantages > 0, log_probs, 0.0)),
            "logps/rejected": sum_over_pair(jnp.where(advantages < 0, log_probs, 0.0)),
        }
        metrics: dict[str, Metric] = {name: _masked_sum(values, pairs) for name, values in per_pair.items()}
        metrics["entropy"] = _mean(completions.entropies, completions.mask)
        metrics["kl"] = _mean(difference, completions.mask)
        return LossSums(_masked_sum(losses, pairs), jnp.sum(pairs), metrics, completions.layers)

    return objective


def _completions(
    params: Tree, spec: ModelSpec, compute: Compute, batch: Batch, rng: Array | None, temperature: float
) -> Completions:
    trained, segments, count = batch["weights"] > 0, batch["segment_ids"], max_segments(batch, 1)
    values = token_log_probs(params, spec, compute, batch, trained, rng, temperature, entropies=True)
    assert values.entropies is not None
    mask = trained.astype(jnp.float32)

    def sum_over_completion(per_token: PerToken) -> PerToken:
        return to_tokens(segment_sum(per_token, segments, count), segments)

    old = batch["old"] * mask if "old" in batch else values.log_probs
    length = jnp.maximum(sum_over_completion(mask), 1.0)
    return Completions(
        mask, values.log_probs, jax.lax.stop_gradient(old), values.entropies, length, sum_over_completion, values.layers
    )


def _policy_losses(config: GrpoConfig, completions: Completions, ratio: PerToken, batch: Batch) -> PerToken:
    """The policy's term of every token."""
    advantages, log_probs = batch["advantages"], completions.log_probs
    if config.loss in CLIPPED_LOSSES:
        return _ppo_losses(ratio, advantages, 1 - config.epsilon, 1 + config.upper_epsilon, config.delta)
    if config.loss == "cispo":
        return -jax.lax.stop_gradient(jnp.minimum(ratio, config.upper_epsilon)) * advantages * log_probs
    if config.loss == "sapo":
        slope = jnp.where(advantages > 0, config.sapo_temperature_pos, config.sapo_temperature_neg)
        return -jax.nn.sigmoid(slope * (ratio - 1)) * 4 / slope * advantages
    assert config.loss == "vespo", config.loss
    return -_vespo_weights(config, completions, batch) * advantages * log_probs


def _ppo_losses(
    ratio: PerToken, advantages: PerToken, lower: float, upper: float, delta: float | None = None
) -> PerToken:
    """PPO's loss (https://arxiv.org/abs/1707.06347), with the unclipped ratio at most `delta`."""
    unclipped = ratio if delta is None else jnp.minimum(ratio, delta)
    return -jnp.minimum(unclipped * advantages, jnp.clip(ratio, lower, upper) * advantages)


def _vespo_weights(config: GrpoConfig, completions: Completions, batch: Batch) -> PerToken:
    """VESPO's weight of every completion, a gamma density of its ratio that is 1 where the ratio is.

    The importance correction in `policy_weights` is a part of the ratio.
    """
    log_weights = jnp.clip(completions.log_ratio, -20.0, 20.0)
    if "policy_weights" in batch:
        correction = jnp.clip(jnp.log(batch["policy_weights"]), LEAST_LOG_WEIGHT, LARGEST_LOG_WEIGHT)
        log_weights = log_weights + correction
    total = completions.sum_over_completion(log_weights * completions.mask)
    log_weight = jnp.clip(total, LEAST_LOG_WEIGHT, LARGEST_LOG_WEIGHT)
    better = batch["advantages"] >= 0
    power = jnp.where(better, config.vespo_k_pos, config.vespo_k_neg)
    decay = jnp.maximum(jnp.where(better, config.vespo_lambda_pos, config.vespo_lambda_neg), 1e-4)
    return jax.lax.stop_gradient(jnp.exp(decay + power * log_weight - decay * jnp.exp(log_weight)))


def _divergence(estimator: str, difference: PerToken) -> PerToken:
    """An estimate of KL(model || reference) from log p(reference) - log p(model) of drawn tokens.

    http://joschu.net/blog/kl-approx.html; k3+ has the gradient of k2, that of the divergence itself.
    """
    square = difference**2 / 2
    if estimator == "k1":
        return -difference
    if estimator == "abs":
        return jnp.abs(difference)
    if estimator == "k2":
        return square
    k3 = jnp.exp(difference) - difference - 1
    return k3 if estimator == "k3" else square + jax.lax.stop_gradient(k3 - square)


def _reference(params: Tree, spec: ModelSpec, compute: Compute, batch: Batch, temperature: float) -> PerToken:
    """The reference model's log-probabilities, without gradient."""
    if "reference_tokens" in batch:
        return batch["reference_tokens"]
    base = jax.tree.map(jax.lax.stop_gradient, without_adapters(params))
    return token_log_probs(base, spec, compute, batch, batch["weights"] > 0, None, temperature).log_probs


def _metrics(
    config: GrpoConfig | RlooConfig | PpoConfig,
    completions: Completions,
    ratio: PerToken,
    shares: PerToken,
    batch: Batch,
) -> dict[str, Metric]:
    """Means over trained tokens, under trl's names; those of ratios with `shares`, which give a completion 1 in all
    where it has one ratio."""
    mask, advantages, ratio = completions.mask, batch["advantages"], jax.lax.stop_gradient(ratio)
    metrics: dict[str, Metric] = {
        "entropy": _mean(completions.entropies, mask),
        "ratio/mean": _mean(ratio, shares),
        "ratio/distance": _mean(jnp.abs(ratio - 1), shares),
    }
    if "sampled" in batch:
        difference = jnp.abs(completions.old - batch["sampled"])
        metrics["sampling/sampling_logp_difference/mean"] = _mean(difference, mask)
    if isinstance(config, RlooConfig | PpoConfig) or config.loss in CLIPPED_LOSSES:
        delta = config.delta if isinstance(config, GrpoConfig) else None
        capped = ratio if delta is None else jnp.minimum(ratio, delta)
        low = (capped < 1 - config.epsilon) & (advantages < 0)
        high = (capped > 1 + config.upper_epsilon) & (advantages > 0)
        for name, clipped in (("low", low), ("high", high), ("region", low | high)):
            metrics[f"clip_ratio/{name}_mean"] = _mean(clipped, shares)
        of_low, of_high = (
            completions.sum_over_completion(clipped * mask) / completions.length for clipped in (low, high)
        )
        metrics["clip_ratio/low_min"] = Smallest(jnp.max((1 - of_low) * mask))
        metrics["clip_ratio/high_max"] = Largest(jnp.max(of_high * mask))
    elif config.loss == "cispo":
        metrics["cispo_clip_ratio"] = _mean((ratio > config.upper_epsilon) & (advantages > 0), shares)
    elif config.loss == "vespo":
        metrics["vespo/phi_seq_mean"] = _mean(_vespo_weights(config, completions, batch), mask / completions.length)
    return metrics


def _mean(values: Array, weights: PerToken) -> WeightedMetric:
    return WeightedMetric(_masked_sum(jax.lax.stop_gradient(values), weights), jnp.sum(weights))


def _masked_sum(values: Array, weights: PerToken) -> Float[Array, ""]:
    """The weighted sum; a value of weight 0 may be infinite."""
    return jnp.sum(jnp.where(weights != 0, values * weights, 0.0))
