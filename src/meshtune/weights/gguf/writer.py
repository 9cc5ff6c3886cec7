"""Writes a model as a GGUF file, tensor by tensor: host memory holds rows of one tensor, or one that is rearranged."""

from __future__ import annotations

import dataclasses
import math
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO, Protocol

import numpy as np
from gguf import GGMLQuantizationType, GGUFValueType, GGUFWriter
from jaxtyping import Float

from meshtune.errors import UserError
from meshtune.families import tensors
from meshtune.families.gguf import GgufLayout, GgufPart
from meshtune.families.tensors import TensorMap
from meshtune.model.spec import ModelSpec
from meshtune.quantize.gguf import TYPES, GgmlType, decode, encode
from meshtune.quantize.gguf.mixture import Mixture
from meshtune.weights.packed import model_tensors
from meshtune.weights.publish import check_room
from meshtune.weights.tensor_reader import TensorReader
from meshtune.weights.writer import read_box


class Numbers(Protocol):
    """Gives rows of parameters in float32."""

    def rows(self, path: str, index: tuple[int, ...], start: int, stop: int) -> Float[np.ndarray, "rows ..."]:
        """Rows start..stop of `params[path][index]`."""
        ...

    def group(self, path: str) -> str:
        """The group of parameters that are computed together with this one: those of one group are best asked for one
        after another."""
        ...


class FileNumbers:
    """The parameters of a model directory, read when they are asked for, a box of a tensor at a time."""

    def __init__(self, directory: Path, spec: ModelSpec, reader: TensorReader):
        self._infos, self._reader = model_tensors(directory, spec.published), reader
        self._entries: dict[str, dict[tuple[int, ...], TensorMap]] = {}
        for entry in tensors(spec):
            self._entries.setdefault(entry.path, {})[entry.index] = entry

    def rows(self, path: str, index: tuple[int, ...], start: int, stop: int) -> Float[np.ndarray, "rows ..."]:
        """Rows start..stop of `params[path][index]`."""
        entries = self._entries[path]
        if index in entries:
            return self._box(entries[index], start, stop)
        parts = (entries[(*index, row)] for row in range(start, stop))  # the experts of a layer, one by one
        return np.stack([self._box(entry, 0, entry.shape[0]) for entry in parts])

    def group(self, path: str) -> str:
        """Every parameter is read by itself."""
        return ""

    def _box(self, entry: TensorMap, start: int, stop: int) -> np.ndarray:
        box = ((start, stop), *((0, n) for n in entry.shape[1:]))
        return read_box(self._reader, self._infos[entry.name], entry.view, box).astype(np.float32)


PART_NUMBERS = 1 << 22  # that are read, encoded and written together
ALIGNMENT = 32  # bytes, of each tensor in the file
LOST = 0.5  # error of a tensor from which its type holds next to nothing of it; the coarsest are at 0.15


@dataclasses.dataclass(frozen=True)
class Written:
    """The written file: tensors by type, bytes, and the error of stored numbers relative to the original
    ones, of the worst tensor (root mean square). `lost` are the names and types of tensors whose numbers are too small
    for their type, which stores zeros or next to nothing of them."""

    types: Mapping[str, int]
    nbytes: int
    error: float
    worst: str
    lost: tuple[tuple[str, str], ...] = ()


def write_gguf(
    file: Path,
    layout: GgufLayout,
    numbers: Numbers,
    mixture: Mixture,
    metadata: Mapping[str, Any],
    progress: Callable[[int, int], None] | None = None,
) -> Written:
    """Writes a file with a mixture of types; `metadata` is added to the layout's.

    Raises UserError for numbers that are not finite, or too large for float16.
    """
    shapes = layout.shapes | {name: array.shape for name, array in layout.computed.items()}
    chosen = {name: (TYPES[mixture.type_of(name, shape)], shape) for name, shape in shapes.items()}
    parts: dict[str, list[GgufPart]] = {}
    for part in sorted(layout.parts, key=lambda part: numbers.group(part.path)):
        parts.setdefault(part.name, []).append(part)
    check_room(file, sum(align_bytes(tensor_bytes(*entry)) for entry in chosen.values()))
    total = sum(math.prod(shape) for _, shape in chosen.values())
    done, worst, counts, lost = 0, (0.0, ""), dict[str, int](), list[tuple[str, str]]()
    stream, offsets = start_file(file, {**metadata, **layout.metadata}, chosen)
    with stream:
        nbytes = align_bytes(max(offsets[name] + tensor_bytes(*entry) for name, entry in chosen.items()))
        for name, array in layout.computed.items():
            stream.seek(offsets[name])
            stream.write(
                encode(chosen[name][0].name, np.ascontiguousarray(array.reshape(-1, array.shape[-1]))).tobytes()
            )
        for name, tensor_parts in parts.items():
            kind = chosen[name][0].name
            counts[kind] = counts.get(kind, 0) + 1
            stream.seek(offsets[name])
            squares = differences = 0.0
            for rows in _rows(tensor_parts, numbers):
                content, stored = encode_rows(name, kind, rows)
                stream.write(content.tobytes())
                squares += float(np.square(rows, dtype=np.float64).sum())
                differences += float(np.square(stored - rows, dtype=np.float64).sum())
                done += rows.size
                if progress:
                    progress(done, total)
            error = (differences / squares) ** 0.5 if squares else 0.0
            if error < LOST:
                worst = max(worst, (error, name))
            else:
                lost.append((name, kind))
        stream.truncate(nbytes)
        stream.flush()
        os.fsync(stream.fileno())
    return Written(counts, nbytes, *worst, tuple(lost))


