"""The gated delta rule against a float64 loop of its formula, its gradients against transformers' torch function."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from transformers.models.qwen3_next.modeling_qwen3_next import torch_chunk_gated_delta_rule

from meshtune.model.delta_net import DeltaInputs, gated_delta_rule, unit_lower_inverse

KEYS, VALUES, DK, DV, LENGTHS = 2, 4, 8, 6, (37, 70, 41)  # segments begin and end within chunks of 64


def inputs(seed=0):
    """One row of documents of LENGTHS; log decays between nothing and e^-60 within a token."""
    rng, T = np.random.default_rng(seed), sum(LENGTHS)
    q, k = rng.normal(size=(2, 1, T, KEYS, DK))
    v = rng.normal(size=(1, T, VALUES, DV))
    g = -np.exp(rng.uniform(-8, 4, (1, T, VALUES)))
    beta = rng.uniform(0, 1, (1, T, VALUES))
    segments = np.repeat(np.arange(1, len(LENGTHS) + 1), LENGTHS)[None]
    q, k, v, g, beta = (jnp.asarray(a, jnp.float32) for a in (q, k, v, g, beta))
    return DeltaInputs(q, k, v, g, beta, jnp.asarray(segments, jnp.int32))


def loop(q, k, v, g, beta, state=None):
    """(o, S) of one document, token by token, in float64; arrays [T, heads, ..]."""
    repeats = v.shape[1] // k.shape[1]
    q, k = (np.repeat(x / np.sqrt((x**2).sum(-1, keepdims=True) + 1e-6), repeats, axis=1) for x in (q, k))
    state = np.zeros((v.shape[1], DK, DV)) if state is None else state
    o = []
    for t in range(len(v)):
        state = np.exp(g[t])[:, None, None] * state
        error = beta[t][:, None] * (v[t] - np.einsum("hkv,hk->hv", state, k[t]))
        state = state + np.einsum("hk,hv->hkv", k[t], error)
        o.append(np.einsum("hkv,hk->hv", state, q[t]) * DK**-0.5)
    return np.stack(o), state


def documents(arrays):
    """Each document's q, k, v, g and beta in float64."""
    start = 0
    for length in LENGTHS:
        yield start, [np.asarray(a[0, start : start + length], np.float64) for a in arrays[:5]]
        start += length


def test_every_segment_is_the_loop_from_a_zero_state():
    """float32 against float64: 2e-6 of values around one."""
    row = inputs()
    o, state = jax.jit(gated_delta_rule)(row)
    for start, document in documents(row):
        expected, last = loop(*document)
        np.testing.assert_allclose(o[0, start : start + len(expected)], expected, atol=2e-6, rtol=0)
    np.testing.assert_allclose(state[0], last, atol=2e-6, rtol=0)


def test_a_row_in_parts_is_the_row():
    """A prompt, further prompts and single tokens over the state: those with g = beta = 0 change nothing."""
    row = inputs(1)._replace(segment_ids=jnp.ones((1, sum(LENGTHS)), jnp.int32))
    rule = jax.jit(gated_delta_rule)
    expected, last = rule(row)
    state, outputs = None, []
    for start, stop in ((0, 70), (70, 90), (90, 91), (91, 92), (92, 148)):
        part = DeltaInputs(*(jnp.pad(a[:, start:stop], [(0, 0), (0, 3)] + [(0, 0)] * (a.ndim - 2)) for a in row))
        o, state = rule(part._replace(segment_ids=jnp.ones_like(part.segment_ids)), state)
        outputs.append(o[:, : stop - start])
    np.testing.assert_allclose(np.concatenate(outputs, axis=1), expected, atol=2e-6, rtol=0)
    np.testing.assert_allclose(state, last, atol=2e-6, rtol=0)


def test_gradients_are_those_of_torch():
    """Of all inputs, document by document there, in one row here: 1e-5 of the largest of each."""
    row = inputs(2)
    cotangent = np.random.default_rng(3).normal(size=(1, sum(LENGTHS), VALUES, DV)).astype(np.float32)

    def total(arrays):
        q, k, v, g, beta = arrays
        return jnp.sum(gated_delta_rule(DeltaInputs(q, k, v, g, beta, row.segment_ids))[0] * cotangent)

    ours = jax.jit(jax.grad(total))(row[:5])
    for start, document in documents(row):
        leaves = [torch.tensor(a[None], requires_grad=True) for a in document]
        q, k, v, g, beta = leaves
        stop = start + v.shape[1]
        o, _ = torch_chunk_gated_delta_rule(q, k, v, g=g, beta=beta, use_qk_l2norm_in_kernel=True)
        (o * torch.tensor(cotangent[:, start:stop])).sum().backward()
        for actual, leaf in zip(ours, leaves, strict=True):
            assert leaf.grad is not None
            expected = leaf.grad.numpy()
            np.testing.assert_allclose(actual[:, start:stop], expected, atol=1e-5 * np.abs(expected).max(), rtol=0)


@pytest.mark.parametrize("size", [1, 2, 64])
def test_the_inverse_of_a_triangle_of_ones_is_exact(size):
    """The hardest case, keys that are all the same: sums of powers of the triangle would reach 1e18."""
    lower = jnp.tril(jnp.ones((3, size, size)), -1)
    expected = np.eye(size) - np.eye(size, k=-1)
    np.testing.assert_array_equal(unit_lower_inverse(lower), np.broadcast_to(expected, lower.shape))
