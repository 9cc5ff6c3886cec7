"""Advantages of completions, and the weights of their tokens in the loss. In float64, by numpy.

A rollout has N completions with M tokens together. Values per completion are [N]; values per token are [M], in the
order of the completions, which `lengths` [N] divides. `trained` [N] are the numbers of tokens in the loss: those that
the model drew, and 0 of a completion that is left out because it was truncated. Formulas:
_generate_and_score_completions of trl 1.16's GRPOTrainer and RLOOTrainer.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from jaxtyping import Bool, Float, Int

from meshtune.config.recipe import Recipe
from meshtune.config.sections import RolloutSection
from meshtune.objectives.config import GrpoConfig, OnlineDpoConfig, PpoConfig, RlooConfig

if TYPE_CHECKING:
    from meshtune.rollout.generate import Completion

EPSILON = 1e-4  # added to deviations, as in trl
PerCompletion = Float[np.ndarray, "N"]
PerToken = Float[np.ndarray, "M"]
Indices = Int[np.ndarray, "N"]


class RolloutTokens(NamedTuple):
    """A rollout for the loss: `tokens` has float32 [M] by the name of a batch's array; `rewards` are the weighted sums,
    NaN where no function applies."""

    advantages: PerCompletion
    tokens: dict[str, PerToken]
    rewards: PerCompletion
    metrics: dict[str, float]


def rollout_tokens(
    recipe: Recipe,
    completions: Sequence[Completion],
    rewards: Float[np.ndarray, "N K"],
    weights: Float[np.ndarray, "K"],
    groups: Indices,
    computed: Mapping[str, Sequence[np.ndarray]],
) -> RolloutTokens:
    """Everything that the loss reads of a rollout's completions, from their rewards.

    `computed` has the values of every completion's tokens before the first update, as far as the loss needs them:
    `old`, `reference_tokens` and `entropies`; the first two always where rloo has a beta. Updates have equal numbers of
    completions, in order.
    """
    stage, rollout = recipe.stage, recipe.rollout
    if isinstance(stage, OnlineDpoConfig):
        return _pair_tokens(stage, completions, total_rewards(rewards, weights), computed)
    assert rollout is not None
    lengths = np.array([len(completion.ids) for completion in completions])
    if isinstance(stage, PpoConfig):
        return _ppo_tokens(stage, rollout, completions, total_rewards(rewards, weights), computed)
    assert isinstance(stage, GrpoConfig | RlooConfig)
    truncated = np.array([completion.reason == "length" for completion in completions])
    drawn = np.concatenate([np.asarray(completion.drawn, bool) for completion in completions])
    trained = np.array([sum(completion.drawn) for completion in completions])
    trained = np.where(truncated, 0, trained) if stage.mask_truncated_completions else trained
    updates = np.arange(len(lengths)) // (len(lengths) // rollout.updates)
    values = {name: np.concatenate(arrays).astype(np.float64) for name, arrays in computed.items()}
    values["sampled"] = np.concatenate([np.asarray(completion.log_probs) for completion in completions])
    is_trained = np.repeat(trained > 0, lengths) & drawn
    metrics, kl = {}, None
    if "old" in values:
        metrics["sampling/sampling_logp_difference/max"] = float(
            np.abs(values["old"] - values["sampled"]).max(initial=0)
        )
    if isinstance(stage, RlooConfig) and stage.beta:
        differences = np.where(is_trained, values["old"] - values["reference_tokens"], 0.0)
        kl = np.bincount(np.repeat(np.arange(len(lengths)), lengths), differences, minlength=len(lengths))
        metrics |= _kl_metrics(differences, is_trained, trained)
    advantages = advantages_of(stage, rewards, weights, groups, trained, kl)
    loss = stage.loss if isinstance(stage, GrpoConfig) else "rloo"
    values["advantages"] = np.repeat(advantages, lengths) * drawn
    of_token = np.repeat(loss_weights(loss, trained, updates, rollout.max_tokens), lengths)
    values["weights"] = np.where(is_trained, of_token, 0.0)
    entropies, acted_on = values.pop("entropies", None), is_trained
    if rollout.correction is not None:
        values["policy_weights"] = _correction(rollout, values, lengths)
    if isinstance(stage, GrpoConfig):
        if stage.top_entropy_quantile < 1:
            assert entropies is not None
            acted_on = is_trained & (entropies >= entropy_threshold(entropies[is_trained], stage.top_entropy_quantile))
            values["policy_weights"] = acted_on * values.get("policy_weights", np.ones(len(acted_on)))
        if stage.entropy_coef:
            values["entropy_weights"] = entropy_weights(lengths, updates, acted_on)
    tokens = {name: array.astype(np.float32) for name, array in values.items()}
    return RolloutTokens(advantages, tokens, total_rewards(rewards, weights), metrics)


def _pair_tokens(
    stage: OnlineDpoConfig,
    completions: Sequence[Completion],
    rewards: PerCompletion,
    computed: Mapping[str, Sequence[np.ndarray]],
) -> RolloutTokens:
    """The chosen completion of each pair of neighbours has advantage 1, the other -1; both have 0, and no weight, where
    no function scores one of them."""
    lengths = np.array([len(completion.ids) for completion in completions])
    first, second = subtract_penalty(rewards, completions, stage.missing_eos_penalty).reshape(-1, 2).T
    signs = np.where(np.isnan(first) | np.isnan(second), 0.0, np.where(first >= second, 1.0, -1.0))
    advantages = np.stack([signs, -signs], axis=1).reshape(-1)
    values = {
        "advantages": np.repeat(advantages, lengths),
        "weights": np.repeat(np.abs(advantages), lengths),
        "reference_tokens": np.concatenate(computed["reference_tokens"]),
    }
    tokens = {name: array.astype(np.float32) for name, array in values.items()}
    return RolloutTokens(advantages, tokens, rewards, {})


def _ppo_tokens(
    stage: PpoConfig,
    rollout: RolloutSection,
    completions: Sequence[Completion],
    rewards: PerCompletion,
    computed: Mapping[str, Sequence[np.ndarray]],
) -> RolloutTokens:
    """Advantages and returns of every token; those of a completion that no function scores are 0, without weight."""
    lengths = np.array([len(completion.ids) for completion in completions])
    values = {name: np.concatenate(arrays).astype(np.float64) for name, arrays in computed.items()}
    values["sampled"] = np.concatenate([np.asarray(completion.log_probs) for completion in completions])
    values.pop("entropies", None)
    scores = subtract_penalty(rewards, completions, stage.missing_eos_penalty)
    mask, ends = np.repeat(~np.isnan(scores), lengths), np.cumsum(lengths) - 1
    metrics: dict[str, float] = {}
    of_tokens = np.zeros(len(mask))
    if stage.kl_coef:
        difference = values["old"] - values["reference_tokens"]
        kl = difference if stage.kl_estimator == "k1" else np.expm1(-difference) + difference
        of_tokens -= stage.kl_coef * kl
        metrics = _kl_metrics(kl, mask, np.where(np.isnan(scores), 0, lengths))
        del values["reference_tokens"]
    of_tokens[ends] += np.nan_to_num(scores)
    if stage.whiten_rewards:
        of_tokens = whiten(of_tokens, mask, keep_mean=True)
    advantages = gae(of_tokens, values["values_old"], lengths, stage.gamma, stage.lam)
    values["returns"] = np.where(mask, advantages + values["values_old"], 0.0)
    values["advantages"] = whiten(advantages, mask)
    trained = np.where(np.isnan(scores), 0, lengths)
    updates = np.arange(len(lengths)) // (len(lengths) // rollout.updates)
    values["weights"] = np.repeat(loss_weights("bnpo", trained, updates, rollout.max_tokens), lengths) * mask
    if rollout.correction is not None:
        values["policy_weights"] = _correction(rollout, values, lengths)
    tokens = {name: array.astype(np.float32) for name, array in values.items()}
    of_completion = np.add.reduceat(values["advantages"], ends - lengths + 1) / lengths
    return RolloutTokens(of_completion, tokens, rewards, metrics)


def _kl_metrics(kl: PerToken, mask: Bool[np.ndarray, "M"], trained: Indices) -> dict[str, float]:
    """The KL divergence of the tokens in `mask`, a token and, under trl's name, a completion."""
    total = float(kl[mask].sum())
    return {"kl": total / max(int(mask.sum()), 1), "objective/kl": total / max(int(np.count_nonzero(trained)), 1)}


