"""Distillation against trl's GKDTrainer.generalized_jsd_loss.

The divergence is compared on given logits, ours in float32 and trl's in float64: losses agree to 1e-6, and
gradients to 4e-6 of their largest, since they are differences of log-probabilities of up to 20 nats, which are rounded
to 1e-6. A whole model is float32 on both sides: 2e-5 of the norm of each leaf's gradient.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from trl.experimental.gkd import GKDTrainer
from trl.experimental.server_distillation.server_distillation_trainer import _add_tail_bucket, _jsd_divergence

from meshtune.arrays.tree import flatten
from meshtune.errors import UserError
from meshtune.kernels.divergence import NamedTokens, divergence, named_tokens
from meshtune.model.compute import Compute
from meshtune.objectives.config import DistillConfig
from meshtune.objectives.stages import STAGES
from tiny_models import same_weights, torch_model

LOSSES = [
    {"loss": "forward_kl"},
    {"loss": "reverse_kl"},
    {"loss": "jsd"},
    {"loss": "jsd", "beta": 0.1, "temperature": 0.7},
    {"loss": "reverse_kl", "temperature": 2.0},
]
jsd = GKDTrainer.generalized_jsd_loss


def scaled(params, hidden):
    """A head whose logits have a rounding error of one unit, as those that trl is given."""
    return hidden * params["weight"]


@pytest.mark.parametrize("chunk", [64, 3])
@pytest.mark.parametrize("options", LOSSES, ids=str)
def test_divergence_and_gradients_equal_trl(options, chunk):
    config = DistillConfig(**options)
    rng = np.random.default_rng(3)
    student, teacher = rng.normal(size=(2, 2, 9, 50)).astype(np.float32)
    heads = [{"weight": rng.uniform(1, 4, 50).astype(np.float32)} for _ in range(2)]
    weights = rng.integers(0, 2, (2, 9)).astype(np.float32)

    expected = [torch.tensor(value).double().requires_grad_() for value in (student, heads[0]["weight"])]
    labels = torch.tensor(np.where(weights > 0, 0, -100))
    target = torch.tensor(teacher).double() * torch.tensor(heads[1]["weight"])
    loss = jsd(expected[0] * expected[1], target, labels, config.interpolation, config.temperature, reduction="sum")
    loss.backward()

    def ours(hidden, head):
        at_temperature = [lambda params, hidden: scaled(params, hidden) / config.temperature] * 2
        arrays = head, heads[1], hidden, jnp.asarray(teacher), weights
        return divergence(tuple(at_temperature), *arrays, beta=config.interpolation, chunk=chunk)

    run = jax.jit(jax.value_and_grad(ours, argnums=(0, 1), has_aux=True))
    (value, equal), gradients = run(jnp.asarray(student), heads[0])
    assert float(value) == pytest.approx(loss.item(), rel=1e-6)
    alike = (student * heads[0]["weight"]).argmax(-1) == target.numpy().argmax(-1)
    assert float(equal) == (alike * weights).sum()
    for gradient, leaf in zip((gradients[0], gradients[1]["weight"]), expected, strict=True):
        np.testing.assert_allclose(gradient, leaf.grad, atol=4e-6 * float(leaf.grad.abs().max()), rtol=0)
    forward_only = jax.jit(lambda: ours(jnp.asarray(student), heads[0]))()
    np.testing.assert_allclose(forward_only, (value, equal), rtol=1e-6)


def test_tokens_that_a_model_excludes_have_no_part():
    """A logit of minus infinity, as heads with masked rows give: 0 log 0 is 0."""
    student = jnp.array([[[1.0, -jnp.inf, 0.5]]])
    for beta in (0.0, 0.5, 1.0):
        loss, _ = jax.value_and_grad(
            lambda x, beta=beta: divergence(
                ((lambda _, x: x), (lambda _, x: x)), {}, {}, x, student + 0.1 * jnp.arange(3), jnp.ones((1, 1)),
                beta=beta, chunk=1,
            )[0]
        )(student)  # fmt: skip
        assert 0 < float(loss) < 0.01


def packed(sequences, starts, rows):
    """The batch of some rows of sequences, of which the tokens from `starts` on are trained."""
    width = max(sum(len(sequences[n]) - 1 for n in row) for row in rows)
    names = ("tokens", "targets", "positions", "segment_ids")
    batch = {name: np.zeros((len(rows), width), np.int32) for name in names}
    batch["weights"] = np.zeros((len(rows), width), np.float32)
    for number, row in enumerate(rows):
        at = 0
        for segment, n in enumerate(row, start=1):
            ids = sequences[n]
            span = slice(at, at + len(ids) - 1)
            batch["tokens"][number, span], batch["targets"][number, span] = ids[:-1], ids[1:]
            batch["positions"][number, span], batch["segment_ids"][number, span] = np.arange(len(ids) - 1), segment
            batch["weights"][number, at + starts[n] - 1 : span.stop] = 1.0
            at = span.stop
    return batch


def test_a_model_learns_from_another_as_in_trl_and_packing_and_splits_change_nothing():
    """The teacher has another architecture, with the same vocabulary."""
    student, teacher = torch_model("llama3"), torch_model("qwen2", seed=1)
    rng = np.random.default_rng(0)
    sequences = [rng.integers(3, 60, n) for n in (9, 6, 12, 5)]
    starts = [4, 2, 5, 1]
    config = DistillConfig(loss="jsd", beta=0.3)
    total = sum(len(ids) - start for ids, start in zip(sequences, starts, strict=True))
    loss = 0.0
    for ids, start in zip(sequences, starts, strict=True):
        tokens = torch.tensor(ids[None])
        labels = torch.tensor(np.where(np.arange(len(ids)) < start, -100, ids)[None])
        with torch.no_grad():
            target = teacher(tokens).logits[:, :-1]
        part = jsd(student(tokens).logits[:, :-1], target, labels[:, 1:], 0.3, num_items_in_batch=total)
        part.backward()
        loss += part.item()
    (spec, params), (teacher_spec, teacher_params) = same_weights(student), same_weights(teacher)
    for parameter in student.parameters():
        parameter.data.copy_(parameter.grad)
    expected = flatten(same_weights(student)[1])
    objective = STAGES["distill"].make(config, teacher_spec)

    def sums(params, batch):
        result = objective(params | {"teacher": teacher_params}, spec, Compute(loss_chunk=4), batch, None)
        return result.loss, result

    run = jax.jit(jax.value_and_grad(sums, has_aux=True))
    for splits in ([[[0, 1, 2, 3]]], [[[0], [1], [2], [3]]], [[[2, 1]], [[0, 3]]]):
        parts = [run(params, packed(sequences, starts, rows)) for rows in splits]
        weight = sum(float(part[0][1].weight) for part in parts)
        assert weight == total
        assert sum(float(part[0][0]) for part in parts) / weight == pytest.approx(loss, rel=2e-6)
        gradient = flatten(jax.tree.map(lambda *leaves: sum(leaves) / total, *(part[1] for part in parts)))
        for path, leaf in expected.items():
            assert np.linalg.norm(gradient[path] - leaf) <= 2e-5 * np.linalg.norm(leaf), path


def test_beta_is_of_the_mixture_only():
    with pytest.raises(UserError, match="beta has no meaning for loss reverse_kl"):
        DistillConfig(loss="reverse_kl", beta=0.2)


def sparse_oracle(student, named_ids, named_log_probs, beta):
    """trl's loss of a server's tokens and a last entry for all others, in float64, summed."""
    exists = named_ids >= 0
    lowest = torch.tensor(-torch.inf, dtype=student.dtype)
    log_probs = torch.log_softmax(student, -1).gather(-1, named_ids.clamp(min=0))
    of_student, mask = _add_tail_bucket(torch.where(exists, log_probs, lowest), exists)
    of_teacher, _ = _add_tail_bucket(torch.where(exists, named_log_probs, lowest), exists)
    return _jsd_divergence(of_student, of_teacher, beta, mask).sum()


def named_of(log_probs, targets, count):
    """The `count` likeliest tokens and the target of log-probabilities [.., V], as a server names them."""
    order = np.argsort(-log_probs, axis=-1, kind="stable")[..., :count]
    target = np.where((order == targets[..., None]).any(-1), -1, targets)[..., None]
    ids = np.concatenate([target, order], axis=-1).astype(np.int32)
    values = np.take_along_axis(log_probs, np.maximum(ids, 0), -1).astype(np.float32)
    return NamedTokens(jnp.asarray(ids), jnp.asarray(np.where(ids >= 0, values, 0.0)))


@pytest.mark.parametrize("beta", [0.0, 0.3, 1.0])
def test_a_few_named_tokens_are_compared_as_in_trl(beta):
    rng = np.random.default_rng(5)
    student, teacher = rng.normal(size=(2, 2, 9, 50)).astype(np.float32) * 2
    weights = rng.integers(0, 2, (2, 9)).astype(np.float32)
    targets = rng.integers(0, 50, (2, 9))
    targets[:, ::2] = teacher[:, ::2].argmax(-1)
    named = named_of(np.array(jax.nn.log_softmax(teacher)), targets, 4)
    assert (named.ids < 0).any(), "some targets are among the likeliest"
    double = torch.tensor(student).double().requires_grad_()
    trained = torch.tensor(weights > 0)
    ids, log_probs = torch.tensor(np.array(named.ids)).long(), torch.tensor(np.array(named.log_probs)).double()
    loss = sparse_oracle(double[trained], ids[trained], log_probs[trained], beta)
    loss.backward()

    def ours(hidden):
        heads = (lambda _, hidden: hidden), named_tokens
        return divergence(heads, {}, {}, hidden, named, jnp.asarray(weights), beta=beta, chunk=3)

    (value, equal), gradient = jax.jit(jax.value_and_grad(ours, has_aux=True))(jnp.asarray(student))
    assert float(value) == pytest.approx(loss.item(), rel=2e-6)
    np.testing.assert_allclose(gradient, double.grad, atol=4e-6 * float(double.grad.abs().max()), rtol=0)
    assert float(equal) == ((student.argmax(-1) == teacher.argmax(-1)) * weights).sum()
    whole = divergence(
        ((lambda _, x: x),) * 2, {}, {}, jnp.asarray(student), jnp.asarray(teacher), weights, beta=beta, chunk=3
    )[0]
    assert 0 < float(value) < float(whole), "what is not told apart cannot differ"


def test_all_tokens_named_are_the_whole_vocabulary():
    """Up to the probability of 1e-7 that is always left to the others, as in trl."""
    rng = np.random.default_rng(6)
    student, teacher = rng.normal(size=(2, 1, 5, 20)).astype(np.float32)
    named = named_of(np.array(jax.nn.log_softmax(teacher)), rng.integers(0, 20, (1, 5)), 20)
    heads = [((lambda _, x: x), (lambda _, x: x)), ((lambda _, x: x), named_tokens)]
    for beta in (0.0, 0.5, 1.0):
        values = [
            jax.value_and_grad(
                lambda x, heads=head, target=target, beta=beta: divergence(
                    heads, {}, {}, x, target, jnp.ones((1, 5)), beta=beta, chunk=5
                )[0]
            )(jnp.asarray(student))
            for head, target in zip(heads, (jnp.asarray(teacher), named), strict=True)
        ]
        np.testing.assert_allclose(*(value for value, _ in values), rtol=1e-5)
        np.testing.assert_allclose(*(gradient for _, gradient in values), atol=1e-6)
