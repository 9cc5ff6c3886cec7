"""Advantages and corrections against trl's own code on recorded rewards, within 1e-6: trl computes in float32.

trl's _generate_and_score_completions runs whole, but for the model, the sampler and the reward functions.
"""

from __future__ import annotations

import collections
import contextlib
import types

import numpy as np
import pytest
import torch
from trl import GRPOTrainer, RLOOTrainer
from trl.trainer import grpo_trainer, rloo_trainer

from meshtune.config.load import load_recipe
from meshtune.objectives.config import GrpoConfig, RlooConfig
from meshtune.rollout.advantages import (
    advantages_of,
    entropy_threshold,
    entropy_weights,
    importance_correction,
    loss_weights,
    rollout_tokens,
)

NAN = float("nan")
GROUPS = np.repeat(np.arange(4), 3)
WEIGHTS = np.array([1.0, 0.5, 2.0])
# A group of spread, one that no function scores in part, one of equal rewards, one with one scored completion.
REWARDS = np.array(
    [
        [0.1, 1.0, NAN], [0.7, 0.0, 0.3], [0.4, NAN, -0.2],
        [1.0, 0.5, 0.25], [NAN, NAN, NAN], [0.2, 0.1, 0.9],
        [0.25, 0.25, 0.25], [0.25, 0.25, 0.25], [0.25, 0.25, 0.25],
        [NAN, NAN, NAN], [0.9, 0.2, NAN], [NAN, NAN, NAN],
    ]
)  # fmt: skip
LENGTHS = np.array([5, 7, 1, 6, 3, 8, 2, 4, 4, 1, 9, 3])
COUNT, EOS = len(LENGTHS), 2


def per_token(seed):
    return [np.float32(-np.random.default_rng(seed + n).gamma(2.0, 0.5, length)) for n, length in enumerate(LENGTHS)]


def pad(values):
    return torch.tensor(np.stack([np.pad(v, (0, LENGTHS.max() - len(v))) for v in values]))


def trl_result(kind, monkeypatch, **options):
    """What a trainer made without its constructor gives for a rollout with these rewards."""
    module = {GRPOTrainer: grpo_trainer, RLOOTrainer: rloo_trainer}[kind]
    monkeypatch.setattr(module, "disable_gradient_checkpointing", lambda *_: contextlib.nullcontext())
    self = object.__new__(kind)
    args = {"per_device_train_batch_size": COUNT, "gradient_accumulation_steps": 1, "steps_per_generation": 2}
    ids = [[5] * (n - 1) + [EOS] for n in LENGTHS]
    sampled = [values.tolist() for values in per_token(100)]
    output = [[1]] * COUNT, ids, None, [""] * COUNT, sampled, {}, None, None
    state = {
        "args": types.SimpleNamespace(**args, gradient_checkpointing_kwargs=None),
        "accelerator": types.SimpleNamespace(
            device=torch.device("cpu"), process_index=0, gather=lambda x: x, reduce=lambda x, **_: x
        ),
        "model": types.SimpleNamespace(training=True),
        "ref_model": "reference",
        "environment_factories": None,
        "environments": None,
        "tools": [],
        "_is_vlm": False,
        "_tokenizer": types.SimpleNamespace(pad_token_id=0),
        "eos_token_ids": [EOS],
        "pad_to_multiple_of": None,
        "mask_truncated_completions": False,
        "num_iterations": 2,
        "num_generations": 3,
        "use_vllm": False,
        "vllm_importance_sampling_correction": False,
        "beta": 0.0,
        "multi_objective_aggregation": "sum_then_normalize",
        "scale_rewards": "group",
        "reward_clip_range": None,
        "normalize_advantages": False,
        "reward_weights": torch.tensor(WEIGHTS),
        "reward_funcs": [None] * 3,
        "reward_func_names": ["a", "b", "c"],
        "log_multimodal": False,
        "_pending_extra_logs": {},
        "_pending_metrics": {},
        "_metrics": collections.defaultdict(lambda: collections.defaultdict(list)),
        "_logs": {
            "prompt": [],
            "completion": [],
            "advantages": [],
            "rewards": collections.defaultdict(list),
            "extra": collections.defaultdict(list),
        },
        "_generate": lambda prompts: output if kind is GRPOTrainer else (output[0], output[1], output[3]),
        "_calculate_rewards": lambda *_: torch.tensor(REWARDS, dtype=torch.float32),
        "_get_per_token_logps_and_entropies": lambda model, *_, **__: (
            pad(per_token(300 if model == "reference" else 200)),
            None,
            None,
        ),
    }
    vars(self).update(state | options)
    monkeypatch.setattr(module, "gather_object", list)
    monkeypatch.setattr(module, "gather", lambda x: x, raising=False)
    return kind._generate_and_score_completions(self, [{"prompt": "a"}] * COUNT)


