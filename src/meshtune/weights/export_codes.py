"""Writes a model whose linear layers are quantised by a recipe as a checkpoint that other programs load: the codes that
the model was trained over are the codes in the files."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import numpy as np
from jaxtyping import Float

from meshtune.arrays.tree import Leaves
from meshtune.errors import UserError
from meshtune.families import tensors
from meshtune.families.tensors import TensorMap, by_name
from meshtune.model.spec import ModelSpec
from meshtune.quantize.config import QuantizeConfig
from meshtune.quantize.published.write import Matrix, Writer
from meshtune.quantize.scales import restored
from meshtune.quantize.weight import QuantisedWeight
from meshtune.weights.load import load_config
from meshtune.weights.read_into import Progress
from meshtune.weights.rewrite import NewTensor, Publication, publish_model, whole_tensor
from meshtune.weights.safetensors_files import DTYPES, TensorInfo, headers
from meshtune.weights.tensor_reader import TensorReader

ENDING = ".weight"


@dataclasses.dataclass(frozen=True)
class WrittenCodes:
    """What was written: where, how many weights as codes, and how far the logits are from those of what was given (root
    mean square, relative)."""

    path: Path
    quantised: int
    difference: float


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

    `changed` are the paths of other leaves whose numbers are not those of the model directory `source`; what is neither
    is copied from its files byte for byte. `expected` are the probe's logits. One tensor is in memory at a time beside
    `params`, and `progress(done, total)` counts the bytes written. Raises UserError where the format cannot hold what
    is quantised, and ExportError where the written files compute something else.
    """
    new = _new_tensors(params, changed, spec)
    stored = headers(source)
    for name, entries in new.items():
        _check_fits(name, entries, params, writer)
    quantised = {name for name, entries in new.items() if isinstance(params[entries[0].path], QuantisedWeight)}
    left_out = [
        name.removesuffix(ENDING)
        for name, info in stored.items()
        if name.endswith(ENDING) and len(info.shape) == 2 and name not in quantised
    ]
    fields = load_config(source) | {"quantization_config": writer.config(config, spec.dtype, left_out)}

    def tensors_of(reader: TensorReader) -> Iterator[NewTensor]:
        return _tensors(new, stored, params, spec.dtype, writer, reader)

    difference = publish_model(publication, source, fields, tensors_of, expected, progress)
    return WrittenCodes(publication.dest, len(quantised), difference)


def _new_tensors(params: Leaves, changed: frozenset[str], spec: ModelSpec) -> dict[str, list[TensorMap]]:
    """The entries of the tensors that are not copied."""

    def is_new(entry: TensorMap) -> bool:
        return entry.path in changed or isinstance(params.get(entry.path), QuantisedWeight)

    return {name: entries for name, entries in by_name(tensors(spec)).items() if any(map(is_new, entries))}


def _check_fits(name: str, entries: Sequence[TensorMap], params: Leaves, writer: Writer) -> None:
    """Raises UserError for a tensor that the format has no place for."""
    leaves = [params[entry.path] for entry in entries]
    codes = [leaf for leaf in leaves if isinstance(leaf, QuantisedWeight)]
    if not codes:
        return
    problem = None
    if len(codes) < len(leaves):
        problem = "is quantised in part"
    elif any(leaf.format != writer.source for leaf in codes):
        problem = f"is kept in {next(leaf.format for leaf in codes if leaf.format != writer.source)}"
    elif any(entry.array.role == "experts" for entry in entries) or not name.endswith(ENDING):
        problem = "is of experts, which loaders of this format do not read"
    elif any(entry.view.rows_dimension != 0 or entry.view.columns is None for entry in entries):
        problem = "is stored transposed"
    if problem:
        raise UserError(
            f"'{name}' {problem}; {writer.name} checkpoints hold linear layers in {writer.source}",
            where="--format",
            fix="leave --format out",
        )


def _tensors(
    new: Mapping[str, Sequence[TensorMap]],
    stored: Mapping[str, TensorInfo],
    params: Leaves,
    dtype: str,
    writer: Writer,
    reader: TensorReader,
) -> Iterator[NewTensor]:
    """Every tensor of the new files, in the order of the source's."""
    for name, info in stored.items():
        entries = new.get(name)
        if entries is None:
            yield NewTensor(name, info.shape, DTYPES[info.dtype].name, lambda info=info: reader.tensor(info))
        elif isinstance(params[entries[0].path], QuantisedWeight):
            yield from _coded(name.removesuffix(ENDING), entries, params, dtype, writer)
        else:
            yield NewTensor(
                name, info.shape, dtype, lambda entries=entries, info=info: _numbers(entries, params, info, dtype)
            )


def _coded(stem: str, entries: Sequence[TensorMap], params: Leaves, dtype: str, writer: Writer) -> Iterator[NewTensor]:
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
    whole = _only(entries)
    if whole is not None and nests:  # the blocks of nested scales are those of the whole matrix
        leaf: QuantisedWeight = params[whole.path]
        nested = None if leaf.nested is None else np.asarray(leaf.nested[whole.index])
        offset = 0.0 if leaf.offset is None else float(leaf.offset[whole.index])
        codes, scales = np.asarray(leaf.codes[whole.index]), np.asarray(leaf.scales[whole.index])
        return Matrix(codes, scales, nested, offset, leaf.block_size)
    matrix = _empty(entries, params, nests)
    for entry in entries:
        leaf = params[entry.path]
        scales = leaf.scales[entry.index]
        if leaf.nested is not None:
            scales = restored(scales, leaf.nested[entry.index], leaf.offset[entry.index])
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
    """The entry of a tensor that is one part of one leaf, as it is; else None."""
    return entries[0] if len(entries) == 1 and entries[0].view.is_identity else None


def _numbers(entries: Sequence[TensorMap], params: Leaves, info: TensorInfo, dtype: str) -> np.ndarray:
    numbers = whole_tensor(entries, params, info.shape)
    return numbers.astype(np.dtype(dtype) if dtype != "bfloat16" else DTYPES["BF16"])
