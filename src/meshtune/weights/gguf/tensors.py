"""Reads the tensors of a GGUF file, decoded, by the names and in the arrangement of a Hugging Face checkpoint."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Any, ClassVar

import numpy as np
from jaxtyping import Float

from meshtune.arrays.spec import ArraySpec
from meshtune.errors import UserError
from meshtune.families import tensors
from meshtune.families.gguf import GgufPart, gguf_layout
from meshtune.families.tensors import TensorMap, View, by_name
from meshtune.model.spec import ModelSpec
from meshtune.quantize.gguf import TYPES, decode
from meshtune.quantize.published.scheme import Box, Form, Parts, Shape
from meshtune.weights.gguf.file import GgufFile, GgufTensor
from meshtune.weights.read_plan import arrange_numbers, tensor_boxes
from meshtune.weights.safetensors_files import Packed, TensorInfo

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
        raise AssertionError("a tensor without a form is decoded while it is read, and has no codes")

    def scales(self, parts: Parts, box: Box) -> np.ndarray:
        raise AssertionError("a tensor without a form is decoded while it is read, and has no scales")


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


PLAIN = {"F32": "F32", "F16": "F16", "BF16": "BF16"}


def tensor_infos(gguf: GgufFile, spec: ModelSpec) -> dict[str, TensorInfo]:
    """Where the tensors of a model's table lie in a file; tensors that are quantised or arranged otherwise are decoded
    when read. Raises UserError for tensors that are missing, have another shape, or belong to nothing."""
    layout = gguf_layout(spec)
    by_leaf: dict[str, dict[tuple[int, ...], list[GgufPart]]] = {}
    for part in layout.parts:
        by_leaf.setdefault(part.path, {}).setdefault(part.index, []).append(part)
    _check(gguf, layout.shapes, set(layout.computed))
    return {name: _info(gguf, entries, by_leaf) for name, entries in by_name(tensors(spec)).items()}


def _info(
    gguf: GgufFile, entries: list[TensorMap], by_leaf: Mapping[str, Mapping[tuple[int, ...], list[GgufPart]]]
) -> TensorInfo:
    entry = entries[0]
    parts = by_leaf[entry.path]
    first = parts.get(entry.index, [])
    rearranged = not entry.view.is_identity and any(entry.view != part.view for part in first)
    if len(entries) > 1 or rearranged or any(not part.is_plain for part in first):
        return _assemble_tensor(gguf, entries, by_leaf)
    (part,) = first or parts[entry.index[:-1]]
    view = part.view
    if part.index != entry.index:  # an expert of those that are together in the file's tensor
        assert view.is_identity
        expert = entry.index[-1]
        view = view.slice(0, expert, expert + 1).merge(*view.tensor[1:])
    elif not entry.view.is_identity:
        # Packed rows, which both kinds of file have in the same order.
        assert entry.view == view, f"{entry.name} and {part.name} are arranged in different ways"
        view = View.identity(view.tensor)
    stored = gguf.tensors[part.name]
    if view.is_identity and not part.offset and stored.type.name in PLAIN:
        return TensorInfo(view.shape, PLAIN[stored.type.name], stored.file, stored.start, stored.nbytes)
    scheme: Any = GgufScheme(stored.type.name, view, part.offset)
    packed = Packed(scheme, ((ROLE, _as_bytes(stored)),))
    return TensorInfo(view.shape, "F32", stored.file, stored.start, stored.nbytes, packed)


def _assemble_tensor(
    gguf: GgufFile, entries: list[TensorMap], by_leaf: Mapping[str, Mapping[tuple[int, ...], list[GgufPart]]]
) -> TensorInfo:
    """A tensor that is put together of whole tensors of the file, which have another arrangement."""
    pieces: list[Piece] = []
    stored: list[tuple[str, TensorInfo]] = []
    for entry in entries:
        tensors: list[tuple[GgufPart, str, str]] = []
        for part in by_leaf[entry.path][entry.index]:
            tensor, role = gguf.tensors[part.name], f"{ROLE}{len(stored)}"
            tensors.append((part, tensor.type.name, role))
            stored.append((role, _as_bytes(tensor)))
        pieces.append(Piece(tuple(tensors), entry.view))
    nbytes = sum(info.nbytes for _, info in stored)
    scheme: Any = AssembledScheme(tuple(pieces))
    first = stored[0][1]
    return TensorInfo(entries[0].view.tensor, "F32", first.file, first.start, nbytes, Packed(scheme, tuple(stored)))


def _as_bytes(tensor: GgufTensor) -> TensorInfo:
    rows = math.prod(tensor.shape[:-1])
    return TensorInfo((rows, tensor.nbytes // rows), "U8", tensor.file, tensor.start, tensor.nbytes)


def small_tensor(gguf: GgufFile, name: str) -> np.ndarray:
    """A whole tensor of a file, for small ones."""
    tensor = gguf.tensors[name]
    with tensor.file.open("rb") as stream:
        stream.seek(tensor.start)
        content = np.frombuffer(stream.read(tensor.nbytes), np.uint8)
    return decode(tensor.type.name, content.reshape(1, -1)).reshape(tensor.shape)


def _check(gguf: GgufFile, expected: Mapping[str, tuple[int, ...]], computed: set[str]) -> None:
    problems: list[str] = []
    for name, shape in expected.items():
        if name not in gguf.tensors:
            problems.append(f"tensor '{name}' is missing")
        elif gguf.tensors[name].shape != shape:
            problems.append(f"tensor '{name}' is {list(gguf.tensors[name].shape)}, and its metadata says {list(shape)}")
    problems += [
        f"tensor '{name}' belongs to nothing in the metadata"
        for name in gguf.tensors
        if name not in expected and name not in computed
    ]
    if problems:
        shown = "; ".join(problems[:6]) + (f"; and {len(problems) - 6} more" if len(problems) > 6 else "")
        raise UserError(
            f"the file's tensors are not those of the model in its metadata: {shown}",
            where=str(gguf.file),
            fix="convert the model again with a current converter, or give its safetensors",
        )
