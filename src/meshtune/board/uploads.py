"""Files that come through the page, and never over one that is there: records, which are text, into ROOT/data, and
documents into ROOT/documents."""

from __future__ import annotations

import codecs
import contextlib
import os
import pathlib
import re
from collections.abc import AsyncIterator, Callable, Sequence
from typing import IO

from meshtune.board.routes.results import MODELS
from meshtune.board.workspace import FOLDER, Workspace
from meshtune.data.sources import READERS, file_type
from meshtune.errors import UserError
from meshtune.evaluate.folder import MARKDOWN, PREDICTIONS, SETTINGS, TASKS, TOTALS
from meshtune.synth.card import RECORD_FILES, REPORT
from meshtune.synth.documents import ARCHIVES, DOCUMENT_TYPES, MOST_BYTES

FOLDER_NAME = "data"  # below the root
TEXT_TYPES = (".json", ".jsonl", ".csv", ".tsv", ".txt")
MAX_BYTES = 2**30
MAX_NAME = 200
# How files begin that are archives, compressed, or of a columnar format.
BINARY = {
    b"PK\x03\x04": "a zip archive",
    b"PK\x05\x06": "a zip archive",
    b"\x1f\x8b": "compressed by gzip",
    b"BZh": "compressed by bzip2",
    b"\xfd7zXZ": "compressed by xz",
    b"\x28\xb5\x2f\xfd": "compressed by zstd",
    b"7z\xbc\xaf": "a 7z archive",
    b"PAR1": "a Parquet file",
    b"%PDF-": "a PDF",
}
DEPTH, MOST_FILES, MOST_FOLDERS = 4, 500, 2000
DOCUMENTS = "documents"  # below the root
# How documents that are no text begin.
STARTS = {".pdf": b"%PDF-", **dict.fromkeys(ARCHIVES, b"PK\x03\x04")}


async def receive(workspace: Workspace, name: str, chunks: AsyncIterator[bytes]) -> pathlib.Path:
    """Writes an upload of records below ROOT/data, under another name where the name is taken.

    Raises: UserError for a file that is not text or too large; nothing is left of it then.
    """
    _check_name(name, TEXT_TYPES)
    return await _receive(workspace, FOLDER_NAME, name, chunks, MAX_BYTES)


async def receive_document(workspace: Workspace, name: str, chunks: AsyncIterator[bytes]) -> pathlib.Path:
    """Writes an upload of a document below ROOT/documents, as `receive` does.

    Raises: UserError for a file of another type than its name says, or too large; nothing is left of it then.
    """
    _check_name(name, DOCUMENT_TYPES)
    return await _receive(workspace, DOCUMENTS, name, chunks, MOST_BYTES, STARTS.get(pathlib.Path(name).suffix.lower()))


async def _receive(
    workspace: Workspace, below: str, name: str, chunks: AsyncIterator[bytes], most: int, start: bytes | None = None
) -> pathlib.Path:
    """Writes a file of at most `most` bytes: text, or with `start` one that begins so."""
    folder = workspace.to_write(below, "name")
    folder.mkdir(parents=True, exist_ok=True)
    path, file = _new_file(folder, name)
    try:
        with file:
            size = await _write(file, name, _limit_size(chunks, name, most, below), start)
        if not size:
            raise UserError("the file is empty", where=name, fix="give one with records, or with text")
    except BaseException:
        path.unlink(missing_ok=True)
        raise
    return path


async def _limit_size(chunks: AsyncIterator[bytes], name: str, most: int, below: str) -> AsyncIterator[bytes]:
    size = 0
    async for chunk in chunks:
        size += len(chunk)
        if size > most:
            fix = f"split it, or copy it to {below}/ of the board's root instead"
            raise UserError(f"the file is larger than {most >> 20} MiB", where=name, fix=fix)
        yield chunk


