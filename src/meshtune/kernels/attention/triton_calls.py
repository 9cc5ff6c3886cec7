"""Calls of the flash-attention kernels on whole arrays: grids, block specs, and the ranges of blocks to visit."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt
from jax.typing import DTypeLike

from meshtune.kernels.attention import triton_tiles
from meshtune.kernels.attention.backend import LOWEST, AttentionInputs, AttentionRequest
from meshtune.kernels.attention.block_ranges import visible_key_ranges, visible_query_ranges
from meshtune.kernels.attention.blocks import token_blocks
from meshtune.kernels.attention.online_softmax import output_delta
from meshtune.kernels.attention.triton_kernels import KernelConfig, forward_kernel, key_grads, query_grads
from meshtune.kernels.attention.triton_tiles import Tile, Tiles

Operand = tuple[jax.Array, pl.BlockSpec]
Result = tuple[jax.ShapeDtypeStruct, pl.BlockSpec]


def forward(
    request: AttentionRequest, inputs: AttentionInputs, dtype: DTypeLike, interpret: bool
) -> tuple[jax.Array, jax.Array]:
    """The output [B,T,H,h] in `dtype` over these keys, and the log-sum-exp float32 [B,H,T], LOWEST if nothing is seen.

    T of the log-sum-exp is rounded up to whole blocks.
    """
    tiles, (B, T, H, h) = triton_tiles.tiles_of(request), inputs.q.shape
    call = _KernelCall(request, tiles, tiles.forward, inputs, interpret)
    out, log_sum_exp = call(
        forward_kernel,
        grid=(call.q_blocks, H, B),
        inputs=[
            (inputs.q, call.q_block),
            (inputs.k, call.all_keys),
            (inputs.v, call.all_keys),
            *call.tokens_by_query_block(),
        ],
        outputs=[
            (jax.ShapeDtypeStruct((B, T, H, h), dtype), call.q_block),
            (jax.ShapeDtypeStruct((B, H, call.q_padded), jnp.float32), call.q_scalars),
        ],
    )
    if call.q_blocks * tiles.forward.q < call.q_padded:  # no program has written the rest
        log_sum_exp = jnp.where(jnp.arange(call.q_padded) < T, log_sum_exp, LOWEST)
    return out, log_sum_exp


def backward(
    request: AttentionRequest,
    inputs: AttentionInputs,
    log_sum_exp: jax.Array,
    delta: jax.Array,
    d_out: jax.Array,
    dtypes: Sequence[DTypeLike],
    interpret: bool,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Gradients of q, k and v in `dtypes` from these keys; `log_sum_exp` and `delta` (`padded_delta`) are over all
    keys."""
    B, T, H, h = inputs.q.shape
    S, K = inputs.k.shape[1:3]
    tiles = triton_tiles.tiles_of(request)

    def operands(queries: pl.BlockSpec, keys: pl.BlockSpec, scalars: pl.BlockSpec) -> list[Operand]:
        return [
            (inputs.q, queries),
            (inputs.k, keys),
            (inputs.v, keys),
            (d_out, queries),
            (log_sum_exp, scalars),
            (delta, scalars),
        ]

    call = _KernelCall(request, tiles, tiles.dq, inputs, interpret)
    (dq,) = call(
        query_grads,
        grid=(call.q_blocks, H, B),
        inputs=[*operands(call.q_block, call.all_keys, call.q_scalars), *call.tokens_by_query_block()],
        outputs=[(jax.ShapeDtypeStruct((B, T, H, h), dtypes[0]), call.q_block)],
    )
    call = _KernelCall(request, tiles, tiles.dkv, inputs, interpret)
    dk, dv = call(
        key_grads,
        grid=(call.kv_blocks, K, B),
        inputs=[*operands(call.all_queries, call.kv_block, call.all_q_scalars), *call.tokens_by_key_block()],
        outputs=[(jax.ShapeDtypeStruct((B, S, K, h), dtype), call.kv_block) for dtype in dtypes[1:]],
    )
    return dq, dk, dv


def padded_delta(out: jax.Array, d_out: jax.Array, padded: int) -> jax.Array:
    """`output_delta` in the kernels' layout: float32 [B,H,padded]."""
    delta = output_delta(out, d_out)[..., 0].swapaxes(1, 2)
    return jnp.pad(delta, ((0, 0), (0, 0), (0, padded - delta.shape[2])))


