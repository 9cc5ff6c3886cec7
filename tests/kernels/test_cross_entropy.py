"""Chunked cross-entropy against torch in float64, and the arrays that its compiled program must not contain."""

from __future__ import annotations

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

from meshtune.kernels.cross_entropy import cross_entropy

# float32 against float64: sums of some 100 losses of size five (relative 1e-6) and gradients of size one.
CLOSE = {"rtol": 2e-5, "atol": 2e-5}
B, T, D, V = 3, 29, 12, 61


def head(params, hidden):
    return jnp.einsum("...d,vd->...v", hidden, params["weight"], preferred_element_type=jnp.float32) + params["bias"]


def case(weights):
    random = np.random.default_rng(0)
    params = {
        "weight": random.normal(size=(V, D)).astype(np.float32),
        "bias": random.normal(size=V).astype(np.float32),
    }
    hidden = random.normal(size=(B, T, D)).astype(np.float32)
    targets = random.integers(0, V, (B, T)).astype(np.int32)
    # Some correct predictions, so that their count is not zero.
    targets[:, ::3] = (hidden @ params["weight"].T + params["bias"]).argmax(-1)[:, ::3]
    weights = {
        "all": np.ones((B, T)),
        "half": random.integers(0, 2, (B, T)),
        "fractions": random.integers(0, 2, (B, T)) * random.uniform(0.1, 2.0, (B, T)),
        "uneven rows": np.arange(T) < np.array([[0], [T], [5]]),
        "one": np.arange(B * T).reshape(B, T) == 40,
        "none": np.zeros((B, T)),
    }[weights].astype(np.float32)
    return params, hidden, targets, weights


def value_and_gradients(params, hidden, targets, weights, chunk):
    """Loss, count, and the gradients of three times the loss: the backward pass must scale by its cotangent."""

    @jax.jit
    def forward_and_backward(params, hidden, targets, weights):
        def run(params, hidden):
            loss, correct = cross_entropy(head, params, hidden, targets, weights, chunk=chunk)
            return 3.0 * loss, (loss, correct)

        (_, sums), gradients = jax.value_and_grad(run, (0, 1), has_aux=True)(params, hidden)
        return sums, gradients

    return jax.tree.map(np.asarray, forward_and_backward(params, hidden, targets, weights))


def torch_cross_entropy(params, hidden, targets, weights):
    """The same from torch.nn.functional.cross_entropy and autograd, in float64."""
    weight, bias, states = (
        torch.tensor(x, dtype=torch.float64, requires_grad=True) for x in (params["weight"], params["bias"], hidden)
    )
    logits = states @ weight.T + bias
    losses = torch.nn.functional.cross_entropy(
        logits.flatten(0, 1), torch.tensor(targets).long().flatten(), reduction="none"
    )
    loss = (losses * torch.tensor(weights).flatten()).sum()
    (3.0 * loss).backward()
    correct = ((logits.argmax(-1).numpy() == targets) * weights).sum()
    return loss.item(), correct, {"weight": weight.grad.numpy(), "bias": bias.grad.numpy()}, states.grad.numpy()


@pytest.mark.parametrize("chunk", [1, 8, 29, 1000])
@pytest.mark.parametrize("weights", ["all", "half", "fractions", "uneven rows", "one", "none"])
def test_sums_and_gradients_equal_torchs_in_float64(weights, chunk):
    arguments = case(weights)
    loss, correct, d_params, d_hidden = torch_cross_entropy(*arguments)
    (our_loss, our_correct), (our_d_params, our_d_hidden) = value_and_gradients(*arguments, chunk)
    np.testing.assert_allclose(our_loss, loss, **CLOSE)
    np.testing.assert_allclose(our_correct, correct, rtol=1e-6)
    np.testing.assert_allclose(our_d_hidden, d_hidden, **CLOSE)
    for name, gradient in d_params.items():
        np.testing.assert_allclose(our_d_params[name], gradient, **CLOSE)


def test_of_equal_logits_the_first_one_is_the_prediction():
    """As with argmax: a head that knows nothing predicts one token, and is right about no other."""
    params, hidden, targets, weights = case("all")
    params = {"weight": np.zeros_like(params["weight"]), "bias": np.zeros_like(params["bias"])}
    params["bias"][[5, 9]] = 1.0
    targets[:, ::3], targets[:, 1::3] = 5, 9
    _, correct = cross_entropy(head, params, hidden, targets, weights, chunk=8)
    assert correct == (targets == 5).sum()


def test_the_value_without_gradients_equals_the_value_with_them():
    """Evaluation uses the path without gradients: its sums are bit-equal."""
    params, hidden, targets, weights = case("fractions")
    value = jax.jit(lambda *x: cross_entropy(head, *x, chunk=8))(params, hidden, targets, weights)
    (loss, correct), _ = value_and_gradients(params, hidden, targets, weights, 8)
    np.testing.assert_array_equal(value, (loss, correct))


@pytest.mark.parametrize("trainable", [["weight"], ["bias"], ["weight", "bias"], []])
def test_any_subset_of_the_heads_leaves_can_be_differentiated(trainable):
    params, hidden, targets, weights = case("half")
    _, _, expected_params, expected_hidden = torch_cross_entropy(params, hidden, targets, weights)

    def loss(leaves, hidden):
        return 3.0 * cross_entropy(head, params | leaves, hidden, targets, weights, chunk=8)[0]

    leaves = {name: params[name] for name in trainable}
    d_params, d_hidden = jax.grad(loss, (0, 1))(leaves, hidden)
    np.testing.assert_allclose(d_hidden, expected_hidden, **CLOSE)
    np.testing.assert_array_equal(d_hidden, jax.grad(loss, 1)(leaves, hidden))
    for name in trainable:
        np.testing.assert_allclose(d_params[name], expected_params[name], **CLOSE)
        np.testing.assert_array_equal(d_params[name], jax.grad(loss, 0)(leaves, hidden)[name])


