"""A GGUF file as a model directory: its config and its tokenizer in files of their own, its tensors where they are.

`open_gguf` writes such a directory, which holds a link to the file, for all that reads models from directories.
"""

from __future__ import annotations

import functools
import hashlib
import json
import os
from pathlib import Path
from typing import Any

from meshtune.errors import UserError
from meshtune.families import model_spec
from meshtune.families.gguf import read_config
from meshtune.families.gguf.rope import FREQUENCIES, LONG, SHORT
from meshtune.json_text import read_json
from meshtune.weights.gguf.file import GgufFile, read_gguf
from meshtune.weights.gguf.tensors import small_tensor, tensor_infos
from meshtune.weights.gguf.tokenizer import tokenizer_files
from meshtune.weights.safetensors_files import LINK, TOKENIZER_PROBLEM, TensorInfo

HEAD = 1 << 25  # bytes
FORM = 3  # of what is written into a directory
DTYPES = {"F32": "float32", "F16": "float16"}


def open_gguf(file: Path, cache: Path) -> Path:
    """The directory of a GGUF file below `cache`, which is written where it is not there, or is of a file that has
    changed since. Raises UserError for a model that is not read; an error of its tokenizer is kept in
    the directory for whoever asks for a tokenizer."""
    file = file.resolve()
    name = hashlib.sha256(f"{FORM} {file} {_version(file)} {_head(file)}".encode()).hexdigest()[:24]
    directory = cache / "gguf" / f"{file.stem}-{name}"
    if (directory / "config.json").is_file():
        return directory
    gguf = read_gguf(file)
    config = gguf_config(gguf)
    _check_vocabulary(gguf, config)
    config |= _ids(gguf)
    try:
        files = tokenizer_files(gguf.metadata, str(file))
    except UserError as error:
        files = {TOKENIZER_PROBLEM: {"what": error.what, "where": error.where, "fix": error.fix}}
    if ends := _ends(gguf):
        files["generation_config.json"] = {"eos_token_id": ends}
    spec = model_spec(dict(config), config["dtype"], str(file))
    tensor_infos(gguf, spec)
    files["config.json"] = config
    partial = directory.with_name(f".{directory.name}.{os.getpid()}")
    partial.mkdir(parents=True)
    (partial / LINK).symlink_to(file)
    for name, content in files.items():
        (partial / name).write_text(json.dumps(content, ensure_ascii=False), encoding="utf-8")
    if not directory.exists():
        partial.rename(directory)
    return directory


def _version(file: Path) -> str:
    """A text that changes with every write to a file, whatever size and time that leaves: it has the inode's too."""
    state = file.stat()
    return f"{state.st_dev} {state.st_ino} {state.st_size} {state.st_mtime_ns} {state.st_ctime_ns}"


def _head(file: Path) -> str:
    """A hash of the bytes in which the metadata are, from which all of a directory is made but for rope's factors."""
    with file.open("rb") as content:
        return hashlib.sha256(content.read(HEAD)).hexdigest()


def gguf_config(gguf: GgufFile) -> dict[str, Any]:
    """The config.json of a file's model. Raises UserError for a model that is not read."""
    if gguf.metadata.get("general.type") == "adapter":
        raise UserError(
            "this GGUF file is an adapter, not a model",
            where=str(gguf.file),
            fix="give the model, and the adapter in PEFT's format",
        )
    if "token_embd.weight" not in gguf.tensors:
        raise UserError("the file has no token_embd.weight, so it is not a language model", where=str(gguf.file))
    factors = {name: small_tensor(gguf, name) for name in (FREQUENCIES, LONG, SHORT) if name in gguf.tensors}
    rows = gguf.tensors["token_embd.weight"].shape[0]
    config = read_config(gguf.architecture, gguf.of_architecture(), factors, gguf.tensors, rows, str(gguf.file))
    sizes: dict[str, int] = {}
    for tensor in gguf.tensors.values():
        sizes[tensor.type.name] = sizes.get(tensor.type.name, 0) + tensor.nbytes
    commonest = max(sizes, key=lambda name: sizes[name])
    return config | {"dtype": DTYPES.get(commonest, "bfloat16")}


def infos_of(link: Path) -> dict[str, TensorInfo]:
    """The tensors of a directory's GGUF file by their names in a checkpoint."""
    file = link.resolve()
    return dict(_infos(link.parent, file, _version(file)))


@functools.lru_cache(maxsize=4)
def _infos(directory: Path, file: Path, _modified: str) -> dict[str, TensorInfo]:
    return tensor_infos(read_gguf(file), model_spec(read_json(directory / "config.json"), where=str(file)))


def _check_vocabulary(gguf: GgufFile, config: dict[str, Any]) -> None:
    tokens = len(gguf.metadata.get("tokenizer.ggml.tokens", ()))
    if tokens > config["vocab_size"]:
        raise UserError(
            f"the file's tokenizer has {tokens} tokens, and its embedding {config['vocab_size']} rows",
            where=str(gguf.file),
            fix="convert the model again with the tokenizer that belongs to it",
        )


def _ids(gguf: GgufFile) -> dict[str, Any]:
    names = {"bos": "bos_token_id", "eos": "eos_token_id", "padding": "pad_token_id"}
    ids = {field: gguf.metadata.get(f"tokenizer.ggml.{name}_token_id") for name, field in names.items()}
    return {field: id_ for field, id_ in ids.items() if id_ is not None}


def _ends(gguf: GgufFile) -> list[int]:
    """The ids at which an answer ends: of a text, of a turn, of a message that calls a tool."""
    ids = (gguf.metadata.get(f"tokenizer.ggml.{name}_token_id") for name in ("eos", "eot", "eom"))
    return list(dict.fromkeys(id_ for id_ in ids if isinstance(id_, int)))
