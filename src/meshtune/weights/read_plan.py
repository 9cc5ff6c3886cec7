"""Plans the reads of a tensor: which blocks of it this process's devices need, and what each shard takes of a block.

A tensor is read in boxes of the shape of its views (`View.split_shape`), every number once, however many shards need
it.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence

import jax
import numpy as np
from jax.sharding import NamedSharding

from meshtune.families.tensors import Range, Shape, TensorMap, View
from meshtune.weights.safetensors_files import BLOCK_BYTES

# [start, stop) of each dimension.
Box = tuple[tuple[int, int], ...]
Device = jax.Device | None  # None: JAX's default device
Slices = tuple[slice, ...]


@dataclasses.dataclass(frozen=True)
class Cut:
    """The part of a block that one shard takes: `shard[target].reshape(dims)[inner] = block[source].transpose(order)`.

    `shard` is the slice `box` of the parameter at `entry.path`. The target is a run of neighbours in every dimension.
    """

    entry: TensorMap
    box: Box
    devices: tuple[Device, ...]
    source: Slices
    target: Slices
    dims: Shape
    inner: Slices

    def of(self, block: np.ndarray) -> np.ndarray:
        """The block's numbers, with dimensions in the parameter's order."""
        return block[self.source].transpose(self.entry.view.order)

    def within(self, shard: np.ndarray) -> np.ndarray:
        """A writable view of the shard's part that `of` gives the numbers for."""
        part = shard[self.target].reshape(self.dims)
        assert np.may_share_memory(part, shard), "dividing dimensions never copies"
        return part[self.inner]

    def runs(self, block: np.ndarray) -> Iterator[tuple[tuple[int, ...], np.ndarray]]:
        """(index in the shard, numbers [*1s, *part]) of pieces that are each a box of the shard: one, unless the view
        interleaves dimensions and the block cuts through them."""
        numbers, lead, groups = self.of(block), len(self.entry.index), self.entry.view.groups
        in_groups = [
            list(_contiguous([self.inner[n] for n in group], [self.dims[n] for n in group])) for group in groups
        ]
        offsets = [part.start for part in self.target]
        for runs in itertools.product(*in_groups):
            selected = list(self.inner)
            for group, (_, slices) in zip(groups, runs, strict=True):
                for n, part in zip(group, slices, strict=True):
                    selected[n] = part
            in_block = tuple(
                slice(part.start - inner.start, part.stop - inner.start)
                for part, inner in zip(selected, self.inner, strict=True)
            )
            shape = [math.prod(part.stop - part.start for part in slices) for _, slices in runs]
            starts = [offset + first for offset, (first, _) in zip(offsets[lead:], runs, strict=True)]
            yield (*offsets[:lead], *starts), numbers[in_block].reshape((*(1,) * lead, *shape))


@dataclasses.dataclass(frozen=True)
class Block:
    """A box of a tensor, in the dimensions `split_shape` of its views, that one read takes."""

    name: str
    split_shape: Shape
    box: Box
    cuts: tuple[Cut, ...]

    @property
    def shape(self) -> Shape:
        return tuple(stop - start for start, stop in self.box)


def boxes(
    shape: tuple[int, ...], sharding: NamedSharding | None, devices: Iterable[Device]
) -> dict[Box, tuple[Device, ...]]:
    """The slices of an array of `shape` that `devices` hold, and which of them hold each."""
    if sharding is None:
        return {tuple((0, n) for n in shape): tuple(devices)}
    holders: dict[Box, tuple[Device, ...]] = {}
    index_of = sharding.devices_indices_map(shape)
    for device in devices:
        assert device is not None
        box = tuple(part.indices(n)[:2] for part, n in zip(index_of[device], shape, strict=True))
        holders[box] = (*holders.get(box, ()), device)
    return holders


