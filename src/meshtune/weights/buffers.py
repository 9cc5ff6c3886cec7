"""The memory of one device's shard of a leaf while it is being filled."""

from __future__ import annotations

import ctypes
import functools
import math
import os
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Protocol

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
from jax import lax
from jax.sharding import SingleDeviceSharding

from meshtune.weights.read_plan import Cut

GROUP_BYTES = 256 << 20
BFLOAT16 = np.dtype(ml_dtypes.bfloat16)


class Buffer(Protocol):
    """A shard that can be written in part; `array` is the shard."""

    @property
    def array(self) -> jax.Array: ...

    def put(self, cut: Cut, block: np.ndarray) -> None:
        """Writes what a cut takes of a block, cast to the shard's dtype."""
        ...

    def put_at(self, at: tuple[int, ...], numbers: np.ndarray | jax.Array) -> None:
        """Writes a box of the shard whose first number is at index `at`; missing leading dimensions are of size one."""
        ...


class HostBuffer:
    """A shard in the memory of a CPU device, which the host writes directly. Threads may write different parts."""

    def __init__(self, array: jax.Array):
        self.array = array.block_until_ready()
        # np.asarray would give a read-only view and keep a reference that prevents a later donation. The memory is
        # XLA's own and nothing has read it yet.
        content = (ctypes.c_uint8 * array.nbytes).from_address(array.unsafe_buffer_pointer())
        self.numbers = np.ctypeslib.as_array(content).view(array.dtype).reshape(array.shape)

    def put(self, cut: Cut, block: np.ndarray) -> None:
        copy_cast(cut.within(self.numbers), cut.of(block))

    def put_at(self, at: tuple[int, ...], numbers: np.ndarray | jax.Array) -> None:
        numbers = np.asarray(numbers)
        shape = (1,) * (len(at) - numbers.ndim) + numbers.shape
        target = self.numbers[tuple(slice(start, start + n) for start, n in zip(at, shape, strict=True))]
        assert target.shape == shape, f"a box of {shape} at {at} is not in the shard of {self.numbers.shape}"
        copy_cast(target, numbers.reshape(shape))


class DeviceBuffer:
    """A shard in the memory of an accelerator, updated in place by a compiled program."""

    def __init__(self, array: jax.Array):
        self.array = array
        self._device = next(iter(array.devices()))
        self._lock = threading.Lock()

    def put(self, cut: Cut, block: np.ndarray) -> None:
        for at, numbers in cut.runs(block):
            self.put_at(at, np.ascontiguousarray(numbers))

    def put_at(self, at: tuple[int, ...], numbers: np.ndarray | jax.Array) -> None:
        block = jax.device_put(numbers, self._device)
        with self._lock:
            self.array = update_slice(self.array, block, np.asarray(at, np.int32))
            # One block in flight: an asynchronous queue of them would hold them all.
            self.array.block_until_ready()


def buffer_for(array: jax.Array) -> Buffer:
    """The buffer that writes into an array just allocated on one device."""
    (device,) = array.devices()
    return HostBuffer(array) if device.platform == "cpu" else DeviceBuffer(array)


def copy_cast(target: np.ndarray, numbers: np.ndarray) -> None:
    """target[...] = numbers, cast to the target's dtype."""
    if target.dtype == numbers.dtype:
        # As integers: numpy copies them without holding the interpreter's lock, and faster than dtypes of extensions.
        bits = np.dtype(f"u{target.dtype.itemsize}")
        np.copyto(target.view(bits), numbers.view(bits))
    elif numbers.dtype == BFLOAT16 and target.dtype == np.float32:
        np.left_shift(numbers.view(np.uint16), 16, out=target.view(np.uint32), dtype=np.uint32)
    else:
        target[...] = numbers.astype(target.dtype)


@functools.partial(jax.jit, donate_argnums=0)
def update_slice(leaf: jax.Array, block: jax.Array, at: jax.Array) -> jax.Array:
    """`leaf` with `block`, cast to its dtype, written at index `at` (int32, one a dimension of leaf), in place."""
    block = block.astype(leaf.dtype).reshape((1,) * (leaf.ndim - block.ndim) + block.shape)
    return lax.dynamic_update_slice(leaf, block, tuple(at[i] for i in range(leaf.ndim)))


def allocate(arrays: dict[str, tuple[tuple[int, ...], str]], device: jax.Device | None = None) -> dict[str, jax.Array]:
    """The memory of some leaves (path -> shape and dtype), all zero, on one device (None: the default device)."""
    sharding = None if device is None else SingleDeviceSharding(device)

    def zeros(paths: tuple[str, ...]) -> dict[str, jax.Array]:
        return {path: jnp.zeros(*arrays[path]) for path in paths}

    program = jax.jit(zeros, static_argnums=0, out_shardings=sharding)
    # One program for many leaves: a compilation for every shape would take longer than reading a small model. Several
    # for a large one: the first write to a page of host memory costs three times what reading it from a file does.
    groups = _groups({path: math.prod(shape) * jnp.dtype(dtype).itemsize for path, (shape, dtype) in arrays.items()})
    with ThreadPoolExecutor(len(groups), "allocate") as threads:
        parts = list(threads.map(lambda paths: jax.block_until_ready(program(tuple(paths))), groups))
    return {path: array for part in parts for path, array in part.items()}


def _groups(sizes: dict[str, int]) -> list[list[str]]:
    """Leaves in groups of about equal bytes: one for each processor, but none for less than GROUP_BYTES."""
    count = max(1, min(os.cpu_count() or 1, 8, sum(sizes.values()) // GROUP_BYTES))
    groups: list[list[str]] = [[] for _ in range(count)]
    filled = [0] * count
    for path in sorted(sizes, key=lambda path: -sizes[path]):
        smallest = filled.index(min(filled))
        groups[smallest].append(path)
        filled[smallest] += sizes[path]
    return [group for group in groups if group]


def row_ranges(shape: tuple[int, ...], itemsize: int, limit: int) -> list[tuple[int, int]]:
    """Ranges [start, stop) of a tensor's first axis, each at most `limit` bytes (or one row), and as equal as can be:
    every other size is another program to compile.
    """
    row_bytes = max(1, math.prod(shape[1:]) * itemsize)
    largest = max(1, limit // row_bytes)
    rows = -(-shape[0] // -(-shape[0] // largest)) if shape[0] else largest
    return [(start, min(shape[0], start + rows)) for start in range(0, shape[0], rows)]
