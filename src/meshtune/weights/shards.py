"""Fills the shards of a model's leaves on this process's devices from files, block by block, quantised leaves too."""

from __future__ import annotations

import ctypes
import dataclasses
import functools
import math
import os
import threading
from collections import deque
from collections.abc import Callable, Collection, Iterable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Protocol

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
from jax import lax
from jax import make_array_from_single_device_arrays as from_shards
from jax.sharding import SingleDeviceSharding

from meshtune.arrays.spec import ArraySpec
from meshtune.arrays.tree import Leaves
from meshtune.families.tensors import TensorMap, by_name
from meshtune.mesh.layout import Layout
from meshtune.mesh.placement import concrete_sharding, host_sharding
from meshtune.quantize.scales import twice_quantised
from meshtune.quantize.weight import QuantisedWeight, encode_blocks
from meshtune.weights.finite import check_finite, check_float16
from meshtune.weights.read_plan import Block, Box, Cut, Device, boxes, read_plan
from meshtune.weights.safetensors_files import BLOCK_BYTES, DTYPES, TensorInfo
from meshtune.weights.tensor_reader import BroadcastReader, TensorReader

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


class Shards:
    """The slices of every leaf that this process's devices hold, while they are being filled."""

    def __init__(
        self,
        arrays: Mapping[str, ArraySpec | QuantisedWeight],
        layout: Layout | None,
        devices: list[Device],
        waiting: Collection[str] = (),
    ):
        """`devices` are those whose shards are read; shards of other processes' devices are planned but not stored.

        `waiting` names arrays (by path, or path and field of a quantised weight) that are never on a device: they are
        filled on the host and moved, array by array, to pinned host memory.
        """
        self._arrays, self._layout, self._waiting = arrays, layout, frozenset(waiting)
        parts = {name: array for path, leaf in arrays.items() for name, array in parts_of(path, leaf).items()}
        self._shapes = {name: array.shape for name, array in parts.items()}
        self._shardings = {name: layout.of(array) if layout else None for name, array in parts.items()}
        self.boxes: dict[str, dict[Box, tuple[Device, ...]]] = {}  # slices in numbers, also where codes are packed
        shards: dict[Device, dict[str, tuple[tuple[int, ...], str]]] = {}
        for path, leaf in arrays.items():
            for name, array in parts_of(path, leaf).items():
                holders = boxes(array.shape, self._shardings[name], devices)
                local = {box: tuple(filter(_is_local, on)) for box, on in holders.items()}
                if name in (path, f"{path}/codes"):
                    per = 1 if isinstance(leaf, ArraySpec) else leaf.shape[-1] // array.shape[-1]
                    self.boxes[path] = {
                        (*box[:-1], (box[-1][0] * per, box[-1][1] * per)): on for box, on in local.items()
                    }
                for box, on in local.items():
                    for device in on:
                        shards.setdefault(device, {})[name] = (tuple(stop - start for start, stop in box), array.dtype)
        # Of each entry that is being read: (path, index) to [.., out, blocks].
        self._scales: dict[tuple[str, tuple[int, ...]], np.ndarray] = {}
        self._threads = ThreadPoolExecutor(len(shards), "load")
        self._buffers = {device: self._allocate(forms, device) for device, forms in shards.items()}

    def _allocate(self, forms: dict[str, tuple[tuple[int, ...], str]], device: Device) -> dict[str, Buffer]:
        on_device = {name: form for name, form in forms.items() if name not in self._waiting}
        on_host = {name: form for name, form in forms.items() if name in self._waiting}
        arrays = allocate(on_device, device) if on_device else {}
        arrays |= allocate(on_host, jax.local_devices(backend="cpu")[0]) if on_host else {}
        return {name: buffer_for(array) for name, array in arrays.items()}

    def is_quantised(self, path: str) -> bool:
        """Whether a leaf is read as a quantised weight."""
        return not isinstance(self._arrays[path], ArraySpec)

    def memory_of(self, block: Block, dtype: np.dtype) -> np.ndarray | None:
        """The shard's own memory as the array [*block.shape] that a block is read into, where the block goes unchanged,
        in one run, to one shard in host memory; else None."""
        if len(block.cuts) != 1 or len(block.cuts[0].devices) != 1:
            return None
        cut, (device,) = block.cuts[0], block.cuts[0].devices
        if self.is_quantised(cut.entry.path) or list(cut.entry.view.order) != list(range(len(block.shape))):
            return None
        buffer = self._buffers[device][cut.entry.path]
        if not isinstance(buffer, HostBuffer) or buffer.numbers.dtype != dtype:
            return None
        target = cut.within(buffer.numbers)
        return target if target.shape == block.shape and target.flags.c_contiguous else None

    def put(self, block: Block, numbers: np.ndarray) -> None:
        """Writes what this process's devices hold of a block. Waits until it is done."""
        if numbers.dtype == np.float64:  # JAX keeps no float64 unless asked to
            numbers = numbers.astype(np.float32)

        def put_one(to: tuple[Cut, Device]) -> None:
            cut, device = to
            leaf = self._arrays[cut.entry.path]
            if isinstance(leaf, ArraySpec):
                self._buffers[device][cut.entry.path].put(cut, numbers)
                return
            for at, part in cut.runs(numbers):
                self._put_quantised(leaf, cut, device, at, np.ascontiguousarray(part))

        targets = [(cut, device) for cut in block.cuts for device in cut.devices]
        if len(targets) == 1:
            put_one(targets[0])
        else:  # side by side: every device compiles programs of its own
            list(self._threads.map(put_one, targets))

    def _put_quantised(
        self, leaf: QuantisedWeight, cut: Cut, device: Device, at: tuple[int, ...], numbers: np.ndarray
    ) -> None:
        codes, absmax = encode_blocks(jax.device_put(numbers, device), format=leaf.format, block_size=leaf.block_size)
        path, buffers = cut.entry.path, self._buffers[device]
        *rows, column = at
        assert column == 0, "a block holds whole rows of a shard"
        buffers[f"{path}/codes"].put_at((*rows, 0), codes)
        if leaf.nested is None:
            buffers[f"{path}/scales"].put_at((*rows, 0), absmax)
            return
        lead = len(cut.entry.index)
        *starts, left = (start + offset for (start, _), offset in zip(cut.box[lead:], at[lead:], strict=True))
        part = np.asarray(absmax).reshape(absmax.shape[lead:])
        first = (*starts, left // leaf.block_size)
        box = tuple(slice(start, start + size) for start, size in zip(first, part.shape, strict=True))
        self._scales[path, cut.entry.index][box] = part

    def begin(self, entry: TensorMap) -> None:
        """Blocks of this part of a leaf come next."""
        leaf = self._arrays[entry.path]
        if isinstance(leaf, QuantisedWeight) and leaf.nested is not None:
            self._scales[entry.path, entry.index] = np.zeros(leaf.scales.shape[len(entry.index) :], np.float32)

    def end(self, entry: TensorMap) -> None:
        """All blocks of a part have come. Where its scales are quantised too every process must call this, for every
        part in the same order: the mean of the scales is that of all.
        """
        leaf, key = self._arrays[entry.path], (entry.path, entry.index)
        if key not in self._scales or not isinstance(leaf, QuantisedWeight):
            return
        scales = self._everywhere(self._scales.pop(key), leaf.scales)
        experts = scales.shape[:-2]  # () for an entry of one matrix
        matrices = map(twice_quantised, scales.reshape(-1, *scales.shape[-2:]))
        stacked = (np.stack(part) for part in zip(*matrices, strict=True))
        codes, nested, offset = (part.reshape((*experts, *part.shape[1:])) for part in stacked)
        lead = len(entry.index)
        for part, numbers in (("scales", codes), ("nested", nested), ("offset", offset)):
            name = f"{entry.path}/{part}"
            for box, on in boxes(self._shapes[name], self._shardings[name], list(self._buffers)).items():
                if not all(start <= i < end for i, (start, end) in zip(entry.index, box[:lead], strict=True)):
                    continue  # experts of other devices
                inner = tuple(slice(*edges) for edges in box[lead:])
                row = (i - start for i, (start, _) in zip(entry.index, box[:lead], strict=True))
                at = (*row, *(0 for _ in inner))
                for device in on:
                    self._buffers[device][name].put_at(at, np.ascontiguousarray(np.asarray(numbers)[inner]))

    def _everywhere(self, part: np.ndarray, scales: ArraySpec) -> np.ndarray:
        """Completes scales [.., out, blocks] of which this process knows only its devices' part."""
        if self._layout is None or jax.process_count() == 1:
            return part
        lead = len(scales.shape) - part.ndim
        part_spec = dataclasses.replace(scales, shape=scales.shape[lead:], axes=scales.axes[lead:])
        spread = jax.make_array_from_callback(part.shape, self._layout.of(part_spec), lambda index: part[index])
        return np.asarray(_replicate(self._layout)(spread).addressable_data(0))

    def assemble(self) -> Leaves:
        """The leaves, path to global array; this object gives up its own hold on them."""
        self._threads.shutdown()
        arrays: dict[str, jax.Array] = {}
        for name, shape in self._shapes.items():
            sharding = self._shardings[name]
            if name in self._waiting:
                arrays[name] = self._on_host(name)
                continue
            parts = [buffers.pop(name).array for buffers in self._buffers.values()]
            arrays[name] = parts[0] if sharding is None else from_shards(shape, sharding, parts)

        def leaf(path: str, array: ArraySpec | QuantisedWeight) -> jax.Array | QuantisedWeight:
            if isinstance(array, ArraySpec):
                return arrays[path]
            return dataclasses.replace(array, **{part: arrays[f"{path}/{part}"] for part in _fields(array)})

        return {path: leaf(path, array) for path, array in self._arrays.items()}

    def _on_host(self, name: str) -> jax.Array:
        sharding = concrete_sharding(host_sharding(self._shardings[name]))
        assert sharding is not None
        parts = []
        for device, buffers in self._buffers.items():
            local = SingleDeviceSharding(device or jax.local_devices()[0], memory_kind=sharding.memory_kind)
            parts.append(jax.device_put(buffers.pop(name).array, local).block_until_ready())
        return from_shards(self._shapes[name], sharding, parts)


def parts_of(path: str, leaf: ArraySpec | QuantisedWeight) -> dict[str, ArraySpec]:
    """The arrays that a leaf is made of, by name: its path, and the field of a quantised weight."""
    if isinstance(leaf, ArraySpec):
        return {path: leaf}
    return {f"{path}/{field}": array for field, array in _fields(leaf).items()}


def _fields(leaf: QuantisedWeight) -> dict[str, ArraySpec]:
    fields = {field: getattr(leaf, field) for field in ("codes", "scales", "nested", "offset", "zeros")}
    return {field: array for field, array in fields.items() if array is not None}


@functools.cache
def _replicate(layout: Layout) -> jax.stages.Wrapped:
    return jax.jit(lambda x: x, out_shardings=layout.replicated)


def _is_local(device: Device) -> bool:
    return device is None or device.process_index == jax.process_index()


Progress = Callable[[int, int], None]
THREADS = max(3, min(4, os.cpu_count() or 1))  # each holds a block; more than cores, since some wait for a device


@dataclasses.dataclass(frozen=True)
class _Tensor:
    """One tensor of a file: the parts of leaves that are views of it, and the blocks it is read in."""

    info: TensorInfo
    entries: tuple[TensorMap, ...]
    blocks: list[Block]

    @property
    def dtype(self) -> np.dtype:
        return DTYPES[self.info.dtype]

    def check(self, numbers: np.ndarray) -> None:
        """Raises UserError where a block that was read has a number that is not finite, or beyond float16's range where
        the model holds that."""
        check_finite(numbers, self.entries[0].name, self.info.file)
        if any(entry.array.dtype == "float16" for entry in self.entries):
            check_float16(numbers, self.entries[0].name, self.info.file)

    def nbytes(self, block: Block) -> int:
        return int(np.prod(block.shape, dtype=np.int64)) * self.dtype.itemsize


def read_into(
    shards: Shards,
    table: Iterable[TensorMap],
    infos: Mapping[str, TensorInfo],
    reader: TensorReader,
    broadcaster: BroadcastReader | None = None,
    progress: Progress | None = None,
) -> None:
    """Writes the tensors of a table into the shards, in place, in the order of the files.

    With a `broadcaster` one process of its group reads and broadcasts every block, and all must make the same calls.
    `progress(done, total)` counts bytes of files. Host memory: THREADS + 1 blocks; with a broadcaster two.
    """
    tensors = _in_file_order(shards, table, infos)
    total = sum(tensor.nbytes(block) for tensor in tensors for block in tensor.blocks)
    done = 0

    def advance(size: int) -> None:
        nonlocal done
        done += size
        if progress:
            progress(done, total)

    if broadcaster is None:
        _read_in_threads(shards, tensors, reader, advance)
    else:
        _read_broadcast(shards, tensors, reader, broadcaster, advance)


def _in_file_order(shards: Shards, table: Iterable[TensorMap], infos: Mapping[str, TensorInfo]) -> list[_Tensor]:
    tensors = []
    for name, entries in by_name(table).items():
        info = infos[name]
        quantised = any(shards.is_quantised(entry.path) for entry in entries)
        # Quantising takes several times a block, in float32.
        limit = BLOCK_BYTES // 4 if quantised else BLOCK_BYTES
        plan = read_plan(entries, shards.boxes, DTYPES[info.dtype].itemsize, limit, whole_rows=quantised)
        tensors.append(_Tensor(info, tuple(entries), plan))
    return sorted(tensors, key=lambda tensor: (str(tensor.info.file), tensor.info.start))


def _read_in_threads(
    shards: Shards, tensors: Iterable[_Tensor], reader: TensorReader, advance: Callable[[int], None]
) -> None:
    """Threads read blocks and write them where they belong; tensors are begun and ended here, in order."""

    def move(tensor: _Tensor, block: Block) -> None:
        memory = shards.memory_of(block, tensor.dtype)
        if memory is not None:
            reader.read_into(memory, tensor.info, block.split_shape, _ranges(block))
            tensor.check(memory)
        else:
            numbers = reader.box(tensor.info, block.split_shape, _ranges(block))
            tensor.check(numbers)
            shards.put(block, numbers)

    pending: deque[tuple[_Tensor, Block | None, Future[None] | None]] = deque()

    def finish_one() -> None:
        tensor, block, future = pending.popleft()
        if future is None or block is None:
            for entry in tensor.entries:
                shards.end(entry)
            return
        future.result()
        advance(tensor.nbytes(block))

    with ThreadPoolExecutor(THREADS, "read") as threads:
        try:
            for tensor in tensors:
                for entry in tensor.entries:
                    shards.begin(entry)
                for block in tensor.blocks:
                    while len(pending) > THREADS:
                        finish_one()
                    pending.append((tensor, block, threads.submit(move, tensor, block)))
                pending.append((tensor, None, None))
            while pending:
                finish_one()
        except BaseException:
            threads.shutdown(cancel_futures=True)
            raise


def _read_broadcast(
    shards: Shards,
    tensors: list[_Tensor],
    reader: TensorReader,
    broadcaster: BroadcastReader,
    advance: Callable[[int], None],
) -> None:
    """Blocks in the same order on every process of the group, the next one being read while one is broadcast."""
    order = [(tensor, block) for tensor in tensors for block in tensor.blocks]

    def read(number: int) -> np.ndarray | None:
        if not broadcaster.reads or number >= len(order):
            return None
        tensor, block = order[number]
        numbers = reader.box(tensor.info, block.split_shape, _ranges(block))
        tensor.check(numbers)
        return numbers

    with ThreadPoolExecutor(1, "read") as thread:
        following, number = thread.submit(read, 0), 0
        for tensor in tensors:
            for entry in tensor.entries:
                shards.begin(entry)
            for block in tensor.blocks:
                numbers, number = following.result(), number + 1
                following = thread.submit(read, number)
                size = tensor.nbytes(block)
                shards.put(block, broadcaster.broadcast(numbers, size).view(tensor.dtype).reshape(block.shape))
                del numbers
                advance(size)
            for entry in tensor.entries:
                shards.end(entry)


def _ranges(block: Block) -> list[tuple[int, int, int]]:
    return [(start, stop, 1) for start, stop in block.box]
