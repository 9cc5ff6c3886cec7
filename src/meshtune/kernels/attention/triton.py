"""Our flash attention for NVIDIA and AMD GPUs: Pallas kernels that Triton compiles (see triton_kernels).

It serves every request of `attention` but ALiBi: packed rows, positions in any order, windows, soft caps, shared key
heads, caches, and the shards of a ring. Memory is linear in tokens: the backward pass recomputes the weights from the
log-sum-exp.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from meshtune.kernels.attention import online_softmax
from meshtune.kernels.attention.backend import (
    NO_ALIBI,
    NO_REACHES,
    AttentionInputs,
    AttentionRequest,
    Backend,
)
from meshtune.kernels.attention.online_softmax import LOG_SUM_EXP, OUTPUT
from meshtune.kernels.chips import chip_of, without_triton
from meshtune.lazy import LazyFunction
from meshtune.translatable import Translatable

DTYPES = ("bfloat16", "float16", "float32")
SMALLEST_HEAD, LARGEST_HEAD = 16, 256
forward = LazyFunction("meshtune.kernels.attention.triton_kernels:forward")
backward = LazyFunction("meshtune.kernels.attention.triton_kernels:backward")
padded_delta = LazyFunction("meshtune.kernels.attention.triton_kernels:padded_delta")
decode = LazyFunction("meshtune.kernels.attention.triton_decode:run")
BLOCK = 64  # slots of a cache that `decode` reads at once


def supports(request: AttentionRequest) -> str | None:
    """NVIDIA GPUs from Ampere on, AMD GPUs with matrix units, head dimensions of 16 to 256."""
    if refusal := without_triton(chip_of(request.platform, request.chip)):
        return refusal
    if request.alibi:
        return NO_ALIBI
    if request.dtype not in DTYPES:
        return Translatable("it computes in {dtypes}, not in {dtype}", dtypes=", ".join(DTYPES), dtype=request.dtype)
    if not SMALLEST_HEAD <= request.head_dim <= LARGEST_HEAD:
        return Translatable(
            "head dimension {size} is not within {least} to {most}",
            size=request.head_dim,
            least=SMALLEST_HEAD,
            most=LARGEST_HEAD,
        )
    return None


def suits(request: AttentionRequest) -> str | None:
    if request.dtype == "float32":
        return Translatable("exact float32 products do not use the GPU's matrix units in Triton")
    return None


def decode_refusal(request: AttentionRequest) -> str | None:
    """The reason why `decode` does not serve a request over caches, or None."""
    if refusal := supports(request) or suits(request):
        return refusal
    if request.reaches:
        return NO_REACHES
    if request.q_length != 1:
        return Translatable("{queries} tokens a row: its kernel is for one", queries=request.q_length)
    if request.head_dim & (request.head_dim - 1):
        return Translatable("head dimension {size} is no power of two", size=request.head_dim)
    if request.kv_length % BLOCK:
        return Translatable("{slots} slots are no multiple of {size}", slots=request.kv_length, size=BLOCK)
    return None


def run(inputs: AttentionInputs, request: AttentionRequest, *, interpret: bool = False) -> jax.Array:
    """Softmax attention with float32 scores and sums; first derivatives only. [B,T,H,h] in q's dtype.

    `interpret` runs the kernels in Pallas's interpreter, on any platform and slowly: for tests.
    """
    return _attend(request, interpret, *without_order(inputs, request))


def without_order(inputs: AttentionInputs, request: AttentionRequest) -> AttentionInputs:
    """The inputs with all positions equal where the request has no causality, so that tokens see their whole segment:
    the kernels go by positions, and not by the order of tokens in a row."""
    if request.causal:
        return inputs
    zeros = jnp.zeros_like(inputs.q_positions), jnp.zeros_like(inputs.kv_positions)
    return inputs._replace(q_positions=zeros[0], kv_positions=zeros[1])


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _attend(request: AttentionRequest, interpret: bool, *inputs):
    return _forward(request, interpret, AttentionInputs(*inputs))[0]


def _forward(request: AttentionRequest, interpret: bool, inputs: AttentionInputs):
    out, log_sum_exp = forward(request, inputs, inputs.q.dtype, interpret)
    return online_softmax.by_head(out, log_sum_exp, inputs.sinks)


def _attend_forward(request: AttentionRequest, interpret: bool, *inputs):
    out, log_sum_exp = _forward(request, interpret, AttentionInputs(*inputs))
    out = checkpoint_name(out, OUTPUT)
    log_sum_exp = checkpoint_name(log_sum_exp, LOG_SUM_EXP)
    return out, (inputs, out, log_sum_exp)


def _attend_backward(request: AttentionRequest, interpret: bool, residuals, d_out: jax.Array):
    arrays, out, log_sum_exp = residuals
    inputs = AttentionInputs(*arrays)
    delta = padded_delta(out, d_out, log_sum_exp.shape[2])
    dtypes = tuple(x.dtype for x in inputs[:3])
    d_sinks = online_softmax.grads_by_head(inputs.sinks, log_sum_exp, delta)
    grads = backward(request, inputs, log_sum_exp, delta, d_out, dtypes, interpret)
    return *grads, None, None, None, None, None, d_sinks, None, None


_attend.defvjp(_attend_forward, _attend_backward)

TRITON = Backend(
    "triton",
    run,
    supports,
    suits,
    run_sharded=LazyFunction("meshtune.kernels.attention.triton_ring:run"),
    hardware=lambda request: request.platform in ("cuda", "rocm", "gpu"),
)
