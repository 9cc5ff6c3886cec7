"""Sinks in every backend that computes here, against torch in float64: values and all gradients."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

import meshtune.kernels.attention.blocks as blocks
from kernels.attention_cases import CLOSE, cache_case, case, output_and_gradients, request_for_gpu
from kernels.attention_oracle import torch_gradients
from meshtune.kernels.attention import (
    AttentionInputs,
    AttentionRequest,
    attention,
    choose_backend,
    triton,
    triton_kernels,
)
from meshtune.kernels.attention.backend import NO_SINKS
from meshtune.kernels.attention.splash import SPLASH
from meshtune.kernels.attention.triton_kernels import Tile, Tiles


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch):
    """Small blocks of several sizes, so that small rows have many, both full and partial."""
    monkeypatch.setattr(blocks, "block_sizes", lambda request: (min(16, request.q_length), min(24, request.kv_length)))
    monkeypatch.setattr(triton_kernels, "tiles_of", lambda request: Tiles(*[Tile(16, 16, 4, 1)] * 3))


def results_of(backend, q, k, v, g, tokens, options, sinks):
    if backend == "triton":
        request = request_for_gpu(q, k, options | {"sinks": True})

        def attend(q, k, v, sinks):
            return triton.run(AttentionInputs(q, k, v, **tokens, sinks=sinks), request, interpret=True)
    else:

        def attend(q, k, v, sinks):
            return attention(q, k, v, **tokens, **options, backend=backend, sinks=sinks)

    return output_and_gradients(attend, q, k, v, g, sinks)


@pytest.mark.parametrize("backend", ["direct", "blockwise", "triton"])
@pytest.mark.parametrize("name", ["padded", "window and softcap", "a cache"])
def test_values_and_gradients_equal_torchs(backend, name):
    """Sinks from far below all scores to far above them; rows that see nothing give zero."""
    q, k, v, g, tokens, options = cache_case(20, 13) if name == "a cache" else case(name)
    sinks = np.linspace(-30, 8, q.shape[2]).astype(np.float32)
    results = results_of(backend, q, k, v, g, tokens, options, sinks)
    expected = torch_gradients(q, k, v, g, tokens, **options, sinks=sinks)
    for x, reference in zip(results, expected, strict=True):
        np.testing.assert_allclose(x, reference, **CLOSE)


def test_a_kernel_without_sinks_says_so():
    request = AttentionRequest(
        batch=1, q_length=512, kv_length=512, heads=4, kv_heads=2, head_dim=128, dtype="bfloat16", platform="tpu",
        scale=0.1, aligned=True, sinks=True,
    )  # fmt: skip
    assert SPLASH.refusal(request) == NO_SINKS
    assert SPLASH.refusal(dataclasses.replace(request, sinks=False)) is None
    backend, reason = choose_backend(request)
    assert backend.name == "blockwise"
    assert f"not splash: {NO_SINKS}" in reason