@dataclasses.dataclass(frozen=True)
class _Part:
    """A box `selection` of what a view takes of its tensor, in the tensor's order of dimensions, and the run of a shard
    that it fills."""

    entry: TensorMap
    box: Box
    devices: tuple[Device, ...]
    selection: Box
    target: Slices

    @property
    def in_tensor(self) -> Box:
        """The box of the tensor that holds it."""
        return tuple(
            (start + low * step, start + (high - 1) * step + 1)
            for (low, high), (start, _, step) in zip(self.selection, self.entry.view.take, strict=True)
        )

    def cut(self, box: Box) -> Cut | None:
        """Returns its part of a box of the tensor; None where there is none."""
        source: list[slice] = []
        inner: list[slice] = []
        for (low, high), (start, _, step), (first, last) in zip(self.selection, self.entry.view.take, box, strict=True):
            a, b = max(low, -((start - first) // step)), min(high, -((start - last) // step))
            if a >= b:
                return None
            source.append(slice(start + a * step - first, start + (b - 1) * step + 1 - first, step))
            inner.append(slice(a - low, b - low))
        order = self.entry.view.order
        dims = tuple(self.selection[n][1] - self.selection[n][0] for n in order)
        inner_slices = tuple(inner[n] for n in order)
        return Cut(self.entry, self.box, self.devices, tuple(source), self.target, dims, inner_slices)


def read_plan(
    entries: Sequence[TensorMap],
    shards: Mapping[str, Mapping[Box, tuple[Device, ...]]],
    itemsize: int,
    limit: int = BLOCK_BYTES,
    whole_rows: bool = False,
) -> list[Block]:
    """Plans the reads of one tensor for the shards of all leaves that it is part of, in the order of the file.

    `entries` are the tensor's; `shards` maps each leaf's slices to the devices that they are for; a slice may be for
    none, and is then read all the same (for another process). A block is at most `limit` bytes,
    or one number of each dimension that is not cut. With `whole_rows` the parameter's last dimension is never cut.
    """
    view = entries[0].view
    parts = [part for entry in entries for part in _parts(entry, shards[entry.path])]
    uncut = {entry.view.order[n] for entry in entries for n in entry.view.groups[-1]} if whole_rows else set()
    plan = []
    for region in _union([part.in_tensor for part in parts]):
        for box in _divide_box(region, max(1, limit // itemsize), uncut):
            cuts = tuple(cut for part in parts if (cut := part.cut(box)) is not None)
            plan.append(Block(entries[0].name, view.split_shape, box, cuts))
    return plan


def tensor_boxes(view: View, box: Box) -> Iterator[tuple[tuple[Range, ...], Slices]]:
    """A box of a view's part as boxes of the tensor: (start, stop, step) of each dimension of `split_shape`, and the
    slices of the box that they fill, in turn."""
    for selection, target in _align_box(view, box):
        ranges = tuple(
            (start + low * step, start + (high - 1) * step + 1, step)
            for (low, high), (start, _, step) in zip(selection, view.take, strict=True)
        )
        yield ranges, target


def arrange_numbers(view: View, numbers: np.ndarray) -> np.ndarray:
    """Arranges the numbers of a box of `tensor_boxes`, with dimensions in the parameter's order and merged."""
    numbers = numbers.transpose(view.order)
    return numbers.reshape([math.prod(numbers.shape[n] for n in group) for group in view.groups])


def scatter_numbers(view: View, ranges: Sequence[Range], numbers: np.ndarray) -> np.ndarray:
    """The inverse of `arrange_numbers`: a parameter's numbers with the dimensions of a box of the tensor."""
    extent = tuple(len(range(*entry)) for entry in ranges)
    inverse = tuple(int(n) for n in np.argsort(view.order))
    return numbers.reshape([extent[n] for n in view.order]).transpose(inverse)


def _parts(entry: TensorMap, shards: Mapping[Box, tuple[Device, ...]]) -> Iterator[_Part]:
    lead = len(entry.index)
    for box, devices in shards.items():
        if not all(start <= i < stop for i, (start, stop) in zip(entry.index, box[:lead], strict=True)):
            continue
        row = tuple(slice(i - start, i - start + 1) for i, (start, _) in zip(entry.index, box[:lead], strict=True))
        for selection, target in _align_box(entry.view, box[lead:]):
            yield _Part(entry, box, devices, selection, (*row, *target))


def _align_box(view: View, box: Box) -> Iterator[tuple[Box, Slices]]:
    """A box of a view's part in boxes of what it takes, in the tensor's order of dimensions, each with its slices
    relative to the box."""
    of_dimensions = [
        list(_runs([view.permuted[n] for n in group], start, stop))
        for group, (start, stop) in zip(view.groups, box, strict=True)
    ]
    for combination in itertools.product(*of_dimensions):
        ranges = [(0, n) for n in view.permuted]
        target = []
        for group, (start, _), (first, last, within) in zip(view.groups, box, combination, strict=True):
            target.append(slice(first - start, last - start))
            for n, part in zip(group, within, strict=True):
                ranges[n] = part
        selection = dict(zip(view.order, ranges, strict=True))
        in_order = tuple(selection[n] for n in range(len(ranges)))
        yield from _permute_box(view, in_order, tuple(target))


def _permute_box(view: View, selection: Box, target: Slices) -> Iterator[tuple[Box, Slices]]:
    """A box of what a view takes, cut where its order of rows jumps: boxes of the tensor, with their slices."""
    if view.rows is None:
        yield selection, target
        return
    start, stop = selection[0]
    place = next(n for n, group in enumerate(view.groups) if view.order.index(0) in group)
    merged = [view.order[n] for n in view.groups[place]]
    leading, inner = merged[: merged.index(0)], merged[merged.index(0) + 1 :]
    width = math.prod(selection[n][1] - selection[n][0] for n in inner)
    jumps = [i for i in range(start + 1, stop) if view.rows[i] != view.rows[i - 1] + 1]
    offset = target[place].start
    for singles in itertools.product(*(range(*selection[n]) for n in leading)):
        single = {n: (i, i + 1) for n, i in zip(leading, singles, strict=True)}
        for first, last in itertools.pairwise((start, *jumps, stop)):
            row, size = view.rows[first], (last - first) * width
            box = {**dict(enumerate(selection)), **single, 0: (row, row + last - first)}
            yield tuple(box.values()), (*target[:place], slice(offset, offset + size), *target[place + 1 :])
            offset += size


def _runs(sizes: Sequence[int], start: int, stop: int) -> Iterator[tuple[int, int, Box]]:
    """[start, stop) of dimensions of `sizes` counted as one, in runs that are each a box: (first, last, box)."""
    if start >= stop:
        return
    if not sizes:
        yield start, stop, ()
        return
    if len(sizes) == 1:
        yield start, stop, ((start, stop),)
        return
    inner = math.prod(sizes[1:])
    row, offset = divmod(start, inner)
    if offset or stop - start < inner:
        end = min(stop, (row + 1) * inner)
        for first, last, box in _runs(sizes[1:], offset, end - row * inner):
            yield row * inner + first, row * inner + last, ((row, row + 1), *box)
    else:
        end = stop // inner * inner
        yield start, end, ((row, end // inner), *((0, n) for n in sizes[1:]))
    yield from _runs(sizes, end, stop)


def _contiguous(inner: Sequence[slice], dims: Sequence[int]) -> Iterator[tuple[int, Slices]]:
    """A box of dimensions counted as one, in runs of neighbours: (the first, slices) of each."""
    cut = [n for n, (part, size) in enumerate(zip(inner, dims, strict=True)) if part.stop - part.start < size]
    depth = max(cut, default=0)
    for singles in itertools.product(*(range(part.start, part.stop) for part in inner[:depth])):
        chosen = (*(slice(i, i + 1) for i in singles), *inner[depth:])
        first = 0
        for part, size in zip(chosen, dims, strict=True):
            first = first * size + part.start
        yield first, chosen


def _union(region: Sequence[Box]) -> list[Box]:
    """Boxes that do not overlap and cover what some boxes cover, in order; neighbours are joined."""
    if not region or not region[0]:
        return [()] if region else []
    edges = sorted({edge for box in region for edge in box[0]})
    joined: list[tuple[int, int, list[Box]]] = []
    for start, stop in itertools.pairwise(edges):
        inner = _union(sorted({box[1:] for box in region if box[0][0] <= start and stop <= box[0][1]}))
        if joined and joined[-1][1] == start and joined[-1][2] == inner:
            start = joined.pop()[0]
        if inner:
            joined.append((start, stop, inner))
    return [((start, stop), *box) for start, stop, inner in joined for box in inner]


def _divide_box(region: Box, max_numbers: int, uncut: set[int]) -> Iterator[Box]:
    """Divides a box along its first dimensions into boxes of at most `max_numbers` numbers, as equal as can be: each
    other size is a program to compile. Dimensions in `uncut` stay whole."""
    sizes = [stop - start for start, stop in region]
    total = math.prod(sizes)
    axis = next((n for n, size in enumerate(sizes) if size > 1 and n not in uncut), None)
    if total <= max_numbers or axis is None:
        yield region
        return
    start, stop = region[axis]
    rows = max(1, max_numbers * sizes[axis] // total)
    rows = -(-sizes[axis] // -(-sizes[axis] // rows))
    for first in range(start, stop, rows):
        box = (*region[:axis], (first, min(stop, first + rows)), *region[axis + 1 :])
        yield from _divide_box(box, max_numbers, uncut) if rows == 1 else [box]