def start_file(
    file: Path, metadata: Mapping[str, Any], tensors: Mapping[str, tuple[GgmlType, tuple[int, ...]]]
) -> tuple[BinaryIO, dict[str, int]]:
    """Writes all of a file before its tensors. Returns (the open file, the byte at which each tensor starts).

    Integers of the metadata become uint32 (or int32, uint64), floats float32, lists arrays of one type, and bytes an
    array of uint8. An empty list is left out: the package writes none.
    """
    writer = GGUFWriter(file, str(metadata["general.architecture"]))
    for key, value in metadata.items():
        if key != "general.architecture" and value != []:
            writer.add_key_value(key, value, _value_type(value))
    offsets: dict[str, int] = {}
    offset = 0
    for name, (kind, shape) in tensors.items():
        nbytes = tensor_bytes(kind, shape)
        writer.add_tensor_info(name, shape, np.dtype(np.float32), nbytes, GGMLQuantizationType(kind.id))
        offsets[name] = offset
        offset += align_bytes(nbytes)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    assert writer.fout is not None
    stream = writer.fout[0]
    start = align_bytes(stream.tell())
    stream.truncate(start)
    return stream, {name: start + offset for name, offset in offsets.items()}


def _value_type(value: Any) -> GGUFValueType:
    if isinstance(value, bytes | list):
        return GGUFValueType.ARRAY
    if isinstance(value, int) and not isinstance(value, bool) and not -(1 << 31) <= value < 0:
        return GGUFValueType.UINT32 if value < 1 << 32 else GGUFValueType.UINT64
    return GGUFValueType.get_type(value)


def align_bytes(nbytes: int) -> int:
    """A number of bytes, rounded up to whole multiples of ALIGNMENT."""
    return -(-nbytes // ALIGNMENT) * ALIGNMENT


def tensor_bytes(kind: GgmlType, shape: tuple[int, ...]) -> int:
    """The bytes of a tensor of a type. Raises ValueError where the type's blocks do not divide its rows."""
    return math.prod(shape[:-1]) * kind.row_bytes(shape[-1])


def _rows(parts: Sequence[GgufPart], numbers: Numbers) -> Iterator[np.ndarray]:
    """The rows of the tensor of these parts [rows, columns], in order."""
    part = parts[0]
    shape: list[int] = [*part.view.tensor]
    if not part.view.is_identity or not part.is_plain:
        tensor = np.empty(part.view.tensor, np.float32)
        for entry in parts:
            entry.into_tensor(numbers.rows(entry.path, entry.index, 0, entry.array_shape[0]), tensor)
        yield tensor.reshape(-1, shape[-1])
        return
    inner = math.prod(shape[1:])
    step = max(1, PART_NUMBERS // inner) if len(shape) > 1 else shape[0]
    for start in range(0, shape[0], step):
        rows = numbers.rows(part.path, part.index, start, min(shape[0], start + step))
        yield rows.reshape(-1, shape[-1]) + np.float32(part.offset)
    first = numbers.rows(part.path, part.index, 0, 1) + np.float32(part.offset) if part.padding else None
    for start in range(0, part.padding, step):
        assert first is not None
        yield np.repeat(first, min(step, part.padding - start), axis=0).reshape(-1, shape[-1])


def encode_rows(name: str, kind: str, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """(rows of a tensor in a type, their decoded numbers). Raises UserError for numbers that are not finite,
    and for ones beyond the type."""
    if not np.isfinite(rows).all():
        raise UserError(
            f"tensor '{name}' has numbers that are not finite",
            where="--gguf",
            fix="the model is damaged, or its training diverged: export an earlier checkpoint",
        )
    with np.errstate(over="ignore", invalid="ignore"):
        content = encode(kind, rows)
        stored = decode(kind, content)
    if not np.isfinite(stored).all():
        within = "float16's range" if kind == "F16" else f"what {kind} holds, whose scales are float16"
        raise UserError(
            f"tensor '{name}' has numbers up to {np.abs(rows).max():.4g}, beyond {within}",
            where=name,
            fix="write it with --gguf BF16",
        )
    return content, stored
