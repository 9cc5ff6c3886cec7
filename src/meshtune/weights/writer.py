"""Writes arrays, which may be sharded over the devices of many processes, into safetensors files.

Arrays are transferred block by block: none is ever gathered whole, on the host or on a device. Every process takes part
in every block of a sharded array, and one of them writes it.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import NamedSharding, PartitionSpec

from meshtune.families.tensors import Range, Shape, View
from meshtune.model.gather import to_device
from meshtune.weights.read_plan import arrange_numbers, scatter_numbers, tensor_boxes
from meshtune.weights.safetensors_files import (
    BLOCK_BYTES,
    DTYPES,
    FileTensor,
    Part,
    StoredTensor,
    Tensor,
    TensorInfo,
    header,
    offsets,
)
from meshtune.weights.shards import row_ranges
from meshtune.weights.tensor_reader import RUN_BYTES, TensorReader, run_axis, run_offsets


@dataclasses.dataclass(frozen=True)
class Block:
    """Rows of a part that travel together: `rows` from `start` on of each of the `shares` its first axis is split in.

    So a device cuts its share out of what it holds, and only the block itself goes from device to device.
    """

    start: int
    rows: int
    shares: int
    stride: int

    @property
    def ranges(self) -> list[tuple[int, int]]:
        """[start, stop) of each share, in rows of the part."""
        starts = [share * self.stride + self.start for share in range(self.shares)]
        return [(start, start + self.rows) for start in starts]


def blocks_of(part: Part, dtype: str) -> Iterator[Block]:
    """The blocks of a part, each of at most BLOCK_BYTES (or one row of each share)."""
    *index_shares, shares = _split(part).shares
    first, *inner = part.view.shape or (1,)
    size = math.prod(index_shares) * shares * math.prod(inner) * jnp.dtype(dtype).itemsize
    for start, stop in row_ranges((first // shares, size), 1, BLOCK_BYTES):
        yield Block(start, stop - start, shares, first // shares)


def fetch(part: Part, block: Block, dtype: str, keep: bool = True) -> np.ndarray | None:
    """A block [shares, rows, ...] of a part in `dtype` on the host, on processes that `keep` it; else None.

    A collective operation where the array is spread: all its processes call this for the same blocks in turn.
    """
    split = _split(part)
    starts: list[int] = []
    chosen: list[int] = []
    for i, n, shares in zip(part.index, part.leaf.shape, split.shares, strict=False):
        starts += [0, i % (n // shares)]
        chosen += [i // (n // shares), 0]
    inner = part.view.shape[1:]
    at = np.asarray((*starts, 0, block.start, *(0,) * len(inner)), np.int32)
    numbers: jax.Array = _cut(part.leaf, at, lead=len(part.index), rows=block.rows, dtype=dtype, split=split)
    if not keep:
        numbers.block_until_ready()  # else blocks that nobody here wants would queue up on the device
        return None
    return np.asarray(numbers.addressable_data(0))[tuple(chosen)].reshape(block.shares, block.rows, *inner)


@dataclasses.dataclass(frozen=True)
class Split:
    """How an array is split along the axes of a part's index and the part's first axis: into `shares` of each.

    `sharding` is that of the array with each of these axes as [shares, rows]; `replicated` has all of it on every
    device. Both are None for an array on one device.
    """

    shares: tuple[int, ...]
    sharding: NamedSharding | None
    replicated: NamedSharding | None


def _split(part: Part) -> Split:
    axes = len(part.index) + 1
    sharding = getattr(part.leaf, "sharding", None)
    if not isinstance(sharding, NamedSharding) or sharding.mesh.size == 1:
        assert sharding is None or len(sharding.device_set) == 1, "the array lies on devices without a mesh"
        return Split((1,) * axes, None, None)
    mesh = sharding.mesh
    spec = (*sharding.spec, *(None,) * (max(axes, part.leaf.ndim) - len(sharding.spec)))
    names = [() if entry is None else (entry,) if isinstance(entry, str) else tuple(entry) for entry in spec[:axes]]
    shares = tuple(math.prod(mesh.shape[name] for name in group) for group in names)
    split = PartitionSpec(*(axis for entry in spec[:axes] for axis in (entry, None)), *spec[axes:])
    return Split(shares, NamedSharding(mesh, split), NamedSharding(mesh, PartitionSpec()))


@functools.partial(jax.jit, static_argnames=("lead", "rows", "dtype", "split"))
def _cut(leaf: jax.Array, at: jax.Array, *, lead: int, rows: int, dtype: str, split: Split) -> jax.Array:
    shape: list[int] = []
    size: list[int] = []
    leaf_shape = leaf.shape if leaf.ndim > lead else (*leaf.shape, 1)
    for n, shares, count in zip(leaf_shape, split.shares, (*(1,) * lead, rows), strict=False):
        shape += [shares, n // shares]
        size += [shares, count]
    inner = leaf_shape[lead + 1 :]
    leaf = leaf.reshape(*shape, *inner)
    if split.sharding is not None:
        leaf = lax.with_sharding_constraint(leaf, split.sharding)
    block = to_device(lax.dynamic_slice(leaf, tuple(at[i] for i in range(leaf.ndim)), (*size, *inner)))
    # The barrier keeps float32 -> bfloat16 -> float32 from being simplified away by a caller that fuses this.
    block = lax.optimization_barrier(block.astype(dtype))
    return block if split.replicated is None else lax.with_sharding_constraint(block, split.replicated)


def write_file(
    file: Path, tensors: Sequence[FileTensor], metadata: dict[str, str], *, writes: bool = True
) -> Iterator[int]:
    """Writes one safetensors file (https://huggingface.co/docs/safetensors); yields the bytes of every block.

    Only the process with `writes` opens the file, and those that stored tensors are copied from. If it fails, it still
    takes part in every block before it raises the OSError, so that no other process waits for it.
    """
    output = _Output(file, header(tensors, metadata)) if writes else None
    try:
        for tensor, offset in zip(tensors, offsets(tensors), strict=True):
            if isinstance(tensor, StoredTensor):
                yield from _copy(tensor, output, offset)
                continue
            itemsize = jnp.dtype(tensor.dtype).itemsize
            for part in tensor.parts:
                row_bytes = math.prod(part.view.shape[1:]) * itemsize
                for block in blocks_of(part, tensor.dtype):
                    fetched = fetch(part, block, tensor.dtype, keep=output is not None and output.error is None)
                    if output is not None and fetched is not None:
                        for (start, stop), rows in zip(block.ranges, fetched, strict=True):
                            _write_rows(output, offset, part.view, (start, stop), rows)
                    yield block.shares * block.rows * row_bytes
    finally:
        if output is not None:
            output.close()
    if output is not None and output.error is not None:
        raise output.error


def _copy(tensor: StoredTensor, output: _Output | None, offset: int) -> Iterator[int]:
    """Copies a stored tensor to `offset` bytes into the data of a file; yields the bytes of every block."""
    with TensorReader() as reader:
        for start, length in tensor.blocks():
            if output is not None:
                output.write(offset + start, memoryview(reader.read(tensor.info, start, length)))
            yield length


def _write_rows(output: _Output, offset: int, view: View, rows: tuple[int, int], numbers: np.ndarray) -> None:
    """Writes rows of a view's part where the view has them in its tensor, which starts `offset` bytes into the data."""
    if not view.shape:
        numbers = numbers.reshape(())
    for ranges, target in tensor_boxes(view, _box_of_rows(view, rows)):
        output.write_box(offset, view.split_shape, ranges, scatter_numbers(view, ranges, numbers[target]))


def _box_of_rows(view: View, rows: tuple[int, int]) -> tuple[tuple[int, int], ...]:
    return (rows, *((0, n) for n in view.shape[1:])) if view.shape else ()


class _Output:
    """A file being written. The first error is kept, and nothing is written after it."""

    def __init__(self, file: Path, start: bytes):
        self.error: OSError | None = None
        self._descriptor, self._data = -1, len(start)
        try:
            self._descriptor = os.open(file, os.O_RDWR | os.O_CREAT | os.O_TRUNC, 0o666)
        except OSError as error:
            self.error = error
        self._put(0, memoryview(start))

    def write(self, offset: int, content: memoryview) -> None:
        """Writes bytes `offset` bytes into the data."""
        self._put(self._data + offset, content)

    def write_box(self, offset: int, shape: Shape, ranges: Sequence[Range], numbers: np.ndarray) -> None:
        """Writes a box of a tensor of `shape` that starts `offset` bytes into the data. Where the box's runs of bytes
        are too short to be written one by one, what lies between them is read, and written again."""
        itemsize = numbers.dtype.itemsize
        axis = run_axis(shape, ranges)
        counts = numbers.shape
        length = math.prod(counts[axis:]) * itemsize
        if math.prod(counts[:axis]) == 1 or length >= RUN_BYTES:
            content = np.ascontiguousarray(numbers).reshape(-1).view("u1").data
            for n, at in enumerate(run_offsets(shape, ranges, axis)):
                self._put(self._data + offset + at * itemsize, content[n * length : (n + 1) * length])
            return
        axis = next(n for n, count in enumerate(counts) if count > 1)
        start, stop, step = ranges[axis]
        enclosing = [*ranges[:axis], (start, stop, 1), *((0, n, 1) for n in shape[axis + 1 :])]
        enclosed = np.zeros((stop - start, *shape[axis + 1 :]), numbers.dtype)
        (first,) = run_offsets(shape, enclosing, axis)
        at = self._data + offset + first * itemsize
        self._get(at, enclosed.reshape(-1).view("u1").data)
        inner = tuple(slice(*entry) for entry in ranges[axis + 1 :])
        enclosed[(slice(None, None, step), *inner)] = numbers[(0,) * axis]
        self._put(at, enclosed.reshape(-1).view("u1").data)

    def close(self) -> None:
        """Everything to disk, and out of the cache, so that a verification reads the disk where it can."""
        if self._descriptor < 0:
            return
        try:
            os.fsync(self._descriptor)
            if hasattr(os, "posix_fadvise"):
                os.posix_fadvise(self._descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        except OSError as error:
            self.error = self.error or error
        os.close(self._descriptor)

    def _put(self, at: int, content: memoryview) -> None:
        try:
            while len(content) and self.error is None:
                done = os.pwrite(self._descriptor, content, at)
                at, content = at + done, content[done:]
        except OSError as error:
            self.error = error

    def _get(self, at: int, into: memoryview) -> None:
        """Reads the written bytes; the part beyond the end of the file is left unchanged."""
        try:
            while len(into) and self.error is None and (done := os.preadv(self._descriptor, [into], at)):
                at, into = at + done, into[done:]
        except OSError as error:
            self.error = error


def first_difference(
    tensors: Sequence[Tensor],
    infos: Mapping[str, TensorInfo],
    local: set[str],
    progress: Callable[[int, int], None] | None = None,
) -> tuple[Tensor, int, np.ndarray, np.ndarray] | None:
    """Compares arrays, bit for bit, with their tensors in files: (tensor, first row, rows, rows in the file)
    of the first block that differs, or None. Rows are those of the part of a leaf.

    Of tensors spread over processes each compares those whose name is in `local`, and helps to transfer all.
    """
    different = None
    done, total = 0, sum(tensor.nbytes for tensor in tensors)
    with TensorReader() as reader:
        for tensor in tensors:
            done += tensor.nbytes
            for part, block in _all_blocks(tensor):
                fetched = fetch(part, block, tensor.dtype, keep=different is None and tensor.name in local)
                if fetched is None:
                    continue
                for (start, stop), expected in zip(block.ranges, fetched, strict=True):
                    box = _box_of_rows(part.view, (start, stop))
                    stored = read_box(reader, infos[tensor.name], part.view, box).reshape(expected.shape)
                    if expected.dtype != stored.dtype or expected.tobytes() != stored.tobytes():
                        different = different or (tensor, start, expected, stored)
            if progress:
                progress(done, total)
    return different


def _all_blocks(tensor: Tensor) -> Iterator[tuple[Part, Block]]:
    for part in tensor.parts:
        for block in blocks_of(part, tensor.dtype):
            yield part, block


def read_box(reader: TensorReader, info: TensorInfo, view: View, box: tuple[tuple[int, int], ...]) -> np.ndarray:
    """A box of a view's part, read from the file of its tensor, in the file's dtype."""
    parts = [
        (target, arrange_numbers(view, reader.box(info, view.split_shape, ranges)))
        for ranges, target in tensor_boxes(view, box)
    ]
    if len(parts) == 1:
        return parts[0][1]
    numbers = np.empty([stop - start for start, stop in box], DTYPES[info.dtype])
    for target, part in parts:
        numbers[target] = part
    return numbers
