"""Policy losses and their gradients against trl's own _compute_loss.

The formulas run on given log-probabilities and entropies, with trl in float64. Ours are float32: the rounding of exp(x)
and of sums of at most 30 terms of size one stays below 5e-7, and below 2e-6 of the largest gradient. trl pads one
completion to a row, ours are packed, and the log-probabilities before the update and of the reference differ from the
model's, so that no ratio is 1 and no divergence 0. Then the whole model, in float32 on both sides: 2e-5 of the norm of
each leaf's gradient.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import functools
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from trl import GRPOConfig, GRPOTrainer, RLOOConfig, RLOOTrainer
from trl.trainer.utils import add_fused_lm_head

from meshtune.adapters.config import LoraConfig
from meshtune.adapters.method import prepare
from meshtune.arrays.tree import merge
from meshtune.config.load import load_recipe
from meshtune.config.sections import STAGE_PRESETS, written_out
from meshtune.errors import UserError
from meshtune.model.compute import Compute
from meshtune.objectives import policy
from meshtune.objectives.answers import TokenLogProbs, add_sums, metric_means
from meshtune.objectives.config import GrpoConfig, RlooConfig
from meshtune.objectives.stages import STAGES
from meshtune.rollout.advantages import entropy_threshold, entropy_weights, importance_correction, loss_weights
from tiny_models import check_gradient, same_weights, torch_model

PROMPT_LENGTHS, LENGTHS = (3, 1, 4, 2, 5, 2), np.array([5, 7, 1, 6, 3, 8])
UPDATES, MAX_TOKENS, LENGTH = np.array([0, 0, 0, 1, 1, 1]), 8, 30
PACKED, APART = [[0, 2], [1], [4, 3, 5]], [[n] for n in range(6)]
TRL_NAMES = {"loss": "loss_type", "ratio": "importance_sampling_level", "kl_correction": "use_bias_correction_kl"}
LOSSES = [
    {"loss": "grpo"},
    {"loss": "bnpo"},
    {"loss": "dr_grpo"},
    {"loss": "dapo"},
    {"loss": "cispo", "epsilon_high": 1.1},
    {"loss": "sapo"},
    {"loss": "luspo", "ratio": "sequence"},
    {"loss": "vespo"},
    {"loss": "grpo", "ratio": "sequence"},
    {"loss": "sapo", "ratio": "sequence", "sapo_temperature_pos": 2.0},
]
VARIANTS = [
    *LOSSES,
    {"loss": "grpo", "epsilon": 0.1, "epsilon_high": 0.3, "delta": 1.35},
    {"loss": "grpo", "beta": 0.3},
    {"loss": "dapo", "beta": 0.3, "kl_correction": False},
    {"loss": "grpo", "beta": 0.3, "ratio": "sequence"},
    {"loss": "luspo", "beta": 0.3, "ratio": "sequence"},
    {"loss": "dr_grpo", "beta": 0.3, "delta": 1.25},  # the divergence is multiplied by the ratio before its cap
    {"loss": "vespo", "beta": 0.1, "vespo_k_neg": 1.5, "vespo_lambda_pos": 1.0},
    {"loss": "dapo", "off_policy_mask_threshold": 0.05, "beta": 0.3},
    {"loss": "bnpo", "top_entropy_quantile": 0.4, "beta": 0.3, "entropy_coef": 0.2},
    {"loss": "grpo", "entropy_coef": -0.1},
]


@dataclasses.dataclass(frozen=True)
class Rollout:
    """Values of every completion: one number, or one for each of its tokens."""

    advantages: np.ndarray
    log_probs: list[np.ndarray]
    old: list[np.ndarray]
    reference: list[np.ndarray]
    sampled: list[np.ndarray]
    entropies: list[np.ndarray]


@pytest.fixture(scope="module")
def rollout():
    rng = np.random.default_rng(1958)  # a draw whose ratios are clipped on both sides, of tokens and of completions

    def near(values, distance):
        return [(value + distance * rng.normal(size=len(value))).astype(np.float32) for value in values]

    log_probs = [-rng.gamma(2.0, 0.5, n).astype(np.float32) for n in LENGTHS]
    old = near(log_probs, 0.3)
    entropies = [rng.gamma(2.0, 0.6, n).astype(np.float32) for n in LENGTHS]
    advantages = np.array([1.2, -0.7, 0.4, -1.1, 0.0, 0.9], np.float32)
    return Rollout(advantages, log_probs, old, near(log_probs, 0.5), near(old, 0.1), entropies)


def pack(rows, per_token):
    """[B, T] of values of completions, at the positions that predict their tokens."""
    result = np.zeros((len(rows), LENGTH), np.float32)
    for row, members in enumerate(rows):
        start = 0
        for n in members:
            first = start + PROMPT_LENGTHS[n] - 1
            result[row, first : first + LENGTHS[n]] = per_token[n]
            start += PROMPT_LENGTHS[n] + LENGTHS[n]
    return result


def packed_batch(rows, sequences=None):
    segments, positions, tokens = np.zeros((3, len(rows), LENGTH), np.int32)
    units = np.zeros((len(rows), max(map(len, rows))), np.float32)
    for row, members in enumerate(rows):
        start = 0
        for place, n in enumerate(members):
            length = PROMPT_LENGTHS[n] + LENGTHS[n]
            segments[row, start : start + length] = place + 1
            positions[row, start : start + length] = np.arange(length)
            if sequences is not None:
                tokens[row, start : start + length] = sequences[n]
            units[row, place] = 1
            start += length
    targets = np.roll(tokens, -1, axis=1)
    return {"tokens": tokens, "targets": targets, "positions": positions, "segment_ids": segments, "units": units}


def pad(per_token, members):
    width = int(LENGTHS[members].max())
    return torch.tensor(np.stack([np.pad(per_token[n], (0, width - len(per_token[n]))) for n in members])).double()


def split(flat):
    return np.split(flat, np.cumsum(LENGTHS)[:-1])


def trained_lengths(truncated):
    return np.where(np.arange(6) == truncated, 0, LENGTHS)


def arrays_of(config, rollout, rows, lengths=LENGTHS, factors=None, bonus=None):
    """The arrays of our batch, of values of completions."""
    loss = config.loss if isinstance(config, GrpoConfig) else "rloo"
    weights = loss_weights(loss, lengths, UPDATES, MAX_TOKENS)
    values = {
        "weights": [np.full(n, weight * (left > 0)) for n, weight, left in zip(LENGTHS, weights, lengths, strict=True)],
        "advantages": [np.full(n, advantage) for n, advantage in zip(LENGTHS, rollout.advantages, strict=True)],
        "old": rollout.old,
        "sampled": rollout.sampled,
        "reference_tokens": rollout.reference,
    }
    values |= {} if factors is None else {"policy_weights": factors}
    values |= {} if bonus is None else {"entropy_weights": bonus}
    return packed_batch(rows) | {name: pack(rows, value) for name, value in values.items()}


def ours(config, rollout, rows, monkeypatch, **arrays):
    """(loss, gradients of log-probabilities and entropies, metrics) of one update, or of a part of one."""

    def from_params(params, spec, compute, batch, mask, *_, **__):
        return TokenLogProbs(params["log_probs"] * mask, params["entropies"] * mask, {})

    monkeypatch.setattr(policy, "token_log_probs", from_params)
    batch = {name: jnp.asarray(array) for name, array in arrays_of(config, rollout, rows, **arrays).items()}
    objective = STAGES[config.kind].make(config)

    def loss_of(params):
        score = objective(params, None, Compute(), batch, None)  # pyright: ignore
        return score.loss / score.weight, metric_means(score)

    params = {"log_probs": pack(rows, rollout.log_probs), "entropies": pack(rows, rollout.entropies)}
    (loss, metrics), gradient = jax.value_and_grad(loss_of, has_aux=True)(params)
    return float(loss), gradient, {name: float(value) for name, value in metrics.items()}


def trl_trainer(kind, options, model=None):
    """A trainer made without its constructor, with trl's defaults of all that `options` leave out."""
    config = {GRPOTrainer: GRPOConfig, RLOOTrainer: RLOOConfig}[kind]
    defaults = {f.name: None if f.default is dataclasses.MISSING else f.default for f in dataclasses.fields(config)}
    args = types.SimpleNamespace(**(defaults | options | {"steps_per_generation": 2}))
    self = object.__new__(kind)
    accelerator = types.SimpleNamespace(
        device=torch.device("cpu"),
        num_processes=1,
        is_main_process=True,
        sync_gradients=True,
        gather=lambda x: x,
        reduce=lambda x, reduction: x,
        pad_across_processes=lambda x, **_: x,
        autocast=contextlib.nullcontext,
    )
    state = {
        "args": args,
        "accelerator": accelerator,
        "model": model or types.SimpleNamespace(training=True),
        "aux_loss_enabled": False,
        "epsilon_low": args.epsilon,
        "epsilon_high": args.epsilon if args.epsilon_high is None else args.epsilon_high,
        "use_vllm": False,
        "max_completion_length": MAX_TOKENS,
        "current_gradient_accumulation_steps": 1,
        "_metrics": collections.defaultdict(lambda: collections.defaultdict(list)),
    }
    if kind is GRPOTrainer:
        names = "loss_type importance_sampling_level beta top_entropy_quantile off_policy_mask_threshold entropy_coef "
        names += "use_adaptive_entropy vllm_importance_sampling_correction"
        state |= {name: getattr(args, name) for name in names.split()}
        state["_entropy_bonus_enabled"] = args.entropy_coef != 0
    vars(self).update(state)
    return self


