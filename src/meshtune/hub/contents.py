"""The files of a push: those of a result, without paths of this machine, and searched for secrets before they go."""

from __future__ import annotations

import json
import os
import re
import shutil
import struct
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from meshtune.digests import FILE as DIGESTS
from meshtune.digests import write_digests
from meshtune.errors import UserError
from meshtune.json_text import read_json

SENT = (
    "*.safetensors", "*.json", "*.jinja", "*.model", "*.txt", "*.tiktoken", "*.gguf", "*Modelfile", "LICENSE*",
    "NOTICE*",
)  # fmt: skip
# JSON files whose strings may name files of this machine; the others are vocabularies.
CONFIGS = (
    "adapter_config.json",
    "config.json",
    "generation_config.json",
    "preprocessor_config.json",
    "processor_config.json",
    "tokenizer_config.json",
)
VOCABULARIES = ("tokenizer.json", "vocab.json", "merges.txt")
LOCAL = ("/", "~/", "./", "../")
TOKEN = re.compile(rb"\bhf_[A-Za-z0-9]{30,}")
SEARCHED_BYTES = 32 << 20  # of a file of weights: its names and metadata are in front


class PublicNames:
    """What paths of this machine are called elsewhere: by `names` (path -> name), any other by its last part."""

    def __init__(self, names: Mapping[str, str]):
        self._names = dict(names)

    def of(self, text: str) -> str:
        if text in self._names:
            return self._names[text]
        return Path(text).name if text.startswith(LOCAL) else text

    def within(self, value: Any) -> Any:
        """A JSON value whose strings name no path of this machine."""
        if isinstance(value, dict):
            return {key: self.within(entry) for key, entry in value.items()}
        if isinstance(value, list):
            return [self.within(entry) for entry in value]
        return self.of(value) if isinstance(value, str) else value


def stage(source: Path, staged: Path, names: PublicNames) -> tuple[dict[str, Path], list[str]]:
    """Prepares the files of `source` (a folder, or one file) for a push: name in the repository -> path.

    Files that name local paths are written to `staged` without them, and the digests of a result are made again for
    that; the others stay where they are. Also returns the names of what is not sent: hidden files, code, pickles.
    """
    if source.is_file():
        return {source.name: source}, []
    files, left_out, rewritten = {}, [], False
    for path in sorted(source.rglob("*")):
        if not path.is_file():
            continue
        name = path.relative_to(source).as_posix()
        if name == DIGESTS or name == "README.md":
            continue
        if any(part.startswith(".") for part in name.split("/")) or not any(path.match(kind) for kind in SENT):
            left_out.append(name)
            continue
        copy = staged / name
        copy.parent.mkdir(parents=True, exist_ok=True)
        files[name] = copy if _rewritten(path, copy, names) else path
        rewritten |= files[name] is copy
    if (source / DIGESTS).is_file():
        files[DIGESTS] = _digests(source, staged, files, rewritten or bool(left_out))
    return files, left_out


def _digests(source: Path, staged: Path, files: Mapping[str, Path], changed: bool) -> Path:
    if not changed:
        return source / DIGESTS
    for name, path in files.items():
        if path != staged / name:
            os.symlink(path.resolve(), staged / name)
    write_digests(staged)
    return staged / DIGESTS


def _rewritten(path: Path, copy: Path, names: PublicNames) -> bool:
    """Writes `copy` without paths of this machine; False, and nothing is written, where `path` names none."""
    if path.suffix == ".safetensors":
        return _header_rewritten(path, copy, names)
    if path.name not in CONFIGS:
        return False
    fields = read_json(path)
    public = names.within(fields)
    if public == fields:
        return False
    copy.write_text(json.dumps(public, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
    return True


def _header_rewritten(path: Path, copy: Path, names: PublicNames) -> bool:
    with path.open("rb") as file:
        (length,) = struct.unpack("<Q", file.read(8))
        header = json.loads(file.read(length))
        metadata = header.get("__metadata__") or {}
        public = {key: _public_text(value, names) for key, value in metadata.items()}
        if public == metadata:
            return False
        text = json.dumps(header | {"__metadata__": public}, separators=(",", ":"), ensure_ascii=False).encode()
        text += b" " * (-len(text) % 8)  # the data that follow stay aligned
        with copy.open("wb") as output:
            output.write(struct.pack("<Q", len(text)) + text)
            shutil.copyfileobj(file, output, 16 << 20)
    return True


def _public_text(value: str, names: PublicNames) -> str:
    """A value of a safetensors file's metadata: JSON, or plain text."""
    try:
        parsed = json.loads(value)
    except ValueError:
        return names.of(value)
    public = names.within(parsed)
    return value if public == parsed else json.dumps(public)


def check_contents(files: Mapping[str, Path | bytes], token: str, paths: Sequence[str]) -> None:
    """Raises UserError for a file that holds a token of the hub, or one of these `paths` of this machine.

    Vocabularies, which may hold any text, are searched for tokens alone; of weights the first 32 MiB are read.
    """
    sought = [path.encode() for path in paths if len(path) > 1]
    for name, content in files.items():
        text = _beginning(content, name)
        if token.encode() in text or TOKEN.search(text):
            raise UserError(
                f"'{name}' holds a token of the hub", where=name, fix="take it out of the file; nothing was pushed"
            )
        local = next((path for path in sought if Path(name).name not in VOCABULARIES and _names_path(path, text)), None)
        if local is not None:
            raise UserError(
                f"'{name}' names a path of this machine: {local.decode()}",
                where=name,
                fix="take it out of the file; nothing was pushed",
            )


def _names_path(path: bytes, text: bytes) -> bool:
    return re.search(rb"(?<![\w.-])" + re.escape(path) + rb"(?![\w.-])", text) is not None


def _beginning(content: Path | bytes, name: str) -> bytes:
    if isinstance(content, bytes):
        return content
    with content.open("rb") as file:
        return file.read(SEARCHED_BYTES if name.endswith((".safetensors", ".gguf")) else -1)


def local_paths(*paths: str | os.PathLike[str] | None) -> list[str]:
    """Absolute forms of paths, and this user's home and working directory."""
    given = [Path(path).expanduser().absolute() for path in paths if path is not None and os.fspath(path)]
    every: Iterable[Path] = [*given, *(path.resolve() for path in given), Path.home(), Path.cwd()]
    longest: Callable[[str], int] = len
    return sorted({str(path) for path in every if len(path.parts) > 1}, key=longest, reverse=True)
