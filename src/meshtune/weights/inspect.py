"""Summarises a model directory, and checks that it is complete, from its config and the headers of its files."""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path

from meshtune.errors import UserError
from meshtune.families import tensors
from meshtune.families.composite import passed_through
from meshtune.weights.check import check
from meshtune.weights.load import load_spec
from meshtune.weights.packed import model_tensors
from meshtune.weights.passed_through import Part, parts
from meshtune.weights.safetensors_files import TensorInfo

DTYPE_NAMES = {"F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16"}


@dataclasses.dataclass(frozen=True)
class ModelSummary:
    """`dtypes` maps the dtypes that the files hold, and methods that weights are quantised by, to bytes.

    `unused` names tensors that the model does not need.

    `composite` is the model_type of the checkpoint whose text model it is, if any, and `passed_through` lists the other
    parts of the checkpoint.
    """

    directory: str
    family: str
    layers: int
    tensors: int
    parameters: int
    bytes: int
    files: int
    dtypes: dict[str, int]
    unused: list[str]
    composite: str | None = None
    passed_through: tuple[Part, ...] = ()


def _dtype(info: TensorInfo) -> str:
    """The storage of its numbers: a dtype, or the method that they are quantised with."""
    return info.packed.scheme.method if info.packed else DTYPE_NAMES.get(info.dtype, info.dtype.lower())


def inspect_model(directory: Path) -> ModelSummary:
    """Checks names, shapes, dtypes and file sizes against config.json; no weight is read, nothing is allocated.

    Raises UserError naming the file and tensor for whatever is missing, half-written, or not as the config says.
    """
    directory = Path(directory)
    if not directory.is_dir():
        raise UserError("there is no such directory", where=str(directory), fix="give the folder of a downloaded model")
    spec, _ = load_spec(directory)
    infos = model_tensors(directory, spec.published)
    check(directory, spec, infos, numbers=False)
    sizes = {entry.name: math.prod(entry.view.tensor) for entry in tensors(spec)}
    dtypes: dict[str, int] = {}
    for name in sizes:
        dtype = _dtype(infos[name])
        dtypes[dtype] = dtypes.get(dtype, 0) + infos[name].nbytes
    return ModelSummary(
        directory=str(directory),
        family=spec.family,
        layers=spec.layers,
        tensors=len(sizes),
        parameters=sum(sizes.values()),
        bytes=sum(infos[name].nbytes for name in sizes),
        files=len({info.file for info in infos.values()}),
        dtypes=dict(sorted(dtypes.items(), key=lambda entry: -entry[1])),
        unused=[name for name in infos if name not in sizes and passed_through(spec, name) is None],
        composite=None if spec.composite is None else spec.composite.model_type,
        passed_through=parts(infos, spec),
    )