async def _write(file: IO[bytes], name: str, chunks: AsyncIterator[bytes], start: bytes | None) -> int:
    """Writes the chunks; returns how many bytes they are."""
    decoder = codecs.getincrementaldecoder("utf-8")()
    size = 0
    try:
        async for chunk in chunks:
            if not size:
                _check_start(chunk, name, start)
            size += len(chunk)
            if start is None:
                if b"\0" in chunk:
                    fix = "save it as UTF-8 text"
                    raise UserError("the file is not text: it holds null bytes", where=name, fix=fix)
                decoder.decode(chunk)
            file.write(chunk)
        decoder.decode(b"", final=True)
    except UnicodeDecodeError as error:
        raise UserError(f"the file is not UTF-8 text: {error.reason}", where=name, fix="save it as UTF-8") from error
    except OSError as error:
        raise UserError(f"the file cannot be written: {error.strerror}", where=name, fix="free some space") from error
    return size


def _check_name(name: str, types: Sequence[str]) -> None:
    if not name or len(name) > MAX_NAME or name.startswith(".") or re.search(r"[/\\\x00-\x1f]", name):
        raise UserError(f"{name!r} is not a plain file name", where="name", fix="rename the file")
    if pathlib.Path(name).suffix.lower() not in types:
        raise UserError(
            f"files of type '{pathlib.Path(name).suffix}' are not taken",
            where=name,
            fix=f"give {', '.join(types)}; unpack archives first, and copy other files below the board's root",
        )


def _check_start(chunk: bytes, name: str, start: bytes | None) -> None:
    if start is not None:
        if not chunk.startswith(start):
            kind = pathlib.Path(name).suffix[1:].upper()
            raise UserError(f"the file is no {kind}", where=name, fix="open it, and save it again; or rename it")
        return
    for start, kind in BINARY.items():
        if chunk.startswith(start):
            raise UserError(f"the file is {kind}, not text", where=name, fix="unpack it, or convert it to JSON lines")


def _new_file(folder: pathlib.Path, name: str) -> tuple[pathlib.Path, IO[bytes]]:
    """A file that did not exist: NAME, or else NAME-2 and so on."""
    stem, suffix = os.path.splitext(name)
    number = 1
    while True:
        path = folder / (name if number == 1 else f"{stem}-{number}{suffix}")
        with contextlib.suppress(FileExistsError):
            return path, path.open("xb")
        number += 1


def data_files(workspace: Workspace) -> list[dict[str, object]]:
    """{path, bytes, registry} of files below the root and the readable folders that are data, or a registry of them."""
    return [
        {"path": workspace.shown(path), "bytes": size, "registry": path.name == "dataset_info.json"}
        for path, size in _files(workspace, lambda name: file_type(pathlib.Path(name)) in READERS)
    ]


def document_files(workspace: Workspace) -> list[dict[str, object]]:
    """{path, bytes} of files below the root and the readable folders that are documents."""
    files = _files(workspace, lambda name: pathlib.Path(name).suffix.lower() in DOCUMENT_TYPES)
    return [{"path": workspace.shown(path), "bytes": size} for path, size in files]


def _files(workspace: Workspace, fits: Callable[[str], bool]) -> list[tuple[pathlib.Path, int]]:
    """(path, bytes) of files whose name fits, those of the root first, outside of runs, models and evaluations."""
    files: list[tuple[pathlib.Path, int]] = []
    pending = [(folder, 0) for folder in (workspace.root, *workspace.readable)]
    visited = 0
    while pending and visited < MOST_FOLDERS and len(files) < MOST_FILES:
        folder, depth = pending.pop(0)
        visited += 1
        try:
            entries = sorted(os.scandir(folder), key=lambda entry: entry.name)
        except OSError:
            continue
        names = {entry.name for entry in entries}
        if folder != workspace.root and names & {"run.json", "config.json", "adapter_config.json"}:
            continue  # runs and models
        if SETTINGS in names and names & {MARKDOWN, PREDICTIONS, TOTALS, TASKS, *MODELS}:
            continue  # evaluations
        for entry in entries:
            if entry.name.startswith((".", FOLDER)):
                continue
            if entry.path == str(workspace.root):
                continue  # the root inside of a --read folder was the first
            if entry.is_dir(follow_symlinks=False) and depth < DEPTH:
                pending.append((pathlib.Path(entry.path), depth + 1))
            elif REPORT in names and entry.name not in RECORD_FILES:
                continue  # of records that were made, what is no record
            elif entry.is_file(follow_symlinks=False) and fits(entry.name):
                files.append((pathlib.Path(entry.path), entry.stat().st_size))
    return sorted(files, key=lambda file: not file[0].is_relative_to(workspace.root))