def trl_options(options):
    return {TRL_NAMES.get(name, name): value for name, value in options.items()}


def theirs(options, rollout, members, lengths=LENGTHS, factors=None):
    """As `ours`, by trl: the gradients padded, one completion a row."""
    self = trl_trainer(GRPOTrainer, trl_options(options))
    mask = pad([np.ones(n) * (left > 0) for n, left in zip(LENGTHS, lengths, strict=True)], members)
    log_probs, entropies = (pad(values, members).requires_grad_() for values in (rollout.log_probs, rollout.entropies))
    self._get_per_token_logps_and_entropies = lambda *_, **__: (log_probs, entropies, None)
    ids = torch.zeros(mask.shape, dtype=torch.long)
    inputs = {"prompt_ids": ids, "prompt_mask": ids, "completion_ids": ids, "completion_mask": mask}
    inputs |= {
        "advantages": torch.tensor(rollout.advantages[members]).double(),
        "num_items_in_batch": torch.tensor(float(lengths.sum())),
        "old_per_token_logps": pad(rollout.old, members),
        "ref_per_token_logps": pad(rollout.reference, members),
        "sampling_per_token_logps": pad(rollout.sampled, members),
    }
    if factors is not None:
        self.use_vllm = True
        inputs["importance_sampling_ratio"] = pad([f - 1 for f in factors], members) + 1
    loss = GRPOTrainer._compute_loss(self, None, inputs)
    loss.backward()
    return loss.item(), (log_probs.grad, entropies.grad), {k: v[0] for k, v in self._metrics["train"].items()}


