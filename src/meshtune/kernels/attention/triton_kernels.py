"""The three kernels of flash attention for NVIDIA and AMD GPUs, in Pallas (FlashAttention-2, arXiv:2307.08691).

`forward_kernel` computes a block of the output and its log-sum-exp, `query_grads` a block of the gradient of q, and
`key_grads` a block of those of k and v. Each block of a result is computed by one program in a fixed order, without
atomic sums, so that equal inputs give equal bits. A program visits the ranges of blocks of `block_ranges`, and masks
only those with a token that is not visible. Query heads that share a key head read it without copies. Exponentials are
to base 2, for which GPUs have an instruction.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt

from meshtune.kernels.attention.backend import LOWEST, MASKED, matmul_precision

LOG2_E = math.log2(math.e)

Carry = TypeVar("Carry")


class KernelConfig(NamedTuple):
    """Compile-time constants of a kernel: the tokens of its blocks, and fields of `AttentionRequest`."""

    block_q: int
    block_kv: int
    q_length: int
    kv_length: int
    head_dim: int
    scale: float
    window: int | None
    softcap: float | None


def forward_kernel(
    cfg: KernelConfig, q_ref, k_ref, v_ref, q_pos, q_seg, kv_pos, kv_seg, ranges,
    out_ref, lse_ref,
) -> None:  # fmt: skip
    """From q [bq,h] of one head and k, v [S,h]: the output [bq,h], and the log-sum-exp [bq], LOWEST if none is seen."""
    i = _query_block_index(cfg)
    q = _load(cfg, q_ref, i, cfg.block_q, cfg.q_length)
    queries = q_pos[...][:, None], q_seg[...][:, None]

    def accumulate_block(j, carry, masked: bool):
        maximum, total, values = carry
        length = cfg.kv_length if masked else None
        k = _load(cfg, k_ref, j, cfg.block_kv, length, whole_row=True)
        scores = _scores(cfg, _dot(q, k, 1, 1)) * LOG2_E
        if masked:
            keys = _tokens(cfg.block_kv, kv_pos, kv_seg, j)
            scores = jnp.where(_visible(cfg, queries, [x[None, :] for x in keys]), scores, MASKED)
        new_maximum = jnp.maximum(maximum, scores.max(1))
        weights = jnp.exp2(scores - new_maximum[:, None])
        rescale = jnp.exp2(maximum - new_maximum)
        v = _load(cfg, v_ref, j, cfg.block_kv, length, whole_row=True)
        values = values * rescale[:, None] + _dot(weights.astype(v.dtype), v, 1, 0)
        return new_maximum, total * rescale + weights.sum(1), values

    initial = jnp.full((cfg.block_q,), LOWEST, jnp.float32), jnp.zeros((cfg.block_q,), jnp.float32)
    maximum, total, values = _for_each_block(accumulate_block, ranges, (*initial, jnp.zeros(q.shape, jnp.float32)))
    sees_nothing = total == 0.0
    total = jnp.where(sees_nothing, 1.0, total)
    _store(cfg, out_ref, values / total[:, None], i, cfg.block_q, cfg.q_length)
    lse_ref[...] = jnp.where(sees_nothing, LOWEST, maximum / LOG2_E + jnp.log(total))


def query_grads(
    cfg: KernelConfig, q_ref, k_ref, v_ref, d_out_ref, lse_ref, delta_ref, q_pos, q_seg, kv_pos, kv_seg, ranges,
    dq_ref,
) -> None:  # fmt: skip
    """The gradient [bq,h] of a block of queries of one head."""
    i = _query_block_index(cfg)
    q = _load(cfg, q_ref, i, cfg.block_q, cfg.q_length)
    d_out = _load(cfg, d_out_ref, i, cfg.block_q, cfg.q_length)
    lse, delta = (lse_ref[...] * LOG2_E)[:, None], delta_ref[...][:, None]
    queries = q_pos[...][:, None], q_seg[...][:, None]

    def accumulate_block(j, dq, masked: bool):
        length = cfg.kv_length if masked else None
        k = _load(cfg, k_ref, j, cfg.block_kv, length, whole_row=True)
        v = _load(cfg, v_ref, j, cfg.block_kv, length, whole_row=True)
        scores = _scores(cfg, _dot(q, k, 1, 1))
        exponent = scores * LOG2_E - lse
        if masked:
            keys = _tokens(cfg.block_kv, kv_pos, kv_seg, j)
            exponent = jnp.where(_visible(cfg, queries, [x[None, :] for x in keys]), exponent, MASKED)
        d_scores = jnp.exp2(exponent) * (_dot(d_out, v, 1, 1) - delta)
        return dq + _dot(_softcap_grad(cfg, d_scores, scores).astype(k.dtype), k, 1, 0)

    dq = _for_each_block(accumulate_block, ranges, jnp.zeros(q.shape, jnp.float32))
    _store(cfg, dq_ref, dq * cfg.scale, i, cfg.block_q, cfg.q_length)


def key_grads(
    cfg: KernelConfig,
    q_ref,
    k_ref,
    v_ref,
    d_out_ref,
    lse_ref,
    delta_ref,
    q_pos,
    q_seg,
    kv_pos,
    kv_seg,
    ranges,
    dk_ref,
    dv_ref,
) -> None:  # fmt: skip
    """The gradients [bkv,h] of a block of keys and values of one key head, from its query heads: q, d_out [T,G,h]."""
    j = pl.program_id(0)
    k = _load(cfg, k_ref, j, cfg.block_kv, cfg.kv_length)
    v = _load(cfg, v_ref, j, cfg.block_kv, cfg.kv_length)
    keys = kv_pos[...][:, None], kv_seg[...][:, None]

    def accumulate_head(g, carry):
        def accumulate_block(i, carry, masked: bool):
            dk, dv = carry
            length, rows = (cfg.q_length if masked else None), pl.ds(i * cfg.block_q, cfg.block_q)
            q = _load(cfg, q_ref, i, cfg.block_q, length, whole_row=True, head=g)
            d_out = _load(cfg, d_out_ref, i, cfg.block_q, length, whole_row=True, head=g)
            # Laid out as [keys, queries], so that no matmul has to transpose what was just computed.
            scores = _scores(cfg, _dot(k, q, 1, 1))
            exponent = scores * LOG2_E - (lse_ref[g, rows] * LOG2_E)[None, :]
            if masked:
                queries = _tokens(cfg.block_q, q_pos, q_seg, i)
                exponent = jnp.where(_visible(cfg, [x[None, :] for x in queries], keys), exponent, MASKED)
            weights = jnp.exp2(exponent)
            dv += _dot(weights.astype(d_out.dtype), d_out, 1, 0)
            d_scores = weights * (_dot(v, d_out, 1, 1) - delta_ref[g, rows][None, :])
            dk += _dot(_softcap_grad(cfg, d_scores, scores).astype(q.dtype), q, 1, 0)
            return dk, dv

        return _for_each_block(accumulate_block, ranges, carry)

    zeros = jnp.zeros(k.shape, jnp.float32)
    dk, dv = jax.lax.fori_loop(0, q_ref.shape[1], accumulate_head, (zeros, zeros))
    _store(cfg, dk_ref, dk * cfg.scale, j, cfg.block_kv, cfg.kv_length)
    _store(cfg, dv_ref, dv, j, cfg.block_kv, cfg.kv_length)


def _query_block_index(cfg: KernelConfig) -> jax.Array:
    """The last query block first: later blocks see more keys, and starting with them balances the processors' load."""
    return pl.num_programs(0) - 1 - pl.program_id(0)