def start_kl_coef(stage: object) -> float | None:
    """The first weight of a KL divergence that is steered to a target; None where there is no target."""
    if not isinstance(stage, RlooConfig | PpoConfig) or stage.kl_target is None:
        return None
    return stage.beta if isinstance(stage, RlooConfig) else stage.kl_coef


def with_kl_coef(recipe: Recipe, coef: float) -> Recipe:
    """The recipe with another weight of the KL divergence in rewards."""
    name = "beta" if isinstance(recipe.stage, RlooConfig) else "kl_coef"
    return recipe.model_copy(update={"stage": dataclasses.replace(recipe.stage, **{name: coef})})


def next_kl_coef(stage: RlooConfig | PpoConfig, coef: float, metrics: Mapping[str, float], completions: int) -> float:
    """The weight of the KL divergence after a rollout that had `coef` and these metrics, by the proportional controller
    of https://arxiv.org/abs/1909.08593, section 2.2."""
    assert stage.kl_target is not None
    kl = metrics["kl" if stage.kl_mean == "tokens" else "objective/kl"]
    error = min(max(kl / stage.kl_target - 1, -0.2), 0.2)
    return coef * (1 + error * completions / stage.kl_horizon)


def gae(rewards: PerToken, values: PerToken, lengths: Indices, gamma: float, lam: float) -> PerToken:
    """Generalised advantages (https://arxiv.org/abs/1506.02438) of the tokens of completions."""
    filled = np.arange(lengths.max()) < lengths[:, None]
    padded = np.zeros((2, *filled.shape))
    padded[0][filled], padded[1][filled] = rewards, values
    following = np.zeros_like(padded[1])
    following[:, :-1] = padded[1][:, 1:]
    differences = padded[0] + gamma * following - padded[1]
    result, later = np.zeros_like(differences), np.zeros(len(lengths))
    for place in reversed(range(filled.shape[1])):
        later = differences[:, place] + gamma * lam * later
        result[:, place] = later
    return result[filled]