def assert_equal_gradients(gradient, expected, rows, members):
    for values, padded in zip((gradient["log_probs"], gradient["entropies"]), expected, strict=True):
        padded = torch.zeros(len(members), 8) if padded is None else padded
        unpadded = [np.zeros(n) for n in LENGTHS]
        for row, n in enumerate(members):
            unpadded[n] = padded[row, : LENGTHS[n]].numpy()
        scale = max(1e-3, float(np.abs(padded.numpy()).max()))
        np.testing.assert_allclose(values, pack(rows, unpadded), rtol=0, atol=2e-6 * scale)


def check_against_trl(options, rollout, monkeypatch, factors=None, truncated=None):
    config, lengths = GrpoConfig(**options), trained_lengths(truncated)
    for update, rows in ((0, [[0, 2], [1]]), (1, [[4, 3, 5]])):
        members = np.flatnonzero(update == UPDATES)
        arrays = {"lengths": lengths, "factors": factors}
        if config.entropy_coef or config.top_entropy_quantile < 1:  # trl's threshold is that of a micro-batch
            kept = [np.zeros(n, bool) for n in LENGTHS]
            entropies = np.concatenate([rollout.entropies[n] for n in members])
            flat = entropies >= entropy_threshold(entropies, config.top_entropy_quantile)
            for n, part in zip(members, np.split(flat, np.cumsum(LENGTHS[members])[:-1]), strict=True):
                kept[n] = part
            arrays["bonus"] = split(entropy_weights(LENGTHS, UPDATES, np.concatenate(kept)))
            if config.top_entropy_quantile < 1:
                assert 0 < flat.sum() < len(flat)
                arrays["factors"] = [part.astype(np.float32) for part in kept]
        loss, gradient, metrics = ours(config, rollout, rows, monkeypatch, **arrays)
        expected, expected_gradient, expected_metrics = theirs(options, rollout, members, lengths, factors)
        assert loss == pytest.approx(expected, rel=1e-6, abs=5e-7)
        assert_equal_gradients(gradient, expected_gradient, rows, members)
        for name in set(metrics) & set(expected_metrics):
            assert metrics[name] == pytest.approx(expected_metrics[name], rel=1e-6), name
        assert "entropy" in metrics
        assert ("vespo/phi_seq_mean" in metrics) == (config.loss == "vespo")
        assert ("kl" in metrics) == (config.beta != 0)


