"""Tensors on their way from arrays, which may be spread over the devices of many processes, to a safetensors file.

They go block by block: no array is ever gathered whole, on the host or on a device. Where an array is spread every
process takes part in every block, and one of them writes it.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import math
import os
import struct
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import NamedSharding, PartitionSpec

from meshtune.model.in_use import here
from meshtune.weights.row_order import RowOrder, between, joined
from meshtune.weights.safetensors_files import TensorInfo, TensorReader
from meshtune.weights.slots import blocks

ST_DTYPES = {"float32": "F32", "bfloat16": "BF16", "float16": "F16"}


@dataclasses.dataclass(frozen=True)
class Tensor:
    """One tensor of a file: `leaf`, or row `row` of a stacked leaf, in `dtype`, with the file's `order` of rows."""

    name: str
    leaf: Any
    row: int | None
    dtype: str
    order: RowOrder | None = None

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.leaf.shape if self.row is None else self.leaf.shape[1:])

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * jnp.dtype(self.dtype).itemsize


@dataclasses.dataclass(frozen=True)
class Block:
    """Rows of a tensor that travel together: `rows` from `start` on of each of the `parts` its first axis is split in.

    So a device cuts its share out of what it holds, and only the block itself goes from device to device.
    """

    start: int
    rows: int
    parts: int
    stride: int

    @property
    def ranges(self) -> list[tuple[int, int]]:
        """[start, stop) of each part, in rows of the tensor."""
        starts = [part * self.stride + self.start for part in range(self.parts)]
        return [(start, start + self.rows) for start in starts]