def whiten(values: PerToken, mask: Bool[np.ndarray, "M"], *, keep_mean: bool = False) -> PerToken:
    """Values of mean 0, or their own, and variance 1 over the tokens in `mask`, 0 elsewhere (trl: masked_whiten)."""
    inside = values[mask]
    if len(inside) < 2 or np.ptp(inside) == 0:
        return np.where(mask & keep_mean, values, 0.0)
    mean = inside.mean()
    whitened = (values - mean) / np.sqrt(inside.var(ddof=1) + 1e-8) + mean * keep_mean
    return np.where(mask, whitened, 0.0)


def subtract_penalty(rewards: PerCompletion, completions: Sequence[Completion], penalty: float | None) -> PerCompletion:
    """Rewards less the `penalty` of completions that did not end by themselves."""
    truncated = np.array([completion.reason == "length" for completion in completions])
    return rewards - (penalty or 0.0) * truncated


def advantages_of(
    config: GrpoConfig | RlooConfig,
    rewards: Float[np.ndarray, "N K"],
    weights: Float[np.ndarray, "K"],
    groups: Indices,
    trained: Indices,
    kl: PerCompletion | None = None,
) -> PerCompletion:
    """The advantages of completions from the rewards of K functions, NaN where a function does not apply.

    `groups` says which completions have the same prompt. `kl` is the sum over a completion of log p(old) - log
    p(reference), which rloo subtracts from rewards. A completion that no function scored has advantage 0 and takes no
    part in any mean. Where all that an advantage is computed from is equal, it is exactly 0.
    """
    rewards = np.asarray(rewards, np.float64)
    totals = total_rewards(rewards, weights)
    if isinstance(config, RlooConfig):
        if config.reward_clip_range is not None:
            totals = np.clip(totals, *config.reward_clip_range)
        if config.beta:
            assert kl is not None
            totals = totals - config.beta * kl
        advantages = _leave_one_out(totals, groups)
        advantages = _normalise(advantages, np.zeros_like(groups)) if config.normalize_advantages else advantages
        return np.nan_to_num(advantages)
    batch = np.zeros_like(groups)
    if config.normalize_then_sum:
        columns = [_normalise(column, groups) for column in rewards.T]
        return np.nan_to_num(_normalise(total_rewards(np.stack(columns, 1), weights), batch))
    centred = totals - _mean(totals, groups) if config.baseline == "group" else totals
    if config.scale == "tokens":
        return np.nan_to_num(_whiten_tokens(centred, trained))
    if config.scale != "none":
        centred = centred / (_deviation(totals, groups if config.scale == "group" else batch) + EPSILON)
    return np.nan_to_num(centred)


def total_rewards(rewards: Float[np.ndarray, "N K"], weights: Float[np.ndarray, "K"]) -> PerCompletion:
    """The weighted sum of the rewards of every completion; NaN where no function applies."""
    totals = np.nansum(rewards * np.asarray(weights, np.float64), axis=1)
    return np.where(np.isnan(rewards).all(axis=1), np.nan, totals)


def loss_weights(loss: str, trained: Indices, updates: Indices, max_tokens: int) -> PerCompletion:
    """The weight of every trained token of a completion in the loss, before it is divided by the update's completions.

    `loss` is a loss of stage grpo, or rloo. `updates` [N] is the update that each completion is trained in.
    """
    lengths = np.asarray(trained, np.float64)
    if loss in ("grpo", "sapo", "rloo"):
        return 1 / np.maximum(lengths, 1)
    if loss == "luspo":
        return np.ones_like(lengths)
    if loss == "dr_grpo":
        return np.full_like(lengths, 1 / max_tokens)
    completions, tokens = np.bincount(updates), np.bincount(updates, lengths)
    if loss != "bnpo":
        assert loss in ("dapo", "cispo", "vespo"), loss
        tokens = np.full_like(tokens, lengths.sum() / np.count_nonzero(completions))
    return (completions / np.maximum(tokens, 1))[updates]


