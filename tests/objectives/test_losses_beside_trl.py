"""Every loss on the same log-probabilities as trl's own code: within 1e-5 (float32 sums in another order).

trl's trainers are made without their constructors: only the method that computes the loss runs, on outputs that hold
the log-probabilities. Ours run whole, but for the model.
"""

from __future__ import annotations

import collections
import types

import jax.numpy as jnp
import numpy as np
import pytest
import torch
from trl import DPOTrainer, KTOTrainer, RewardTrainer
from trl.experimental.cpo import CPOTrainer
from trl.experimental.orpo import ORPOTrainer
from units_of import loader_of, random_pairs

from meshtune.model.compute import Compute
from meshtune.objectives import answers as answers_module
from meshtune.objectives import rm
from meshtune.objectives.answers import metric_means
from meshtune.objectives.stages import STAGES

PAIRS, CLOSE = 5, {"rtol": 1e-5, "atol": 1e-5}
NONE: dict = {}
NO_LAYERS = {}


def identity(x):
    return x


@pytest.fixture
def case(tmp_path, monkeypatch):
    """(our batch, log-probabilities of it and of the reference, the same padded as trl has them)."""
    documents = random_pairs(97, PAIRS, seed=3)
    batch = {k: v[0] for k, v in loader_of(documents, tmp_path, nll="answer").batch(0).arrays.items()}
    rng = np.random.default_rng(1)
    learned = batch["weights"] > 0
    log_probs, reference = (
        np.where(learned, -rng.gamma(2.0, 0.6, learned.shape), 0).astype(np.float32) for _ in range(2)
    )
    monkeypatch.setattr(
        answers_module,
        "token_log_probs",
        lambda params, *_: answers_module.TokenLogProbs(jnp.asarray(params["log_probs"]), None, NO_LAYERS),
    )

    def pad_rows(per_token, dtype=np.float32):
        """[2 * pairs, T]: the chosen answers, then the rejected ones, each from its own beginning."""
        out = np.zeros((2 * PAIRS, per_token.shape[1]), dtype)
        for row in range(PAIRS):
            for side in (0, 1):
                segment = batch["segment_ids"][row] == side + 1
                out[side * PAIRS + row, : segment.sum()] = per_token[row][segment]
        return torch.tensor(out)

    return batch, log_probs, reference, pad_rows


def ours(stage, options, batch, log_probs, reference=None):
    kind = STAGES[stage]
    batch = {name: jnp.asarray(array) for name, array in batch.items()}
    if reference is not None:
        batch["reference"] = jnp.asarray(reference)
    score = kind.make(kind.config(**options))({"log_probs": log_probs}, None, Compute(), batch, None)  # pyright: ignore
    return float(score.loss / score.weight), {name: float(value) for name, value in metric_means(score).items()}


def sum_log_probs(batch, per_token, tail=None):
    """The reference's log-probabilities as a batch has them, [rows, 2]."""
    out = np.zeros((PAIRS, 2), np.float32)
    for row in range(PAIRS):
        lengths = [((batch["segment_ids"][row] == s) & (batch["weights"][row] > 0)).sum() for s in (1, 2)]
        for side in (0, 1):
            tokens = per_token[row][(batch["segment_ids"][row] == side + 1) & (batch["weights"][row] > 0)]
            weight = np.where(np.arange(len(tokens)) < min(lengths), 1.0, 1.0 if tail is None else tail)
            out[row, side] = (tokens * weight).sum()
    return out


def trainer(kind, **fields):
    self = object.__new__(kind)
    accelerator = types.SimpleNamespace(device=torch.device("cpu"), gather=identity, gather_for_metrics=identity)
    common = {"accelerator": accelerator, "_metrics": collections.defaultdict(lambda: collections.defaultdict(list))}
    common |= {
        "model": types.SimpleNamespace(training=True),
        "aux_loss_enabled": False,
        "_total_train_tokens": 0,
        "_tp_size": 1,
        "precompute_ref_logps": True,
    }
    for name, value in (common | fields).items():
        setattr(self, name, value)
    return self


