"""Summarises a model directory, checks that it is complete, and names a base's content by a hash."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
from pathlib import Path

from meshtune.errors import UserError
from meshtune.families import mathematics, tensors
from meshtune.families.composite import passed_through
from meshtune.weights.check import check
from meshtune.weights.load import load_config, load_spec
from meshtune.weights.packed import model_tensors
from meshtune.weights.passed_through import Part, parts
from meshtune.weights.safetensors_files import TensorInfo, headers, samples
from meshtune.weights.tensor_reader import TensorReader

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


def base_hash(directory: Path) -> str:
    """'sha256:<64 hex digits>' of a model directory.

    Hashed, in the order of tensor names: the config fields that the family read and that say something about the
    mathematics; each tensor's name, dtype and shape, of towers that are not tuned too; and its bytes, in full up to
    64 KiB, else 16 samples of 4 KiB spread evenly from its first byte to its last. So the hash does not change with
    copying, renaming or sharding, does change with dtype and with any training that moves the weights, and reads about
    75 MB of a 405B model. A change to single numbers between the samples goes unseen: it recognises a model, and is no
    defence against forgery. Raises UserError as `headers` and `model_spec` do.
    """
    directory = Path(directory)
    config = load_config(directory)
    digest = hashlib.sha256(b"meshtune base 1\n")
    digest.update(_canonical(mathematics(dict(config), str(directory / "config.json"))))
    with TensorReader() as reader:
        for name, info in sorted(headers(directory).items()):
            digest.update(_canonical([name, info.dtype, list(info.shape)]))
            for offset, length in samples(info):
                digest.update(reader.read(info, offset, length))
    return f"sha256:{digest.hexdigest()}"


def _canonical(value: object) -> bytes:
    return json.dumps(value, sort_keys=True, separators=(",", ":")).encode() + b"\n"