def entropy_weights(lengths: Indices, updates: Indices, mask: Bool[np.ndarray, "M"]) -> PerToken:
    """Weights that make the entropy bonus the mean over the tokens of an update that are in `mask`."""
    of_token = np.repeat(updates, lengths)
    completions = np.bincount(updates)
    tokens = np.bincount(of_token, mask, minlength=len(completions))
    return mask * (completions / np.maximum(tokens, 1))[of_token]


def entropy_threshold(entropies: PerToken, share: float) -> float:
    """The least entropy of the `share` of tokens that have the highest (https://arxiv.org/abs/2506.01939)."""
    return float(np.quantile(entropies, 1 - share)) if len(entropies) else np.inf


def _correction(rollout: RolloutSection, values: Mapping[str, PerToken], lengths: Indices) -> PerToken:
    level, mode = (rollout.correction or "").split("_")
    bounds = rollout.correction_min, rollout.correction_max
    return importance_correction(values["old"], values["sampled"], lengths, level, mode, *bounds)


def importance_correction(
    old: PerToken,
    sampled: PerToken,
    lengths: Indices,
    level: str,
    mode: str,
    lower: float | None = None,
    upper: float | None = 3.0,
) -> PerToken:
    """Factors that correct for tokens drawn from other probabilities than the model's: p(old) / p(sampled).

    `level` is token or sequence: the ratio is that of a token or of its whole completion. `mode` is truncate or mask:
    beyond the bounds the ratio is the bound, or 0. A token whose log-probability the sampler did not report, NaN, has
    ratio 1.
    """
    difference = np.nan_to_num(np.asarray(old, np.float64) - sampled)
    if level == "sequence":
        of_token = np.repeat(np.arange(len(lengths)), lengths)
        difference = np.bincount(of_token, difference, minlength=len(lengths))[of_token]
    ratio = np.exp(difference)
    bounded = np.clip(ratio, lower, upper)
    return bounded if mode == "truncate" else np.where(bounded == ratio, ratio, 0.0)


def _sums(values: PerCompletion, groups: Indices) -> tuple[Indices, Indices, PerCompletion]:
    """(group of every completion as 0 .. G - 1, scored completions [G], sums of their values [G])."""
    _, index = np.unique(groups, return_inverse=True)
    scored = ~np.isnan(values)
    return index, np.bincount(index, scored), np.bincount(index, np.where(scored, values, 0.0))


def _are_equal(values: PerCompletion, index: Indices) -> Bool[np.ndarray, "G"]:
    """Whether the scored completions of a group have the same value; in floats their mean need not have it."""
    least, largest = (np.full(index.max(initial=-1) + 1, bound) for bound in (np.inf, -np.inf))
    np.fmin.at(least, index, values)
    np.fmax.at(largest, index, values)
    return least >= largest


def _mean(values: PerCompletion, groups: Indices) -> PerCompletion:
    """The mean of every completion's group."""
    index, scored, sums = _sums(values, groups)
    means = (sums / np.maximum(scored, 1))[index]
    return np.where(_are_equal(values, index)[index], values, means)


def _deviation(values: PerCompletion, groups: Indices) -> PerCompletion:
    """The standard deviation of every completion's group, with n - 1; 0 for one completion."""
    index, scored, squares = _sums((values - _mean(values, groups)) ** 2, groups)
    return np.sqrt(squares / np.maximum(scored - 1, 1))[index]


def _normalise(values: PerCompletion, groups: Indices) -> PerCompletion:
    return (values - _mean(values, groups)) / (_deviation(values, groups) + EPSILON)


def _leave_one_out(rewards: PerCompletion, groups: Indices) -> PerCompletion:
    """The reward minus the mean reward of the group's other completions; NaN where there is no other."""
    index, scored, sums = _sums(rewards, groups)
    count = scored[index] - 1
    baseline = np.where(count > 0, (sums[index] - rewards) / np.maximum(count, 1), np.nan)
    return np.where(_are_equal(rewards, index)[index] & (count > 0), 0 * rewards, rewards - baseline)


def _whiten_tokens(values: PerCompletion, trained: Indices) -> PerCompletion:
    """Values of mean 0 and variance 1 over all trained tokens, as REINFORCE++ has them (verl: masked_whiten)."""
    tokens = np.where(np.isnan(values), 0, trained).astype(np.float64)
    scored = np.where(np.isnan(values), 0.0, values)
    if tokens.sum() < 2 or np.ptp(scored[tokens > 0]) == 0:
        return 0 * values
    mean = np.sum(tokens * scored) / tokens.sum()
    variance = np.sum(tokens * (scored - mean) ** 2) / (tokens.sum() - 1)
    return (values - mean) / np.sqrt(variance + 1e-8)
