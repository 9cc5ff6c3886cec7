"""What a model directory holds, and that it is whole: from its config and the headers of its files alone."""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path

from meshtune.errors import UserError
from meshtune.families import tensors
from meshtune.weights.check import check
from meshtune.weights.load import load_spec
from meshtune.weights.safetensors_files import headers

DTYPE_NAMES = {"F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16"}


@dataclasses.dataclass(frozen=True)
class Survey:
    """`dtypes` maps the dtypes that the files hold to bytes, `unused` names tensors that the model does not need."""

    directory: str
    family: str
    layers: int
    tensors: int
    parameters: int
    bytes: int
    files: int
    dtypes: dict[str, int]
    unused: list[str]


def survey(directory: Path) -> Survey:
    """Checks names, shapes, dtypes and file sizes against config.json; no weight is read, nothing is allocated.

    Raises UserError naming the file and tensor for whatever is missing, half-written, or not as the config says.
    """
    directory = Path(directory)
    if not directory.is_dir():
        raise UserError("there is no such directory", where=str(directory), fix="give the folder of a downloaded model")
    spec, _ = load_spec(directory)
    found = headers(directory)
    check(directory, spec, found, numbers=False)
    wanted = {entry.name: math.prod(entry.view.tensor) for entry in tensors(spec)}
    dtypes: dict[str, int] = {}
    for name in wanted:
        dtype = DTYPE_NAMES.get(found[name].dtype, found[name].dtype.lower())
        dtypes[dtype] = dtypes.get(dtype, 0) + found[name].nbytes
    return Survey(
        directory=str(directory),
        family=spec.family,
        layers=spec.layers,
        tensors=len(wanted),
        parameters=sum(wanted.values()),
        bytes=sum(found[name].nbytes for name in wanted),
        files=len({info.file for info in found.values()}),
        dtypes=dict(sorted(dtypes.items(), key=lambda entry: -entry[1])),
        unused=[name for name in found if name not in wanted],
    )
