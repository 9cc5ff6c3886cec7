"""PPO against a transcription of trl 1.12's PPOTrainer.train in torch, and its critic.

One micro-batch, as trl's means are those of a micro-batch. A completion's reward is on its last token, as in verl; trl
has it there for completions of full length. Advantages are float64 on both sides: 1e-5, the rounding of the float32 in
which they are kept. A step of whole models is float32: 2e-6 of the loss, 2e-5 of the norm of each leaf's gradient.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

from meshtune.adapters.config import FullConfig, LoraConfig
from meshtune.adapters.merge import merge_adapters
from meshtune.adapters.method import abstract, prepare
from meshtune.arrays.tree import flatten, merge, unflatten
from meshtune.config.load import load_recipe
from meshtune.errors import UserError
from meshtune.model.compute import Compute
from meshtune.model.decoder import forward
from meshtune.model.inputs import inputs_of
from meshtune.objectives.answers import CRITIC, metric_means, without_adapters, without_critic
from meshtune.objectives.config import PpoConfig
from meshtune.objectives.critic import abstract_critic, critic_values, start_critic
from meshtune.objectives.stages import STAGES
from meshtune.rollout.advantages import next_kl_coef, rollout_tokens, start_kl_coef, with_kl_coef
from meshtune.rollout.batch import completion_rows, online_arrays
from meshtune.rollout.generate import Completion
from tiny_models import same_weights, torch_model

PROMPT_LENGTHS, LENGTHS = (3, 1, 4), np.array([5, 7, 2, 6, 4, 1])  # two completions of each prompt
REWARDS = np.array([[0.2], [1.0], [0.7], [0.7], [-0.5], [1.4]])
TRUNCATED = (1, 5)
OPTIONS = {"gamma": 0.9, "lam": 0.8, "kl_coef": 0.3, "missing_eos_penalty": 1.5}
SPLITS = np.cumsum(LENGTHS)[:-1]


def recipe_of(rollout=None, **options):
    fields: dict[str, object] = {"model": "m", "data": {"train": "d.jsonl", "max_length": 16}, "output": "o"}
    fields |= {"stage": {"kind": "ppo"} | options, "rewards": [{"kind": "length", "target": 4}]}
    rollout = {"prompts": 3, "samples": 2, "max_tokens": 8, "iterations": 2, "temperature": 0.7} | (rollout or {})
    return load_recipe(fields | {"rollout": rollout})


def drawn(lengths=LENGTHS):
    return [
        Completion([1] * n, [0.0] * n, "length" if number in TRUNCATED else "stop") for number, n in enumerate(lengths)
    ]


def values_of(lengths=LENGTHS, seed=0):
    rng = np.random.default_rng(seed)
    names = {"old": (-1.0, 0.5), "reference_tokens": (-1.0, 0.5), "values_old": (0.0, 0.4)}
    return {name: [mean + size * rng.normal(size=n) for n in lengths] for name, (mean, size) in names.items()}


def masked_mean(values, mask):
    return (values * mask).sum() / mask.sum()


def masked_whiten(values, mask, shift_mean=True):
    mean = masked_mean(values, mask)
    var = masked_mean((values - mean) ** 2, mask) * mask.sum() / (mask.sum() - 1)
    whitened = (values - mean) * torch.rsqrt(var + 1e-8)
    return whitened if shift_mean else whitened + mean


def pad(values, fill=0.0):
    width = max(map(len, values))
    return torch.tensor(np.stack([np.pad(v, (0, width - len(v)), constant_values=fill) for v in values])).double()


def trls(values, scores, stage):
    """(advantages, returns) [N, T] of trl's lines 4 to 6, with the score on the last token."""
    logprobs, ref_logprobs, values, mask = (
        pad(values[name]) for name in ("old", "reference_tokens", "values_old", "mask")
    )
    mask = mask.bool()
    logr = ref_logprobs - logprobs
    kl = -logr if stage.kl_estimator == "k1" else (logr.exp() - 1) - logr
    rewards = -stage.kl_coef * kl
    rewards[torch.arange(len(rewards)), mask.sum(dim=1) - 1] += scores
    if stage.whiten_rewards:
        rewards = masked_whiten(rewards, mask, shift_mean=False)
    rewards = torch.masked_fill(rewards, ~mask, 0)
    lastgaelam, advantages_reversed, gen_length = 0, [], rewards.shape[1]
    for t in reversed(range(gen_length)):
        nextvalues = values[:, t + 1] if t < gen_length - 1 else 0.0
        delta = rewards[:, t] + stage.gamma * nextvalues - values[:, t]
        lastgaelam = delta + stage.gamma * stage.lam * lastgaelam
        advantages_reversed.append(lastgaelam)
    advantages = torch.stack(advantages_reversed[::-1], dim=1)
    returns = advantages + values
    return masked_whiten(advantages, mask) * mask, returns * mask, mask


