"""Which bytes of a tensor some devices hold: strips to read, and the pieces each is cut into.

A strip is a run of rows, all or a range of their columns, that one read can take; a piece is what one slice of the
parameter, held by one or more devices, takes of it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Mapping
from itertools import pairwise

import jax
from jax.sharding import NamedSharding

from meshtune.weights.row_order import Run, runs_of
from meshtune.weights.slots import Slot, blocks

# [start, stop) of each dimension of a parameter.
Box = tuple[tuple[int, int], ...]
Device = jax.Device | None  # None: wherever JAX puts what nobody places


@dataclasses.dataclass(frozen=True)
class Piece:
    """`strip[:, columns, ...]`: its first row belongs at index `at` of the slice that each of `devices` holds."""

    columns: tuple[slice, ...]
    at: tuple[int, ...]
    devices: tuple[Device, ...]


@dataclasses.dataclass(frozen=True)
class Strip:
    """Rows start..stop of a slot's tensor, with a range of its second axis, or all of it (None).

    `rows` are the file's, `top` is the first one's place in the parameter.
    """

    slot: Slot
    rows: tuple[int, int]
    top: int
    columns: tuple[int, int] | None
    pieces: tuple[Piece, ...]

    @property
    def shape(self) -> tuple[int, ...]:
        rows, (_, *inner) = self.rows[1] - self.rows[0], self.slot.shape
        return (rows, *inner) if self.columns is None else (rows, self.columns[1] - self.columns[0], *inner[1:])


def boxes(
    shape: tuple[int, ...], sharding: NamedSharding | None, devices: Iterable[Device]
) -> dict[Box, tuple[Device, ...]]:
    """The slices of an array of `shape` that `devices` hold, and which of them hold each."""
    if sharding is None:
        return {tuple((0, n) for n in shape): tuple(devices)}
    held: dict[Box, tuple[Device, ...]] = {}
    index_of = sharding.devices_indices_map(shape)
    for device in devices:
        assert device is not None
        box = tuple(part.indices(n)[:2] for part, n in zip(index_of[device], shape, strict=True))
        held[box] = (*held.get(box, ()), device)
    return held


def strips(slot: Slot, held: Mapping[Box, tuple[Device, ...]], itemsize: int) -> Iterator[Strip]:
    """What is to be read of a slot's tensor, each number once, in the order of the file, as strips of at most
    BLOCK_BYTES. `held` maps slices of the parameter to the devices they are for; a slice may be for none.
    """
    row = slot.row
    here = [box for box in held if row is None or box[0][0] <= row < box[0][1]]
    lead = 0 if row is None else 1
    edges = {edge for box in here for edge in box[lead]}
    for run, top, bottom in _stretches(slot, edges):
        across = [box for box in here if box[lead][0] <= top and bottom <= box[lead][1]]
        for columns in _merged(across, lead):
            within = [box for box in across if columns is None or _inside(box[lead + 1], columns)]
            if columns == (0, slot.shape[1] if len(slot.shape) > 1 else 1):
                columns = None
            width = itemsize
            for n in slot.shape[1:] if columns is None else (columns[1] - columns[0], *slot.shape[2:]):
                width *= n
            for start, stop in blocks((bottom - top, width), 1):
                first = top + start
                rows = (first - run.memory + run.file, top + stop - run.memory + run.file)
                pieces = (_piece(slot, box, first, columns, held[box]) for box in within if held[box])
                yield Strip(slot, rows, first, columns, tuple(pieces))


def _stretches(slot: Slot, edges: set[int]) -> Iterator[tuple[Run, int, int]]:
    """(run of the file, first row, one past the last) of a parameter's rows, cut at `edges`, in the file's order."""
    for run in runs_of(slot.order, slot.shape[0]):
        end = run.memory + run.rows
        inside = {edge for edge in edges if run.memory < edge < end}
        for top, bottom in pairwise(sorted({run.memory, end} | inside)):
            yield run, top, bottom


def _merged(across: list[Box], lead: int) -> list[tuple[int, int] | None]:
    """The ranges of columns that some boxes cover together, adjoining ones as one."""
    if across and len(across[0]) == lead + 1:
        return [None]
    merged: list[tuple[int, int] | None] = []
    for start, stop in sorted({box[lead + 1] for box in across}):
        if merged and (last := merged[-1]) and start <= last[1]:
            merged[-1] = (last[0], max(last[1], stop))
        else:
            merged.append((start, stop))
    return merged


def _inside(inner: tuple[int, int], outer: tuple[int, int]) -> bool:
    return outer[0] <= inner[0] and inner[1] <= outer[1]


def _piece(slot: Slot, box: Box, top: int, columns: tuple[int, int] | None, devices: tuple[Device, ...]) -> Piece:
    """What the slice `box` takes of a strip whose first row is `top`."""
    (first, _), *inner = box if slot.row is None else box[1:]
    before = columns[0] if columns else 0
    cut = [
        slice(start - (before if n == 0 else 0), stop - (before if n == 0 else 0))
        for n, (start, stop) in enumerate(inner)
    ]
    at = (top - first, *(0 for _ in inner))
    return Piece(tuple(cut), at if slot.row is None else (slot.row - box[0][0], *at), devices)
