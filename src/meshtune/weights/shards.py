"""The slices of a model that this process's devices hold, while they are being filled, quantised ones too."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Collection, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax
import numpy as np
from jax import make_array_from_single_device_arrays as from_shards
from jax.sharding import SingleDeviceSharding

from meshtune.arrays.spec import ArraySpec
from meshtune.mesh.layout import Layout
from meshtune.mesh.placement import on_host, real
from meshtune.quantize.scales import twice_quantised
from meshtune.quantize.weight import QuantisedWeight, encoded
from meshtune.weights.slots import Slot, allocate, place
from meshtune.weights.strips import Box, Device, Piece, Strip, boxes


class Shards:
    """The slices of every leaf that this process's devices hold, while they are being filled."""

    def __init__(
        self,
        arrays: Mapping[str, ArraySpec | QuantisedWeight],
        layout: Layout | None,
        devices: list[Device],
        waiting: Collection[str] = (),
    ):
        """`devices`: those whose slices are to be read; the slices of other processes' devices are not kept.

        `waiting` names arrays (a path, and the field of a quantised weight) that are never on a device: they are filled
        on the host, and go from there, array by array, to the memory that a device reads.
        """
        self._arrays, self._layout, self._waiting = arrays, layout, frozenset(waiting)
        parts = {name: array for path, leaf in arrays.items() for name, array in parts_of(path, leaf).items()}
        self._shapes = {name: array.shape for name, array in parts.items()}
        self._shardings = {name: layout.of(array) if layout else None for name, array in parts.items()}
        self.held: dict[str, dict[Box, tuple[Device, ...]]] = {}  # slices in numbers, also where codes are packed
        shards: dict[Device, dict[str, tuple[tuple[int, ...], str]]] = {}
        for path, leaf in arrays.items():
            for name, array in parts_of(path, leaf).items():
                held = boxes(array.shape, self._shardings[name], devices)
                here = {box: tuple(filter(_is_here, on)) for box, on in held.items()}
                if name in (path, f"{path}/codes"):
                    per = 1 if isinstance(leaf, ArraySpec) else leaf.shape[-1] // array.shape[-1]
                    self.held[path] = {
                        (*box[:-1], (box[-1][0] * per, box[-1][1] * per)): on for box, on in here.items()
                    }
                for box, on in here.items():
                    for device in on:
                        shards.setdefault(device, {})[name] = (tuple(stop - start for start, stop in box), array.dtype)
        self._scales: dict[str, np.ndarray] = {}  # of the matrix that is being read, path to [out, blocks]
        self._threads = ThreadPoolExecutor(len(shards), "load")
        self._leaves = {device: self._allocate(mine, device) for device, mine in shards.items()}

    def _allocate(self, mine: dict[str, tuple[tuple[int, ...], str]], device: Device) -> dict[str, jax.Array]:
        here = {name: form for name, form in mine.items() if name not in self._waiting}
        there = {name: form for name, form in mine.items() if name in self._waiting}
        made = allocate(here, device) if here else {}
        return made | (allocate(there, jax.local_devices(backend="cpu")[0]) if there else {})

    def put(self, strip: Strip, block: np.ndarray) -> None:
        """Writes what this process's devices hold of a strip, whose numbers are `block`. Waits until it is done."""
        if block.dtype == np.float64:  # JAX keeps no float64 unless asked to
            block = block.astype(np.float32)
        leaf = self._arrays[strip.slot.path]
        write = self._plain if isinstance(leaf, ArraySpec) else functools.partial(self._quantised, leaf)

        def one(to: tuple[Piece, Device]) -> None:
            piece, device = to
            cut = jax.device_put(np.ascontiguousarray(block[(slice(None), *piece.columns)]), device)
            write(strip, piece, device, cut)

        # Side by side: every device compiles programs of its own.
        list(self._threads.map(one, ((piece, device) for piece in strip.pieces for device in piece.devices)))

    def _plain(self, strip: Strip, piece: Piece, device: Device, cut: jax.Array) -> None:
        self._place(strip.slot.path, device, cut, piece.at)

    def _quantised(self, leaf: QuantisedWeight, strip: Strip, piece: Piece, device: Device, cut: jax.Array) -> None:
        codes, absmax = encoded(cut, format=leaf.format, block_size=leaf.block_size)
        path, (*at, column) = strip.slot.path, piece.at
        assert column == 0, "a piece begins where its slice's rows do"
        self._place(f"{path}/codes", device, codes, (*at, 0))
        if leaf.nested is None:
            self._place(f"{path}/scales", device, absmax, (*at, 0))
            return
        first = (strip.columns[0] if strip.columns else 0) + piece.columns[-1].start
        matrix = self._scales[path]
        columns = slice(first // leaf.block_size, first // leaf.block_size + absmax.shape[-1])
        matrix[strip.top : strip.top + len(absmax), columns] = np.asarray(absmax)

    def _place(self, name: str, device: Device, block: Any, at: tuple[int, ...]) -> None:
        leaves = self._leaves[device]
        if name in self._waiting:
            block = jax.device_put(block, *leaves[name].devices())
        leaves[name] = place(leaves[name], block, np.asarray(at, np.int32))
        # One block in flight: an asynchronous queue of them would hold them all.
        leaves[name].block_until_ready()

    def begin(self, slot: Slot) -> None:
        """A tensor's strips come next."""
        leaf = self._arrays[slot.path]
        if isinstance(leaf, QuantisedWeight) and leaf.nested is not None:
            self._scales[slot.path] = np.zeros(leaf.scales.shape[-2:], np.float32)

    def end(self, slot: Slot) -> None:
        """All strips of a tensor have come. Where its scales are quantised too every process must call this, for every
        tensor in the same order: the mean of the scales is that of all.
        """
        leaf = self._arrays[slot.path]
        if slot.path not in self._scales or not isinstance(leaf, QuantisedWeight):
            return
        codes, nested, offset = twice_quantised(self._everywhere(self._scales.pop(slot.path), leaf.scales))
        row = () if slot.row is None else (slot.row,)
        for part, numbers in (("scales", codes), ("nested", nested), ("offset", offset)):
            name = f"{slot.path}/{part}"
            held = boxes(self._shapes[name], self._shardings[name], list(self._leaves))
            for box, on in held.items():
                lead = len(row)
                inner = tuple(slice(*edges) for edges in box[lead:])
                at = (*(r - box[0][0] for r in row), *(0 for _ in inner))
                for device in on:
                    cut = np.ascontiguousarray(np.asarray(numbers)[inner])
                    self._place(name, device, jax.device_put(cut, device), at)

    def _everywhere(self, matrix: np.ndarray, scales: ArraySpec) -> np.ndarray:
        """A matrix of scales of which this process knows what its devices hold, whole."""
        if self._layout is None or jax.process_count() == 1:
            return matrix
        lead = len(scales.shape) - 2
        own = dataclasses.replace(scales, shape=scales.shape[lead:], axes=scales.axes[lead:])
        spread = jax.make_array_from_callback(matrix.shape, self._layout.of(own), lambda index: matrix[index])
        return np.asarray(_replicated(self._layout)(spread).addressable_data(0))

    def assembled(self) -> dict[str, Any]:
        """The leaves, path to global array; this object gives up its own hold on them."""
        self._threads.shutdown()
        made: dict[str, jax.Array] = {}
        for name, shape in self._shapes.items():
            sharding = self._shardings[name]
            if name in self._waiting:
                made[name] = self._on_host(name)
                continue
            parts = [leaves.pop(name) for leaves in self._leaves.values()]
            made[name] = parts[0] if sharding is None else from_shards(shape, sharding, parts)

        def leaf(path: str, array: ArraySpec | QuantisedWeight) -> Any:
            if isinstance(array, ArraySpec):
                return made[path]
            return dataclasses.replace(array, **{part: made[f"{path}/{part}"] for part in _fields(array)})

        return {path: leaf(path, array) for path, array in self._arrays.items()}

    def _on_host(self, name: str) -> jax.Array:
        where = real(on_host(self._shardings[name]))
        assert where is not None
        parts = []
        for device, leaves in self._leaves.items():
            mine = SingleDeviceSharding(device or jax.local_devices()[0], memory_kind=where.memory_kind)
            parts.append(jax.device_put(leaves.pop(name), mine).block_until_ready())
        return from_shards(self._shapes[name], where, parts)


def parts_of(path: str, leaf: ArraySpec | QuantisedWeight) -> dict[str, ArraySpec]:
    """The arrays that a leaf is made of, by name: its path, and the field of a quantised weight."""
    if isinstance(leaf, ArraySpec):
        return {path: leaf}
    return {f"{path}/{field}": array for field, array in _fields(leaf).items()}


def _fields(leaf: QuantisedWeight) -> dict[str, Any]:
    every = {field: getattr(leaf, field) for field in ("codes", "scales", "nested", "offset")}
    return {field: array for field, array in every.items() if array is not None}


@functools.cache
def _replicated(layout: Layout) -> Any:
    return jax.jit(lambda x: x, out_shardings=layout.replicated)


def _is_here(device: Device) -> bool:
    return device is None or device.process_index == jax.process_index()
