"""Reads tensors, or boxes of them, from files by byte range, and decodes published codes. On slow shared storage one
process of a group reads and broadcasts.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import math
import os
import threading
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec

from meshtune.families.tensors import Range, Shape, split_dimensions
from meshtune.quantize.published.scheme import Box
from meshtune.weights.safetensors_files import BLOCK_BYTES, DTYPES, TensorInfo, broken

GAP = 64  # numbers along a dimension that are rather decoded in vain than by another call


class Reader(Protocol):
    """Reads boxes of tensors (weights.tensor_reader.TensorReader)."""

    def box(self, info: TensorInfo, shape: Shape, ranges: Sequence[Range]) -> np.ndarray: ...


@dataclasses.dataclass(frozen=True)
class StoredParts:
    """The `scheme.Parts` of one weight, read from their files."""

    infos: Mapping[str, TensorInfo]
    reader: Reader

    def __contains__(self, role: str) -> bool:
        return role in self.infos

    def shape(self, role: str) -> Shape:
        return self.infos[role].shape

    def dtype(self, role: str) -> str:
        return self.infos[role].dtype

    def box(self, role: str, box: Box) -> np.ndarray:
        info = self.infos[role]
        return self.reader.box(info, info.shape, [(start, stop, 1) for start, stop in box])

    def whole(self, role: str) -> np.ndarray:
        return self.box(role, tuple((0, n) for n in self.shape(role)))


def decode_box(reader: Reader, info: TensorInfo, shape: Shape, ranges: Sequence[Range]) -> np.ndarray:
    """A box of a packed tensor seen in another shape, as TensorReader.box gives it."""
    assert info.packed is not None
    packed = info.packed
    parts = StoredParts(dict(packed.parts), reader)
    read = packed.scheme.decode if packed.content == "numbers" else getattr(packed.scheme, packed.content)
    counts = [len(range(*entry)) for entry in ranges]
    runs = [
        list(_runs(_positions([shape[n] for n in group], [ranges[n] for n in group])))
        for group in split_dimensions(shape, info.shape)
    ]
    pieces: list[np.ndarray] = []
    for combination in itertools.product(*runs):
        box = tuple((int(run[0]), int(run[-1]) + 1) for run in combination)
        numbers = read(parts, box)
        for axis, run in enumerate(combination):
            if len(run) < run[-1] + 1 - run[0]:
                numbers = np.take(numbers, run - run[0], axis=axis)
        pieces.append(numbers)
    return np.ascontiguousarray(_join_pieces(pieces, [len(along) for along in runs]).reshape(counts))


def _positions(sizes: Sequence[int], ranges: Sequence[Range]) -> np.ndarray:
    """Where the indices `ranges` of dimensions of `sizes` are, counted as one dimension: ascending."""
    positions = np.zeros(1, np.int64)
    for size, entry in zip(sizes, ranges, strict=True):
        positions = (positions[:, None] * size + np.arange(*entry)).reshape(-1)
    return positions


def _runs(positions: np.ndarray) -> list[np.ndarray]:
    """Positions in runs without large gaps."""
    return np.split(positions, np.flatnonzero(np.diff(positions) > GAP) + 1)


def _join_pieces(pieces: list[np.ndarray], counts: Sequence[int]) -> np.ndarray:
    """Pieces of an array, in the order of a product of `counts` pieces of each dimension, as one."""
    for axis in reversed(range(len(counts))):
        size = counts[axis]
        if size > 1:
            pieces = [np.concatenate(pieces[n : n + size], axis=axis) for n in range(0, len(pieces), size)]
    assert len(pieces) == 1
    return pieces[0]


# A shorter run of bytes is not worth a read of its own, which costs some 1.5 microseconds: in these 16 KB of whole rows
# are copied from the page cache, and storage hands out whole pages anyway.
RUN_BYTES = 1024
ALIGNMENT = 64


class TensorReader:
    """Reads tensors, or boxes of them, into host arrays; keeps files open until closed. Threads may share one.

    Bytes are read, not mapped: pages of a mapped file count as the process's own memory. `bytes` and `files` count
    the bytes read and the files opened; each is opened once.
    """

    def __init__(self):
        self._open: dict[Path, int] = {}
        self._lock = threading.Lock()
        self.bytes = self.files = 0

    def __enter__(self) -> TensorReader:
        return self

    def __exit__(self, *_: object) -> None:
        for descriptor in self._open.values():
            os.close(descriptor)
        self._open.clear()

    def rows(self, info: TensorInfo, start: int, stop: int) -> np.ndarray:
        """Rows start..stop of the tensor's first axis, in the file's own dtype."""
        return self.box(info, info.shape, [(start, stop, 1), *((0, n, 1) for n in info.shape[1:])])

    def tensor(self, info: TensorInfo) -> np.ndarray:
        """The whole tensor."""
        return self.box(info, info.shape, [(0, n, 1) for n in info.shape])

    def box(self, info: TensorInfo, shape: Shape, ranges: Sequence[Range]) -> np.ndarray:
        """A box of the tensor seen in another shape: (start, stop, step) of each dimension of `shape`."""
        if info.packed is not None:
            return decode_box(self, info, shape, ranges)
        numbers = aligned_empty(tuple(len(range(*entry)) for entry in ranges), DTYPES[info.dtype])
        self.read_into(numbers, info, shape, ranges)
        return numbers

    def read_into(self, numbers: np.ndarray, info: TensorInfo, shape: Shape, ranges: Sequence[Range]) -> None:
        """Fills a contiguous array with a box of the tensor. Reads only the box; where its runs are so short that this
        would take longer than reading what lies between them, reads that as well (`bytes` counts it) and cuts."""
        if info.packed is not None:
            numbers[...] = decode_box(self, info, shape, ranges)
            return
        itemsize = DTYPES[info.dtype].itemsize
        axis = run_axis(shape, ranges)
        counts = [len(range(*entry)) for entry in ranges]
        length = math.prod(counts[axis:]) * itemsize
        if math.prod(counts[:axis]) == 1 or length >= RUN_BYTES:
            content = numbers.reshape(-1).view(np.uint8).data
            for n, offset in enumerate(run_offsets(shape, ranges, axis)):
                self._fill(info, content[n * length : (n + 1) * length], info.start + offset * itemsize)
            return
        axis = next(n for n, count in enumerate(counts) if count > 1)
        start, stop, step = ranges[axis]
        slab = math.prod(shape[axis + 1 :]) * itemsize * step
        several = max(1, BLOCK_BYTES // slab)
        inner = tuple(slice(*entry) for entry in ranges[axis + 1 :])
        for first in range(0, counts[axis], several):
            low, high = start + first * step, min(stop, start + (first + several) * step)
            part = numbers[(0,) * axis + (slice(first, first + several),)]
            if several == 1 and slab > BLOCK_BYTES:
                narrowed = [*ranges[:axis], (low, low + 1, 1), *ranges[axis + 1 :]]
                self.read_into(part, info, shape, narrowed)
                continue
            enclosing = [*ranges[:axis], (low, high, 1), *((0, n, 1) for n in shape[axis + 1 :])]
            part[...] = self.box(info, shape, enclosing)[(0,) * axis][(slice(None, None, step), *inner)]

    def read(self, info: TensorInfo, offset: int, length: int) -> bytes:
        """`length` raw bytes of the tensor from byte `offset`."""
        block = bytearray(length)
        self._fill(info, memoryview(block), info.start + offset)
        return bytes(block)

    def _fill(self, info: TensorInfo, into: memoryview, at: int) -> None:
        with self._lock:
            if info.file not in self._open:
                self._open[info.file] = os.open(info.file, os.O_RDONLY)
                self.files += 1
            descriptor = self._open[info.file]
            self.bytes += len(into)
        done = 0
        while done < len(into):
            count = os.preadv(descriptor, [into[done:]], at + done)
            if count == 0:
                raise broken(info.file, "it became shorter while it was read")
            done += count


def aligned_empty(shape: Shape, dtype: np.dtype) -> np.ndarray:
    """An uninitialised array that a CPU device can use directly: JAX copies arrays not aligned to 64 bytes."""
    size = math.prod(shape) * dtype.itemsize
    content = np.empty(size + ALIGNMENT, np.uint8)
    start = -content.ctypes.data % ALIGNMENT
    return content[start : start + size].view(dtype).reshape(shape)


def run_axis(shape: Shape, ranges: Sequence[Range]) -> int:
    """The first dimension such that for each index of those before it a box is contiguous."""
    axis = len(shape)
    while axis > 0 and ranges[axis - 1] == (0, shape[axis - 1], 1):
        axis -= 1
    if axis > 0 and (ranges[axis - 1][2] == 1 or len(range(*ranges[axis - 1])) == 1):
        axis -= 1
    return axis


def run_offsets(shape: Shape, ranges: Sequence[Range], axis: int) -> Iterator[int]:
    """Where each run of a box starts, in numbers from the start of the tensor; `axis` is its `run_axis`."""
    strides = [math.prod(shape[n + 1 :]) for n in range(len(shape))]
    base = sum(entry[0] * stride for entry, stride in zip(ranges[axis:], strides[axis:], strict=True))
    for index in itertools.product(*(range(*entry) for entry in ranges[:axis])):
        yield base + sum(i * stride for i, stride in zip(index, strides, strict=False))


SMALLEST = 4096  # blocks are padded to powers of two, so that there are few programs


class BroadcastReader:
    """Broadcasts bytes from the first process of a group to all of them. Every transfer is collective: all processes
    of the group must make the same calls in the same order.

    A transfer is a sum over the group, to which all but the reader contribute zeros, on one device of each process.
    Host and device memory: two blocks.
    """

    def __init__(self, devices: Sequence[jax.Device]):
        self._device = next(device for device in devices if device.process_index == jax.process_index())
        self.reads = self._device == devices[0]
        self._members = len(devices)
        mesh = Mesh(np.array(devices), ("process",))
        self._rows = NamedSharding(mesh, PartitionSpec("process"))
        self._sum = jax.jit(
            lambda x: jnp.sum(x, 0, dtype=jnp.uint32), out_shardings=NamedSharding(mesh, PartitionSpec())
        )

    def broadcast(self, block: np.ndarray | None, size: int) -> np.ndarray:
        """The reader's block of `size` bytes, as uint8, on every process; the others pass None."""
        assert (block is not None) == self.reads
        length = max(SMALLEST, 1 << (size - 1).bit_length()) // 4
        local = np.zeros((1, length), np.uint32)
        if block is not None:
            local.view(np.uint8)[0, :size] = block.reshape(-1).view(np.uint8)
        shape = (self._members, length)
        rows = jax.make_array_from_single_device_arrays(shape, self._rows, [jax.device_put(local, self._device)])
        del local
        (shard,) = self._sum(rows).addressable_shards
        return np.asarray(shard.data).view(np.uint8)[:size]

    def broadcast_json(self, value: object) -> Any:
        """A JSON value of the reader, on every process; the others pass None."""
        text = np.frombuffer(json.dumps(value).encode(), np.uint8) if self.reads else None
        length = None if text is None else np.array([text.size], np.int64)
        size = int(self.broadcast(length, 8).view(np.int64)[0])
        return json.loads(self.broadcast(text, size).tobytes())


