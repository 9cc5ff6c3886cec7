"""cuDNN's attention on NVIDIA GPUs through jax.nn.dot_product_attention, for the requests that it serves exactly.

The public interface takes the length of each row, but no documents within it. So this backend serves rows of one
document with padding at the end (data.packing=false) and refuses packed ones; a bias that separated documents would be
as large as all scores. JAX names none of its residuals for a rematerialisation policy: under remat the backward pass
runs the forward kernel again.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp

from meshtune.kernels.attention.backend import (
    NO_PARENTS,
    NO_REACHES,
    NO_SINKS,
    AttentionInputs,
    AttentionRequest,
    Backend,
)
from meshtune.kernels.chips import chip_of
from meshtune.translatable import Translatable

DTYPES = ("bfloat16", "float16")


def supports(request: AttentionRequest) -> str | None:
    """NVIDIA GPUs that are attached, half precision, rows of one document, no soft cap, and JAX's own conditions."""
    if request.platform not in ("cuda", "gpu") or chip_of(request.platform, request.chip).vendor != "nvidia":
        return Translatable("it is a library for NVIDIA GPUs, not for {platform}", platform=request.platform)
    if request.dtype not in DTYPES:
        return Translatable("it computes in {dtypes}, not in {dtype}", dtypes=" and ".join(DTYPES), dtype=request.dtype)
    if request.packed:
        return Translatable("it cannot tell the documents of a packed row apart (data.packing)")
    if not request.aligned and (request.causal or request.q_length != request.kv_length):
        return Translatable("these queries and keys are not one row")
    if request.softcap is not None:
        return Translatable("it has no soft cap")
    if request.alibi:
        return Translatable("its bias is as large as all scores, so it would hold them (ALiBi)")
    if request.sinks:
        return NO_SINKS
    if request.reaches:
        return NO_REACHES
    if request.parents:
        return NO_PARENTS
    return _jax_refusal(request)


@functools.cache
def _jax_refusal(request: AttentionRequest) -> str | None:
    """The error with which JAX refuses these shapes, this chip or the installed cuDNN; None if it accepts them."""
    B, T, h = request.batch, request.q_length, request.head_dim
    q, k = (jax.ShapeDtypeStruct((B, T, n, h), jnp.dtype(request.dtype)) for n in (request.heads, request.kv_heads))
    tokens = jax.ShapeDtypeStruct((B, T), jnp.int32)

    def forward_and_backward(q, k, v, tokens):
        def attend(q, k, v):
            return run(AttentionInputs(q, k, v, tokens, tokens, tokens, tokens), request)

        out, vjp = jax.vjp(attend, q, k, v)
        return vjp(out)

    try:
        jax.eval_shape(forward_and_backward, q, k, k, tokens)
    except (NotImplementedError, RuntimeError, ValueError) as error:
        return Translatable("JAX says: {error}", error=str(error).splitlines()[0])
    return None


def run(inputs: AttentionInputs, request: AttentionRequest) -> jax.Array:
    """Softmax attention with float32 scores and sums; first derivatives only. [B,T,H,h] in q's dtype.

    A row that is not one document followed by padding gives NaN, and never the content of another document.
    """
    segments = inputs.q_segments
    lengths = (segments != 0).sum(1, dtype=jnp.int32)
    real = jnp.arange(segments.shape[1]) < lengths[:, None]
    single_document = (segments == jnp.where(real, segments[:, :1], 0)).all(1)
    # Masked before and after the kernel, so that padding enters neither values nor gradients, whatever it computes.
    q, k, v = (jnp.where(real[..., None, None], x, 0) for x in inputs[:3])
    out = jax.nn.dot_product_attention(
        q, k, v, scale=request.scale, is_causal=request.causal,
        query_seq_lengths=lengths, key_value_seq_lengths=lengths,
        local_window_size=None if request.window is None else (request.window - 1, 0), implementation="cudnn",
    )  # fmt: skip
    out = jnp.where(real[..., None, None], out, 0)
    return jnp.where(single_document[:, None, None, None], out, jnp.nan)


CUDNN = Backend("cudnn", run, supports, hardware=lambda request: request.platform in ("cuda", "gpu"))