def outputs(log_probs):
    zeros = torch.zeros_like(log_probs)
    return types.SimpleNamespace(log_probs=log_probs, entropy=zeros, mean_logits=zeros, is_top1=zeros.bool())


class Model(torch.nn.Module):
    def __init__(self, result):
        super().__init__()
        self.result = result

    def forward(self, **_):
        return self.result


def trl_inputs(padded, batch):
    """Ids and masks in trl's shape: one position more than there are log-probabilities."""
    rows = padded(batch["weights"])
    mask = torch.cat([torch.zeros(len(rows), 1), rows], 1)
    return {"input_ids": mask.long(), "attention_mask": mask.long(), "completion_mask": mask.long()}


@pytest.mark.parametrize(
    ("options", "theirs"),
    [
        ({}, {"loss_types": ["sigmoid"]}),
        ({"beta": 0.3}, {"loss_types": ["sigmoid"], "beta": 0.3}),
        ({"loss": "hinge"}, {"loss_types": ["hinge"]}),
        ({"loss": "ipo"}, {"loss_types": ["ipo"]}),
        ({"loss": "robust", "label_smoothing": 0.2}, {"loss_types": ["robust"], "label_smoothing": 0.2}),
        ({"ld_alpha": 0.5}, {"loss_types": ["sigmoid"], "ld_alpha": 0.5}),
        ({"ld_alpha": 0.0}, {"loss_types": ["sigmoid"], "ld_alpha": 0.0}),
        ({"sft_weight": 0.7}, {"loss_types": ["sigmoid", "sft"], "loss_weights": [1.0, 0.7]}),
    ],
)
def test_dpo(case, options, theirs):
    batch, log_probs, reference, padded = case
    tail = options.get("ld_alpha")
    reference_sums = sum_log_probs(batch, reference, tail)
    loss, metrics = ours("dpo", options, batch, log_probs, reference_sums)
    fields = {"beta": 0.1, "label_smoothing": 0.0, "ld_alpha": None, "loss_weights": [1.0], "use_weighting": False}
    self = trainer(DPOTrainer, f_divergence_type="reverse_kl", **fields | theirs)
    inputs = trl_inputs(padded, batch)
    inputs |= {
        "ref_chosen_logps": torch.tensor(reference_sums[:, 0]),
        "ref_rejected_logps": torch.tensor(reference_sums[:, 1]),
    }
    expected = DPOTrainer._compute_loss(self, Model(outputs(padded(log_probs))), inputs, False)
    np.testing.assert_allclose(loss, expected.item(), **CLOSE)
    for name in ("chosen", "rejected", "margins", "accuracies"):
        (value,) = self._metrics["train"][f"rewards/{name}"]
        np.testing.assert_allclose(metrics[f"rewards/{name}"], value, **CLOSE)
    for name in ("chosen", "rejected"):
        np.testing.assert_allclose(metrics[f"logps/{name}"], self._metrics["train"][f"logps/{name}"][0], **CLOSE)


def test_conservative_dpo_is_the_mixture_of_both_labels(case):
    """trl's sigmoid loss no longer smooths labels; its CPO loss, without a reference, is the same formula."""
    batch, log_probs, reference, _ = case
    reference_sums = sum_log_probs(batch, reference)
    loss, _ = ours("dpo", {"label_smoothing": 0.1}, batch, log_probs, reference_sums)
    self = trainer(CPOTrainer, beta=0.1, alpha=0.0, loss_type="sigmoid", label_smoothing=0.1)
    ratios = torch.tensor(sum_log_probs(batch, log_probs) - reference_sums)
    losses, *_ = CPOTrainer.cpo_loss(self, ratios[:, 0], ratios[:, 1])
    np.testing.assert_allclose(loss, losses.mean().item(), **CLOSE)