class _KernelCall:
    """The block specs of one kernel: which part of each array a program of the grid gets.

    `q_block` and `kv_block` are a program's own block, `all_queries` and `all_keys` whole rows of the other side;
    `q_scalars` and `all_q_scalars` are the same for arrays with one number per query and head.
    """

    def __init__(self, request: AttentionRequest, tiles: Tiles, tile: Tile, inputs: AttentionInputs, interpret: bool):
        self.request, self.tile, self.inputs, self.interpret = request, tile, inputs, interpret
        self.q_padded = -(-request.q_length // tiles.longest) * tiles.longest
        self.kv_padded = -(-request.kv_length // tiles.longest) * tiles.longest
        # Blocks that start past the end of a row get no program: on a GPU they would write into the next row.
        self.q_blocks, self.kv_blocks = -(-request.q_length // tile.q), -(-request.kv_length // tile.kv)
        self.group = request.heads // request.kv_heads
        width = triton_tiles.padded_head_dim(request.head_dim)
        last, group = self.q_blocks - 1, self.group
        self.q_block = pl.BlockSpec((None, tile.q, None, width), lambda i, n, b: (b, last - i, n, 0))
        self.q_scalars = pl.BlockSpec((None, None, tile.q), lambda i, n, b: (b, n, last - i))
        self.all_keys = pl.BlockSpec((None, self.kv_padded, None, width), lambda i, n, b: (b, 0, n // group, 0))
        self.kv_block = pl.BlockSpec((None, tile.kv, None, width), lambda j, n, b: (b, j, n, 0))
        self.all_queries = pl.BlockSpec((None, self.q_padded, group, width), lambda j, n, b: (b, 0, n, 0))
        self.all_q_scalars = pl.BlockSpec((None, group, self.q_padded), lambda j, n, b: (b, n, 0))
        self._queries = _pad_tokens(inputs.q_positions, self.q_padded), _pad_tokens(inputs.q_segments, self.q_padded)
        self._keys = _pad_tokens(inputs.kv_positions, self.kv_padded), _pad_tokens(inputs.kv_segments, self.kv_padded)
        self._token_blocks = token_blocks(*self._queries, tile.q), token_blocks(*self._keys, tile.kv)

    def tokens_by_query_block(self) -> list[Operand]:
        """Positions and segments of a query block and of all keys, then the ranges of key blocks that it visits."""
        last = self.q_blocks - 1
        block_spec = pl.BlockSpec((None, self.tile.q), lambda i, n, b: (b, last - i))
        specs = [block_spec, block_spec, *[_whole_row(self.kv_padded)] * 2]
        ranges = visible_key_ranges(*self._token_blocks, self.request.window)
        ranges_spec = pl.BlockSpec((None, None, 4), lambda i, n, b: (b, last - i, 0))
        return [*zip([*self._queries, *self._keys], specs, strict=True), (ranges, ranges_spec)]

    def tokens_by_key_block(self) -> list[Operand]:
        """Positions and segments of all queries and of a key block, then the ranges of query blocks that it visits."""
        block_spec = pl.BlockSpec((None, self.tile.kv), lambda j, n, b: (b, j))
        specs = [*[_whole_row(self.q_padded)] * 2, block_spec, block_spec]
        ranges = visible_query_ranges(*self._token_blocks, self.request.window)
        ranges_spec = pl.BlockSpec((None, None, 4), lambda j, n, b: (b, j, 0))
        return [*zip([*self._queries, *self._keys], specs, strict=True), (ranges, ranges_spec)]

    def __call__(
        self,
        kernel: Callable[..., None],
        *,
        grid: tuple[int, ...],
        inputs: Sequence[Operand],
        outputs: Sequence[Result],
    ) -> list[jax.Array]:
        request, tile = self.request, self.tile
        config = KernelConfig(
            tile.q, tile.kv, request.q_length, request.kv_length, request.head_dim,
            request.scale, request.window, request.softcap,
        )  # fmt: skip
        return pl.pallas_call(
            functools.partial(kernel, config),
            grid=grid,
            in_specs=[spec for _, spec in inputs],
            out_specs=[spec for _, spec in outputs],
            out_shape=[shape for shape, _ in outputs],
            compiler_params=plt.CompilerParams(num_warps=tile.warps, num_stages=tile.stages),
            interpret=self.interpret,
            name=f"attention_{kernel.__name__}",
        )(*(array for array, _ in inputs))


def _whole_row(length: int) -> pl.BlockSpec:
    return pl.BlockSpec((None, length), lambda i, n, b: (b, 0))


def _pad_tokens(x: jax.Array, length: int) -> jax.Array:
    return jnp.pad(x.astype(jnp.int32), ((0, 0), (0, length - x.shape[1])))
