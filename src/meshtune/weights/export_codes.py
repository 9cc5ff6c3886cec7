"""Writes a model with quantised weights. With a recipe's quantisation the codes that the model was trained over are
those in the files. In the format in which its base is published, tensors that training did not change are copied
byte for byte, and others are quantised again by the base's own scheme.

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
from meshtune.families.balancing import has_experts
from meshtune.families.composite import HEAD, tensor_name
from meshtune.families.tensors import Shape, TensorMap, by_name
from meshtune.model.spec import ModelSpec
from meshtune.quantize.config import QuantizeConfig
from meshtune.quantize.published.scheme import Box, Parts, Rewritable
from meshtune.quantize.published.write import Matrix, Writer
from meshtune.quantize.scales import restore_scales
from meshtune.quantize.weight import QuantisedWeight
from meshtune.weights.export import NewTensor, Publication, publish_model, round_numbers, whole_tensor
from meshtune.weights.load import load_config
from meshtune.weights.packed import model_tensors
from meshtune.weights.safetensors_files import DTYPES, STORED_DTYPES, TensorInfo, headers
from meshtune.weights.shards import Progress
from meshtune.weights.tensor_reader import TensorReader
from meshtune.weights.verify import ExportError


@dataclasses.dataclass(frozen=True)
class CodesTensor:
    """A tensor as a model without codes would have it: written from the parts of leaves that `entries` say, or, where
    `copied` is given, copied byte for byte from there."""

    name: str
    entries: Sequence[TensorMap]
    copied: TensorInfo | None = None

    @property
    def shape(self) -> Shape:
        return self.copied.shape if self.copied is not None else self.entries[0].view.tensor


def codes_tensors(
    params: Leaves, changed: frozenset[str], spec: ModelSpec, stored: Mapping[str, TensorInfo]
) -> list[CodesTensor]:
    """The tensors of a checkpoint of `params` (path -> leaf), in the order of those `stored` in the source's files.

    Written are QuantisedWeights and the leaves whose paths are in `changed`. Where experts are quantised, each expert's
    matrices are tensors of their own, as the loaders of codes expect, also if the source has all of a layer in one.
    Raises UserError where some matrices of experts are quantised and others are not.
    """
    split = dataclasses.replace(spec, fused_experts=False) if experts_as_codes(params, spec) else spec
    return list(_in_order(params, changed, by_name(tensors(spec)), by_name(tensors(split)), stored))


def experts_as_codes(params: Leaves, spec: ModelSpec) -> bool:
    """Whether a model's experts are quantised. Raises UserError where some of their matrices are and others are not."""
    names = {False: "", True: ""}
    for entry in tensors(spec):
        if entry.array.role == "experts":
            names[isinstance(params[entry.path], QuantisedWeight)] = entry.name
    if all(names.values()):
        raise UserError(
            f"of the experts '{names[True]}' is quantised and '{names[False]}' is not: loaders of codes read all "
            "matrices of an expert in one format",
            where="--format",
            fix="leave --format out; or train with quantize.modules naming all matrices of the experts, or none",
        )
    return bool(names[True])


def _in_order(
    params: Leaves,
    changed: frozenset[str],
    read: Mapping[str, Sequence[TensorMap]],
    written: Mapping[str, Sequence[TensorMap]],
    stored: Mapping[str, TensorInfo],
) -> Iterator[CodesTensor]:
    def is_new(entry: TensorMap) -> bool:
        return entry.path in changed or isinstance(params.get(entry.path), QuantisedWeight)

    # The layers of leaves that each tensor has a part of, in files with and without tensors of single experts.
    places: dict[tuple[str, tuple[int, ...]], list[str]] = {}
    for name, entries in written.items():
        for entry in entries:
            places.setdefault((entry.path, entry.index[:1]), []).append(name)
    done = set[str]()
    for name, info in stored.items():
        if name not in read:
            yield CodesTensor(name, (), info)
            continue
        targets = (target for entry in read[name] for target in places[entry.path, entry.index[:1]])
        for target in dict.fromkeys(targets):
            if target in done:
                continue
            done.add(target)
            if any(map(is_new, written[target])):
                yield CodesTensor(target, written[target])
            else:
                source = stored.get(target, info)
                assert source.shape == written[target][0].view.tensor, (target, name)
                yield CodesTensor(target, written[target], source)


