"""The three kernels of flash attention for NVIDIA and AMD GPUs, in Pallas (FlashAttention-2, arXiv:2307.08691).

`attend` makes a block of the output and its log-sum-exp, `query_slopes` a block of the gradient of q, `key_slopes` one
of those of k and v. Each block of a result is made by one program in a fixed order, with no atomic sums, so that equal
inputs give equal bits. A program meets the blocks that `reach` names, and masks only where some token is not seen.
Query heads that share a key head read it where it lies. Exponents are to the base 2, which is what GPUs have.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt

from meshtune.kernels.attention.visibility import LOWEST, MASKED, exact

LOG2_E = math.log2(math.e)


class Facts(NamedTuple):
    """What is fixed when a kernel is made: the tokens of its blocks, and what `AttentionRequest` says."""

    block_q: int
    block_kv: int
    q_length: int
    kv_length: int
    head_dim: int
    scale: float
    window: int | None
    softcap: float | None


def attend(f: Facts, q_ref, k_ref, v_ref, q_pos, q_seg, kv_pos, kv_seg, runs, out_ref, lse_ref) -> None:
    """q [bq,h] of one head against k, v [S,h]: the output [bq,h] and the log-sum-exp [bq] (LOWEST for nothing seen)."""
    i = _own_block(f)
    q = _load(f, q_ref, i, f.block_q, f.q_length)
    own = q_pos[...][:, None], q_seg[...][:, None]

    def meet(j, carry, masked: bool):
        top, total, values = carry
        length = f.kv_length if masked else None
        k = _load(f, k_ref, j, f.block_kv, length, inside=True)
        scores = _scores(f, _dot(q, k, 1, 1)) * LOG2_E
        if masked:
            other = _tokens(f.block_kv, kv_pos, kv_seg, j)
            scores = jnp.where(_seen(f, own, [x[None, :] for x in other]), scores, MASKED)
        new_top = jnp.maximum(top, scores.max(1))
        weights = jnp.exp2(scores - new_top[:, None])
        fade = jnp.exp2(top - new_top)
        v = _load(f, v_ref, j, f.block_kv, length, inside=True)
        values = values * fade[:, None] + _dot(weights.astype(v.dtype), v, 1, 0)
        return new_top, total * fade + weights.sum(1), values

    nothing = jnp.full((f.block_q,), LOWEST, jnp.float32), jnp.zeros((f.block_q,), jnp.float32)
    top, total, values = _run(meet, runs, (*nothing, jnp.zeros(q.shape, jnp.float32)))
    blind = total == 0.0
    total = jnp.where(blind, 1.0, total)
    _store(f, out_ref, values / total[:, None], i, f.block_q, f.q_length)
    lse_ref[...] = jnp.where(blind, LOWEST, top / LOG2_E + jnp.log(total))


def query_slopes(
    f: Facts, q_ref, k_ref, v_ref, d_out_ref, lse_ref, delta_ref, q_pos, q_seg, kv_pos, kv_seg, runs, dq_ref
) -> None:
    """The gradient [bq,h] of a block of queries of one head."""
    i = _own_block(f)
    q = _load(f, q_ref, i, f.block_q, f.q_length)
    d_out = _load(f, d_out_ref, i, f.block_q, f.q_length)
    lse, delta = (lse_ref[...] * LOG2_E)[:, None], delta_ref[...][:, None]
    own = q_pos[...][:, None], q_seg[...][:, None]

    def meet(j, dq, masked: bool):
        length = f.kv_length if masked else None
        k = _load(f, k_ref, j, f.block_kv, length, inside=True)
        v = _load(f, v_ref, j, f.block_kv, length, inside=True)
        scores = _scores(f, _dot(q, k, 1, 1))
        exponent = scores * LOG2_E - lse
        if masked:
            other = _tokens(f.block_kv, kv_pos, kv_seg, j)
            exponent = jnp.where(_seen(f, own, [x[None, :] for x in other]), exponent, MASKED)
        d_scores = jnp.exp2(exponent) * (_dot(d_out, v, 1, 1) - delta)
        return dq + _dot(_uncapped(f, d_scores, scores).astype(k.dtype), k, 1, 0)

    dq = _run(meet, runs, jnp.zeros(q.shape, jnp.float32))
    _store(f, dq_ref, dq * f.scale, i, f.block_q, f.q_length)


def key_slopes(
    f: Facts, q_ref, k_ref, v_ref, d_out_ref, lse_ref, delta_ref, q_pos, q_seg, kv_pos, kv_seg, runs, dk_ref, dv_ref
) -> None:
    """The gradients [bkv,h] of a block of one key head, from all its query heads: q and d_out [T,G,h]."""
    j = pl.program_id(0)
    k = _load(f, k_ref, j, f.block_kv, f.kv_length)
    v = _load(f, v_ref, j, f.block_kv, f.kv_length)
    own = kv_pos[...][:, None], kv_seg[...][:, None]

    def one_head(g, carry):
        def meet(i, carry, masked: bool):
            dk, dv = carry
            length, rows = (f.q_length if masked else None), pl.ds(i * f.block_q, f.block_q)
            q = _load(f, q_ref, i, f.block_q, length, inside=True, head=g)
            d_out = _load(f, d_out_ref, i, f.block_q, length, inside=True, head=g)
            # Held as [keys, queries], so that no product has to turn what was just computed.
            scores = _scores(f, _dot(k, q, 1, 1))
            exponent = scores * LOG2_E - (lse_ref[g, rows] * LOG2_E)[None, :]
            if masked:
                other = _tokens(f.block_q, q_pos, q_seg, i)
                exponent = jnp.where(_seen(f, [x[None, :] for x in other], own), exponent, MASKED)
            weights = jnp.exp2(exponent)
            dv += _dot(weights.astype(d_out.dtype), d_out, 1, 0)
            d_scores = weights * (_dot(v, d_out, 1, 1) - delta_ref[g, rows][None, :])
            dk += _dot(_uncapped(f, d_scores, scores).astype(q.dtype), q, 1, 0)
            return dk, dv

        return _run(meet, runs, carry)

    empty = jnp.zeros(k.shape, jnp.float32)
    dk, dv = jax.lax.fori_loop(0, q_ref.shape[1], one_head, (empty, empty))
    _store(f, dk_ref, dk * f.scale, j, f.block_kv, f.kv_length)
    _store(f, dv_ref, dv, j, f.block_kv, f.kv_length)


def _own_block(f: Facts) -> Any:
    """Later blocks of queries have more keys to meet, and go first so that no device waits for the longest one."""
    return pl.num_programs(0) - 1 - pl.program_id(0)


def _run(meet: Callable[..., Any], runs, carry: Any) -> Any:
    """`meet` of every block of the run start, whole, broken, stop; masked where not all of a block is seen."""
    start, whole, broken, stop = (runs[n] for n in range(4))
    for first, last, masked in ((start, whole, True), (whole, broken, False), (broken, stop, True)):
        carry = jax.lax.fori_loop(first, last, lambda n, carry, masked=masked: meet(n, carry, masked), carry)
    return carry


def _load(f: Facts, ref, block, size: int, length: int | None, inside: bool = False, head: Any = None):
    """Block number `block` of `size` tokens: [size, h padded to a power of two].

    `inside`: of a reference to the whole row, not to the block itself. With a `length` the row may end in the block.
    """
    width = ref.shape[-1]
    mask = _mask(f, width, block, size, length)
    if inside:
        ref = ref.at[pl.ds(block * size, size), *(() if head is None else (head,)), :]
    return plt.load(ref, mask=mask, other=None if mask is None else 0.0)


def _store(f: Facts, ref, x, block, size: int, length: int) -> None:
    plt.store(ref, x.astype(ref.dtype), mask=_mask(f, ref.shape[-1], block, size, length))


def _mask(f: Facts, width: int, block, size: int, length: int | None):
    """False past the end of the row and past the head dimension; None where neither can be."""
    mask = None
    if length is not None and length % size:
        mask = (block * size + jnp.arange(size) < length)[:, None]
    if width != f.head_dim:
        inside = (jnp.arange(width) < f.head_dim)[None, :]
        mask = inside if mask is None else mask & inside
    return None if mask is None else jnp.broadcast_to(mask, (size, width))


def _tokens(size: int, positions, segments, block):
    rows = pl.ds(block * size, size)
    return positions[rows], segments[rows]


def _seen(f: Facts, queries, keys):
    """`visibility.visible` of tokens that are already laid out against each other."""
    (q_positions, q_segments), (kv_positions, kv_segments) = queries, keys
    apart = q_positions - kv_positions
    seen = (q_segments == kv_segments) & (q_segments != 0) & (apart >= 0)
    return seen if f.window is None else seen & (apart < f.window)


def _scores(f: Facts, products):
    scores = products * f.scale
    return scores if f.softcap is None else f.softcap * jnp.tanh(scores * (1.0 / f.softcap))


def _uncapped(f: Facts, d_scores, scores):
    return d_scores if f.softcap is None else d_scores * (1.0 - jax.lax.square(scores * (1.0 / f.softcap)))


def _dot(x, y, x_axis: int, y_axis: int):
    """The product over one axis of each, in float32."""
    axes = (((x_axis,), (y_axis,)), ((), ()))
    return jax.lax.dot_general(x, y, axes, precision=exact(x.dtype), preferred_element_type=jnp.float32)
