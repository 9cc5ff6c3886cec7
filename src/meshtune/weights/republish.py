"""Writes a tuned model in the quantised format in which its base is published.

Tensors that training did not change are copied byte for byte, codes and scales included. Changed ones are quantised
again by the base's own scheme where they were quantised there, and rounded to the dtype it has in the base's files
elsewhere.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import numpy as np
from jaxtyping import Float

from meshtune.arrays.tree import Leaves
from meshtune.errors import UserError
from meshtune.families import tensors
from meshtune.families.tensors import Shape, TensorMap, by_name
from meshtune.model.spec import ModelSpec
from meshtune.quantize.published.scheme import Box, Parts, Rewritable
from meshtune.weights.load import load_config
from meshtune.weights.packed import model_tensors
from meshtune.weights.read_into import Progress
from meshtune.weights.rewrite import NewTensor, Publication, publish_model, round_numbers, whole_tensor
from meshtune.weights.safetensors_files import DTYPES, STORED_DTYPES, TensorInfo, headers
from meshtune.weights.tensor_reader import TensorReader
from meshtune.weights.verify import ExportError


@dataclasses.dataclass(frozen=True)
class Republished:
    """The written directory: its path, how many weights were quantised again, how far their numbers moved by that, and
    how far the logits are from those of the trained model; both root mean squares, relative."""

    path: Path
    quantised: int
    moved: float
    difference: float


@dataclasses.dataclass(frozen=True)
class InMemory:
    """The `scheme.Parts` of one weight, as arrays."""

    arrays: Mapping[str, np.ndarray]

    def __contains__(self, role: str) -> bool:
        return role in self.arrays

    def shape(self, role: str) -> Shape:
        return self.arrays[role].shape

    def dtype(self, role: str) -> str:
        return STORED_DTYPES[self.arrays[role].dtype.name]

    def box(self, role: str, box: Box) -> np.ndarray:
        return self.arrays[role][tuple(slice(start, stop) for start, stop in box)]

    def whole(self, role: str) -> np.ndarray:
        return self.arrays[role]


class _Requantised:
    """A weight of the base with other numbers, quantised when its first part is written; the parts are written one
    after another."""

    def __init__(self, entries: Sequence[TensorMap], leaves: Leaves, info: TensorInfo, moved: dict[str, float]):
        self._entries, self._leaves, self._info, self._moved = entries, leaves, info, moved
        self._parts: dict[str, np.ndarray] = {}

    def part(self, role: str, shape: Shape) -> np.ndarray:
        """The tensor of this role, with `shape` in the file; it is made once and given away."""
        if role not in self._parts:
            self._parts = dict(self._encode_parts())
        return self._parts.pop(role).reshape(shape)

    def _encode_parts(self) -> Mapping[str, np.ndarray]:
        assert self._info.packed is not None
        scheme = self._info.packed.scheme
        assert isinstance(scheme, Rewritable)
        numbers, name = whole_tensor(self._entries, self._leaves, self._info.shape), self._entries[0].name
        stored = {role: DTYPES[info.dtype] for role, info in self._info.packed.parts}
        parts = scheme.encode(numbers, stored)
        memory: Parts = InMemory(parts)
        again = scheme.decode(memory, tuple((0, n) for n in numbers.shape))
        size = float(np.sqrt(np.mean(numbers.astype(np.float64) ** 2)))
        self._moved[name] = float(np.sqrt(np.mean((again.astype(np.float64) - numbers) ** 2))) / max(size, 1e-30)
        if not self._moved[name] <= scheme.largest_error:
            raise ExportError(
                f"'{name}' moved by {self._moved[name]:.1%} when it was quantised again, and {scheme.method} allows "
                f"{scheme.largest_error:.0%}",
                fix="export it wide: leave --format out",
            )
        return parts


def republish(
    changed: Leaves,
    spec: ModelSpec,
    source: Path,
    publication: Publication,
    expected: Float[np.ndarray, "B T V"],
    progress: Progress | None = None,
) -> Republished:
    """Writes the model directory `source` again with other numbers for the leaves in `changed` (path -> float32,
    without adapters), in the format of its files. All leaves that a tensor of the files holds are changed, or none.

    `expected` are the probe's logits of the trained model. One tensor is in memory at a time, and `progress(done,
    total)` counts bytes. Raises UserError for a base that is not published quantised, or in a format that is not
    written, and as `write_model` does.
    """
    if not isinstance(spec.published, Rewritable):
        method = "not quantised" if spec.published is None else f"quantised by {spec.published.method}"
        raise UserError(
            f"this base is published {method}, and a model cannot be written in that format again",
            where="--format",
            fix="leave --format out: the model is then written wide; fp8 and mxfp4 can be written again",
        )
    moved: dict[str, float] = {}

    def tensors_of(reader: TensorReader) -> Iterator[NewTensor]:
        return _republished_tensors(changed, spec, source, reader, moved)

    difference = publish_model(publication, source, load_config(source), tensors_of, expected, progress)
    return Republished(publication.dest, len(moved), max(moved.values(), default=0.0), difference)


def _republished_tensors(
    changed: Leaves, spec: ModelSpec, source: Path, reader: TensorReader, moved: dict[str, float]
) -> Iterator[NewTensor]:
    """Every tensor of the source's files, in their order."""
    table = by_name(tensors(spec)).items()
    new = {name: entries for name, entries in table if any(entry.path in changed for entry in entries)}
    assert all(entry.path in changed for entries in new.values() for entry in entries)
    stored, logical = headers(source), model_tensors(source, spec.published)
    parts: dict[str, tuple[_Requantised, str]] = {}
    for name, entries in new.items():
        info = logical[name]
        if info.packed is not None:
            weight = _Requantised(entries, changed, info, moved)
            names = {(part.file, part.start): role for role, part in info.packed.parts}
            parts |= {
                part: (weight, names[stored[part].file, stored[part].start])
                for part in stored
                if (stored[part].file, stored[part].start) in names
            }
    for name, info in stored.items():
        dtype = DTYPES[info.dtype].name
        if name in parts:
            weight, role = parts[name]
            yield NewTensor(
                name, info.shape, dtype, lambda weight=weight, role=role, info=info: weight.part(role, info.shape)
            )
        elif name in new:
            yield NewTensor(
                name, info.shape, dtype, lambda name=name, info=info: _round_tensor(new[name], changed, info)
            )
        else:
            yield NewTensor(name, info.shape, dtype, lambda info=info: reader.tensor(info))


def _round_tensor(entries: Sequence[TensorMap], leaves: Leaves, info: TensorInfo) -> np.ndarray:
    return round_numbers(whole_tensor(entries, leaves, info.shape), DTYPES[info.dtype], entries[0].name)
