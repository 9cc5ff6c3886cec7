"""Tokens that see later ones up to a position of their own (the tokens of a picture in Gemma 3), and rows without
causality, in every backend that computes here, against torch in float64: values and all gradients."""

from __future__ import annotations

import numpy as np
import pytest

import meshtune.kernels.attention.blocks as blocks
from kernels.attention_cases import CLOSE, output_and_gradients, request_for_gpu
from kernels.attention_oracle import normal, pack_rows, torch_gradients
from meshtune.kernels.attention import AttentionInputs, attention, triton, triton_kernels
from meshtune.kernels.attention.triton_kernels import Tile, Tiles

T = 96
every_backend = pytest.mark.parametrize("backend", ["direct", "blockwise", "triton"])


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch):
    """Small blocks of several sizes, so that small rows have many, both full and partial."""
    monkeypatch.setattr(blocks, "block_sizes", lambda request: (min(8, request.q_length), min(12, request.kv_length)))
    monkeypatch.setattr(triton_kernels, "tiles_of", lambda request: Tiles(*[Tile(8, 8, 4, 1)] * 3))


def tokens_of(rows):
    segments, positions = pack_rows(rows, T)
    names = ("q_positions", "kv_positions", "q_segments", "kv_segments")
    return dict(zip(names, (positions, positions, segments, segments), strict=True))


def results_of(backend, tokens, options, arrays):
    def attend(q, k, v):
        if backend == "triton":
            request = request_for_gpu(q, k, options | {"reaches": "q_reach" in tokens})
            return triton.run(AttentionInputs(q, k, v, **tokens), request, interpret=True)
        return attention(q, k, v, **tokens, **options, backend=backend)

    return output_and_gradients(attend, *arrays)


def arrays_of(seed):
    return normal(seed, (2, T, 4, 16), (2, T, 2, 16), (2, T, 2, 16), (2, T, 4, 16))


@every_backend
@pytest.mark.parametrize("window", [None, 11])
def test_the_tokens_of_a_picture_see_each_other(backend, window):
    """Pictures of 1 to 20 tokens, also wider than a block and than the window, at both ends of a document."""
    tokens = tokens_of([(31, 40, 20), (1, 70)])
    reach = tokens["q_positions"].copy()
    for row, first, last in ((0, 3, 9), (0, 10, 29), (0, 31, 44), (0, 71, 90), (1, 1, 1), (1, 20, 33), (1, 66, 70)):
        reach[row, first : last + 1] = tokens["q_positions"][row, last]
    tokens["q_reach"] = reach
    options = {"scale": 0.3, "window": window, "softcap": None}
    arrays = arrays_of(6)
    expected = torch_gradients(*arrays, tokens, **options)
    for x, reference in zip(results_of(backend, tokens, options, arrays), expected, strict=True):
        np.testing.assert_allclose(x, reference, **CLOSE)


def test_rows_without_causality_equal_torchs_in_triton():
    tokens, options = tokens_of([(31, 40, 20), (1, 70)]), {"scale": 0.3, "window": None, "softcap": None}
    arrays = arrays_of(7)
    equal = {name: np.zeros_like(x) if "positions" in name else x for name, x in tokens.items()}
    expected = torch_gradients(*arrays, equal, **options)
    for x, reference in zip(results_of("triton", tokens, options | {"causal": False}, arrays), expected, strict=True):
        np.testing.assert_allclose(x, reference, **CLOSE)
