"""Attention of one new token over stacked caches on GPUs: against float64, and who serves which request."""

from __future__ import annotations

import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest

import meshtune.kernels.attention as package
from kernels.attention_cases import request_for_gpu
from kernels.attention_oracle import normal, torch_gradients
from meshtune.kernels.attention import AttentionInputs, StackedCaches, attention, triton, triton_decode
from meshtune.kernels.attention.backend import NO_ALIBI

S, LAYERS, H, K, h = 192, 2, 6, 2, 16
# Rows in every state: full, short, empty, wrapped round as a window's cache is, and one whose first block is invisible.
LENGTHS = np.array([192, 37, 0, 450, 130])


def arrays(dtype="float32"):
    B = len(LENGTHS)
    q, k, v = normal(3, (B, 1, H, h), (LAYERS, B, K, S, h), (LAYERS, B, K, S, h))
    newest = LENGTHS[:, None] - 1
    positions = newest - (newest - np.arange(S)) % S  # as LayerCache.slot_positions
    segments = ((newest >= 0) & (positions >= 0)).astype(np.int32)
    tokens = {
        "q_positions": np.maximum(newest, 0).astype(np.int32),
        "kv_positions": np.maximum(positions, 0).astype(np.int32),
        "q_segments": (newest >= 0).astype(np.int32),
        "kv_segments": segments,
    }
    return (*(jnp.asarray(x, dtype) for x in (q, k, v)), tokens)


@pytest.mark.parametrize("programs", [1, 30, 512])  # one split of the slots, three, and one a block
@pytest.mark.parametrize(
    ("window", "softcap", "with_sinks"), [(None, None, False), (70, None, False), (None, 2.0, True)]
)
def test_values_equal_the_definition_in_float64(window, softcap, with_sinks, programs, monkeypatch):
    monkeypatch.setattr(triton_decode, "PROGRAMS", programs)
    q, k, v, tokens = arrays()
    options = {"scale": 0.3, "window": window, "softcap": softcap}
    sinks = np.linspace(-3, 2, H).astype(np.float32) if with_sinks else None
    by_token = [x[1].swapaxes(1, 2) for x in (k, v)]
    request = request_for_gpu(q, by_token[0], options | {"sinks": with_sinks})
    inputs = AttentionInputs(q, *by_token, **tokens, sinks=None if sinks is None else jnp.asarray(sinks))
    ours = triton_decode.run(inputs, request, StackedCaches(k, v, 1), interpret=True)
    x, y, z = (np.asarray(array) for array in (q, *by_token))
    expected = torch_gradients(x, y, z, x, tokens, **options, sinks=sinks)[0]
    np.testing.assert_allclose(ours, expected, rtol=2e-5, atol=2e-6)
    np.testing.assert_array_equal(np.asarray(ours)[2], 0)
    direct = attention(q, *by_token, **tokens, **options, sinks=inputs.sinks, backend="direct")
    np.testing.assert_allclose(ours, direct, rtol=2e-5, atol=2e-6)


def test_only_gpus_take_it_and_only_what_it_serves(monkeypatch):
    q, k, v, tokens = arrays("bfloat16")
    by_token = [x[1].swapaxes(1, 2) for x in (k, v)]
    request = request_for_gpu(q, by_token[0], {"scale": 0.3, "window": None, "softcap": None})
    assert triton.decode_refusal(request) is None
    assert triton.decode_refusal(dataclasses.replace(request, alibi=True)) == NO_ALIBI
    changes = [{"platform": "cpu", "chip": ""}, {"dtype": "float32"}, {"q_length": 2}, {"head_dim": 80}]
    changes += [{"kv_length": 100}, {"chip": "sm_75"}]
    reasons = [triton.decode_refusal(dataclasses.replace(request, **change)) for change in changes]
    assert all(reasons)
    assert len(set(reasons)) == len(reasons)

    calls = []
    monkeypatch.setattr(package, "decode", lambda inputs, request, caches: calls.append(request) or inputs.q)
    for chip, backend in [("sm_90a", "auto"), ("sm_90a", "direct"), ("", "auto")]:
        platform = "cuda" if chip else "cpu"
        options = {"platform": platform, "chip": chip, "backend": backend}
        attention(q, *by_token, **tokens, scale=0.3, caches=StackedCaches(k, v, 1), **options)
    assert [call.platform for call in calls] == ["cuda"]
