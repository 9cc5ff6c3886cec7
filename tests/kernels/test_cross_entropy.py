"""Chunked cross-entropy against torch in float64 and against the plain form; what its compiled program never holds."""

from __future__ import annotations

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

from meshtune.kernels.cross_entropy import cross_entropy, plain_cross_entropy

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
    # Some right guesses, so that their count says something.
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


def value_and_gradients(function, params, hidden, targets, weights, chunk, **options):
    """Loss, count, and the gradients of three times the loss: the backward pass must scale by what comes in."""

    @jax.jit
    def both(params, hidden, targets, weights):
        def run(params, hidden):
            loss, correct = function(head, params, hidden, targets, weights, chunk=chunk, **options)
            return 3.0 * loss, (loss, correct)

        (_, sums), gradients = jax.value_and_grad(run, (0, 1), has_aux=True)(params, hidden)
        return sums, gradients

    return jax.tree.map(np.asarray, both(params, hidden, targets, weights))


def torchs(params, hidden, targets, weights):
    """The same by torch.nn.functional.cross_entropy and its autograd, in float64."""
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
def test_sums_and_gradients_are_torchs_in_float64(weights, chunk):
    arguments = case(weights)
    loss, correct, d_params, d_hidden = torchs(*arguments)
    (our_loss, our_correct), (our_d_params, our_d_hidden) = value_and_gradients(cross_entropy, *arguments, chunk)
    np.testing.assert_allclose(our_loss, loss, **CLOSE)
    np.testing.assert_allclose(our_correct, correct, rtol=1e-6)
    np.testing.assert_allclose(our_d_hidden, d_hidden, **CLOSE)
    for name, gradient in d_params.items():
        np.testing.assert_allclose(our_d_params[name], gradient, **CLOSE)


def test_plain_cross_entropy_is_torchs_too():
    arguments = case("fractions")
    loss, correct, d_params, d_hidden = torchs(*arguments)
    (our_loss, our_correct), (our_d_params, our_d_hidden) = value_and_gradients(plain_cross_entropy, *arguments, None)
    np.testing.assert_allclose([our_loss, our_correct], [loss, correct], **CLOSE)
    np.testing.assert_allclose(our_d_hidden, d_hidden, **CLOSE)
    np.testing.assert_allclose(our_d_params["weight"], d_params["weight"], **CLOSE)


def test_value_alone_equals_value_with_gradients():
    """Evaluation takes the path without gradients: the same sums, bit for bit."""
    params, hidden, targets, weights = case("fractions")
    alone = jax.jit(lambda *x: cross_entropy(head, *x, chunk=8))(params, hidden, targets, weights)
    (loss, correct), _ = value_and_gradients(cross_entropy, params, hidden, targets, weights, 8)
    np.testing.assert_array_equal(alone, (loss, correct))


@pytest.mark.parametrize("which", [["weight"], ["bias"], ["weight", "bias"], []])
def test_each_choice_of_what_is_learned(which):
    """Gradients of the learned leaves are those of the plain form, whichever leaves they are."""
    params, hidden, targets, weights = case("half")
    learned = {name: params[name] for name in which}

    def gradients(function):
        def loss(learned, hidden):
            return function(head, params | learned, hidden, targets, weights, chunk=8)[0]

        if which:
            return jax.grad(loss, (0, 1))(learned, hidden), jax.grad(loss, 0)(learned, hidden)
        return jax.grad(loss, 1)(learned, hidden)

    jax.tree.map(
        functools.partial(np.testing.assert_allclose, **CLOSE), gradients(cross_entropy), gradients(plain_cross_entropy)
    )


def test_unsupervised_positions_may_hold_anything():
    """Exactly no part in loss or gradients: not even infinities, or targets outside the vocabulary."""
    params, hidden, targets, weights = case("half")
    idle = weights == 0
    before = value_and_gradients(cross_entropy, params, hidden, targets, weights, 8)
    targets = np.where(idle, -100, targets).astype(np.int32)
    hidden = np.where(idle[..., None], 1e30, hidden).astype(np.float32)
    after = value_and_gradients(cross_entropy, params, hidden, targets, weights, 8)
    jax.tree.map(np.testing.assert_array_equal, before, after)
    assert not after[1][1][idle].any()


