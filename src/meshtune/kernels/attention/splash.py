"""JAX's splash attention for TPUs (jax.experimental.pallas.ops.tpu.splash_attention), for requests it serves exactly.

It masks by the order of tokens in a row and by segments. In aligned rows that is equivalent to positions, which rise by
one within a document. Tokens of padding see each other in it; their results, and thereby their gradients, are zeroed.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from meshtune.kernels.attention.backend import (
    NO_ALIBI,
    NO_PARENTS,
    NO_REACHES,
    NO_SINKS,
    ONLY_CAUSAL,
    AttentionInputs,
    AttentionRequest,
    Backend,
)
from meshtune.kernels.attention.online_softmax import OUTPUT
from meshtune.translatable import Translatable

LANES = 128
BLOCK = 512  # tokens, of queries and of keys: MaxText's choice (not measured)
# The table of visible blocks must fit a core's scalar memory.
MOST_BLOCKS = 512
LARGEST_BLOCK = 1024


def supports(request: AttentionRequest) -> str | None:
    """TPUs, bfloat16, self-attention over whole rows."""
    if request.platform != "tpu":
        return Translatable("its kernels are for TPUs, not for {platform}", platform=request.platform)
    if not request.causal:
        return ONLY_CAUSAL
    if request.alibi:
        return NO_ALIBI
    if request.sinks:
        return NO_SINKS
    if request.reaches:
        return NO_REACHES
    if request.parents:
        return NO_PARENTS
    if request.dtype != "bfloat16":
        return Translatable("it would round the factors of {dtype} products to bfloat16", dtype=request.dtype)
    if not request.aligned:
        return Translatable("it goes by the order of tokens in a row, and these queries and keys are not one row")
    if request.q_length > MOST_BLOCKS * LARGEST_BLOCK:
        return Translatable(
            "its table of blocks for {length} tokens does not fit a core's scalar memory", length=request.q_length
        )
    return None


def run(inputs: AttentionInputs, request: AttentionRequest, *, interpret: bool = False) -> jax.Array:
    """Softmax attention with float32 scores and sums; first derivatives only. [B,T,H,h] in q's dtype.

    The output and the log-sum-exp are named OUTPUT, so that a rematerialisation policy can save both.
    """
    T = request.q_length
    kernel, padded_length = _make_kernel(request, interpret)
    scale = jnp.asarray(request.scale, jnp.float32)

    def to_kernel_layout(x: jax.Array) -> jax.Array:
        """[B,T,heads,h] to [B,heads,padded_length,h]."""
        return jnp.pad(x.swapaxes(1, 2), ((0, 0), (0, 0), (0, padded_length - T), (0, 0)))

    q = to_kernel_layout((inputs.q * scale).astype(inputs.q.dtype))
    segments = jnp.pad(inputs.q_segments.astype(jnp.int32), ((0, 0), (0, padded_length - T)))
    out = jax.vmap(kernel)(q, to_kernel_layout(inputs.k), to_kernel_layout(inputs.v), segments)
    out = out[:, :, :T].swapaxes(1, 2)
    return jnp.where((inputs.q_segments != 0)[..., None, None], out, 0)


def _make_kernel(request: AttentionRequest, interpret: bool) -> tuple[Callable[..., jax.Array], int]:
    """A function of one row's q [H,T,h], k and v [K,T,h] and segments [T], and the padded T it takes."""
    from jax.experimental.pallas.ops.tpu import splash_attention as splash

    padded_length, block = _padded_length_and_block(request.q_length)
    compute = min(block, BLOCK)
    kernel = splash.make_splash_mha_single_device(
        splash.MultiHeadMask([_make_mask(padded_length, request.window)] * request.heads),
        block_sizes=splash.BlockSizes(
            block_q=block, block_kv=block, block_kv_compute=compute,
            block_q_dkv=block, block_kv_dkv=block, block_kv_dkv_compute=compute,
            block_q_dq=block, block_kv_dq=block,
        ),
        attn_logits_soft_cap=request.softcap,
        residual_checkpoint_name=OUTPUT,
        interpret=interpret,
    )  # fmt: skip

    def attend_row(q: jax.Array, k: jax.Array, v: jax.Array, segments: jax.Array) -> jax.Array:
        return kernel(q, k, v, segment_ids=splash.SegmentIds(segments, segments))  # pyright: ignore[reportReturnType]

    return attend_row, padded_length


def _make_mask(length: int, window: int | None) -> Any:
    """Equivalent to `splash.CausalMask` and `splash.LocalMask`, in constant time per block.

    Theirs build every element of every block to decide whether it is empty, full or mixed: minutes for 100k tokens.
    """
    from jax.experimental.pallas.ops.tpu import splash_attention as splash

    class Causal(splash.Mask):
        def __init__(self) -> None:
            self.q_sequence = np.arange(length, dtype=np.int32)

        @property
        def shape(self) -> tuple[int, int]:
            return length, length

        def __getitem__(self, block: tuple[slice, slice]) -> np.ndarray:
            """Not the elements of the block, but a few that show whether all, none or some are visible."""
            (q_first, q_last), (kv_first, kv_last) = ((side.start, side.stop - 1) for side in block)
            least, greatest = q_first - kv_last, q_last - kv_first  # distances between a query and a key of the block
            nearest, farthest = 0, length if window is None else window - 1
            if greatest < nearest or least > farthest:
                return np.zeros((1, 1), bool)
            if nearest <= least and greatest <= farthest:
                return np.ones((1, 1), bool)
            return np.array([[True, False]])

        def mask_function(self, q_ids: jax.Array, kv_ids: jax.Array) -> jax.Array:
            causal = q_ids >= kv_ids
            return causal if window is None else causal & (q_ids - kv_ids < window)

        def __eq__(self, other: object) -> bool:
            return self is other

        def __hash__(self) -> int:
            return id(self)

    return Causal()


def _padded_length_and_block(T: int) -> tuple[int, int]:
    """T rounded up to a multiple of the block, and the tokens of a block, which is larger for rows longer than the
    table of blocks allows."""
    block = min(BLOCK, -(-T // LANES) * LANES)
    while MOST_BLOCKS * block < T:
        block *= 2
    return -(-T // block) * block, block


SPLASH = Backend("splash", run, supports, hardware=lambda request: request.platform == "tpu")
