"""The kernels of flash attention called on whole arrays: grids, blocks, and the runs of blocks they go through."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt

from meshtune.kernels.attention import triton_tiles
from meshtune.kernels.attention.blocks import token_blocks
from meshtune.kernels.attention.products import output_slope
from meshtune.kernels.attention.reach import reach, reached_by
from meshtune.kernels.attention.request import AttentionInputs, AttentionRequest
from meshtune.kernels.attention.triton_kernels import Facts, attend, key_slopes, query_slopes
from meshtune.kernels.attention.triton_tiles import Tile, Tiles
from meshtune.kernels.attention.visibility import LOWEST


def forward(request: AttentionRequest, inputs: AttentionInputs, dtype: Any, interpret: bool):
    """The output [B,T,H,h] in `dtype` over these keys, and the log-sum-exp float32 [B,H,T], LOWEST for nothing seen.

    T of the log-sum-exp is rounded up to whole blocks.
    """
    tiles, (B, T, H, h) = triton_tiles.tiles_of(request), inputs.q.shape
    call = _Call(request, tiles, tiles.forward, inputs, interpret)
    out, log_sum_exp = call(
        attend,
        grid=(call.q_blocks, H, B),
        inputs=[
            (inputs.q, call.own_queries),
            (inputs.k, call.all_keys),
            (inputs.v, call.all_keys),
            *call.tokens(own="queries"),
        ],
        outputs=[
            (jax.ShapeDtypeStruct((B, T, H, h), dtype), call.own_queries),
            (jax.ShapeDtypeStruct((B, H, call.q_padded), jnp.float32), call.own_numbers),
        ],
    )
    if call.q_blocks * tiles.forward.q < call.q_padded:  # the rest was written by no program
        log_sum_exp = jnp.where(jnp.arange(call.q_padded) < T, log_sum_exp, LOWEST)
    return out, log_sum_exp


def backward(request: AttentionRequest, inputs: AttentionInputs, lse, delta, d_out, dtypes: Any, interpret: bool):
    """Gradients of q, k and v in `dtypes`, by these keys. `lse` and `delta` (see `slopes_of`) are over all keys."""
    B, T, H, h = inputs.q.shape
    S, K = inputs.k.shape[1:3]
    tiles = triton_tiles.tiles_of(request)
    call = _Call(request, tiles, tiles.dq, inputs, interpret)
    (dq,) = call(
        query_slopes,
        grid=(call.q_blocks, H, B),
        inputs=[
            (inputs.q, call.own_queries),
            (inputs.k, call.all_keys),
            (inputs.v, call.all_keys),
            (d_out, call.own_queries),
            (lse, call.own_numbers),
            (delta, call.own_numbers),
            *call.tokens(own="queries"),
        ],
        outputs=[(jax.ShapeDtypeStruct((B, T, H, h), dtypes[0]), call.own_queries)],
    )
    call = _Call(request, tiles, tiles.dkv, inputs, interpret)
    dk, dv = call(
        key_slopes,
        grid=(call.kv_blocks, K, B),
        inputs=[
            (inputs.q, call.all_queries),
            (inputs.k, call.own_keys),
            (inputs.v, call.own_keys),
            (d_out, call.all_queries),
            (lse, call.all_numbers),
            (delta, call.all_numbers),
            *call.tokens(own="keys"),
        ],
        outputs=[(jax.ShapeDtypeStruct((B, S, K, h), dtype), call.own_keys) for dtype in dtypes[1:]],
    )
    return dq, dk, dv


def slopes_of(out: jax.Array, d_out: jax.Array, padded: int) -> jax.Array:
    """`products.output_slope` as the kernels read it: float32 [B,H,padded]."""
    delta = output_slope(out, d_out)[..., 0].swapaxes(1, 2)
    return jnp.pad(delta, ((0, 0), (0, 0), (0, padded - delta.shape[2])))


class _Call:
    """One kernel's view of the arrays: which part of each a program is given."""

    def __init__(self, request: AttentionRequest, tiles: Tiles, tile: Tile, inputs: AttentionInputs, interpret: bool):
        self.request, self.tile, self.inputs, self.interpret = request, tile, inputs, interpret
        self.q_padded = -(-request.q_length // tiles.longest) * tiles.longest
        self.kv_padded = -(-request.kv_length // tiles.longest) * tiles.longest
        # Blocks that begin past the end of a row get no program: on a GPU they would write into the next row.
        self.q_blocks, self.kv_blocks = -(-request.q_length // tile.q), -(-request.kv_length // tile.kv)
        self.group = request.heads // request.kv_heads
        width = triton_tiles.width_of(request.head_dim)
        last, group = self.q_blocks - 1, self.group
        self.own_queries = pl.BlockSpec((None, tile.q, None, width), lambda i, n, b: (b, last - i, n, 0))
        self.own_numbers = pl.BlockSpec((None, None, tile.q), lambda i, n, b: (b, n, last - i))
        self.all_keys = pl.BlockSpec((None, self.kv_padded, None, width), lambda i, n, b: (b, 0, n // group, 0))
        self.own_keys = pl.BlockSpec((None, tile.kv, None, width), lambda j, n, b: (b, j, n, 0))
        self.all_queries = pl.BlockSpec((None, self.q_padded, group, width), lambda j, n, b: (b, 0, n, 0))
        self.all_numbers = pl.BlockSpec((None, group, self.q_padded), lambda j, n, b: (b, n, 0))

    def tokens(self, own: str) -> list[tuple[jax.Array, pl.BlockSpec]]:
        """Positions and segments of both sides, then the runs of blocks of the other side for each block of `own`."""
        x, tile, window = self.inputs, self.tile, self.request.window
        queries = [_padded(array, self.q_padded) for array in (x.q_positions, x.q_segments)]
        keys = [_padded(array, self.kv_padded) for array in (x.kv_positions, x.kv_segments)]
        in_blocks = token_blocks(queries[0], queries[1], tile.q), token_blocks(keys[0], keys[1], tile.kv)
        if own == "queries":
            last = self.q_blocks - 1
            one, block = pl.BlockSpec((None, tile.q), lambda i, n, b: (b, last - i)), (lambda i, n, b: (b, last - i, 0))
            runs, specs = reach(*in_blocks, window), [one, one, *[_whole(self.kv_padded)] * 2]
        else:
            one, block = pl.BlockSpec((None, tile.kv), lambda j, n, b: (b, j)), (lambda j, n, b: (b, j, 0))
            runs, specs = reached_by(*in_blocks, window), [*[_whole(self.q_padded)] * 2, one, one]
        return [*zip([*queries, *keys], specs, strict=True), (runs, pl.BlockSpec((None, None, 4), block))]

    def __call__(self, kernel: Any, *, grid: tuple[int, ...], inputs: list, outputs: list) -> list[jax.Array]:
        request, tile = self.request, self.tile
        facts = Facts(
            tile.q, tile.kv, request.q_length, request.kv_length, request.head_dim,
            request.scale, request.window, request.softcap,
        )  # fmt: skip
        return pl.pallas_call(
            functools.partial(kernel, facts),
            grid=grid,
            in_specs=[spec for _, spec in inputs],
            out_specs=[spec for _, spec in outputs],
            out_shape=[shape for shape, _ in outputs],
            compiler_params=plt.CompilerParams(num_warps=tile.warps, num_stages=tile.stages),
            interpret=self.interpret,
            name=f"attention_{kernel.__name__}",
        )(*(array for array, _ in inputs))


def _whole(length: int) -> pl.BlockSpec:
    return pl.BlockSpec((None, length), lambda i, n, b: (b, 0))


def _padded(x: jax.Array, length: int) -> jax.Array:
    return jnp.pad(x.astype(jnp.int32), ((0, 0), (0, length - x.shape[1])))