@pytest.mark.parametrize("options", VARIANTS, ids=str)
def test_both_updates_of_a_rollout_equal_trls(options, rollout, monkeypatch):
    check_against_trl(options, rollout, monkeypatch)


def test_clipping_acts_in_the_cases_above(rollout, monkeypatch):
    for config in (GrpoConfig(loss="grpo"), GrpoConfig(loss="grpo", ratio="sequence"), RlooConfig()):
        *_, metrics = ours(config, rollout, PACKED, monkeypatch)
        assert 0 < metrics["clip_ratio/low_mean"] < metrics["clip_ratio/region_mean"] < 1


@pytest.mark.parametrize(
    ("options", "level", "mode"),
    [
        ({"loss": "dapo", "beta": 0.2}, "token", "truncate"),
        ({"loss": "grpo", "ratio": "sequence"}, "sequence", "mask"),
        ({"loss": "vespo"}, "token", "mask"),
    ],
    ids=str,
)
def test_a_corrected_policy_term_equals_trls(options, level, mode, rollout, monkeypatch):
    bounds = {"lower": 0.8 if mode == "mask" else None, "upper": 1.1}
    flat = importance_correction(
        np.concatenate(rollout.old), np.concatenate(rollout.sampled), LENGTHS, level, mode, **bounds
    )
    assert (flat == (0 if mode == "mask" else 1.1)).any()
    check_against_trl(options, rollout, monkeypatch, factors=split(flat.astype(np.float32)))


@pytest.mark.parametrize("options", [{"loss": "grpo"}, {"loss": "dapo", "beta": 0.3}, {"loss": "bnpo"}], ids=str)
def test_a_truncated_completion_is_counted_and_not_trained_on_as_in_trl(options, rollout, monkeypatch):
    check_against_trl(options, rollout, monkeypatch, truncated=3)