@pytest.mark.parametrize("options", [{}, OPTIONS, {**OPTIONS, "kl_estimator": "k3", "whiten_rewards": True}], ids=str)
@pytest.mark.parametrize("lengths", [LENGTHS, np.full(6, 4)], ids=["uneven", "full"])
def test_advantages_and_returns_equal_trls(options, lengths):
    recipe, computed = recipe_of(**options), values_of(lengths)
    made = rollout_tokens(recipe, drawn(lengths), REWARDS, np.ones(1), np.arange(6) // 2, computed)
    penalty = np.isin(np.arange(6), TRUNCATED) * options.get("missing_eos_penalty", 0.0)
    scores = torch.tensor(REWARDS[:, 0] - penalty)
    advantages, returns, mask = trls(computed | {"mask": [np.ones(n) for n in lengths]}, scores, recipe.stage)
    np.testing.assert_allclose(made.tokens["advantages"], advantages[mask], rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(made.tokens["returns"], returns[mask], rtol=1e-5, atol=1e-6)
    assert np.unique(made.tokens["weights"]) == pytest.approx(6 / lengths.sum())


class AdaptiveKLController:
    """Of trl 0.11's trainer/utils.py, which cites section 2.2 of https://arxiv.org/abs/1909.08593."""

    def __init__(self, init_kl_coef, target, horizon):
        self.value, self.target, self.horizon = init_kl_coef, target, horizon

    def update(self, current, n_steps):
        proportional_error = np.clip(current / self.target - 1, -0.2, 0.2)
        mult = 1 + proportional_error * n_steps / self.horizon
        self.value *= mult


@pytest.mark.parametrize("kl_mean", ["tokens", "completions"])
@pytest.mark.parametrize(("kind", "coef"), [("ppo", "kl_coef"), ("rloo", "beta")])
def test_the_weight_of_the_divergence_is_steered_as_trls_controller_does(kind, coef, kl_mean):
    """Over rollouts whose divergence is far below, near and far above the target, and once negative."""
    target, horizon = {"tokens": (0.2, 20), "completions": (0.9, 50)}[kl_mean]
    stage = {"kind": kind, coef: 0.3, "kl_target": target, "kl_horizon": horizon, "kl_mean": kl_mean}
    recipe = recipe_of(**stage)
    value, theirs = start_kl_coef(recipe.stage), AdaptiveKLController(0.3, target, horizon)
    mask, errors = pad([np.ones(n) for n in LENGTHS]), []
    for size in (0.01, 1.0, -0.5, 0.19, 0.22, 3.0):
        computed = values_of()
        computed["reference_tokens"] = [old - size - 0.01 * np.sin(old) for old in computed["old"]]
        made = rollout_tokens(with_kl_coef(recipe, value), drawn(), REWARDS, np.ones(1), np.arange(6) // 2, computed)
        fixed = rollout_tokens(
            recipe_of(kind=kind, **{coef: value}), drawn(), REWARDS, np.ones(1), np.arange(6) // 2, computed
        )
        np.testing.assert_array_equal(made.tokens["advantages"], fixed.tokens["advantages"])
        kls = pad(computed["old"]) - pad(computed["reference_tokens"])
        mean_kl = (kls * mask).sum(dim=-1).mean() if kl_mean == "completions" else masked_mean(kls, mask)
        assert made.metrics["objective/kl"] == pytest.approx((kls * mask).sum(dim=-1).mean().item(), rel=1e-12)
        errors.append(mean_kl.item() / target - 1)
        theirs.update(mean_kl.item(), len(LENGTHS))
        value = next_kl_coef(recipe.stage, value, made.metrics, len(LENGTHS))
        assert value == pytest.approx(theirs.value, rel=1e-12)
    assert min(errors) < -0.2
    assert max(errors) > 0.2
    assert any(0.01 < abs(error) < 0.2 for error in errors)


def test_a_completion_without_a_reward_takes_no_part():
    """The others are as if it had not been drawn, but for the number of completions."""
    rewards, rest = REWARDS.copy(), np.array([0, 1, 4, 5])
    rewards[2:4] = np.nan
    recipe, computed = recipe_of(**OPTIONS, whiten_rewards=True), values_of()
    made = rollout_tokens(recipe, drawn(), rewards, np.ones(1), np.arange(6) // 2, computed)
    fewer = {name: [values[n] for n in rest] for name, values in computed.items()}
    completions = [drawn()[n] for n in rest]
    expected = rollout_tokens(recipe, completions, REWARDS[rest], np.ones(1), rest // 2, fewer)
    for name in ("advantages", "returns", "weights"):
        values = np.split(made.tokens[name], SPLITS)
        assert not np.any(values[2]), name
        assert not np.any(values[3]), name
        factor = 6 / 4 if name == "weights" else 1.0
        np.testing.assert_allclose(
            np.concatenate([values[n] for n in rest]), expected.tokens[name] * factor, rtol=1e-6, err_msg=name
        )


@pytest.fixture(scope="module")
def models():
    """(policy, critic, its score, prompts, completions)."""
    rng = np.random.default_rng(0)
    critic = torch_model("llama3", seed=1)
    score = torch.from_numpy(0.2 * rng.normal(size=(1, critic.config.hidden_size))).float().requires_grad_()
    prompts = [rng.integers(8, 97, n).tolist() for n in PROMPT_LENGTHS]
    completions = [rng.integers(8, 97, n).tolist() for n in LENGTHS]
    return torch_model("llama3"), critic, score, prompts, completions


def tree_of_gradients(model):
    weights = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    try:
        for parameter in model.parameters():
            parameter.data.copy_(torch.zeros_like(parameter) if parameter.grad is None else parameter.grad)
        return flatten(same_weights(model)[1])
    finally:
        model.load_state_dict(weights, strict=False)


def test_a_steps_loss_and_gradients_equal_trls(models):
    """Of the policy and the critic, with ratios and values that are clipped."""
    policy, critic, score, prompts, completions = models
    recipe = recipe_of(vf_coef=0.4, cliprange=0.1, cliprange_value=0.3)
    stage = recipe.stage
    assert isinstance(stage, PpoConfig)
    new, vpred = [], []
    for number, ids in enumerate(completions):
        prompt = prompts[number // 2]
        ids, span = torch.tensor([[*prompt, *ids]]), slice(len(prompt) - 1, -1)
        log_probs = (policy(ids).logits[0, span] / 0.7).log_softmax(-1)
        new.append(log_probs.gather(1, ids[0, len(prompt) :, None])[:, 0])
        vpred.append((critic.model(ids).last_hidden_state[0] @ score[0])[span])
    rng = np.random.default_rng(5)
    computed = values_of() | {
        "old": [(v.detach().numpy() + 0.2 * rng.normal(size=len(v))).astype(np.float32) for v in new],
        "values_old": [(v.detach().numpy() + 0.5 * rng.normal(size=len(v))).astype(np.float32) for v in vpred],
    }
    made = rollout_tokens(recipe, drawn(), REWARDS, np.ones(1), np.arange(6) // 2, computed)
    # trl's lines from `vpredclipped` on, with all tokens in one row: its means are over all that are not padding.
    new_logprobs, vpred = torch.cat(new), torch.cat(vpred)
    mb_advantage, mb_return, mb_values, mb_logprobs = (
        torch.tensor(made.tokens[name]) for name in ("advantages", "returns", "values_old", "old")
    )
    vpredclipped = torch.clamp(vpred, mb_values - stage.cliprange_value, mb_values + stage.cliprange_value)
    vf_losses1, vf_losses2 = torch.square(vpred - mb_return), torch.square(vpredclipped - mb_return)
    vf_loss = 0.5 * torch.max(vf_losses1, vf_losses2).mean()
    ratio = torch.exp(new_logprobs - mb_logprobs)
    pg_losses = -mb_advantage * ratio
    pg_losses2 = -mb_advantage * torch.clamp(ratio, 1.0 - stage.cliprange, 1.0 + stage.cliprange)
    pg_loss = torch.max(pg_losses, pg_losses2).mean()
    loss = pg_loss + stage.vf_coef * vf_loss
    for model in (policy, critic):
        model.zero_grad()
    loss.backward()

    groups = [completions[start : start + 2] for start in range(0, 6, 2)]
    rows = completion_rows(prompts, groups, {"batch": 3, "length": 32, "units": 8}, shared=True)
    arrays = rows.arrays | {name: rows.scatter(np.split(v, SPLITS)) for name, v in made.tokens.items()}
    arrays = {name: jnp.asarray(arrays[name]) for name in online_arrays(recipe, shared=True)}
    spec, params = same_weights(policy)
    body = without_head(same_weights(critic)[1])
    params = params | {CRITIC: body | {"score": {"weight": jnp.asarray(score.detach().numpy())}}}
    objective = STAGES["ppo"].make(stage, 0.7)

    @jax.jit
    def both(params):
        def loss(params):
            sums = objective(params, spec, Compute(loss_chunk=16, shared_prompts=True), arrays, None)
            return sums.loss / sums.weight, metric_means(sums)

        return jax.value_and_grad(loss, has_aux=True)(params)

    (ours, metrics), gradient = both(params)
    assert float(ours) == pytest.approx(loss.item(), rel=2e-6)
    expected = {
        "loss/policy_avg": pg_loss,
        "loss/value_avg": vf_loss,
        "val/clipfrac_avg": (vf_losses2 > vf_losses1).float().mean(),
        "clip_ratio/region_mean": (pg_losses2 > pg_losses).float().mean(),
    }
    for name, value in expected.items():
        assert float(metrics[name]) == pytest.approx(value.item(), rel=5e-6, abs=1e-6), name
    assert 0 < metrics["val/clipfrac_avg"] < 1
    assert 0 < metrics["clip_ratio/region_mean"] < 1
    gradients = tree_of_gradients(policy)
    of_critic = flatten(without_head(unflatten(tree_of_gradients(critic)))) | {"score/weight": score.grad.numpy()}
    gradients |= {f"{CRITIC}/{path}": values for path, values in of_critic.items()}
    assert set(flatten(gradient)) == set(gradients)
    for path, values in flatten(gradient).items():
        norm = np.linalg.norm(gradients[path])
        assert norm > 0, path
        assert np.linalg.norm(values - gradients[path]) <= 2e-5 * norm, path


def without_head(params):
    return {name: node for name, node in params.items() if name != "head"}


@pytest.mark.parametrize("method", [LoraConfig(rank=4, targets="all-linear"), FullConfig()], ids=lambda m: m.kind)
def test_a_critic_is_the_model_with_its_own_trained_part(method, models):
    policy, *_, prompts, _ = models
    spec, params = same_weights(policy)
    planned = abstract_critic(abstract(method, spec), "float32")
    prepared = start_critic(prepare(method, spec, params, jax.random.key(0)), planned.trainable[CRITIC], None)
    shapes = {path: jax.tree.leaves(leaf) for path, leaf in flatten(prepared.trainable).items()}
    for path, leaf in flatten(planned.trainable).items():
        assert [(x.shape, str(x.dtype)) for x in shapes[path]] == [(x.shape, x.dtype) for x in jax.tree.leaves(leaf)]
    tokens = jnp.asarray([prompts[2]])
    batch = {"tokens": tokens, "positions": jnp.arange(4)[None], "segment_ids": jnp.ones((1, 4), jnp.int32)}

    def values(trainable):
        return critic_values(merge(trainable, prepared.frozen), prepared.spec, Compute(), batch, None)

    assert not np.any(values(prepared.trainable)), "every value is 0 at the start"
    moved = jax.tree.map(
        lambda leaf: leaf + 0.05 * jax.random.normal(jax.random.key(1), leaf.shape), prepared.trainable[CRITIC]
    )
    computed = values({**prepared.trainable, CRITIC: moved})
    base = flatten(without_adapters(merge(without_critic(prepared.trainable), prepared.frozen)))
    whole = merge_adapters(jax.tree.map(jnp.copy, unflatten(base | flatten(moved))))
    hidden, _, _ = forward(without_head(whole), prepared.spec, Compute(), inputs_of(batch))
    expected = np.asarray(hidden, np.float64)[0] @ np.asarray(moved["score"]["weight"], np.float64)[0]
    assert np.abs(expected).max() > 0.05
    np.testing.assert_allclose(computed[0], expected, rtol=1e-4, atol=1e-5)


def test_a_target_without_effect_is_refused():
    for options, problem in [
        ({"kl_coef": 0, "kl_target": 0.1}, "kl_coef 0 stays 0"),
        ({"kl_horizon": 64}, "no meaning without kl_target"),
        ({"kl_mean": "completions"}, "no meaning without kl_target"),
        ({"kl_target": 0.1, "kl_horizon": 1.2}, "too short for rollouts of 6 completions"),
        ({"kind": "rloo", "beta": 0, "kl_target": 0.1}, "beta 0 stays 0"),
        ({"kind": "grpo", "kl_target": 0.1}, "does not belong to stage grpo"),
    ]:
        with pytest.raises(UserError, match=problem):
            recipe_of(**options)
    assert recipe_of(kl_target=0.1, kl_horizon=1.3).stage.kl_horizon == 1.3


def test_recipes_of_ppo():
    assert recipe_of(rollout={"samples": 1}).train.batch_size == 3
    fields = {"model": "m", "data": {"train": "d.jsonl"}, "output": "o", "stage": "ppo", "method": "full"}
    fields |= {"rewards": [{"kind": "length", "target": 4}], "rollout": {"max_tokens": 8}}
    for optimizer in ({"name": "badam"}, {"in_backward": True, "max_grad_norm": None}):
        with pytest.raises(UserError, match="the critic"):
            load_recipe(fields | {"optimizer": optimizer, "train": {"micro_batch": 32}})
    assert dataclasses.asdict(recipe_of().stage)["vf_coef"] == 0.1