def neighbours(devices: Sequence[jax.Device], processes: int | None = None) -> list[list[int]]:
    """Groups of `processes` neighbouring processes of a job (None: all of them)."""
    ranks = sorted({device.process_index for device in devices})
    size = processes or len(ranks)
    return [ranks[start : start + size] for start in range(0, len(ranks), size)]


def replica_groups(mesh: Mesh | AbstractMesh) -> list[list[int]]:
    """Groups of processes whose devices hold the same shards, since they differ in dp only."""
    axis = mesh.axis_names.index("dp")
    places: dict[int, set[tuple[int, ...]]] = {}
    for index, device in np.ndenumerate(np.asarray(mesh.devices)):
        places.setdefault(device.process_index, set()).add(index[:axis] + index[axis + 1 :])
    groups: dict[frozenset[tuple[int, ...]], list[int]] = {}
    for process in sorted(places):
        groups.setdefault(frozenset(places[process]), []).append(process)
    return list(groups.values())


def broadcast_reader(
    devices: Sequence[jax.Device], groups: Sequence[Sequence[int]]
) -> tuple[BroadcastReader | None, list[jax.Device]]:
    """(the reader of this process's group, all devices of the group), of the `devices` of a job.

    The first process of a group reads. The reader is None where a process is a group by itself.
    """
    group = next(group for group in groups if jax.process_index() in group)
    first = [next(device for device in devices if device.process_index == number) for number in group]
    reader = BroadcastReader(first) if len(group) > 1 else None
    return reader, [device for device in devices if device.process_index in group]