@pytest.mark.parametrize("options", [{}, {"epsilon": 0.1, "epsilon_high": 0.4}], ids=str)
def test_rloo_equals_trls(options, rollout, monkeypatch):
    config, members = RlooConfig(**options), np.arange(6)
    loss, gradient, metrics = ours(config, rollout, PACKED, monkeypatch)
    self = trl_trainer(RLOOTrainer, options)
    log_probs, mask = pad(rollout.log_probs, members).requires_grad_(), pad([np.ones(n) for n in LENGTHS], members)
    self._get_per_token_logps_and_entropies = lambda *_, **__: (log_probs, pad(rollout.entropies, members), None)
    ids = torch.zeros(mask.shape, dtype=torch.long)
    inputs = {"prompt_ids": ids, "prompt_mask": ids, "completion_ids": ids, "completion_mask": mask}
    inputs |= {"advantages": torch.tensor(rollout.advantages).double(), "old_logps": pad(rollout.old, members).sum(1)}
    expected = RLOOTrainer._compute_loss(self, None, inputs)
    expected.backward()
    assert loss == pytest.approx(expected.item(), rel=1e-6)
    assert_equal_gradients(gradient, (log_probs.grad, None), PACKED, members)
    for name in ("entropy", "clip_ratio/low_mean", "clip_ratio/high_mean", "clip_ratio/region_mean"):
        assert metrics[name] == pytest.approx(self._metrics["train"][name][0], rel=1e-6)


def test_the_least_and_the_most_clipped_completion_are_found_over_micro_batches(rollout, monkeypatch):
    def row_of(arrays, row):
        return {name: array[row : row + 1] for name, array in arrays.items()}

    config, extremes = GrpoConfig(loss="grpo"), ("clip_ratio/low_min", "clip_ratio/high_max")
    *_, together = ours(config, rollout, PACKED, monkeypatch)
    batch = {name: jnp.asarray(array) for name, array in arrays_of(config, rollout, PACKED).items()}
    values = {"log_probs": pack(PACKED, rollout.log_probs), "entropies": pack(PACKED, rollout.entropies)}
    parts = [
        STAGES["grpo"].make(config)(row_of(values, row), None, Compute(), row_of(batch, row), None)  # pyright: ignore
        for row in range(len(PACKED))
    ]
    shares = [metric_means(part) for part in parts]
    assert len({float(share[extremes[1]]) for share in shares}) > 1
    added = metric_means(functools.reduce(add_sums, parts))
    for name in extremes:
        assert float(added[name]) == pytest.approx(together[name], rel=1e-6)


@pytest.mark.parametrize("options", [*LOSSES, {"loss": "dapo", "beta": 0.2, "entropy_coef": 0.1}], ids=str)
def test_the_split_into_micro_batches_changes_nothing(options, rollout, monkeypatch):
    """trl's bnpo depends on it. The sums of two micro-batches of unequal size, in another order: float32 rounding."""
    config = GrpoConfig(**options)
    bonus = split(entropy_weights(LENGTHS, np.zeros(6, int), np.ones(LENGTHS.sum(), bool)))
    loss, gradient, _ = ours(config, rollout, APART, monkeypatch, bonus=bonus)
    total, together = 0.0, {name: [values[n] for n in range(6)] for name, values in gradient.items()}
    for rows in ([[0, 5], [1]], [[4, 2, 3]]):
        part, gradient, _ = ours(config, rollout, rows, monkeypatch, bonus=bonus)
        share = sum(map(len, rows)) / 6
        total += part * share
        for name, values in gradient.items():
            expected = [
                row[PROMPT_LENGTHS[n] - 1 :][: LENGTHS[n]] for n, row in enumerate(map(np.asarray, together[name]))
            ]
            np.testing.assert_allclose(np.asarray(values) * share, pack(rows, expected), rtol=2e-6, atol=1e-8)
    assert total == pytest.approx(loss, rel=1e-6, abs=5e-7)


