"""Tensors of a checkpoint outside of the tuned model: vision towers, projectors, next-token prediction heads.

Their tensors are no parameters: no device ever holds them. A full export copies them byte for byte.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Mapping
from pathlib import Path

from meshtune.families import tensors
from meshtune.families.composite import passed_through
from meshtune.mesh.processes import SINGLE_PROCESS, Job
from meshtune.model.spec import ModelSpec
from meshtune.weights.safetensors_files import StoredTensor, TensorInfo, headers, tensor_names
from meshtune.weights.tensor_reader import TensorReader


@dataclasses.dataclass(frozen=True)
class Part:
    """A part of a checkpoint that is passed through: its name, its number of tensors and their bytes."""

    name: str
    tensors: int
    nbytes: int


def passed_tensors(source: Path, spec: ModelSpec, job: Job = SINGLE_PROCESS) -> list[StoredTensor]:
    """The tensors of the model directory `source` that are passed through, in the order of its files.

    Process 0 of `job` reads the headers, and all processes return the same list.
    """
    entries = None
    if job.is_main_process:
        infos = headers(source)
        entries = [
            [name, list(info.shape), info.dtype, str(info.file), info.start, info.nbytes]
            for name, info in infos.items()
            if passed_through(spec, name) is not None
        ]
    entries = job.broadcast("export: passed through", entries)
    return [
        StoredTensor(name, TensorInfo(tuple(shape), dtype, Path(file), start, nbytes))
        for name, shape, dtype, file, start, nbytes in entries
    ]


def parts(infos: Mapping[str, TensorInfo], spec: ModelSpec) -> tuple[Part, ...]:
    """The parts of a checkpoint that are passed through, given its tensors."""
    sizes: dict[str, list[int]] = {}
    for name, info in infos.items():
        if (part := passed_through(spec, name)) is not None:
            sizes.setdefault(part, []).append(info.nbytes)
    return tuple(Part(name, len(nbytes), sum(nbytes)) for name, nbytes in sizes.items())


def list_parts(parts: Iterable[Part]) -> str:
    """Parts as a run's banner and `weights check` list them."""
    return ", ".join(f"{part.name} ({part.tensors:,} tensors, {part.nbytes:,} bytes)" for part in parts)


def notes(source: Path, spec: ModelSpec) -> list[tuple[str, str]]:
    """(which model is tuned, what of its checkpoint passes through) for a run's banner; [] where nothing does."""
    infos = headers(source) if any(passed_through(spec, name) for name in tensor_names(source)) else {}
    if spec.composite is None and not infos:
        return []
    count = sum(math.prod(shape) for shape in {entry.name: entry.view.tensor for entry in tensors(spec)}.values())
    model = spec.family if spec.composite is None else f"text model of {spec.composite.model_type}"
    if spec.vision is not None:
        model = f"{spec.composite.model_type if spec.composite else spec.family} with its vision tower"
        if not infos:
            return [(model, f"{count:,} parameters")]
    names = list_parts(parts(infos, spec)) or "all other parts"
    return [(model, f"{count:,} parameters; not tuned and passed through: {names}")]


def first_changed(tensors: Iterable[StoredTensor], written: Mapping[str, TensorInfo]) -> str | None:
    """The name of the first tensor that is not byte for byte what it was copied from; None if all are."""
    with TensorReader() as reader:
        for tensor in tensors:
            copy = written.get(tensor.name)
            if copy is None or (copy.shape, copy.dtype) != (tensor.info.shape, tensor.info.dtype):
                return tensor.name
            if any(reader.read(tensor.info, *piece) != reader.read(copy, *piece) for piece in tensor.blocks()):
                return tensor.name
    return None