@pytest.mark.parametrize(
    ("stage", "options", "theirs"),
    [
        ("cpo", {"sft_weight": 0.0}, {"loss_type": "sigmoid"}),
        ("cpo", {"sft_weight": 1.0}, {"loss_type": "sigmoid"}),
        ("cpo", {"sft_weight": 0.0, "label_smoothing": 0.1}, {"loss_type": "sigmoid", "label_smoothing": 0.1}),
        ("cpo", {"sft_weight": 0.0, "loss": "hinge"}, {"loss_type": "hinge"}),
        ("cpo", {"sft_weight": 0.0, "loss": "ipo"}, {"loss_type": "ipo"}),
        ("simpo", {"beta": 2.5, "gamma": 1.25}, {"loss_type": "simpo", "beta": 2.5, "simpo_gamma": 1.25}),
        ("simpo", {"label_smoothing": 0.1, "sft_weight": 0.5}, {"loss_type": "simpo", "beta": 2.0, "simpo_gamma": 1.0}),
    ],
)
def test_cpo_and_simpo(case, stage, options, theirs):
    batch, log_probs, _, padded = case
    loss, metrics = ours(stage, options, batch, log_probs)
    smoothing = options.get("label_smoothing", 0.0)
    self = trainer(CPOTrainer, **{"beta": 0.1, "alpha": 0.0, "label_smoothing": smoothing, **theirs})
    sums = sum_log_probs(batch, log_probs)
    if theirs["loss_type"] in ("simpo", "ipo"):
        sums = sums / sum_log_probs(batch, (batch["weights"] > 0).astype(np.float32))
    losses, chosen, rejected = CPOTrainer.cpo_loss(self, torch.tensor(sums[:, 0]), torch.tensor(sums[:, 1]))
    rows = padded(log_probs)[:PAIRS]
    nll = -rows.sum() / (padded(batch["weights"])[:PAIRS] > 0).sum()
    np.testing.assert_allclose(loss, (losses.mean() + options.get("sft_weight", 0.0) * nll).item(), **CLOSE)
    np.testing.assert_allclose(metrics["rewards/margins"], (chosen - rejected).mean().item(), **CLOSE)


def test_orpo(case):
    batch, log_probs, _, padded = case
    loss, metrics = ours("orpo", {"beta": 0.25}, batch, log_probs)
    means_ = sum_log_probs(batch, log_probs) / sum_log_probs(batch, (batch["weights"] > 0).astype(np.float32))
    self = trainer(ORPOTrainer, beta=0.25)
    losses, chosen, _, _, odds = ORPOTrainer.odds_ratio_loss(
        self, torch.tensor(means_[:, 0]), torch.tensor(means_[:, 1])
    )
    nll = -padded(log_probs)[:PAIRS].sum() / (padded(batch["weights"])[:PAIRS] > 0).sum()
    np.testing.assert_allclose(loss, (nll - losses.mean()).item(), **CLOSE)
    np.testing.assert_allclose(metrics["log_odds"], odds.item(), **CLOSE)
    np.testing.assert_allclose(metrics["rewards/chosen"], chosen.mean().item(), **CLOSE)