def _for_each_block(accumulate_block: Callable[[Any, Carry, bool], Carry], ranges, carry: Carry) -> Carry:
    """Calls `accumulate_block` for every visible block; masked unless the block is fully visible (see block_ranges)."""
    start, full_start, full_stop, stop = (ranges[n] for n in range(4))
    for first, last, masked in ((start, full_start, True), (full_start, full_stop, False), (full_stop, stop, True)):
        carry = jax.lax.fori_loop(first, last, lambda n, c, masked=masked: accumulate_block(n, c, masked), carry)
    return carry


def _load(cfg: KernelConfig, ref, block, size: int, length: int | None, whole_row: bool = False, head: Any = None):
    """The block with index `block`, of `size` tokens: [size, h padded to a power of two].

    `whole_row`: `ref` refers to the whole row, not to the block itself. With a `length` the row may end in the block.
    """
    width = ref.shape[-1]
    mask = _mask(cfg, width, block, size, length)
    if whole_row:
        ref = ref.at[pl.ds(block * size, size), *(() if head is None else (head,)), :]
    return plt.load(ref, mask=mask, other=None if mask is None else 0.0)


def _store(cfg: KernelConfig, ref, x, block, size: int, length: int) -> None:
    plt.store(ref, x.astype(ref.dtype), mask=_mask(cfg, ref.shape[-1], block, size, length))


def _mask(cfg: KernelConfig, width: int, block, size: int, length: int | None):
    """False past the end of the row and past the head dimension; None if the block has neither."""
    mask = None
    if length is not None and length % size:
        mask = (block * size + jnp.arange(size) < length)[:, None]
    if width != cfg.head_dim:
        in_head = (jnp.arange(width) < cfg.head_dim)[None, :]
        mask = in_head if mask is None else mask & in_head
    return None if mask is None else jnp.broadcast_to(mask, (size, width))


def _tokens(size: int, positions, segments, block):
    rows = pl.ds(block * size, size)
    return positions[rows], segments[rows]


def _visible(cfg: KernelConfig, queries, keys):
    """`visibility.visible` for tokens whose shapes already broadcast against each other."""
    (q_positions, q_segments), (kv_positions, kv_segments) = queries, keys
    distance = q_positions - kv_positions
    causal = (q_segments == kv_segments) & (q_segments != 0) & (distance >= 0)
    return causal if cfg.window is None else causal & (distance < cfg.window)


def _scores(cfg: KernelConfig, products):
    scores = products * cfg.scale
    return scores if cfg.softcap is None else cfg.softcap * jnp.tanh(scores * (1.0 / cfg.softcap))


def _softcap_grad(cfg: KernelConfig, d_scores, scores):
    return d_scores if cfg.softcap is None else d_scores * (1.0 - jax.lax.square(scores * (1.0 / cfg.softcap)))


def _dot(x, y, x_axis: int, y_axis: int):
    """Contracts one axis of each, in float32."""
    axes = (((x_axis,), (y_axis,)), ((), ()))
    return jax.lax.dot_general(x, y, axes, precision=matmul_precision(x.dtype), preferred_element_type=jnp.float32)
