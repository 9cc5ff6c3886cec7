"""Log-probabilities of targets and smoothed cross-entropy against torch in float64, and the compiled programs."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from test_cross_entropy import CLOSE, case, float_sizes, head

from meshtune.kernels.cross_entropy import cross_entropy, log_probs, log_probs_and_entropies


def torch_log_probs(params, hidden, targets):
    """log p(target) [B,T] in float64, and the differentiable head weight, bias and hidden states."""
    weight, bias, states = (
        torch.tensor(x, dtype=torch.float64, requires_grad=True) for x in (params["weight"], params["bias"], hidden)
    )
    log_probs = (states @ weight.T + bias).log_softmax(-1)
    return log_probs.gather(-1, torch.tensor(targets).long()[..., None])[..., 0], (weight, bias, states)


@pytest.mark.parametrize("chunk", [1, 8, 1000])
@pytest.mark.parametrize("weights", ["all", "half", "uneven rows", "none"])
def test_log_probs_and_the_gradients_of_a_function_of_them_equal_torchs_in_float64(weights, chunk):
    params, hidden, targets, weights = case(weights)

    def nonlinear_loss(params, hidden):
        results = log_probs(head, params, hidden, targets, weights > 0, chunk=chunk)
        return jnp.sum(jnp.tanh(results.sum(1) / 40)), results

    (value, results), gradients = jax.jit(jax.value_and_grad(nonlinear_loss, (0, 1), has_aux=True))(params, hidden)
    expected, (weight, bias, states) = torch_log_probs(params, hidden, targets)
    masked = expected * torch.tensor(weights > 0)
    loss = torch.tanh(masked.sum(1) / 40).sum()
    loss.backward()
    np.testing.assert_allclose(results, masked.detach(), **CLOSE)
    np.testing.assert_allclose(value, loss.item(), **CLOSE)
    np.testing.assert_allclose(gradients[0]["weight"], weight.grad, **CLOSE)
    np.testing.assert_allclose(gradients[0]["bias"], bias.grad, **CLOSE)
    np.testing.assert_allclose(gradients[1], states.grad, **CLOSE)
    with_frozen_head = jax.jit(jax.grad(lambda hidden: nonlinear_loss(params, hidden)[0]))
    np.testing.assert_allclose(with_frozen_head(hidden), states.grad, **CLOSE)


def test_logits_are_computed_once_where_the_head_is_frozen():
    """Two products with the head where it is frozen, four where it is trained."""
    params, hidden, targets, weights = case("half")

    def loss(params, hidden):
        return jnp.tanh(log_probs(head, params, hidden, targets, weights > 0, chunk=8)).sum()

    counts = [str(jax.make_jaxpr(jax.grad(loss, wrt))(params, hidden)).count("dot_general[") for wrt in (1, (0, 1))]
    assert counts == [2, 4]


def test_the_compiled_program_has_neither_all_logits_nor_the_gradient_of_a_frozen_head():
    T, chunk, D, V = 16, 4, 128, 1024  # V * D is the head itself, and T * V the logits: eight times fewer
    params = {"weight": np.ones((V, D), np.float32), "bias": np.ones(V, np.float32)}
    hidden, targets, mask = np.ones((1, T, D), np.float32), np.ones((1, T), np.int32), np.ones((1, T), bool)

    def gradient(wrt):
        return jax.grad(lambda p, h: jnp.sum(log_probs(head, p, h, targets, mask, chunk=chunk) ** 2), wrt)

    assert T * V not in float_sizes(gradient(1), params, hidden)
    assert chunk * V in float_sizes(gradient(1), params, hidden)
    head_bytes = V * D * 4
    compiled = [jax.jit(gradient(wrt)).lower(params, hidden).compile() for wrt in ((0, 1), 1)]
    full, frozen = (program.memory_analysis().temp_size_in_bytes for program in compiled)
    assert full > head_bytes  # the test detects such an array
    assert frozen < head_bytes / 2


@pytest.mark.parametrize("smoothing", [0.1, 0.5])
def test_smoothed_cross_entropy_equals_torchs(smoothing):
    """torch's label_smoothing, like transformers' LabelSmoother, averages over the vocabulary."""
    params, hidden, targets, weights = case("fractions")

    def loss_of(params, hidden):
        return cross_entropy(head, params, hidden, targets, weights, chunk=8, smoothing=smoothing)[0]

    value, gradients = jax.jit(jax.value_and_grad(loss_of, (0, 1)))(params, hidden)
    _, (weight, bias, states) = torch_log_probs(params, hidden, targets)
    logits = states @ weight.T + bias
    losses = torch.nn.functional.cross_entropy(
        logits.flatten(0, 1), torch.tensor(targets).long().flatten(), reduction="none", label_smoothing=smoothing
    )
    loss = (losses * torch.tensor(weights).flatten()).sum()
    loss.backward()
    np.testing.assert_allclose(value, loss.item(), rtol=1e-6)
    np.testing.assert_allclose(gradients[0]["weight"], weight.grad, **CLOSE)
    np.testing.assert_allclose(gradients[1], states.grad, **CLOSE)


def test_a_loss_by_probability_equals_dynamic_fine_tunings():
    """Each loss is multiplied by p(target), and no gradient flows through that factor (arXiv:2508.05629)."""
    params, hidden, targets, weights = case("fractions")

    def loss_of(params, hidden):
        return cross_entropy(head, params, hidden, targets, weights, chunk=8, by_probability=True)[0]

    value, gradients = jax.jit(jax.value_and_grad(loss_of, (0, 1)))(params, hidden)
    expected, (weight, bias, states) = torch_log_probs(params, hidden, targets)
    loss = (-expected * expected.detach().exp() * torch.tensor(weights)).sum()
    loss.backward()
    np.testing.assert_allclose(value, loss.item(), rtol=1e-6)
    np.testing.assert_allclose(gradients[0]["weight"], weight.grad, **CLOSE)
    np.testing.assert_allclose(gradients[0]["bias"], bias.grad, **CLOSE)
    np.testing.assert_allclose(gradients[1], states.grad, **CLOSE)


@pytest.mark.parametrize("chunk", [8, 1000])
@pytest.mark.parametrize("weights", ["half", "none"])
def test_entropies_and_the_gradients_of_both_equal_torchs_in_float64(weights, chunk):
    params, hidden, targets, weights = case(weights)
    factors = np.random.default_rng(5).normal(size=weights.shape).astype(np.float32)

    def loss_of(params, hidden):
        results, entropies = log_probs_and_entropies(head, params, hidden, targets, weights > 0, chunk=chunk)
        return jnp.sum(jnp.tanh(results.sum(1) / 40)) + jnp.sum(factors * entropies**2), (results, entropies)

    (value, (results, entropies)), gradients = jax.jit(jax.value_and_grad(loss_of, (0, 1), has_aux=True))(
        params, hidden
    )
    expected, (weight, bias, states) = torch_log_probs(params, hidden, targets)
    mask = torch.tensor(weights > 0)
    distributions = torch.distributions.Categorical(logits=states @ weight.T + bias)
    expected_entropies = distributions.entropy() * mask
    loss = torch.tanh((expected * mask).sum(1) / 40).sum() + (torch.tensor(factors) * expected_entropies**2).sum()
    loss.backward()
    np.testing.assert_array_equal(results, log_probs(head, params, hidden, targets, weights > 0, chunk=chunk))
    np.testing.assert_allclose(entropies, expected_entropies.detach(), **CLOSE)
    np.testing.assert_allclose(value, loss.item(), **CLOSE)
    np.testing.assert_allclose(gradients[0]["weight"], weight.grad, **CLOSE)
    np.testing.assert_allclose(gradients[0]["bias"], bias.grad, **CLOSE)
    np.testing.assert_allclose(gradients[1], states.grad, **CLOSE)


def test_entropies_of_infinite_logits_are_finite_and_those_without_a_gradient_cost_none():
    params, hidden, targets, weights = case("all")
    params = {**params, "bias": params["bias"].copy()}
    params["bias"][3] = -np.inf
    targets = np.where(targets == 3, 4, targets)

    def loss_of(hidden, stop):
        results, entropies = log_probs_and_entropies(head, params, hidden, targets, weights > 0, chunk=8)
        return results.sum() + (jax.lax.stop_gradient(entropies) if stop else entropies).sum()

    assert np.isfinite(jax.grad(loss_of)(hidden, False)).all()
    programs = [jax.make_jaxpr(jax.grad(loss_of), static_argnums=1)(hidden, stop) for stop in (True, False)]
    stopped, differentiated = (str(program).count(" log ") for program in programs)
    plain = jax.make_jaxpr(
        jax.grad(lambda hidden: log_probs(head, params, hidden, targets, weights > 0, chunk=8).sum())
    )(hidden)
    assert differentiated > stopped > str(plain).count(" log ")
