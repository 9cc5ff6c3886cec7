"""Splash attention for TPUs, interpreted: against torch in float64, and its mask against JAX's."""

from __future__ import annotations

import functools

import jax
import numpy as np
import pytest
from jax.experimental.pallas.ops.tpu import splash_attention

from kernels.attention_oracle import normal, pack_rows, torch_gradients
from meshtune.kernels.attention import AttentionInputs, AttentionRequest, splash

# The interpreter rounds no factors: float32 sums of up to 300 terms of size one have errors of some 1e-6.
CLOSE = {"rtol": 2e-5, "atol": 2e-5}


def request_of(**changes):
    fields = {
        "batch": 2, "q_length": 200, "kv_length": 200, "heads": 4, "kv_heads": 2, "head_dim": 32, "dtype": "bfloat16",
        "platform": "tpu", "scale": 0.25, "aligned": True,
    }  # fmt: skip
    return AttentionRequest(**fields | changes)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("lengths", "T", "window", "softcap"),
    [([[100, 60], [200]], 200, None, None), ([[130, 1], []], 256, 37, 3.0)],
    ids=["packed and padded", "window, soft cap, a row of padding"],
)
def test_values_and_gradients_equal_torchs_in_float64(lengths, T, window, softcap, monkeypatch):
    monkeypatch.setattr(splash, "BLOCK", 128)  # several blocks per row
    q, k, v, g = normal(0, (2, T, 4, 32), (2, T, 2, 32), (2, T, 2, 32), (2, T, 4, 32))
    segments, positions = pack_rows(lengths, T)
    tokens = {"q_positions": positions, "kv_positions": positions, "q_segments": segments, "kv_segments": segments}
    request = request_of(q_length=T, kv_length=T, window=window, softcap=softcap)

    @functools.partial(jax.jit, compiler_options={"xla_backend_optimization_level": 0})
    def forward_and_backward(q, k, v, g):
        out, vjp = jax.vjp(lambda *qkv: splash.run(AttentionInputs(*qkv, **tokens), request, interpret=True), q, k, v)
        return out, *vjp(g)

    expected = torch_gradients(q, k, v, g, tokens, scale=request.scale, window=window, softcap=softcap)
    for x, y in zip(forward_and_backward(q, k, v, g), expected, strict=True):
        np.testing.assert_allclose(x, y, **CLOSE)
        assert not np.asarray(x)[segments == 0].any()


@pytest.mark.parametrize("window", [None, 1, 7, 33, 100])
def test_the_mask_equals_jaxs_own_for_every_block(window):
    length, block = 96, 8
    mask, shape = splash._make_mask(length, window), (length, length)
    if window is None:
        expected = splash_attention.CausalMask(shape)
    else:
        expected = splash_attention.LocalMask(shape, (window - 1, 0), 0)
    ids = np.arange(length)
    np.testing.assert_array_equal(mask.mask_function(ids[:, None], ids[None]), expected[:, :])
    for i in range(0, length, block):
        for j in range(0, length, block):
            at = slice(i, i + block), slice(j, j + block)
            assert mask[at].any() == expected[at].any()
            assert mask[at].all() == expected[at].all()


def test_long_rows_have_larger_blocks_until_the_table_is_full():
    assert splash._padded_length_and_block(100) == (128, 128)
    assert splash._padded_length_and_block(5000) == (5120, 512)
    assert splash._padded_length_and_block(262144) == (262144, 512)
    assert splash._padded_length_and_block(300000) == (300032, 1024)
    assert splash.supports(request_of(q_length=524288, kv_length=524288)) is None
    assert "scalar memory" in (splash.supports(request_of(q_length=600000, kv_length=600000)) or "")


@pytest.mark.parametrize(
    ("changes", "reason"),
    [({"platform": "cuda"}, "for TPUs"), ({"dtype": "float32"}, "round"), ({"aligned": False}, "not one row")],
)
def test_other_requests_are_refused_with_a_reason(changes, reason):
    assert splash.supports(request_of()) is None
    assert reason in (splash.supports(request_of(**changes)) or "")
