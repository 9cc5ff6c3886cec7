"""Reads boxes of weights that are published quantised, from the tensors of files that they are made of."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Mapping, Sequence
from typing import Protocol

import numpy as np

from meshtune.families.refinement import split_dimensions
from meshtune.families.tensors import Range, Shape
from meshtune.quantize.published.scheme import Box
from meshtune.weights.safetensors_files import TensorInfo

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