@pytest.mark.parametrize(
    ("options", "theirs"),
    [
        ({}, {}),
        ({"scale": "batch"}, {"scale_rewards": "batch"}),
        ({"scale": "none"}, {"scale_rewards": "none"}),
        ({"normalize_then_sum": True}, {"multi_objective_aggregation": "normalize_then_sum"}),
    ],
    ids=str,
)
def test_advantages_equal_trls(options, theirs, monkeypatch):
    advantages = advantages_of(GrpoConfig(**options), REWARDS, WEIGHTS, GROUPS, LENGTHS)
    expected = trl_result(GRPOTrainer, monkeypatch, **theirs)["advantages"]
    np.testing.assert_allclose(advantages, expected, rtol=1e-5, atol=1e-6)
    spread = [0, 1, 2, 3, 5]
    assert np.count_nonzero(advantages[spread]) == len(spread)
    assert (advantages[[4, 9, 11]] == 0).all()


@pytest.mark.parametrize(
    "options",
    [
        {"beta": 0.0},
        {"beta": 0.3},
        {"beta": 0.3, "reward_clip_range": (0.3, 0.9), "normalize_advantages": True},
    ],
    ids=str,
)
def test_leave_one_out_advantages_equal_trls(options, monkeypatch):
    kl = np.array([(a - b).sum(dtype=np.float64) for a, b in zip(per_token(200), per_token(300), strict=True)])
    advantages = advantages_of(RlooConfig(**options), REWARDS, WEIGHTS, GROUPS, LENGTHS, kl)
    expected = trl_result(RLOOTrainer, monkeypatch, **options)["advantages"]
    np.testing.assert_allclose(advantages, expected, rtol=1e-5, atol=1e-6)
    assert (advantages[9:] == 0).all()
    assert np.count_nonzero(advantages) == (8 if options["beta"] else 5)


@pytest.mark.parametrize("level", ["token", "sequence"])
@pytest.mark.parametrize("mode", ["truncate", "mask"])
def test_corrections_equal_trls(level, mode, monkeypatch):
    theirs = {
        "use_vllm": True,
        "vllm_importance_sampling_correction": True,
        "vllm_importance_sampling_mode": f"{level}_{mode}",
        "vllm_importance_sampling_clip_min": 0.2,
        "vllm_importance_sampling_clip_max": 1.5,
    }
    expected = trl_result(GRPOTrainer, monkeypatch, **theirs)["importance_sampling_ratio"]
    expected = expected.expand(COUNT, LENGTHS.max())
    ratio = importance_correction(
        np.concatenate(per_token(200)), np.concatenate(per_token(100)), LENGTHS, level, mode, 0.2, 1.5
    )
    flat = np.concatenate([row[:n] for row, n in zip(expected, LENGTHS, strict=True)])
    np.testing.assert_allclose(ratio, flat, rtol=2e-6)
    assert 0 < np.mean(ratio == (1.5 if mode == "truncate" else 0)) < 1


def test_a_token_without_a_sampled_probability_is_not_corrected():
    ratio = importance_correction(np.array([-1.0, -2.0]), np.array([NAN, -2.5]), np.array([2]), "token", "mask")
    np.testing.assert_allclose(ratio, [1, np.exp(0.5)])


@pytest.mark.parametrize(
    "config",
    [
        GrpoConfig(),
        GrpoConfig(scale="batch"),
        GrpoConfig(scale="none"),
        GrpoConfig(scale="tokens"),
        GrpoConfig(baseline="none", scale="tokens"),
        GrpoConfig(normalize_then_sum=True),
        RlooConfig(beta=0.0),
        RlooConfig(beta=0.0, normalize_advantages=True),
    ],
    ids=str,
)
def test_equal_rewards_give_advantages_of_exactly_zero(config):
    """The mean of seven times 0.1 is not 0.1 in floats."""
    rewards = np.full((7, 3), 0.1)
    rewards[2] = NAN
    advantages = advantages_of(config, rewards, WEIGHTS, np.zeros(7, int), np.arange(7))
    assert (advantages == 0).all()
    rewards[3] += 0.5
    assert (advantages_of(config, rewards, WEIGHTS, np.zeros(7, int), np.arange(7)) != 0).any()


@pytest.mark.parametrize("baseline", ["none", "group"])
def test_reinforce_plus_plus_whitens_over_tokens(baseline):
    """verl's masked_whiten of every token's return, in float64; at gamma 1 that is its completion's reward."""
    rewards = REWARDS[:6, :1]
    groups, lengths = GROUPS[:6], LENGTHS[:6]
    advantages = advantages_of(GrpoConfig(baseline=baseline, scale="tokens"), rewards, np.ones(1), groups, lengths)
    centred = rewards[:, 0].copy()
    if baseline == "group":
        for group in (0, 1):
            centred[groups == group] -= np.nanmean(centred[groups == group])
    scored = ~np.isnan(centred)
    tokens = torch.tensor(np.repeat(centred[scored], lengths[scored]))
    whitened = (tokens - tokens.mean()) * torch.rsqrt(tokens.var() + 1e-8)
    np.testing.assert_allclose(np.repeat(advantages[scored], lengths[scored]), whitened, rtol=1e-12)
    assert (advantages[~scored] == 0).all()


