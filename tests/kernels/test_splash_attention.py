"""TPU splash attention as it is called here, interpreted: against torch in float64, and its mask against JAX's own."""

from __future__ import annotations

import functools

import jax
import numpy as np
import pytest
from jax.experimental.pallas.ops.tpu import splash_attention

from kernels.attention_oracle import normal, packed, torch_gradients
from meshtune.kernels.attention import AttentionInputs, AttentionRequest, splash

# float32 all through (the interpreter rounds no factors): sums of up to 300 terms of size one err by some 1e-6.
CLOSE = {"rtol": 2e-5, "atol": 2e-5}


def request_of(**changes):
    asked = {
        "batch": 2, "q_length": 200, "kv_length": 200, "heads": 4, "kv_heads": 2, "head_dim": 32, "dtype": "bfloat16",
        "platform": "tpu", "scale": 0.25, "aligned": True,
    }  # fmt: skip
    return AttentionRequest(**asked | changes)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("lengths", "T", "window", "softcap"),
    [([[100, 60], [200]], 200, None, None), ([[130, 1], []], 256, 37, 3.0)],
    ids=["packed and padded", "window, soft cap, a row of padding"],
)
def test_values_and_gradients_are_torchs_in_float64(lengths, T, window, softcap, monkeypatch):
    monkeypatch.setattr(splash, "BLOCK", 128)  # several blocks a row
    q, k, v, g = normal(0, (2, T, 4, 32), (2, T, 2, 32), (2, T, 2, 32), (2, T, 4, 32))
    segments, positions = packed(lengths, T)
    tokens = {"q_positions": positions, "kv_positions": positions, "q_segments": segments, "kv_segments": segments}
    request = request_of(q_length=T, kv_length=T, window=window, softcap=softcap)

    @functools.partial(jax.jit, compiler_options={"xla_backend_optimization_level": 0})
    def both(q, k, v, g):
        out, pull = jax.vjp(lambda *qkv: splash.run(AttentionInputs(*qkv, **tokens), request, interpret=True), q, k, v)
        return out, *pull(g)

    theirs = torch_gradients(q, k, v, g, tokens, scale=request.scale, window=window, softcap=softcap)
    for mine, exact in zip(both(q, k, v, g), theirs, strict=True):
        np.testing.assert_allclose(mine, exact, **CLOSE)
        assert not np.asarray(mine)[segments == 0].any()


@pytest.mark.parametrize("window", [None, 1, 7, 33, 100])
def test_the_mask_says_of_every_block_what_jaxs_own_says(window):
    length, block = 96, 8
    mine, shape = splash._make_mask(length, window), (length, length)
    if window is None:
        theirs = splash_attention.CausalMask(shape)
    else:
        theirs = splash_attention.LocalMask(shape, (window - 1, 0), 0)
    ids = np.arange(length)
    np.testing.assert_array_equal(mine.mask_function(ids[:, None], ids[None]), theirs[:, :])
    for i in range(0, length, block):
        for j in range(0, length, block):
            here = slice(i, i + block), slice(j, j + block)
            assert mine[here].any() == theirs[here].any()
            assert mine[here].all() == theirs[here].all()


def test_long_rows_take_larger_blocks_until_the_table_is_full():
    assert splash._padded_length_and_block(100) == (128, 128)
    assert splash._padded_length_and_block(5000) == (5120, 512)
    assert splash._padded_length_and_block(262144) == (262144, 512)
    assert splash._padded_length_and_block(300000) == (300032, 1024)
    assert splash.supports(request_of(q_length=524288, kv_length=524288)) is None
    assert "scalar memory" in (splash.supports(request_of(q_length=600000, kv_length=600000)) or "")


@pytest.mark.parametrize(
    ("change", "reason"),
    [({"platform": "cuda"}, "for TPUs"), ({"dtype": "float32"}, "round"), ({"aligned": False}, "not one row")],
)
def test_it_says_why_not(change, reason):
    assert splash.supports(request_of()) is None
    assert reason in (splash.supports(request_of(**change)) or "")
