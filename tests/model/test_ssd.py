"""The state-space recurrence of Mamba-2 and its gradients against a float64 loop of its formula in torch."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import torch

from meshtune.model.mamba2 import SsdInputs, state_space

GROUPS, HEADS, P, N, LENGTHS = 2, 3, 4, 5, (37, 70, 41)  # segments begin and end within chunks of 64


def inputs(seed=0):
    """One row of documents of LENGTHS; log decays between nothing and e^-60 within a token."""
    rng, T = np.random.default_rng(seed), sum(LENGTHS)
    u = rng.normal(size=(1, T, GROUPS, HEADS, P))
    B, C = rng.normal(size=(2, 1, T, GROUPS, N))
    g = -np.exp(rng.uniform(-8, 4, (1, T, GROUPS, HEADS)))
    segments = np.repeat(np.arange(1, len(LENGTHS) + 1), LENGTHS)[None]
    u, B, C, g = (jnp.asarray(a, jnp.float32) for a in (u, B, C, g))
    return SsdInputs(u, B, C, g, jnp.asarray(segments, jnp.int32))


def loop(u, B, C, g):
    """(y, S) of one document of torch tensors [T, ..], token by token."""
    state, y = torch.zeros(GROUPS, HEADS, P, N, dtype=u.dtype), []
    for t in range(len(u)):
        state = torch.exp(g[t])[..., None, None] * state + torch.einsum("grp,gn->grpn", u[t], B[t])
        y.append(torch.einsum("grpn,gn->grp", state, C[t]))
    return torch.stack(y), state


def test_every_segment_is_the_loop_from_a_zero_state_and_so_are_gradients():
    """float32 against float64: 2e-5 of values up to thirty, 1e-5 of the largest gradient of each input."""
    row = inputs()
    cotangent = np.random.default_rng(3).normal(size=row.u.shape)

    def total(u, B, C, g):
        y, state = state_space(SsdInputs(u, B, C, g, row.segment_ids))
        return jnp.sum(y * cotangent.astype(np.float32)), (y, state)

    gradients, (y, state) = jax.jit(jax.grad(total, argnums=(0, 1, 2, 3), has_aux=True))(*row[:4])
    start, last = 0, None
    for length in LENGTHS:
        document = slice(start, start + length)
        leaves = [torch.tensor(np.asarray(a[0, document], np.float64), requires_grad=True) for a in row[:4]]
        expected, last = loop(*leaves)
        np.testing.assert_allclose(y[0, document], expected.detach().numpy(), atol=2e-5, rtol=0)
        (expected * torch.tensor(cotangent[0, document])).sum().backward()
        for actual, leaf in zip(gradients, leaves, strict=True):
            assert leaf.grad is not None
            theirs = leaf.grad.numpy()
            np.testing.assert_allclose(actual[0, document], theirs, atol=1e-5 * np.abs(theirs).max(), rtol=0)
        start += length
    assert last is not None
    np.testing.assert_allclose(state[0], last.detach().numpy(), atol=2e-5, rtol=0)


def test_a_row_in_parts_is_the_row():
    """A prompt, a further prompt and single tokens over the state: padding with g = u = 0 changes nothing."""
    row = inputs(1)._replace(segment_ids=jnp.ones((1, sum(LENGTHS)), jnp.int32))
    rule = jax.jit(state_space)
    expected, last = rule(row)
    state, outputs = None, []
    for start, stop in ((0, 70), (70, 147), (147, 148)):
        part = SsdInputs(*(jnp.pad(a[:, start:stop], [(0, 0), (0, 3)] + [(0, 0)] * (a.ndim - 2)) for a in row))
        y, state = rule(part._replace(segment_ids=jnp.ones_like(part.segment_ids)), state)
        outputs.append(y[:, : stop - start])
    np.testing.assert_allclose(np.concatenate(outputs, axis=1), expected, atol=2e-5, rtol=0)
    np.testing.assert_allclose(state, last, atol=2e-5, rtol=0)