def blocks_of(tensor: Tensor) -> Iterator[Block]:
    """The blocks of a tensor, each of at most BLOCK_BYTES (or one row of each part)."""
    parts, _, _ = _split(tensor)
    first, *rest = tensor.shape
    size = parts * math.prod(rest) * jnp.dtype(tensor.dtype).itemsize
    for start, stop in blocks((first // parts, size), 1):
        yield Block(start, stop - start, parts, first // parts)


def fetch(tensor: Tensor, block: Block, keep: bool = True) -> np.ndarray | None:
    """A block [parts, rows, ...] in the tensor's dtype on the host, on processes that `keep` it; else None.

    A collective operation where the array is spread: all its processes call this for the same blocks in turn.
    """
    _, split, whole = _split(tensor)
    row = () if tensor.row is None else (tensor.row,)
    at = np.asarray((*row, 0, block.start, *(0,) * (len(tensor.shape) - 1)), np.int32)
    shape = {"stacked": tensor.row is not None, "parts": block.parts, "rows": block.rows}
    found: jax.Array = _cut(tensor.leaf, at, **shape, dtype=tensor.dtype, split=split, whole=whole)
    if not keep:
        found.block_until_ready()  # else blocks that nobody here wants would queue up on the device
        return None
    return np.asarray(found.addressable_data(0)).reshape(block.parts, block.rows, *tensor.shape[1:])


def _split(tensor: Tensor) -> tuple[int, NamedSharding | None, NamedSharding | None]:
    """(parts of the first axis, the sharding with that axis as parts x rows, the same on every device)."""
    sharding = getattr(tensor.leaf, "sharding", None)
    if not isinstance(sharding, NamedSharding) or sharding.mesh.size == 1:
        assert sharding is None or len(sharding.device_set) == 1, f"{tensor.name} lies on devices without a mesh"
        return 1, None, None
    mesh, lead = sharding.mesh, 0 if tensor.row is None else 1
    spec = (*sharding.spec, *(None,) * (tensor.leaf.ndim - len(sharding.spec)))
    assert lead == 0 or spec[0] is None, f"{tensor.name}: layers are not split over devices"
    names = () if spec[lead] is None else (spec[lead],) if isinstance(spec[lead], str) else tuple(spec[lead])
    parts = math.prod(mesh.shape[name] for name in names)
    split = PartitionSpec(*spec[: lead + 1], None, *spec[lead + 1 :])
    return parts, NamedSharding(mesh, split), NamedSharding(mesh, PartitionSpec())


@functools.partial(jax.jit, static_argnames=("stacked", "parts", "rows", "dtype", "split", "whole"))
def _cut(
    leaf: jax.Array,
    at: jax.Array,
    *,
    stacked: bool,
    parts: int,
    rows: int,
    dtype: str,
    split: NamedSharding | None,
    whole: NamedSharding | None,
) -> jax.Array:
    lead = int(stacked)
    *stack, first = leaf.shape[: lead + 1]
    rest = leaf.shape[lead + 1 :]
    leaf = leaf.reshape(*stack, parts, first // parts, *rest)
    if split is not None:
        leaf = lax.with_sharding_constraint(leaf, split)
    block = lax.dynamic_slice(leaf, tuple(at[i] for i in range(leaf.ndim)), (*(1,) * lead, parts, rows, *rest))
    block = here(block)
    # The barrier keeps float32 -> bfloat16 -> float32 from being simplified away by a caller that fuses this.
    block = lax.optimization_barrier(block.astype(dtype))
    return block if whole is None else lax.with_sharding_constraint(block, whole)


def write_file(file: Path, tensors: list[Tensor], metadata: dict[str, str], *, mine: bool = True) -> Iterator[int]:
    """Writes one safetensors file (https://huggingface.co/docs/safetensors); yields the bytes of every block.

    Only the process whose file is `mine` writes. If it cannot, it still takes part in every block before it raises the
    OSError, so that no other process waits for it.
    """
    output = _Output(file, header(tensors, metadata)) if mine else None
    try:
        for tensor, at in zip(tensors, _offsets(tensors), strict=True):
            row_bytes = tensor.nbytes // tensor.shape[0] if tensor.shape[0] else 0
            for block in blocks_of(tensor):
                found = fetch(tensor, block, keep=output is not None and output.error is None)
                if output is not None and found is not None:
                    for (start, _), part in zip(block.ranges, found, strict=True):
                        for run in between(tensor.order, start, start + len(part)):
                            rows = part[run.memory - start : run.memory - start + run.rows]
                            output.write(at + run.file * row_bytes, rows)
                yield block.parts * block.rows * row_bytes
    finally:
        if output is not None:
            output.close()
    if output is not None and output.error is not None:
        raise output.error


def header(tensors: list[Tensor], metadata: dict[str, str]) -> bytes:
    """What stands before the data of a file of these tensors, its length included."""
    entries: dict[str, Any] = {"__metadata__": metadata}
    for tensor, at in zip(tensors, _offsets(tensors), strict=True):
        offsets = [at, at + tensor.nbytes]
        entries[tensor.name] = {
            "dtype": ST_DTYPES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": offsets,
        }
    text = json.dumps(entries, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)  # the data starts at a multiple of eight bytes
    return struct.pack("<Q", len(text)) + text


def _offsets(tensors: list[Tensor]) -> list[int]:
    at, offsets = 0, []
    for tensor in tensors:
        offsets.append(at)
        at += tensor.nbytes
    return offsets


class _Output:
    """A file being written. The first error is kept, and nothing is written after it."""

    def __init__(self, file: Path, start: bytes):
        self.error: OSError | None = None
        self._descriptor, self._data = -1, len(start)
        try:
            self._descriptor = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o666)
        except OSError as error:
            self.error = error
        self._put(0, memoryview(start))

    def write(self, at: int, array: np.ndarray) -> None:
        """Puts an array's bytes `at` bytes behind the start of the data."""
        self._put(self._data + at, np.ascontiguousarray(array).reshape(-1).view("u1").data)

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


def first_difference(
    tensors: Iterable[Tensor], found: dict[str, TensorInfo], mine: set[str]
) -> tuple[Tensor, int, np.ndarray, np.ndarray] | None:
    """Compares arrays, bit for bit, with what was written of them in files: (tensor, first row, rows, rows in the file)
    of the first block that differs, or None.

    Of tensors spread over processes each compares those whose name is `mine`, and takes part in all.
    """
    different = None
    with TensorReader() as reader:
        for tensor in tensors:
            for block in blocks_of(tensor):
                trained = fetch(tensor, block, keep=different is None and tensor.name in mine)
                if trained is None:
                    continue
                for (start, stop), ours in zip(block.ranges, trained, strict=True):
                    info, runs = found[tensor.name], between(tensor.order, start, stop)
                    theirs = joined([reader.rows(info, run.file, run.file + run.rows) for run in runs])
                    if ours.dtype != theirs.dtype or ours.tobytes() != theirs.tobytes():
                        different = different or (tensor, start, ours, theirs)
    return different