def test_groups_need_not_be_neighbours():
    order = np.random.default_rng(0).permutation(COUNT)
    for config in (GrpoConfig(), RlooConfig(beta=0.0), GrpoConfig(normalize_then_sum=True)):
        straight = advantages_of(config, REWARDS, WEIGHTS, GROUPS, LENGTHS)
        shuffled = advantages_of(config, REWARDS[order], WEIGHTS, GROUPS[order], LENGTHS[order])
        np.testing.assert_allclose(shuffled, straight[order], atol=1e-14)


def test_weights_of_losses():
    """trl's normalisers; the losses that they give are compared in tests/objectives/test_policy.py."""
    lengths, updates = np.array([2, 0, 4, 6]), np.array([0, 0, 1, 1])
    expected = {
        "grpo": [1 / 2, 1, 1 / 4, 1 / 6],
        "luspo": [1, 1, 1, 1],
        "dr_grpo": [1 / 8] * 4,
        "dapo": [2 / 6] * 4,
        "bnpo": [2 / 2, 2 / 2, 2 / 10, 2 / 10],
    }
    for loss, weights in expected.items():
        np.testing.assert_allclose(loss_weights(loss, lengths, updates, 8), weights)
    weights = entropy_weights(lengths, updates, np.arange(12) != 5)
    np.testing.assert_allclose(weights, [1, 1, 2 / 9, 2 / 9, 2 / 9, 0] + [2 / 9] * 6)


def test_the_threshold_of_entropy_equals_trls():
    entropies = np.random.default_rng(0).gamma(2.0, size=41).astype(np.float32)
    self = types.SimpleNamespace(
        accelerator=types.SimpleNamespace(pad_across_processes=lambda x, **_: x, gather=lambda x: x)
    )
    for share in (0.2, 0.5, 0.85):
        expected = GRPOTrainer.get_high_entropy_mask(self, torch.tensor(entropies)[None], torch.ones(1, 41), 1 - share)[
            0
        ]
        np.testing.assert_array_equal(entropies >= entropy_threshold(entropies, share), expected)
        assert 0 < expected.sum() < 41


def test_tokens_of_a_rollout():
    """Two updates, with a truncated completion that is left out of the loss: all that a batch's arrays are made of."""
    stage = {"loss": "bnpo", "mask_truncated_completions": True, "top_entropy_quantile": 0.5, "entropy_coef": 0.1}
    raw = {
        "model": "model",
        "data": "data.jsonl",
        "output": "out",
        "rewards": [{"kind": "function", "function": "r.py:f"}],
    }
    raw |= {"stage": {"kind": "grpo", **stage}, "rollout": {"prompts": 2, "samples": 2, "updates": 2, "max_tokens": 4}}
    recipe = load_recipe(raw)
    lengths, reasons = [2, 4, 1, 3], ["stop", "length", "stop", "stop"]
    completions = [
        types.SimpleNamespace(ids=[5] * n, log_probs=[-0.5] * n, reason=reason)
        for n, reason in zip(lengths, reasons, strict=True)
    ]
    rewards, groups = np.array([[1.0], [0.0], [2.0], [2.0]]), np.array([0, 0, 1, 1])
    entropies = np.split(np.array([1.0, 9.0, 8.0, 8.0, 8.0, 8.0, 3.0, 4.0, 0.5, 2.0]), [2, 6, 7])
    old = [np.full(n, -0.75) for n in lengths]
    result = rollout_tokens(recipe, completions, rewards, np.ones(1), groups, {"entropies": entropies, "old": old})
    scaled = 0.5 / (np.sqrt(0.5) + 1e-4)
    np.testing.assert_allclose(result.advantages, [scaled, -scaled, 0, 0])
    expected = {
        "advantages": [scaled] * 2 + [-scaled] * 4 + [0] * 4,
        "weights": [2 / 2] * 2 + [0] * 4 + [2 / 4] * 4,
        "policy_weights": [0, 1] + [0] * 4 + [1, 1, 0, 0],
        "entropy_weights": [0, 2] + [0] * 4 + [1, 1, 0, 0],
        "sampled": [-0.5] * 10,
        "old": [-0.75] * 10,
    }
    assert set(result.tokens) == set(expected)
    for name, values in expected.items():
        np.testing.assert_allclose(result.tokens[name], values, rtol=1e-6)
        assert result.tokens[name].dtype == np.float32
    np.testing.assert_array_equal(result.rewards, [1, 0, 2, 2])
    assert result.metrics == {"sampling/sampling_logp_difference/max": 0.25}