ENDING = ".weight"


@dataclasses.dataclass(frozen=True)
class WrittenCodes:
    """The written directory: its path, how many weights as codes, how far the logits are from the given ones (root
    mean square, relative), and who does not read the experts, if there are any."""

    path: Path
    quantised: int
    difference: float
    experts_note: str


def export_codes(
    params: Leaves,
    changed: frozenset[str],
    spec: ModelSpec,
    config: QuantizeConfig,
    source: Path,
    publication: Publication,
    writer: Writer,
    expected: Float[np.ndarray, "B T V"],
    progress: Progress | None = None,
) -> WrittenCodes:
    """Writes `params` (path -> leaf, without adapters), whose QuantisedWeights have the codes.

    `changed` are the paths of other leaves whose numbers are not those of the model directory `source`; other tensors
    are copied from its files byte for byte. `expected` are the probe's logits. One tensor is in memory at a time
    besides `params`, and `progress(done, total)` counts the bytes written. Raises UserError where the format cannot
    hold a quantised weight, and ExportError where the written files compute something else.
    """
    planned = codes_tensors(params, changed, spec, headers(source))
    for tensor in planned:
        _check_fits(tensor, params, writer)
    coded = {tensor.name for tensor in planned if _is_coded(tensor, params)}
    plain_experts = has_experts(spec) and not experts_as_codes(params, spec)
    left_out = _left_out(planned, coded, spec)
    fields = load_config(source) | {"quantization_config": writer.config(config, spec.dtype, left_out, plain_experts)}

    def tensors_of(reader: TensorReader) -> Iterator[NewTensor]:
        return _tensors(planned, params, spec.dtype, writer, reader)

    note = (writer.plain_experts_note if plain_experts else writer.experts_note) if has_experts(spec) else ""
    difference = publish_model(publication, source, fields, tensors_of, expected, progress)
    return WrittenCodes(publication.dest, len(coded), difference, note)


def _left_out(planned: Sequence[CodesTensor], coded: set[str], spec: ModelSpec) -> list[str]:
    """The modules that hold a matrix, and no codes."""
    left_out = [
        tensor.name.removesuffix(ENDING)
        for tensor in planned
        if tensor.name.endswith(ENDING) and len(tensor.shape) == 2 and tensor.name not in coded
    ]
    head = tensor_name(spec, HEAD).removesuffix(ENDING)
    # A head that is tied to the embedding is a linear layer too, and has no tensor in the files.
    return left_out if head in left_out else [*left_out, head]


def _is_coded(tensor: CodesTensor, params: Leaves) -> bool:
    return tensor.copied is None and isinstance(params[tensor.entries[0].path], QuantisedWeight)


def _check_fits(tensor: CodesTensor, params: Leaves, writer: Writer) -> None:
    """Raises UserError for a tensor that the format has no place for."""
    leaves = [] if tensor.copied is not None else [params[entry.path] for entry in tensor.entries]
    codes = [leaf for leaf in leaves if isinstance(leaf, QuantisedWeight)]
    if not codes:
        return
    problem = None
    if len(codes) < len(leaves):
        problem = "is quantised in part"
    elif any(leaf.format != writer.source for leaf in codes):
        problem = f"is kept in {next(leaf.format for leaf in codes if leaf.format != writer.source)}"
    elif len(tensor.shape) != 2 or not tensor.name.endswith(ENDING):
        problem = "holds all experts of a layer, and this family's files have no tensors for single ones"
    elif any(entry.view.rows_dimension != 0 or entry.view.columns is None for entry in tensor.entries):
        problem = "is stored transposed"
    if problem:
        raise UserError(
            f"'{tensor.name}' {problem}; {writer.name} checkpoints hold linear layers in {writer.source}",
            where="--format",
            fix="leave --format out",
        )


