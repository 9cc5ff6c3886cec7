"""The Triton kernels of attention, the sizes of their tiles, and their calls.

The three kernels of flash attention for NVIDIA and AMD GPUs, in Pallas (FlashAttention-2, arXiv:2307.08691).

`forward_kernel` computes a block of the output and its log-sum-exp, `query_grads` a block of the gradient of q, and
`key_grads` a block of those of k and v. Each block of a result is computed by one program in a fixed order, without
atomic sums, so that equal inputs give equal bits. A program visits the ranges of blocks of `block_ranges`, and masks
only those with a token that is not visible. Query heads that share a key head read it without copies. Exponentials are
to base 2, for which GPUs have an instruction.

Chosen without these chips, from their compilers' reports: the largest blocks whose values stay in registers (a spilled
one goes through memory each time) and that fit the shared memory of a thread block. The resources that each of them
needs are filed in benchmarks/kernels_deviceless; benchmarks/gpu_kernels times them on a GPU.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt
from jax.typing import DTypeLike

from meshtune.kernels.attention.backend import LOWEST, MASKED, AttentionInputs, AttentionRequest, matmul_precision
from meshtune.kernels.attention.blocks import token_blocks, visible_key_ranges, visible_query_ranges
from meshtune.kernels.attention.online_softmax import output_delta
from meshtune.kernels.chips import Chip, chip_of

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
    reaches: bool


def forward_kernel(
    cfg: KernelConfig, q_ref, k_ref, v_ref, q_tokens, kv_tokens, ranges,
    out_ref, lse_ref,
) -> None:  # fmt: skip
    """From q [bq,h] of one head and k, v [S,h]: the output [bq,h], and the log-sum-exp [bq], LOWEST if none is seen.

    `q_tokens` are positions, segments and, if any, the segments that these continue; `kv_tokens` are positions and
    segments.
    """
    i = _query_block_index(cfg)
    q = _load(cfg, q_ref, i, cfg.block_q, cfg.q_length)
    queries = [x[...][:, None] for x in q_tokens]

    def accumulate_block(j, carry, masked: bool):
        maximum, total, values = carry
        length = cfg.kv_length if masked else None
        k = _load(cfg, k_ref, j, cfg.block_kv, length, whole_row=True)
        scores = _scores(cfg, _dot(q, k, 1, 1)) * LOG2_E
        if masked:
            keys = [x[None, :] for x in _tokens(cfg.block_kv, kv_tokens, j)]
            scores = jnp.where(_visible(cfg, queries, keys), scores, MASKED)
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
    cfg: KernelConfig, q_ref, k_ref, v_ref, d_out_ref, lse_ref, delta_ref, q_tokens, kv_tokens, ranges,
    dq_ref,
) -> None:  # fmt: skip
    """The gradient [bq,h] of a block of queries of one head."""
    i = _query_block_index(cfg)
    q = _load(cfg, q_ref, i, cfg.block_q, cfg.q_length)
    d_out = _load(cfg, d_out_ref, i, cfg.block_q, cfg.q_length)
    lse, delta = (lse_ref[...] * LOG2_E)[:, None], delta_ref[...][:, None]
    queries = [x[...][:, None] for x in q_tokens]

    def accumulate_block(j, dq, masked: bool):
        length = cfg.kv_length if masked else None
        k = _load(cfg, k_ref, j, cfg.block_kv, length, whole_row=True)
        v = _load(cfg, v_ref, j, cfg.block_kv, length, whole_row=True)
        scores = _scores(cfg, _dot(q, k, 1, 1))
        exponent = scores * LOG2_E - lse
        if masked:
            keys = [x[None, :] for x in _tokens(cfg.block_kv, kv_tokens, j)]
            exponent = jnp.where(_visible(cfg, queries, keys), exponent, MASKED)
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
    q_tokens,
    kv_tokens,
    ranges,
    dk_ref,
    dv_ref,
) -> None:  # fmt: skip
    """The gradients [bkv,h] of a block of keys and values of one key head, from its query heads: q, d_out [T,G,h]."""
    j = pl.program_id(0)
    k = _load(cfg, k_ref, j, cfg.block_kv, cfg.kv_length)
    v = _load(cfg, v_ref, j, cfg.block_kv, cfg.kv_length)
    keys = [x[...][:, None] for x in kv_tokens]

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
                queries = [x[None, :] for x in _tokens(cfg.block_q, q_tokens, i)]
                exponent = jnp.where(_visible(cfg, queries, keys), exponent, MASKED)
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

    def accumulate_range(n, carry):
        start, full_start, full_stop, stop = (ranges[4 * n + bound] for bound in range(4))
        for first, last, masked in ((start, full_start, True), (full_start, full_stop, False), (full_stop, stop, True)):
            carry = jax.lax.fori_loop(first, last, lambda n, c, masked=masked: accumulate_block(n, c, masked), carry)
        return carry

    count = ranges.shape[0] // 4
    return accumulate_range(0, carry) if count == 1 else jax.lax.fori_loop(0, count, accumulate_range, carry)


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


def _tokens(size: int, tokens, block):
    return [x[pl.ds(block * size, size)] for x in tokens]


def _visible(cfg: KernelConfig, queries, keys):
    """`visibility.visible` for tokens whose shapes already broadcast against each other."""
    (q_positions, q_segments, *others), (kv_positions, kv_segments) = queries, keys
    q_parents, q_reach = others[: len(others) - cfg.reaches], others[-1] if cfg.reaches else q_positions
    distance = q_positions - kv_positions
    same_segment = (q_segments == kv_segments) & (q_segments != 0)
    for parents in q_parents:
        same_segment |= (parents == kv_segments) & (parents != 0)
    causal = same_segment & (q_reach >= kv_positions)
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


SMALLEST_SIZE = 16  # of a dimension of a block


@dataclasses.dataclass(frozen=True)
class Tile:
    """Of one kernel: tokens in a block of queries and of keys, warps per program, pipeline stages."""

    q: int
    kv: int
    warps: int
    stages: int


@dataclasses.dataclass(frozen=True)
class Tiles:
    """Of the three kernels."""

    forward: Tile
    dq: Tile
    dkv: Tile

    @property
    def longest(self) -> int:
        """A multiple of all block sizes: rows of tokens are padded to a multiple of it."""
        return max(n for tile in (self.forward, self.dq, self.dkv) for n in (tile.q, tile.kv))


# For bfloat16 and float16. The key is the largest padded head dimension for which an entry is used.
TilesByHeadDim = dict[int, Tiles]
HOPPER: TilesByHeadDim = {
    64: Tiles(Tile(128, 64, 4, 3), Tile(128, 64, 8, 2), Tile(64, 128, 8, 2)),
    128: Tiles(Tile(128, 64, 8, 3), Tile(64, 64, 4, 2), Tile(64, 128, 8, 2)),
    256: Tiles(Tile(128, 64, 8, 2), Tile(128, 32, 8, 2), Tile(64, 64, 8, 2)),
}
# Accumulators are in a separate tensor memory, which the gradients of 64 keys of 256 columns exceed.
BLACKWELL = {
    64: Tiles(Tile(128, 64, 8, 2), Tile(128, 64, 8, 2), Tile(64, 64, 8, 2)),
    128: Tiles(Tile(128, 64, 8, 3), Tile(64, 64, 4, 2), Tile(64, 64, 8, 2)),
    256: Tiles(Tile(128, 64, 8, 2), Tile(128, 32, 8, 2), Tile(32, 32, 4, 1)),
}
# Ampere, Ada and consumer Blackwell, whose matmuls read registers: sized for the 99 KiB of the smallest.
AMPERE = {
    64: Tiles(Tile(128, 64, 8, 2), Tile(128, 64, 8, 2), Tile(32, 64, 4, 2)),
    128: Tiles(Tile(128, 64, 8, 2), Tile(128, 32, 8, 2), Tile(64, 64, 8, 2)),
    256: Tiles(Tile(64, 32, 4, 2), Tile(32, 32, 4, 2), Tile(32, 32, 4, 2)),
}
# CDNA: a warp is 64 threads with up to 512 registers; a second stage would not leave room for two warps per unit.
CDNA = {
    64: Tiles(Tile(128, 64, 4, 1), Tile(128, 32, 4, 1), Tile(32, 64, 4, 1)),
    128: Tiles(Tile(128, 64, 8, 1), Tile(128, 32, 8, 1), Tile(32, 64, 4, 1)),
    256: Tiles(Tile(64, 32, 4, 1), Tile(64, 32, 4, 1), Tile(32, 32, 4, 1)),
}
# RDNA 3 and 3.5: warps of 32 threads with 256 registers, and matrix products that take each factor twice. Of the tiles
# that were compiled (benchmarks/kernels_deviceless), those that spill least.
RDNA3 = {
    64: Tiles(Tile(64, 32, 4, 1), Tile(32, 32, 4, 1), Tile(32, 32, 8, 1)),
    128: Tiles(Tile(64, 32, 8, 1), Tile(64, 16, 8, 1), Tile(16, 64, 8, 1)),
    256: Tiles(Tile(32, 16, 8, 1), Tile(64, 16, 16, 1), Tile(16, 64, 16, 1)),
}
# Other RDNA: warps of 32 threads, 64 KiB of shared memory.
RDNA = {
    64: Tiles(Tile(64, 32, 4, 1), Tile(32, 32, 4, 1), Tile(32, 32, 4, 1)),
    128: Tiles(Tile(64, 32, 4, 1), Tile(32, 32, 4, 1), Tile(32, 32, 4, 1)),
    256: Tiles(Tile(32, 32, 4, 1), Tile(32, 32, 8, 1), Tile(32, 32, 8, 1)),
}
AMD_TILES = {"gfx9": CDNA, "gfx11": RDNA3}
# Exact float32 matmuls use no matrix units on any chip.
FLOAT32 = Tiles(Tile(32, 32, 4, 1), Tile(32, 32, 4, 1), Tile(32, 32, 4, 1))


def tiles_of(request: AttentionRequest) -> Tiles:
    """The tiles for the request's chip, head dimension and dtype."""
    if request.dtype == "float32":
        return FLOAT32
    head_dim = padded_head_dim(request.head_dim)
    by_head_dim = _of_generation(chip_of(request.platform, request.chip))
    return next(tiles for largest, tiles in by_head_dim.items() if head_dim <= largest)