@pytest.mark.parametrize("shift", [0.0, 9.0], ids=["clamped", "above zero"])
@pytest.mark.parametrize("weights", [(1.0, 1.0), (1.5, 0.5)])
def test_kto(case, weights, shift):
    """The second document of a unit is its companion, whose mean log-ratio is the baseline: 0 where negative."""
    batch, log_probs, reference, padded = case
    batch["values"] = np.array([[1], [0], [0], [1], [1]], np.float32)
    reference_sums = sum_log_probs(batch, reference) - np.array([0.0, shift], np.float32)
    options = {"beta": 0.2, "desirable_weight": weights[0], "undesirable_weight": weights[1]}
    loss, metrics = ours("kto", options, batch, log_probs, reference_sums)
    self = trainer(
        KTOTrainer,
        beta=0.2,
        loss_type="kto",
        calculate_KL=True,
        desirable_weight=weights[0],
        undesirable_weight=weights[1],
    )
    inputs_of_all = trl_inputs(padded, batch)
    inputs = {name: array[:PAIRS] for name, array in inputs_of_all.items()}
    inputs |= {f"KL_{name}": array[PAIRS:] for name, array in inputs_of_all.items()}
    inputs |= {"ref_logps": torch.tensor(reference_sums[:, 0]), "ref_KL_logps": torch.tensor(reference_sums[:, 1])}
    inputs |= {"label": torch.tensor(batch["values"][:, 0] > 0)}
    per_token = padded(log_probs)
    results = iter([outputs(per_token[PAIRS:]), outputs(per_token[:PAIRS])])  # it asks for the companions first

    class Both(torch.nn.Module):
        def forward(self, **_):
            return next(results)

    expected = KTOTrainer._compute_loss(self, Both(), inputs, False)
    np.testing.assert_allclose(loss, expected.item(), **CLOSE)
    assert (metrics["kl"] > 0) == (shift > 0)
    for name in ("kl", "rewards/chosen", "rewards/rejected", "logps/chosen", "logps/rejected"):
        np.testing.assert_allclose(metrics[name], self._metrics["train"][name][0], **CLOSE)


@pytest.mark.parametrize("margin", [False, True])
@pytest.mark.parametrize("centre", [0.0, 0.1])
def test_reward_model(case, monkeypatch, margin, centre):
    batch, *_ = case
    rng = np.random.default_rng(5)
    scores = rng.normal(size=(PAIRS, 2)).astype(np.float32)
    batch["values"] = rng.uniform(0, 2, (PAIRS, 1)).astype(np.float32) * margin
    monkeypatch.setattr(rm, "segment_scores", lambda *_: (jnp.asarray(scores), NO_LAYERS))
    loss, metrics = ours("rm", {"centre": centre}, batch, NONE)
    self = trainer(RewardTrainer, args=types.SimpleNamespace(center_rewards_coefficient=centre or None))
    inputs = {"attention_mask": torch.ones(2 * PAIRS, 3)}
    inputs |= {"margin": torch.tensor(batch["values"][:, 0])} if margin else {}
    logits = torch.tensor(scores.T.reshape(-1, 1))
    expected = RewardTrainer.compute_loss(self, Model(types.SimpleNamespace(logits=logits)), inputs)
    np.testing.assert_allclose(loss, expected.item(), **CLOSE)
    np.testing.assert_allclose(metrics["rewards/accuracies"], self._metrics["train"]["accuracy"][0], **CLOSE)
    np.testing.assert_allclose(metrics["rewards/margins"], self._metrics["train"]["margin"][0], **CLOSE)


@pytest.mark.parametrize("packing", [False, True])
def test_by_pairs_each_chosen_answer_weighs_alike(case, tmp_path, packing):
    """LLaMA-Factory's term: the mean over pairs of a chosen answer's mean cross-entropy, in float64."""
    documents = random_pairs(97, PAIRS, seed=3)
    rows = {"rows": 2, "max_length": 60} if packing else {}
    loader = loader_of(documents, tmp_path, packing=packing, nll="answer", nll_mean="pairs", **rows)
    batch = {name: array[0] for name, array in loader.batch(0).arrays.items()}
    learned = batch["weights"] > 0
    log_probs = np.where(learned, -np.random.default_rng(1).gamma(2.0, 0.6, learned.shape), 0).astype(np.float32)
    terms = [ours("simpo", {"sft_weight": weight}, batch, log_probs)[0] for weight in (0.5, 0.0)]
    answers = [
        log_probs[row][(batch["segment_ids"][row] == segment) & learned[row]].astype(np.float64)
        for row in range(len(learned))
        for segment in range(1, batch["segment_ids"][row].max() + 1, 2)
    ]
    assert len({len(answer) for answer in answers}) > 1  # or both means would be the same
    np.testing.assert_allclose(terms[0] - terms[1], -0.5 * np.mean([answer.mean() for answer in answers]), **CLOSE)
