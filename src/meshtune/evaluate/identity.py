"""Which model an evaluation is of, and where its results go by default."""

from __future__ import annotations

import pathlib

from meshtune.digests import digest_files
from meshtune.runs.sources import find, is_run
from meshtune.runs.states import split_state
from meshtune.runs.verify import weights_digests
from meshtune.weights.fingerprint import base_hash


def identity(path: str, adapter: str | None = None, revision: str | None = None) -> str:
    """A hash of a model's mathematics and of all its weights, and of its adapter's if it has one."""
    source = find(path, adapter, revision=revision)
    weights_identity = " ".join([base_hash(source.base), *weights_digests(source.base)])
    return weights_identity if source.adapter is None else f"{weights_identity} + {adapter_hash(source.adapter)}"


def adapter_hash(adapter: pathlib.Path) -> str:
    """A hash of the files of an adapter."""
    names = ["adapter_config.json", "adapter_model.safetensors"]
    digests = digest_files(adapter, names)
    return " ".join(digests[name].digest for name in names)


def default_output(model: str, kind: str, subject: str) -> pathlib.Path:
    """In a run: its own folder `kind`; else a folder `kind` here. Both are named after the model."""
    name = pathlib.Path(subject).stem or "data"
    directory, state = split_state(model)
    if is_run(directory):
        return directory / kind / (name if state is None else f"{name}-{state}")
    return pathlib.Path(kind) / f"{directory.resolve().name if directory.exists() else directory.name}-{name}"
