"""Reads boxes of tensors of a GGUF file, decoded, in the arrangement that a Hugging Face checkpoint has."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import ClassVar

import numpy as np
from jaxtyping import Float

from meshtune.arrays.spec import ArraySpec
from meshtune.families.gguf import GgufPart
from meshtune.families.tensors import View
from meshtune.quantize.gguf import TYPES, decode
from meshtune.quantize.published.scheme import Box, Form, Parts, Shape
from meshtune.weights.read_plan import arrange_numbers, tensor_boxes

ROLE = "tensor"


class _WideScheme:
    """Common base for tensors of GGUF files: decoded during reading, they have no codes (see Scheme)."""

    method: ClassVar[str] = "gguf"
    ending: ClassVar[str] = ".weight"
    endings: ClassVar[Mapping[str, str]] = {ROLE: ".weight"}
    required: ClassVar[tuple[str, ...]] = ()
    ignored: ClassVar[tuple[str, ...]] = ()
    skip: ClassVar[tuple[str, ...]] = ()

    def converts(self, module: str, array: ArraySpec) -> bool:
        """Tensors of a GGUF file are read wide."""
        return False

    def form(self, weight: ArraySpec) -> Form | None:
        """Codes of GGUF are decoded during reading."""
        return None

    def codes(self, parts: Parts, box: Box) -> np.ndarray:
        raise NotImplementedError("a GGUF tensor has no codes of a quantised weight")

    def scales(self, parts: Parts, box: Box) -> np.ndarray:
        raise NotImplementedError("a GGUF tensor has no scales of a quantised weight")


@dataclasses.dataclass(frozen=True)
class GgufScheme(_WideScheme):
    """A tensor that is `view` of a tensor of a GGUF file of a type and shape, less `offset` (see Scheme).

    The file's tensor is given as bytes [rows, bytes of a row].
    """

    type: str
    view: View
    offset: float = 0.0
    role: str = ROLE

    def shape(self, parts: Parts) -> Shape:
        """The shape of the tensor."""
        return self.view.shape

    def decode(self, parts: Parts, box: Box) -> Float[np.ndarray, "..."]:
        """A box of the tensor in float32; of the file's rows those are read that it needs, in whole blocks."""
        numbers = np.empty([stop - start for start, stop in box], np.float32)
        for ranges, target in tensor_boxes(self.view, box):
            numbers[target] = arrange_numbers(self.view, self._read(parts, ranges)) - np.float32(self.offset)
        return numbers

    def _read(self, parts: Parts, ranges: tuple[tuple[int, int, int], ...]) -> np.ndarray:
        """A box of the tensor as the view divides it. Its rows are what lies in the tensor's last dimension."""
        kind, columns = TYPES[self.type], self.view.tensor[-1]
        finer = self._columns
        lead = len(self.view.split_shape) - finer
        places = np.zeros(1, np.int64)
        for size, entry in zip(self.view.split_shape[:lead], ranges[:lead], strict=True):
            places = (places[:, None] * size + np.arange(*entry)).reshape(-1)
        within = np.arange(math.prod(self.view.split_shape[lead:])).reshape(self.view.split_shape[lead:])
        within = within[tuple(slice(*entry) for entry in ranges[lead:])].reshape(-1)
        first, last = int(within.min()) // kind.block, int(within.max()) // kind.block + 1
        width = kind.row_bytes(columns)
        span = (first * kind.nbytes, last * kind.nbytes)
        assert span[1] <= width
        rows = [self._rows(parts, run, span) for run in np.split(places, np.flatnonzero(np.diff(places) != 1) + 1)]
        decoded = decode(self.type, np.concatenate(rows))
        counts = [len(range(*entry)) for entry in ranges]
        return decoded[:, within - first * kind.block].reshape(counts)

    @property
    def _columns(self) -> int:
        """How many of the last dimensions of `split_shape` divide a row."""
        count, size = 0, 1
        while size < self.view.tensor[-1] or not count:
            count += 1
            size *= self.view.split_shape[-count]
        return count

    def _rows(self, parts: Parts, run: np.ndarray, span: tuple[int, int]) -> np.ndarray:
        return parts.box(self.role, ((int(run[0]), int(run[-1]) + 1), span))


@dataclasses.dataclass(frozen=True)
class Piece:
    """An array that tensors of a file make up, each of a type and in the part with this role, and the view of the
    checkpoint's tensor that it is."""

    tensors: tuple[tuple[GgufPart, str, str], ...]
    view: View

    def decode(self, parts: Parts) -> Float[np.ndarray, "..."]:
        """The whole array in float32."""
        array = np.empty(self.view.shape, np.float32)
        for part, kind, role in self.tensors:
            scheme = GgufScheme(kind, View.identity(part.view.tensor), role=role)
            part.into_array(scheme.decode(parts, tuple((0, size) for size in part.view.tensor)), array)
        return array


@dataclasses.dataclass(frozen=True)
class AssembledScheme(_WideScheme):
    """A tensor that several tensors of a GGUF file, or one in another arrangement, make up (see Scheme)."""

    pieces: tuple[Piece, ...]

    def shape(self, parts: Parts) -> Shape:
        """The shape of the tensor."""
        return self.pieces[0].view.tensor

    def decode(self, parts: Parts, box: Box) -> Float[np.ndarray, "..."]:
        """A box of the tensor in float32, for which all of it is read."""
        tensor = np.empty(self.pieces[0].view.tensor, np.float32)
        for piece in self.pieces:
            piece.view.write(piece.decode(parts), tensor)
        return tensor[tuple(slice(*entry) for entry in box)]
