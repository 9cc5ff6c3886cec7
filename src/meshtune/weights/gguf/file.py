"""Reads the header of a GGUF file: its metadata, and where each tensor lies.

The package gguf is not used for it. GGUFReader 0.19 takes half a minute and a gigabyte for a vocabulary of 262,144
pieces (this, one second), goes through as many values as a damaged file claims to have, and cannot tell where a file
that was cut short ends.
"""

from __future__ import annotations

import dataclasses
import math
import mmap
import re
import struct
from pathlib import Path
from typing import Any

import numpy as np

from meshtune.errors import UserError
from meshtune.json_text import file_size
from meshtune.quantize.gguf import BY_ID, GgmlType

MAGIC, ALIGNMENT = b"GGUF", 32
STRING, ARRAY = 8, 9
NUMBERS = {0: "u1", 1: "i1", 2: "<u2", 3: "<i2", 4: "<u4", 5: "<i4", 6: "<f4", 7: "?", 10: "<u8", 11: "<i8", 12: "<f8"}
PART_NAME = re.compile(r"(.+)-\d{5}-of-(\d{5})\.gguf")
LARGEST = 1 << 32  # no sound file has as many entries
LONGEST_HEADER = 256 << 20  # bytes; the largest vocabularies take a tenth
LARGEST_SPLIT = 99_999  # the number of parts has five digits in their names
LARGEST_ALIGNMENT = 1 << 20
DEEPEST = 2  # arrays in arrays: no writer has any
DAMAGED = "download or copy the file again; where that does not help, convert the model again"


@dataclasses.dataclass(frozen=True)
class GgufTensor:
    """A tensor its type, its shape with rows first, and the bytes from `start` on of the file that it lies in."""

    type: GgmlType
    shape: tuple[int, ...]
    start: int
    nbytes: int
    file: Path


@dataclasses.dataclass(frozen=True)
class GgufFile:
    """A file's metadata and tensors, from its header only."""

    file: Path
    metadata: dict[str, Any]
    tensors: dict[str, GgufTensor]

    @property
    def architecture(self) -> str:
        return str(self.metadata.get("general.architecture", ""))

    def integer(self, key: str, default: int, *, least: int = 0, greatest: int = 1 << 32) -> int:
        """A whole number of the metadata. Raises UserError where it is another value, or out of bounds."""
        value = self.metadata.get(key, default)
        if type(value) is not int or not least <= value <= greatest:
            raise broken(
                self.file,
                f"{key} is {_show_value(value)}, which is not a whole number from {least} to {greatest}",
                DAMAGED,
            )
        return value

    def of_architecture(self) -> dict[str, Any]:
        """The metadata of the architecture, without its name before the keys."""
        start = f"{self.architecture}."
        return {key.removeprefix(start): value for key, value in self.metadata.items() if key.startswith(start)}


def read_gguf(file: Path) -> GgufFile:
    """Reads a header, or the headers of all parts of a model that is split into files `-00001-of-00003.gguf`.

    Raises UserError for a file that is not GGUF, is not whole, or has tensors of an unknown type, and for parts that
    are missing or of another model.
    """
    first = _part(file)
    count = first.integer("split.count", 1, greatest=LARGEST_SPLIT)
    if count <= 1:
        return first
    paths = part_paths(file, count)
    if absent := [path.name for path in paths if not path.is_file()]:
        raise UserError(
            f"the model is split into {count} parts, and {', '.join(absent[:4])} "
            + ("is missing" if len(absent) == 1 else f"{'and others ' * (len(absent) > 4)}are missing"),
            where=str(file),
            fix="put all parts into one folder, under the names that they were written with",
        )
    parts = [_part(path) for path in paths]
    for number, part in enumerate(parts):
        place = part.metadata.get("split.no"), part.metadata.get("split.count")
        if place != (number, count):
            claim = f"part {place[0] + 1} of {place[1]}" if isinstance(place[0], int) else "no part of a model"
            raise broken(
                part.file,
                f"by its name it is part {number + 1} of {count}, and by its content {claim}",
                "give the parts the names that they were written with, or download them again",
            )
    tensors = {name: tensor for part in parts for name, tensor in part.tensors.items()}
    total = parts[0].metadata.get("split.tensors.count", len(tensors))
    if len(tensors) != total or len(tensors) != sum(len(part.tensors) for part in parts):
        raise broken(file, f"its parts have {len(tensors)} tensors, and {total} are said to be in them")
    return GgufFile(paths[0], parts[0].metadata, tensors)


def part_paths(file: Path, count: int) -> list[Path]:
    """The files of a split model, by the name of any. Raises UserError for a name that is not of such a file."""
    match = PART_NAME.fullmatch(file.name)
    if match is None or int(match[2]) != count:
        raise UserError(
            f"this is one of the {count} parts that a GGUF model is split into, and its name does not say which",
            where=str(file),
            fix=f"give the parts the names that they were written with: NAME-00001-of-{count:05d}.gguf",
        )
    return [file.with_name(f"{match[1]}-{number:05d}-of-{count:05d}.gguf") for number in range(1, count + 1)]