def test_only_the_chunks_that_are_needed_are_computed():
    """Counted while it runs, by a head that reports each call: 0, 7 and 5 positions fill two chunks of 3 x 3."""
    calls = []

    def counting(params, hidden):
        jax.debug.callback(lambda: calls.append(1))
        return head(params, hidden)

    params, hidden, targets, weights = case("uneven rows")
    weights[1, 7:] = 0  # the fullest row now has 7, not in one place
    weights[1] = np.roll(weights[1], 20)
    jax.block_until_ready(cross_entropy(counting, params, hidden, targets, weights, chunk=3))
    jax.effects_barrier()
    assert len(calls) == 2


def test_large_logits_do_not_overflow():
    """Logits of 1e4, where exp overflows: the loss is that of float64, and gradients are finite."""
    params, hidden, targets, weights = case("all")
    params = {name: 3000 * value for name, value in params.items()}
    loss, *_ = torchs(params, hidden, targets, weights)
    (our_loss, _), gradients = value_and_gradients(cross_entropy, params, hidden, targets, weights, 8)
    np.testing.assert_allclose(our_loss, loss, rtol=1e-5)
    assert all(np.isfinite(x).all() for x in jax.tree.leaves(gradients))


def test_bfloat16_hidden_states_and_head():
    """Gradients come in bfloat16, the head's summed over chunks in float32: as near as one rounding (2**-8) allows.

    The reference is float64 on the rounded inputs. A bfloat16 product of rounded factors in the gradient of hidden
    adds errors of the size of its largest terms, hence the absolute part.
    """
    params, hidden, targets, weights = case("half")
    rounded = [jax.tree.map(lambda x: jnp.asarray(x, jnp.bfloat16), x) for x in (params, hidden)]
    exact = [jax.tree.map(lambda x: np.asarray(x, np.float64), x) for x in rounded]
    loss, _, d_params, d_hidden = torchs(*exact, targets, weights)
    (our_loss, _), (our_d_params, our_d_hidden) = value_and_gradients(cross_entropy, *rounded, targets, weights, 4)
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


@pytest.mark.parametrize("what", ["value", "gradients"])
def test_compiled_program_never_holds_all_logits(what):
    T, chunk, D, V = 64, 8, 4, 512
    params = {"weight": np.ones((V, D), np.float32), "bias": np.ones(V, np.float32)}
    rest = np.ones((2, T, D), np.float32), np.ones((2, T), np.int32), np.ones((2, T), np.float32)

    def run(function):
        def loss(params, *rest):
            return function(head, params, *rest, chunk=chunk)[0]

        return loss if what == "value" else jax.grad(loss, (0, 1))

    assert 2 * T * V in float_sizes(run(plain_cross_entropy), params, *rest)  # the test can see them
    assert max(float_sizes(run(cross_entropy), params, *rest)) == 2 * chunk * V


def test_compiled_program_has_no_gradient_of_a_frozen_head():
    """[V, D] appears as the parameter alone: the frozen program's temporaries hold not one more of it."""
    T, chunk, D, V = 16, 4, 128, 1024
    params = {"weight": np.ones((V, D), np.float32), "bias": np.ones(V, np.float32)}
    rest = np.ones((1, T, D), np.float32), np.ones((1, T), np.int32), np.ones((1, T), np.float32)

    def temporaries(wrt):
        gradient = jax.grad(lambda *x: cross_entropy(head, *x, chunk=chunk)[0], wrt)
        return jax.jit(gradient).lower(params, *rest).compile().memory_analysis().temp_size_in_bytes

    one = V * D * 4
    assert temporaries((0, 1)) > one  # the test can see it
    assert temporaries(1) < one / 2
