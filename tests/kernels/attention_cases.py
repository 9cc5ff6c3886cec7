"""Small attention cases, and functions that compute a backend's output and gradients for them."""

from __future__ import annotations

import functools

import jax
import numpy as np

from kernels.attention_oracle import normal, pack_rows, same_tokens, torch_gradients
from meshtune.kernels.attention import AttentionInputs, AttentionRequest, attention, triton

# float32 sums of up to 300 terms of size one have errors of some 1e-6; 2e-5 leaves room for gradients' larger values.
CLOSE = {"rtol": 2e-5, "atol": 2e-5}

# (rows of document lengths, T, H, K, h, window, softcap)
ROWS = {
    "one document": ([[64]], 64, 4, 4, 16, None, None),
    "odd length": ([[37], [35]], 37, 4, 2, 16, None, None),
    "one token": ([[1]], 1, 4, 1, 16, None, None),
    "packed": ([[20, 1, 30, 13], [50, 14]], 64, 4, 2, 16, None, None),
    "many segments": ([[3] * 23, [7] * 10], 71, 6, 3, 16, None, None),
    "padded": ([[10], [41], []], 41, 4, 1, 16, None, None),
    "window": ([[50], [30, 20]], 50, 4, 2, 16, 7, None),
    "window of one": ([[33]], 33, 2, 2, 16, 1, None),
    "window wider than the row": ([[33]], 33, 2, 1, 16, 100, None),
    "softcap": ([[40, 9]], 53, 4, 1, 16, None, 1.5),
    "window and softcap": ([[61], [30, 20, 5]], 61, 8, 2, 16, 19, 2.0),
    "all padding": ([[], []], 32, 2, 1, 16, 5, 3.0),
    "head of 8": ([[24, 8]], 32, 2, 1, 8, None, None),
    "head of 80": ([[40]], 40, 2, 1, 80, None, None),
    "head of 96": ([[30, 9]], 40, 4, 2, 96, 11, None),
    "head of 256": ([[24]], 24, 1, 1, 256, None, None),
}


def case(name, seed=0):
    """q, k, v, the output's cotangent, the tokens of queries and keys, and the options of `attention`."""
    lengths, T, H, K, h, window, softcap = ROWS[name]
    B = len(lengths)
    q, k, v, g = normal(seed, (B, T, H, h), (B, T, K, h), (B, T, K, h), (B, T, H, h))
    return (
        q,
        k,
        v,
        g,
        same_tokens(*pack_rows(lengths, T)),
        {"scale": h**-0.5 * 1.3, "window": window, "softcap": softcap},
    )


def cache_case(T, start):
    """T queries with a cache of 57 slots that is filled up to the last query; unfilled slots have segment 0, and the
    two rows have different lengths."""
    S = 57
    arrays = normal(1, (2, T, 4, 16), (2, S, 2, 16), (2, S, 2, 16), (2, T, 4, 16))
    slots = np.arange(S)
    kv_segments = np.stack([slots < start + T, (slots >= 3) & (slots < start + T)]).astype(np.int32)
    kv_positions = np.stack([slots, slots - 3]).astype(np.int32)
    tokens = {
        "q_positions": kv_positions[:, start : start + T],
        "kv_positions": kv_positions,
        "q_segments": kv_segments[:, start : start + T],
        "kv_segments": kv_segments,
    }
    return *arrays, tokens, {"scale": 0.3, "window": None, "softcap": None}


def unordered_case():
    """Tokens with random segments and positions."""
    random = np.random.default_rng(2)
    arrays = normal(2, (2, 45, 2, 16), (2, 70, 2, 16), (2, 70, 2, 16), (2, 45, 2, 16))
    tokens = {
        f"{side}_{field}": random.integers(0, high, (2, n)).astype(np.int32)
        for side, n in (("q", 45), ("kv", 70))
        for field, high in (("positions", 90), ("segments", 4))
    }
    return *arrays, tokens, {"scale": 0.3, "window": 31, "softcap": None}


def output_and_gradients(attend, q, k, v, g, *further):
    """The output of `attend(q, k, v)` and the gradients of q, k and v (and of further inputs)."""

    # Compiles in half the time; tests of the compiled programs use the compiler's default optimisation.
    @functools.partial(jax.jit, compiler_options={"xla_backend_optimization_level": 0})
    def forward_and_backward(q, k, v, g, *further):
        out, vjp = jax.vjp(attend, q, k, v, *further)
        return out, *vjp(g)

    return [np.asarray(x) for x in forward_and_backward(q, k, v, g, *further)]


def by_backend(backend, q, k, v, g, tokens, options, *, aligned=False):
    """By `attention` with a backend of XLA's own matmuls: "direct" or "blockwise"."""

    def attend(q, k, v):
        return attention(q, k, v, **tokens, **options, backend=backend, aligned=aligned)

    return output_and_gradients(attend, q, k, v, g)


def request_for_gpu(q, k, options, chip="sm_90a"):
    (B, T, H, h), (_, S, K, _) = q.shape, k.shape
    return AttentionRequest(
        batch=B, q_length=T, kv_length=S, heads=H, kv_heads=K, head_dim=h, dtype=str(q.dtype), platform="cuda",
        chip=chip, **options,
    )  # fmt: skip


def by_triton(q, k, v, g, tokens, options, *, aligned=False, chip="sm_90a"):
    """By the Triton kernels in Pallas's interpreter, which computes them with XLA and float32 sums."""
    request = request_for_gpu(q, k, options | {"aligned": aligned}, chip)

    def attend(q, k, v):
        return triton.run(AttentionInputs(q, k, v, **tokens), request, interpret=True)

    return output_and_gradients(attend, q, k, v, g)


def assert_equals_torch(results, q, k, v, g, tokens, options):
    """Output and gradients equal torch's in float64."""
    for x, expected in zip(results, torch_gradients(q, k, v, g, tokens, **options), strict=True):
        np.testing.assert_allclose(x, expected, **CLOSE)