def test_positions_of_weight_0_may_have_any_values():
    """They contribute exactly nothing to loss and gradients, even infinities and targets outside the vocabulary."""
    params, hidden, targets, weights = case("half")
    ignored = weights == 0
    before = value_and_gradients(params, hidden, targets, weights, 8)
    targets = np.where(ignored, -100, targets).astype(np.int32)
    hidden = np.where(ignored[..., None], 1e30, hidden).astype(np.float32)
    after = value_and_gradients(params, hidden, targets, weights, 8)
    jax.tree.map(np.testing.assert_array_equal, before, after)
    assert not after[1][1][ignored].any()


def test_only_chunks_with_weights_are_computed():
    """Counted at run time by a head that reports each call: 0, 7 and 5 positions fill two chunks of 3 x 3."""
    calls = []

    def counting(params, hidden):
        jax.debug.callback(lambda: calls.append(1))
        return head(params, hidden)

    params, hidden, targets, weights = case("uneven rows")
    weights[1, 7:] = 0  # the fullest row now has 7 positions, which the roll separates
    weights[1] = np.roll(weights[1], 20)
    jax.block_until_ready(cross_entropy(counting, params, hidden, targets, weights, chunk=3))
    jax.effects_barrier()
    assert len(calls) == 2


def test_large_logits_do_not_overflow():
    """Logits of 1e4, whose exponentials overflow: the loss equals that in float64, and gradients are finite."""
    params, hidden, targets, weights = case("all")
    params = {name: 3000 * value for name, value in params.items()}
    loss, *_ = torch_cross_entropy(params, hidden, targets, weights)
    (our_loss, _), gradients = value_and_gradients(params, hidden, targets, weights, 8)
    np.testing.assert_allclose(our_loss, loss, rtol=1e-5)
    assert all(np.isfinite(x).all() for x in jax.tree.leaves(gradients))


def test_bfloat16_gradients_are_within_one_rounding_of_float64():
    """The head's gradient is accumulated over chunks in float32 and rounded once (2**-8).

    The reference is float64 on the rounded inputs. A bfloat16 product of rounded factors in the gradient of hidden
    adds errors of the size of its largest terms, hence the absolute part.
    """
    params, hidden, targets, weights = case("half")
    inputs = [jax.tree.map(lambda x: jnp.asarray(x, jnp.bfloat16), x) for x in (params, hidden)]
    exact = [jax.tree.map(lambda x: np.asarray(x, np.float64), x) for x in inputs]
    loss, _, d_params, d_hidden = torch_cross_entropy(*exact, targets, weights)
    (our_loss, _), (our_d_params, our_d_hidden) = value_and_gradients(*inputs, targets, weights, 4)
    assert our_loss.dtype == np.float32
    assert our_d_hidden.dtype == our_d_params["weight"].dtype == jnp.bfloat16
    np.testing.assert_allclose(our_loss, loss, rtol=1e-4)
    np.testing.assert_allclose(np.asarray(our_d_hidden, np.float64), d_hidden, rtol=2**-6, atol=0.05)
    np.testing.assert_allclose(
        np.asarray(our_d_params["weight"], np.float64), d_params["weight"], rtol=2**-6, atol=0.05
    )


def test_weights_cannot_be_differentiated():
    params, hidden, targets, weights = case("all")
    with pytest.raises(ValueError, match="weights"):
        jax.grad(lambda w: cross_entropy(head, params, hidden, targets, w, chunk=8)[0])(weights)


def float_sizes(function, *arguments):
    """The element counts of every float array in the compiled program."""
    text = jax.jit(function).lower(*arguments).compile().as_text() or ""
    return {int(np.prod([int(n) for n in shape.split(",")])) for shape in re.findall(r"\bf32\[([\d,]+)\]", text)}


@pytest.mark.parametrize("computed", ["value", "gradients"])
def test_the_compiled_program_never_holds_all_logits(computed):
    T, chunk, D, V = 64, 8, 4, 512
    params = {"weight": np.ones((V, D), np.float32), "bias": np.ones(V, np.float32)}
    arrays = np.ones((2, T, D), np.float32), np.ones((2, T), np.int32), np.ones((2, T), np.float32)

    def sizes(chunk):
        def loss(params, *arrays):
            return cross_entropy(head, params, *arrays, chunk=chunk)[0]

        return float_sizes(loss if computed == "value" else jax.grad(loss, (0, 1)), params, *arrays)

    assert 2 * T * V in sizes(T)  # the test detects an array of all logits
    assert max(sizes(chunk)) == 2 * chunk * V


def test_the_compiled_program_has_no_gradient_of_a_frozen_head():
    """[V, D] appears only as the parameter: the temporaries of the frozen program are smaller than one such array."""
    T, chunk, D, V = 16, 4, 128, 1024
    params = {"weight": np.ones((V, D), np.float32), "bias": np.ones(V, np.float32)}
    arrays = np.ones((1, T, D), np.float32), np.ones((1, T), np.int32), np.ones((1, T), np.float32)

    def temporaries(wrt):
        gradient = jax.grad(lambda *x: cross_entropy(head, *x, chunk=chunk)[0], wrt)
        return jax.jit(gradient).lower(params, *arrays).compile().memory_analysis().temp_size_in_bytes

    head_bytes = V * D * 4
    assert temporaries((0, 1)) > head_bytes  # the test detects such an array
    assert temporaries(1) < head_bytes / 2
