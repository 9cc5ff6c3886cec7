"""Reads tensors, or boxes of them, from safetensors files by byte range."""

from __future__ import annotations

import itertools
import math
import os
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np

from meshtune.families.tensors import Range, Shape
from meshtune.weights.decode import decode_box
from meshtune.weights.safetensors_files import BLOCK_BYTES, DTYPES, TensorInfo, broken

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
