"""Attention of one new token a row to the caches of all layers, for GPUs: a Pallas kernel that Triton compiles.

The kernel reads its layer's keys and values out of the stacked caches. XLA would first copy the layer's slice with all
of its slots, empty ones too. A program reads the blocks of slots that a row sees, once for all query heads
that share a key head. Few rows are split over more programs, whose results are added by their log-sum-exps (Flash-
Decoding, https://pytorch.org/blog/flash-decoding/).
"""

from __future__ import annotations

import functools
import math

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt
from jaxtyping import Array, Float

from meshtune.kernels.attention.backend import (
    LOWEST,
    MASKED,
    AttentionInputs,
    AttentionRequest,
    StackedCaches,
    cap_scores,
    visible,
)
from meshtune.kernels.attention.triton import BLOCK

FEWEST_ROWS = 16  # of a product in Triton: query heads that share a key head are padded to it
PROGRAMS = 512  # that keep the processors of a large GPU busy
LOG2_E = math.log2(math.e)


def decode_kernel(
    scale: float, softcap: float | None, splits: int,
    layer_ref, q_ref, k_ref, v_ref, visible_ref, bounds_ref,
    out_ref, maximum_ref, total_ref,
) -> None:  # fmt: skip
    """From q [rows,h] of one key head, k and v [L,S,h], the visible slots [S] and the bounds of their blocks: the
    unnormalised output [rows,h] of a split, its maxima (to base 2) and its sums [rows]."""
    q, layer, first, stop = q_ref[...], layer_ref[0], bounds_ref[0], bounds_ref[1]
    size = (stop - first + splits - 1) // splits
    first = first + pl.program_id(0) * size

    def add_block(j, carry):
        maximum, total, values = carry
        slots = pl.ds(j * BLOCK, BLOCK)
        scores = cap_scores(_dot(q, k_ref[layer, slots, :], 1) * scale, softcap) * LOG2_E
        scores = jnp.where(visible_ref[slots][None, :] != 0, scores, MASKED)
        new_maximum = jnp.maximum(maximum, scores.max(1))
        weights, rescale = jnp.exp2(scores - new_maximum[:, None]), jnp.exp2(maximum - new_maximum)
        v = v_ref[layer, slots, :]
        values = values * rescale[:, None] + _dot(weights.astype(v.dtype), v, 0)
        return new_maximum, total * rescale + weights.sum(1), values

    rows = q.shape[0]
    start = jnp.full((rows,), LOWEST, jnp.float32), jnp.zeros((rows,), jnp.float32), jnp.zeros(q.shape, jnp.float32)
    maximum, total, values = jax.lax.fori_loop(first, jnp.minimum(stop, first + size), add_block, start)
    out_ref[...], maximum_ref[...], total_ref[...] = values, maximum, total


def _dot(x, y, y_axis: int):
    return jax.lax.dot_general(x, y, (((1,), (y_axis,)), ((), ())), preferred_element_type=jnp.float32)


def run(
    inputs: AttentionInputs, request: AttentionRequest, caches: StackedCaches, *, interpret: bool = False
) -> Float[Array, "B 1 H h"]:
    """Softmax attention with float32 scores and sums; not differentiable. Serves what triton.decode_refusal allows.

    `inputs.k` and `inputs.v` are not read, so XLA does not compute them.

    `interpret` runs the kernel in Pallas's interpreter, on any platform: for tests.
    """
    B, _, H, h = inputs.q.shape
    L, _, K, S, _ = caches.k.shape
    group, blocks = H // K, S // BLOCK
    rows = max(FEWEST_ROWS, 1 << (group - 1).bit_length())
    q = jnp.pad(inputs.q.reshape(B, K, group, h), ((0, 0), (0, 0), (0, rows - group), (0, 0)))
    tokens = inputs.q_positions, inputs.kv_positions, inputs.q_segments, inputs.kv_segments
    is_visible = visible(*tokens, request, inputs.q_parents)[:, 0]
    any_visible, numbers = is_visible.reshape(B, blocks, BLOCK).any(-1), jnp.arange(blocks, dtype=jnp.int32)
    first, last = jnp.where(any_visible, numbers, blocks).min(-1), jnp.where(any_visible, numbers, -1).max(-1)
    bounds = jnp.stack([first, jnp.maximum(first, last + 1)], axis=-1)
    splits = max(1, min(PROGRAMS // (B * K), blocks))
    cache = pl.BlockSpec((L, None, None, S, h), lambda s, n, b: (0, b, n, 0, 0))
    of_rows = pl.BlockSpec((None, None, None, rows), lambda s, n, b: (s, b, n, 0))
    out, maximum, total = pl.pallas_call(
        functools.partial(decode_kernel, request.scale, request.softcap, splits),
        grid=(splits, K, B),
        in_specs=[
            pl.BlockSpec((1,), lambda s, n, b: (0,)),
            pl.BlockSpec((None, None, rows, h), lambda s, n, b: (b, n, 0, 0)),
            cache,
            cache,
            pl.BlockSpec((None, S), lambda s, n, b: (b, 0)),
            pl.BlockSpec((None, 2), lambda s, n, b: (b, 0)),
        ],
        out_specs=[pl.BlockSpec((None, None, None, rows, h), lambda s, n, b: (s, b, n, 0, 0)), of_rows, of_rows],
        out_shape=[
            jax.ShapeDtypeStruct((splits, B, K, rows, h), jnp.float32),
            *[jax.ShapeDtypeStruct((splits, B, K, rows), jnp.float32)] * 2,
        ],
        compiler_params=plt.CompilerParams(num_warps=4, num_stages=2),
        interpret=interpret,
        name="attention_decode",
    )(jnp.asarray(caches.layer, jnp.int32).reshape(1), q, caches.k, caches.v, is_visible.astype(jnp.int32), bounds)
    highest = maximum.max(0)
    if inputs.sinks is not None:
        sinks = inputs.sinks.astype(jnp.float32).reshape(K, group) * LOG2_E
        sinks = jnp.pad(sinks, ((0, 0), (0, rows - group)), constant_values=MASKED)
        highest = jnp.maximum(highest, sinks)
    weights = jnp.exp2(maximum - highest)
    total = (total * weights).sum(0) + (0.0 if inputs.sinks is None else jnp.exp2(sinks - highest))
    out = (out * weights[..., None]).sum(0) / jnp.where(total == 0.0, 1.0, total)[..., None]
    return out[:, :, :group].reshape(B, 1, H, h).astype(inputs.q.dtype)
