"""The shards of a model's leaves on this process's devices while they are filled from files, quantised ones too."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Collection, Mapping
from concurrent.futures import ThreadPoolExecutor

import jax
import numpy as np
from jax import make_array_from_single_device_arrays as from_shards
from jax.sharding import SingleDeviceSharding

from meshtune.arrays.spec import ArraySpec
from meshtune.arrays.tree import Leaves
from meshtune.families.tensors import TensorMap
from meshtune.mesh.layout import Layout
from meshtune.mesh.placement import concrete_sharding, host_sharding
from meshtune.quantize.scales import twice_quantised
from meshtune.quantize.weight import QuantisedWeight, encode_blocks
from meshtune.weights.buffers import Buffer, HostBuffer, allocate, buffer_for
from meshtune.weights.read_plan import Block, Box, Cut, Device, boxes


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