def _of_generation(chip: Chip) -> TilesByHeadDim:
    if chip.vendor == "amd":
        return next((tiles for arch, tiles in AMD_TILES.items() if chip.arch.startswith(arch)), RDNA)
    return {9: HOPPER, 10: BLACKWELL, 11: BLACKWELL}.get(chip.capability[0], AMPERE)


def padded_head_dim(head_dim: int) -> int:
    """The columns of a block: a power of two; only `head_dim` of them are loaded and stored."""
    return max(SMALLEST_SIZE, 1 << (head_dim - 1).bit_length())


Operand = tuple[Any, Any]  # an array and its block spec, or a tuple of arrays and of theirs
Result = tuple[jax.ShapeDtypeStruct, pl.BlockSpec]


def forward(
    request: AttentionRequest, inputs: AttentionInputs, dtype: DTypeLike, interpret: bool
) -> tuple[jax.Array, jax.Array]:
    """The output [B,T,H,h] in `dtype` over these keys, and the log-sum-exp float32 [B,H,T], LOWEST if nothing is seen.

    T of the log-sum-exp is rounded up to whole blocks.
    """
    tiles, (B, T, H, h) = tiles_of(request), inputs.q.shape
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
    tiles = tiles_of(request)

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
        width = padded_head_dim(request.head_dim)
        last, group = self.q_blocks - 1, self.group
        self.q_block = pl.BlockSpec((None, tile.q, None, width), lambda i, n, b: (b, last - i, n, 0))
        self.q_scalars = pl.BlockSpec((None, None, tile.q), lambda i, n, b: (b, n, last - i))
        self.all_keys = pl.BlockSpec((None, self.kv_padded, None, width), lambda i, n, b: (b, 0, n // group, 0))
        self.kv_block = pl.BlockSpec((None, tile.kv, None, width), lambda j, n, b: (b, j, n, 0))
        self.all_queries = pl.BlockSpec((None, self.q_padded, group, width), lambda j, n, b: (b, 0, n, 0))
        self.all_q_scalars = pl.BlockSpec((None, group, self.q_padded), lambda j, n, b: (b, n, 0))
        queries, others = (inputs.q_positions, inputs.q_segments), (inputs.q_parents, inputs.q_reach)
        positions, segments = (_pad_tokens(x, self.q_padded) for x in queries)
        padded = [None if x is None else _pad_tokens(x, self.q_padded) for x in others]
        self._queries = (positions, segments, *(x for x in padded if x is not None))
        self._keys = tuple(_pad_tokens(x, self.kv_padded) for x in (inputs.kv_positions, inputs.kv_segments))
        self._token_blocks = token_blocks(tile.q, positions, segments, *padded), token_blocks(tile.kv, *self._keys)

    def tokens_by_query_block(self) -> list[Operand]:
        """The tokens of a query block and of all keys, then the ranges of key blocks that it visits."""
        last = self.q_blocks - 1
        block_spec = pl.BlockSpec((None, self.tile.q), lambda i, n, b: (b, last - i))
        queries = self._queries, (block_spec,) * len(self._queries)
        keys = self._keys, (_whole_row(self.kv_padded),) * len(self._keys)
        ranges = visible_key_ranges(*self._token_blocks, self.request.window)
        return [queries, keys, (ranges, pl.BlockSpec((None, None, ranges.shape[-1]), lambda i, n, b: (b, last - i, 0)))]

    def tokens_by_key_block(self) -> list[Operand]:
        """The tokens of all queries and of a key block, then the ranges of query blocks that it visits."""
        block_spec = pl.BlockSpec((None, self.tile.kv), lambda j, n, b: (b, j))
        queries = self._queries, (_whole_row(self.q_padded),) * len(self._queries)
        keys = self._keys, (block_spec,) * len(self._keys)
        ranges = visible_query_ranges(*self._token_blocks, self.request.window)
        return [queries, keys, (ranges, pl.BlockSpec((None, None, ranges.shape[-1]), lambda j, n, b: (b, j, 0)))]

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
            request.scale, request.window, request.softcap, request.reaches,
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