def _tensors(
    planned: Sequence[CodesTensor], params: Leaves, dtype: str, writer: Writer, reader: TensorReader
) -> Iterator[NewTensor]:
    """Every tensor of the new files."""
    for tensor in planned:
        if (info := tensor.copied) is not None:
            yield NewTensor(tensor.name, info.shape, DTYPES[info.dtype].name, lambda info=info: reader.tensor(info))
        elif _is_coded(tensor, params):
            yield from _coded_parts(tensor.name.removesuffix(ENDING), tensor.entries, params, dtype, writer)
        else:
            yield NewTensor(tensor.name, tensor.shape, dtype, lambda tensor=tensor: _numbers(tensor, params, dtype))


def _coded_parts(
    stem: str, entries: Sequence[TensorMap], params: Leaves, dtype: str, writer: Writer
) -> Iterator[NewTensor]:
    """The parts of one weight, computed when the first of them is written and given away one by one."""
    parts: dict[str, np.ndarray] = {}

    def part(ending: str) -> np.ndarray:
        if ending not in parts:
            parts.update(writer.parts(_matrix(entries, params, writer.nests), dtype))
        return parts.pop(ending)

    # Shapes and dtypes are those of the parts of a matrix of zeros, which takes no memory of pages.
    for ending, array in writer.parts(_empty(entries, params, writer.nests), dtype).items():
        yield NewTensor(stem + ending, array.shape, array.dtype.name, lambda ending=ending: part(ending))


def _matrix(entries: Sequence[TensorMap], params: Leaves, nests: bool) -> Matrix:
    """A whole tensor of the files: the codes and scales of the leaves' parts, rows where the files have them."""
    single = _only(entries)
    if single is not None and nests:  # the blocks of nested scales are those of the whole matrix
        leaf: QuantisedWeight = params[single.path]
        nested = None if leaf.nested is None else np.asarray(leaf.nested[single.index])
        offset = 0.0 if leaf.offset is None else float(leaf.offset[single.index])
        codes, scales = np.asarray(leaf.codes[single.index]), np.asarray(leaf.scales[single.index])
        return Matrix(codes, scales, nested, offset, leaf.block_size)
    matrix = _empty(entries, params, nests)
    for entry in entries:
        leaf = params[entry.path]
        scales = leaf.scales[entry.index]
        if leaf.nested is not None:
            scales = restore_scales(scales, leaf.nested[entry.index], leaf.offset[entry.index])
        for array, part in ((matrix.codes, leaf.codes[entry.index]), (matrix.scales, scales)):
            entry.view.with_columns(array.shape[-1]).write(np.asarray(part), array)
    return matrix


def _empty(entries: Sequence[TensorMap], params: Leaves, nests: bool) -> Matrix:
    out, into = entries[0].view.tensor
    leaf: QuantisedWeight = params[entries[0].path]
    codes, blocks = np.zeros((out, into // 2), np.uint8), into // leaf.block_size
    if leaf.nested is None or not nests or _only(entries) is None:
        return Matrix(codes, np.zeros((out, blocks), np.float32), None, 0.0, leaf.block_size)
    # The offset is written as text, whose length the header must know.
    offset = float(leaf.offset[entries[0].index])
    nested = np.zeros(leaf.nested.shape[-1], np.float32)
    return Matrix(codes, np.zeros((out, blocks), np.uint8), nested, offset, leaf.block_size)


def _only(entries: Sequence[TensorMap]) -> TensorMap | None:
    """The entry of a tensor that is one unchanged part of one leaf; else None."""
    return entries[0] if len(entries) == 1 and entries[0].view.is_identity else None


def _numbers(tensor: CodesTensor, params: Leaves, dtype: str) -> np.ndarray:
    numbers = whole_tensor(tensor.entries, params, tensor.shape)
    return round_numbers(numbers, np.dtype(dtype) if dtype != "bfloat16" else DTYPES["BF16"], tensor.name)


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