def _part(file: Path) -> GgufFile:
    size = file_size(file)
    if size < 24:
        raise broken(file, f"it is {size} bytes long, too short for a header")
    with file.open("rb") as stream, mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ) as mapped:
        cursor = _Cursor(file, mapped)
        _check_start(file, cursor)
        tensors, entries = cursor.count("tensors"), cursor.count("metadata")
        metadata: dict[str, Any] = {}
        for _ in range(entries):
            key = cursor.string()
            if key in metadata:
                raise broken(file, f"its metadata have {key!r} twice")
            metadata[key] = cursor.value(cursor.number("<I"))
        infos = [(cursor.string(), cursor.shape(), cursor.number("<I"), cursor.number("<Q")) for _ in range(tensors)]
        end = cursor.at
    gguf = GgufFile(file, metadata, {})
    alignment = gguf.integer("general.alignment", ALIGNMENT, least=1, greatest=LARGEST_ALIGNMENT)
    if alignment & (alignment - 1):
        raise broken(file, f"general.alignment is {alignment}, which is not a power of two", DAMAGED)
    data = -(-end // alignment) * alignment
    located: dict[str, GgufTensor] = {}
    for name, shape, kind, offset in infos:
        if name in located:
            raise broken(file, f"it has the tensor {name!r} twice")
        if offset % alignment:
            raise broken(file, f"tensor {name!r} starts at byte {offset} of the data, not a multiple of {alignment}")
        located[name] = _tensor(file, name, shape, kind, data + offset)
    stop = data
    for name, tensor in sorted(located.items(), key=lambda item: (item[1].start, item[1].nbytes)):
        if not stop <= tensor.start < stop + alignment:
            raise broken(file, f"tensor {name!r} starts at byte {tensor.start:,}, and the one before ends at {stop:,}")
        stop = tensor.start + tensor.nbytes
    if stop > size:
        raise broken(file, f"its tensors end at byte {stop:,}, and the file after {size:,}")
    return dataclasses.replace(gguf, tensors=located)


def _show_value(value: Any) -> str:
    return repr(value)[:100]


def _check_start(file: Path, cursor: _Cursor) -> None:
    magic = cursor.take(4)
    if magic != MAGIC:
        if magic.startswith(b"vers"):
            raise broken(file, "it is a Git LFS pointer, not the weights themselves", "run `git lfs pull` in the clone")
        raise broken(file, f"it begins with {magic!r} and not with {MAGIC!r}", "give a GGUF file, or a model directory")
    version = cursor.number("<I")
    if version >> 24 and not version & 0xFFFF:
        raise broken(file, "its numbers are in big-endian order", "convert the model again for little-endian machines")
    if version not in (2, 3):
        raise broken(file, f"it has version {version}; 2 and 3 are read", "convert it again with a current llama.cpp")


def _tensor(file: Path, name: str, shape: tuple[int, ...], kind: int, start: int) -> GgufTensor:
    if kind not in BY_ID:
        raise UserError(
            f"tensor '{name}' has type {kind}, which is not known",
            where=str(file),
            fix="give a file with types of llama.cpp's own, such as Q4_K_M, Q8_0 or F16",
        )
    try:
        row = BY_ID[kind].row_bytes(shape[-1])
    except ValueError as error:
        raise broken(file, f"tensor '{name}' {list(shape)}: {error}") from error
    return GgufTensor(BY_ID[kind], shape, start, math.prod(shape[:-1]) * row, file)


class _Cursor:
    """Reads values one after another from the start of a file."""

    def __init__(self, file: Path, content: mmap.mmap):
        self.file, self.content, self.at = file, content, 0

    def take(self, length: int) -> bytes:
        if self.at + length > LONGEST_HEADER:
            raise broken(self.file, f"its header has more than {LONGEST_HEADER:,} bytes")
        if self.at + length > len(self.content):
            raise broken(self.file, f"its header goes on beyond its end, after {len(self.content):,} bytes")
        self.at += length
        return self.content[self.at - length : self.at]

    def number(self, form: str) -> int:
        return struct.unpack(form, self.take(struct.calcsize(form)))[0]

    def count(self, noun: str) -> int:
        count = self.number("<Q")
        if count > LARGEST:
            raise broken(self.file, f"it is said to have {count:,} {noun}")
        return count

    def string(self) -> str:
        length = self.count("bytes in a string")
        return self.take(length).decode("utf-8", errors="replace")

    def shape(self) -> tuple[int, ...]:
        dimensions = self.number("<I")
        if not 1 <= dimensions <= 4:
            raise broken(self.file, f"a tensor has {dimensions} dimensions")
        return tuple(self.number("<Q") for _ in range(dimensions))[::-1]

    def value(self, kind: int, depth: int = 0) -> Any:
        if kind == STRING:
            return self.string()
        if kind in NUMBERS:
            dtype = np.dtype(NUMBERS[kind])
            return np.frombuffer(self.take(dtype.itemsize), dtype)[0].item()
        if kind != ARRAY or depth == DEEPEST:
            raise broken(self.file, f"a value of its metadata has type {kind}" + " at that depth" * (kind == ARRAY))
        inner, count = self.number("<I"), self.count("values in an array")
        if inner in NUMBERS:
            dtype = np.dtype(NUMBERS[inner])
            return np.frombuffer(self.take(dtype.itemsize * count), dtype).tolist()
        return [self.value(inner, depth + 1) for _ in range(count)]


def broken(file: Path, reason: str, fix: str = "download or copy the file again") -> UserError:
    """The error for a GGUF file that is damaged."""
    return UserError(f"{file.name} is not a whole GGUF file: {re.sub(chr(10), ' ', reason)}", where=str(file), fix=fix)
