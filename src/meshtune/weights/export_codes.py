"""Writes a model whose linear layers are quantised by a recipe as a checkpoint that other programs load: the codes that
the model was trained over are the codes in the files."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
from jaxtyping import Float

from meshtune.arrays.tree import Leaves
from meshtune.errors import UserError
from meshtune.families.composite import HEAD, tensor_name
from meshtune.families.experts import has_experts
from meshtune.families.tensors import TensorMap
from meshtune.model.spec import ModelSpec
from meshtune.quantize.config import QuantizeConfig
from meshtune.quantize.published.write import Matrix, Writer
from meshtune.quantize.scales import restore_scales
from meshtune.quantize.weight import QuantisedWeight
from meshtune.weights.codes_layout import CodesTensor, codes_tensors, experts_as_codes
from meshtune.weights.load import load_config
from meshtune.weights.read_into import Progress
from meshtune.weights.rewrite import NewTensor, Publication, publish_model, round_numbers, whole_tensor
from meshtune.weights.safetensors_files import DTYPES, headers
from meshtune.weights.tensor_reader import TensorReader

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