def test_estimators_of_the_divergence_and_their_gradients():
    """http://joschu.net/blog/kl-approx.html, in float64; k3+ has the value of k3 and the gradient of k2."""
    difference = np.array([-1.5, -0.2, 0.3, 1.1])
    expected = {
        "k1": (-difference, -np.ones(4)),
        "abs": (np.abs(difference), np.sign(difference)),
        "k2": (difference**2 / 2, difference),
        "k3": (np.expm1(difference) - difference, np.expm1(difference)),
        "k3+": (np.expm1(difference) - difference, difference),
    }
    for name, (values, slopes) in expected.items():
        function = lambda x, name=name: policy._divergence(name, x)  # noqa: E731
        computed, pull = jax.vjp(function, jnp.asarray(difference, jnp.float32))
        np.testing.assert_allclose(computed, values, rtol=1e-5, atol=1e-6)
        np.testing.assert_allclose(pull(jnp.ones(4))[0], slopes, rtol=1e-5, atol=1e-6)


def test_advantages_of_zero_give_a_gradient_of_exactly_zero(rollout, monkeypatch):
    constant = dataclasses.replace(rollout, advantages=np.zeros(6, np.float32))
    for options in LOSSES:
        _, gradient, _ = ours(GrpoConfig(**options), constant, PACKED, monkeypatch)
        assert not any(np.any(values) for values in gradient.values())


@pytest.fixture(scope="module")
def model():
    """(torch model, sequences of prompt and completion)."""
    rng = np.random.default_rng(0)
    sequences = [rng.integers(1, 97, p + n) for p, n in zip(PROMPT_LENGTHS, LENGTHS, strict=True)]
    return torch_model("llama3"), sequences


def model_batch(config, rollout, rows, sequences):
    bonus = split(entropy_weights(LENGTHS, UPDATES, np.ones(LENGTHS.sum(), bool)))
    batch = arrays_of(config, rollout, rows, bonus=bonus) | packed_batch(rows, sequences)
    return {name: jnp.asarray(array) for name, array in batch.items()}


@pytest.mark.parametrize("options", [{"loss": "dapo", "beta": 0.2, "entropy_coef": 0.1}], ids=str)
def test_a_whole_models_gradients_equal_trls(options, model, rollout):
    """At temperature 0.7, with trl's own head, log-probabilities and entropies."""
    theirs, sequences = model
    spec, params = same_weights(theirs)
    members, rows = np.arange(3), [[0, 2], [1]]
    add_fused_lm_head(theirs, temperature=0.7, outputs=("log_probs", "entropy"))
    theirs.train()
    self = trl_trainer(GRPOTrainer, trl_options(options), theirs)
    prompts, completions = max(PROMPT_LENGTHS[:3]), max(LENGTHS[:3])
    ids, mask = torch.zeros((2, 3, prompts + completions), dtype=torch.long)
    for n in members:
        start = prompts - PROMPT_LENGTHS[n]
        ids[n, start : start + len(sequences[n])] = torch.tensor(sequences[n])
        mask[n, start : start + len(sequences[n])] = 1
    with torch.no_grad():
        log_probs, *_ = self._get_per_token_logps_and_entropies(theirs, ids, mask, completions)
    rng = np.random.default_rng(3)

    def near(distance):
        noise = [np.float32(distance * rng.normal(size=n)) for n in LENGTHS]
        return [log_probs[n, : LENGTHS[n]].numpy() + noise[n] if n in members else noise[n] for n in range(6)]

    near_model = dataclasses.replace(rollout, old=near(0.3), reference=near(0.5))
    inputs = {"prompt_ids": ids[:, :prompts], "prompt_mask": mask[:, :prompts]}
    inputs |= {"completion_ids": ids[:, prompts:], "completion_mask": mask[:, prompts:]}
    inputs |= {
        "advantages": torch.tensor(rollout.advantages[members]),
        "num_items_in_batch": torch.tensor(float(LENGTHS.sum())),
        "old_per_token_logps": pad(near_model.old, members).float(),
        "ref_per_token_logps": pad(near_model.reference, members).float(),
    }
    expected = GRPOTrainer._compute_loss(self, theirs, inputs)
    theirs.zero_grad()
    expected.backward()
    objective = policy.grpo(GrpoConfig(**options), temperature=0.7)
    batch = model_batch(GrpoConfig(**options), near_model, rows, sequences)

    @jax.jit
    def both(params):
        def loss(params):
            score = objective(params, spec, Compute(loss_chunk=16), batch, None)
            return score.loss / score.weight

        return jax.value_and_grad(loss)(params)

    loss, gradient = both(params)
    assert float(loss) == pytest.approx(expected.item(), rel=2e-6)
    check_gradient(gradient, theirs)


