"""cuDNN's attention on NVIDIA GPUs, by jax.nn.dot_product_attention, where it serves exactly.

Its public interface knows the length of each row and nothing of documents within it. So it serves rows of one document,
padded at the end (data.packing=false), and refuses packed ones; a bias that would tell documents apart is as large as
all scores. JAX keeps nothing of it for a rematerialisation policy: the backward pass runs the forward kernel again.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp

from meshtune.kernels.attention.request import AttentionInputs, AttentionRequest, Backend
from meshtune.kernels.chips import chip_of

DTYPES = ("bfloat16", "float16")


def supports(request: AttentionRequest) -> str | None:
    """NVIDIA GPUs that are here, half precision, rows of one document, no soft cap, and what JAX asks for beside."""
    if request.platform not in ("cuda", "gpu") or chip_of(request.platform, request.chip).maker != "nvidia":
        return f"it is a library for NVIDIA GPUs, not for {request.platform}"
    if request.dtype not in DTYPES:
        return f"it computes in {' and '.join(DTYPES)}, not in {request.dtype}"
    if request.packed:
        return "it cannot tell the documents of a packed row apart (data.packing)"
    if not request.aligned:
        return "these queries and keys are not one row"
    if request.softcap is not None:
        return "it has no soft cap"
    if request.alibi:
        return "its bias is as large as all scores, so it would hold them (ALiBi)"
    return _refused_by_jax(request)


@functools.cache
def _refused_by_jax(request: AttentionRequest) -> str | None:
    """What JAX says of these shapes, this chip and the cuDNN that is installed, in its own words."""
    B, T, h = request.batch, request.q_length, request.head_dim
    q, k = (jax.ShapeDtypeStruct((B, T, n, h), jnp.dtype(request.dtype)) for n in (request.heads, request.kv_heads))
    tokens = jax.ShapeDtypeStruct((B, T), jnp.int32)

    def both(q, k, v, tokens):
        def here(q, k, v):
            return run(AttentionInputs(q, k, v, tokens, tokens, tokens, tokens), request)

        out, pull = jax.vjp(here, q, k, v)
        return pull(out)

    try:
        jax.eval_shape(both, q, k, k, tokens)
    except (NotImplementedError, RuntimeError, ValueError) as error:
        return f"JAX says: {str(error).splitlines()[0]}"
    return None


def run(inputs: AttentionInputs, request: AttentionRequest) -> jax.Array:
    """Softmax attention with float32 scores and sums; first derivatives only. [B,T,H,h] in q's dtype.

    A row that is not one document and then padding gives NaN, and never what another document says.
    """
    segments = inputs.q_segments
    lengths = (segments != 0).sum(1, dtype=jnp.int32)
    real = jnp.arange(segments.shape[1]) < lengths[:, None]
    single = (segments == jnp.where(real, segments[:, :1], 0)).all(1)
    # Selected on both sides of the kernel, so that padding has no part in values or gradients, whatever it makes there.
    q, k, v = (jnp.where(real[..., None, None], x, 0) for x in inputs[:3])
    out = jax.nn.dot_product_attention(
        q, k, v, scale=request.scale, is_causal=True, query_seq_lengths=lengths, key_value_seq_lengths=lengths,
        local_window_size=None if request.window is None else (request.window - 1, 0), implementation="cudnn",
    )  # fmt: skip
    out = jnp.where(real[..., None, None], out, 0)
    return jnp.where(single[:, None, None, None], out, jnp.nan)


CUDNN = Backend("cudnn", run, supports)
