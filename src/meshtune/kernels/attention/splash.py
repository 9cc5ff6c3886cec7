"""JAX's own splash attention for TPUs (jax.experimental.pallas.ops.tpu.splash_attention), where it serves exactly.

It masks by the order of tokens in a row and by segments. In aligned rows that is what positions say, too: they rise by
one within a document. Tokens of padding see each other there; what they get is taken out of the result, and with it
every gradient of theirs.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from meshtune.kernels.attention.products import OUTPUT
from meshtune.kernels.attention.request import NO_BIASES, AttentionInputs, AttentionRequest, Backend

LANES = 128
BLOCK = 512  # tokens, of queries and of keys: MaxText's choice (not measured here)
# The table of blocks that may see each other lies in the scalar memory of a core.
MOST_BLOCKS = 512
LARGEST_BLOCK = 1024


def supports(request: AttentionRequest) -> str | None:
    """TPUs, bfloat16, whole rows that see themselves."""
    if request.platform != "tpu":
        return f"its kernels are for TPUs, not for {request.platform}"
    if request.alibi:
        return NO_BIASES
    if request.dtype != "bfloat16":
        return f"it would round the factors of {request.dtype} products to bfloat16"
    if not request.aligned:
        return "it goes by the order of tokens in a row, and these queries and keys are not one row"
    if request.q_length > MOST_BLOCKS * LARGEST_BLOCK:
        return f"its table of blocks for {request.q_length} tokens does not fit a core's scalar memory"
    return None


def run(inputs: AttentionInputs, request: AttentionRequest, *, interpret: bool = False) -> jax.Array:
    """Softmax attention with float32 scores and sums; first derivatives only. [B,T,H,h] in q's dtype.

    The output and log-sum-exp carry the name OUTPUT, so that a rematerialisation policy can keep both.
    """
    T = request.q_length
    kernel, padded = _kernel(request, interpret)
    scale = jnp.asarray(request.scale, jnp.float32)

    def laid_out(x: jax.Array) -> jax.Array:
        """[B, heads, padded, h]"""
        return jnp.pad(x.swapaxes(1, 2), ((0, 0), (0, 0), (0, padded - T), (0, 0)))

    q = laid_out((inputs.q * scale).astype(inputs.q.dtype))
    segments = jnp.pad(inputs.q_segments.astype(jnp.int32), ((0, 0), (0, padded - T)))
    out = jax.vmap(kernel)(q, laid_out(inputs.k), laid_out(inputs.v), segments)
    out = out[:, :, :T].swapaxes(1, 2)
    return jnp.where((inputs.q_segments != 0)[..., None, None], out, 0)


def _kernel(request: AttentionRequest, interpret: bool):
    """A function of one row's q [H,T,h], k, v [K,T,h] and segments [T], and the T it takes."""
    from jax.experimental.pallas.ops.tpu import splash_attention as splash

    padded, block = _blocks(request.q_length)
    compute = min(block, BLOCK)
    kernel = splash.make_splash_mha_single_device(
        splash.MultiHeadMask([_mask(padded, request.window)] * request.heads),
        block_sizes=splash.BlockSizes(
            block_q=block, block_kv=block, block_kv_compute=compute,
            block_q_dkv=block, block_kv_dkv=block, block_kv_dkv_compute=compute,
            block_q_dq=block, block_kv_dq=block,
        ),
        attn_logits_soft_cap=request.softcap,
        residual_checkpoint_name=OUTPUT,
        interpret=interpret,
    )  # fmt: skip

    def one_row(q: jax.Array, k: jax.Array, v: jax.Array, segments: jax.Array) -> jax.Array:
        return kernel(q, k, v, segment_ids=splash.SegmentIds(segments, segments))  # pyright: ignore[reportReturnType]

    return one_row, padded


def _mask(length: int, window: int | None) -> Any:
    """Causal, or within a window: what `splash.CausalMask` and `splash.LocalMask` say, in the time of one look a block.

    Theirs make every element of every block to learn whether it is empty, full or neither: minutes for 100k tokens.
    """
    from jax.experimental.pallas.ops.tpu import splash_attention as splash

    class Causal(splash.Mask):
        def __init__(self) -> None:
            self.q_sequence = np.arange(length, dtype=np.int32)

        @property
        def shape(self) -> tuple[int, int]:
            return length, length

        def __getitem__(self, block: Any) -> np.ndarray:
            """Not the elements of a block, but as many as show whether all are seen, none, or some."""
            (q_first, q_last), (kv_first, kv_last) = ((side.start, side.stop - 1) for side in block)
            least, most = q_first - kv_last, q_last - kv_first  # how far a query of it stands after a key
            nearest, farthest = 0, length if window is None else window - 1
            if most < nearest or least > farthest:
                return np.zeros((1, 1), bool)
            if nearest <= least and most <= farthest:
                return np.ones((1, 1), bool)
            return np.array([[True, False]])

        def mask_function(self, q_ids: jax.Array, kv_ids: jax.Array) -> jax.Array:
            seen = q_ids >= kv_ids
            return seen if window is None else seen & (q_ids - kv_ids < window)

        def __eq__(self, other: object) -> bool:
            return self is other

        def __hash__(self) -> int:
            return id(self)

    return Causal()


def _blocks(T: int) -> tuple[int, int]:
    """T rounded up so that blocks divide it, and the tokens of a block: as large as the row is long."""
    block = min(BLOCK, -(-T // LANES) * LANES)
    while MOST_BLOCKS * block < T:
        block *= 2
    return -(-T // block) * block, block


SPLASH = Backend("splash", run, supports)
