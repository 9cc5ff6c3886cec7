"""A short name for a base model's content, to know it again when an adapter or a run comes back to it."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

from meshtune.families import mathematics
from meshtune.weights.load import load_config
from meshtune.weights.safetensors_files import headers, samples
from meshtune.weights.tensor_reader import TensorReader


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
