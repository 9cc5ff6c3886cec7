"""Every attention backend that serves here, values and gradients, over every class of shapes, against torch in float64.

On the CPU rows are 16 times shorter and the Triton kernels are interpreted, by the same test bodies.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from attention_cases import SHAPES, Inputs, Shape, exact, inputs_of
from platforms import on_both

from meshtune.kernels.attention import BACKENDS, AttentionInputs, AttentionRequest, Backend, triton
from meshtune.kernels.chips import arch_of

# The largest error as a share of the largest value. Inputs are rounded before the exact result is computed, so what is
# left is the rounding of weights, of their gradients and of the result (2^-9 each in bfloat16, 2^-12 in float16) and of
# float32 sums of up to a thousand terms.
ALLOWED = {"bfloat16": 2**-6, "float16": 2**-9, "float32": 2**-13}
SHORTER_ON_CPU = 16
# On the CPU the others are slow: an interpreted kernel takes seconds to compile.
QUICK = [("window and soft cap", "bfloat16"), ("ALiBi", "float32")]
ON_BOTH = [pytest.param("cpu", marks=pytest.mark.slow), pytest.param("gpu", marks=pytest.mark.gpu)]
CASES = [(name, dtype) for name in SHAPES for dtype in ALLOWED]
SLOW = [(name, "bfloat16") for name in SHAPES if (name, "bfloat16") not in QUICK]


def on(platform: str, name: str) -> Shape:
    return SHAPES[name] if platform == "gpu" else SHAPES[name].divided(SHORTER_ON_CPU)


def request_of(platform: str, shape: Shape, inputs: Inputs, dtype: str) -> AttentionRequest:
    (B, T, H, h), (_, S, K, _) = inputs.q.shape, inputs.k.shape
    simulated = platform == "cpu"  # asks as for an H100; triton's kernels are then interpreted
    return AttentionRequest(
        batch=B, q_length=T, kv_length=S, heads=H, kv_heads=K, head_dim=h, dtype=dtype, scale=inputs.scale,
        window=shape.window, softcap=shape.softcap, aligned=not shape.cache, packed=shape.packed, alibi=shape.alibi,
        platform="cuda" if simulated else jax.default_backend(),
        chip="sm_90a" if simulated else arch_of(jax.devices()[0]),
    )  # fmt: skip


def serving(platform: str, request: AttentionRequest) -> list[Backend]:
    """The backends that compute this request here."""
    backends = [backend for backend in BACKENDS if backend.refusal(request) is None]
    if platform == "gpu":
        return backends
    interpreted = Backend("triton", functools.partial(triton.run, interpret=True))
    return [interpreted if backend.name == "triton" else backend for backend in backends if backend.name != "cudnn"]


def with_gradients(backend: Backend, request: AttentionRequest, inputs: Inputs) -> list[np.ndarray]:
    """float64 copies of the output and of the gradients of q, k and v."""
    tokens = {name: jnp.asarray(array) for name, array in inputs.tokens.items()}
    slopes = None if inputs.slopes is None else jnp.asarray(inputs.slopes)

    @jax.jit
    def both(q, k, v, gradient):
        def attend(q, k, v):
            return backend.run(AttentionInputs(q, k, v, **tokens, slopes=slopes), request)

        out, pull = jax.vjp(attend, q, k, v)
        return out, *pull(gradient)

    arrays = (jnp.asarray(array, request.dtype) for array in (inputs.q, inputs.k, inputs.v, inputs.gradient))
    with jax.default_matmul_precision("highest"):  # else a GPU multiplies float32 with 10 bits (tf32)
        return [np.asarray(array, np.float64) for array in both(*arrays)]


def round_inputs(inputs: Inputs, dtype: str) -> Inputs:
    """The inputs as `dtype` has them, in float32 again."""
    names = ("q", "k", "v", "gradient")
    arrays = {name: np.asarray(jnp.asarray(getattr(inputs, name), dtype), np.float32) for name in names}
    return Inputs(**arrays, tokens=inputs.tokens, slopes=inputs.slopes, scale=inputs.scale)


@pytest.mark.parametrize(("platform", "name", "dtype"), on_both(CASES, QUICK, SLOW), indirect=["platform"])
def test_every_backend_that_serves_computes_torchs_values_and_gradients(platform, name, dtype):
    shape = on(platform, name)
    inputs = round_inputs(inputs_of(shape, seed=CASES.index((name, dtype))), dtype)
    request = request_of(platform, shape, inputs, dtype)
    backends, expected = serving(platform, request), exact(shape, inputs)
    assert {"direct", "blockwise"} <= {backend.name for backend in backends}
    for backend in backends:
        for part, ours, theirs in zip(
            ("out", "dq", "dk", "dv"), with_gradients(backend, request, inputs), expected, strict=True
        ):
            error = np.abs(ours - theirs).max() / np.abs(theirs).max()
            assert error <= ALLOWED[dtype], f"{backend.name}: {part} is off by {error:.1e} of its largest value"


@pytest.mark.parametrize("platform", ON_BOTH, indirect=True)
def test_another_document_cannot_be_felt(platform):
    """Bit for bit: changing one document of a row to huge numbers leaves its neighbours as they were."""
    shape = on(platform, "packed")
    inputs = round_inputs(inputs_of(shape), "bfloat16")
    request = request_of(platform, shape, inputs, "bfloat16")
    third = inputs.tokens["q_segments"] == 3
    changed = {
        name: np.where(third[..., None, None], getattr(inputs, name) * 100, getattr(inputs, name)) for name in "qkv"
    }
    perturbed = Inputs(**changed, gradient=inputs.gradient, tokens=inputs.tokens, slopes=None, scale=inputs.scale)
    for backend in serving(platform, request):
        before, after = (with_gradients(backend, request, arrays) for arrays in (inputs, perturbed))
        for ours, theirs in zip(before, after, strict=True):
            np.testing.assert_array_equal(ours[~third], theirs[~third], err_msg=backend.name)


@pytest.mark.parametrize("platform", ON_BOTH, indirect=True)
def test_padding_is_exactly_zero(platform):
    """A stray number at a padded position would reach the gradients of the weights."""
    shape = on(platform, "a row of padding")
    inputs = round_inputs(inputs_of(shape), "bfloat16")
    request = request_of(platform, shape, inputs, "bfloat16")
    padding = inputs.tokens["q_segments"] == 0
    assert padding.any()
    for backend in serving(platform, request):
        for array in with_gradients(backend, request, inputs):
            assert not array[padding].any(), backend.name


def test_a_gpu_has_kernels_of_its_own(platform):
    """That no shape quietly falls back: packed bfloat16 rows are served by triton, or by splash on a TPU."""
    shape = on(platform, "packed")
    request = request_of(platform, shape, inputs_of(shape), "bfloat16")
    assert "triton" in {backend.name for backend in serving(platform, request)}