def test_the_reference_is_the_model_without_its_adapters(model, rollout):
    """The log-probabilities of transformers' model, which has none, in place of our own: float32 rounding."""
    theirs, sequences = model
    spec, params = same_weights(theirs)
    prepared = prepare(LoraConfig(rank=4), spec, params, jax.random.key(0))
    trainable = jax.tree.map(
        lambda leaf: leaf + 0.05 * jax.random.normal(jax.random.key(1), leaf.shape), prepared.trainable
    )
    with torch.no_grad():
        distributions = [theirs(torch.tensor(s)[None]).logits[0].log_softmax(-1).numpy() for s in sequences]
    reference = [
        np.take_along_axis(d[p - 1 : -1], s[p:, None], 1)[:, 0]
        for d, s, p in zip(distributions, sequences, PROMPT_LENGTHS, strict=True)
    ]
    config = GrpoConfig(beta=5.0)
    batch = model_batch(config, dataclasses.replace(rollout, reference=reference), PACKED, sequences)
    without_reference = {name: array for name, array in batch.items() if name not in ("reference_tokens", "old")}
    objective = STAGES["grpo"].make(config)

    def score(batch):
        return jax.jit(
            lambda batch: metric_means(
                objective(merge(trainable, prepared.frozen), prepared.spec, Compute(loss_chunk=16), batch, None)
            )
        )(batch)

    computed, read = score(without_reference), score({name: batch[name] for name in batch if name != "old"})
    assert computed["ratio/mean"] == 1
    assert computed["kl"] > 1e-3
    np.testing.assert_allclose(computed["kl"], read["kl"], rtol=1e-4)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"loss": "dapo", "ratio": "sequence"}, "long completions"),
        ({"loss": "vespo", "ratio": "sequence"}, "by itself"),
        ({"loss": "luspo"}, "sequences"),
        ({"loss": "cispo"}, "epsilon_high: 5.0"),
        ({"loss": "sapo", "delta": 2.0}, "delta has no meaning for loss sapo"),
        ({"vespo_k_pos": 1.0}, "use loss vespo"),
        ({"kl_correction": False}, "give beta"),
        ({"delta": 1.1}, "above 1.2"),
        ({"normalize_then_sum": True, "scale": "none"}, "leave scale"),
        ({"baseline": "none"}, "REINFORCE"),
    ],
    ids=str,
)
def test_options_that_would_be_ignored_or_misread_are_refused(options, message):
    with pytest.raises(UserError, match=message):
        GrpoConfig(**options)


def test_a_preset_is_its_options_and_those_of_the_recipe_win():
    for name, options in STAGE_PRESETS.items():
        assert GrpoConfig(**written_out({"stage": name})["stage"]) == GrpoConfig(**options)  # pyright: ignore
    stage = written_out({"stage": {"kind": "gspo", "epsilon": 0.1, "beta": 0.2}})["stage"]
    assert stage == {**STAGE_PRESETS["gspo"], "epsilon": 0.1, "beta": 0.2}
    recipe = load_recipe(
        {
            "model": "model",
            "data": "data.jsonl",
            "output": "out",
            "stage": "gspo",
            "rollout": {"max_tokens": 16},
            "rewards": [{"kind": "function", "function": "reward.py:score"}],
        },
        ["stage.epsilon=0.01"],
    )
    assert recipe.stage == GrpoConfig(loss="grpo", ratio="sequence", epsilon=0.01, epsilon_high=4e-4)
