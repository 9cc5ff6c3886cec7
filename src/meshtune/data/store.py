"""Tokenised documents on disk: flat memory-mapped arrays, written once, found again by what they were made from."""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import os
import pathlib
import shutil
import tempfile
import time
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import IO, Any

import numpy as np

from meshtune.cache import cache_folder
from meshtune.data.conversation import Origin
from meshtune.data.tokens import Example
from meshtune.errors import UserError

VERSION = 4  # of the files' layout and of everything that turns documents into tokens: raise it when either changes
_ARRAYS = {
    "ids": np.int32,  # [tokens]
    "weights": np.float32,  # [tokens]
    "offsets": np.int64,  # [documents + 1]
    "sources": np.int32,  # [documents]: index into meta.json's sources
    "records": np.int64,  # [documents]
    "digests": np.uint64,  # [documents]: of ids, to find copies
    "values": np.float32,  # [documents]: see tokens.Example
}


@dataclasses.dataclass(frozen=True)
class Store:
    """Examples by index. Arrays are memory maps; `meta` is what the builder noted (counts)."""

    path: pathlib.Path
    ids: np.ndarray
    weights: np.ndarray
    offsets: np.ndarray
    sources: np.ndarray
    records: np.ndarray
    digests: np.ndarray
    values: np.ndarray
    names: tuple[str, ...]
    meta: dict[str, Any]

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def __getitem__(self, index: int) -> Example:
        start, end = self.offsets[index], self.offsets[index + 1]
        return Example(self.ids[start:end], self.weights[start:end], self.origin(index), float(self.values[index]))

    def origin(self, index: int) -> Origin:
        """Where document `index` came from."""
        return Origin(self.names[self.sources[index]], int(self.records[index]))

    @property
    def lengths(self) -> np.ndarray:
        """Tokens of each document, int64 [documents]."""
        return np.diff(self.offsets)


def cache_directory(override: str | os.PathLike[str] | None = None) -> pathlib.Path:
    """Where tokenised data are kept: `override`, $MESHTUNE_CACHE, or ~/.cache/meshtune."""
    base = cache_folder() if override is None else pathlib.Path(override).expanduser()
    return base / "tokens"


def fingerprint(documents: Iterable[Any], *parts: str) -> str:
    """A hash of the documents' contents and of everything else that decides their tokens."""
    digest = hashlib.sha256(f"meshtune tokens {VERSION}".encode())
    for part in parts:
        digest.update(hashlib.sha256(part.encode()).digest())
    for document in documents:
        # Dataclasses of strings, numbers, tuples and dicts: repr is their whole content.
        digest.update(repr(document).encode("utf-8", "surrogatepass"))
        digest.update(b"\0")
    return digest.hexdigest()[:32]


def open_or_build(
    key: str,
    build: Callable[[], tuple[Iterable[Example], Callable[[], dict[str, Any]]]],
    cache: str | os.PathLike[str] | None = None,
) -> Store:
    """The store named `key`, built if it is not there whole.

    `build()` gives the examples and a function that is called after the last of them and gives what to note beside
    them. A build becomes visible only when it is complete; one that died, or whose files do not match their checksums,
    is built again. Raises UserError if the cache cannot be written.
    """
    path = cache_directory(cache) / key
    found = open_store(path)
    if found is not None:
        return found
    with _writing(path.parent):
        path.parent.mkdir(parents=True, exist_ok=True)
        _clear_abandoned(path.parent)
        draft = pathlib.Path(tempfile.mkdtemp(dir=path.parent, prefix=".building-"))
    try:
        examples, note = build()
        _write(draft, examples, note)
        if path.exists() and open_store(path) is None:
            shutil.rmtree(path, ignore_errors=True)
        with _writing(path.parent):
            _publish(draft, path)
    finally:
        shutil.rmtree(draft, ignore_errors=True)
    built = open_store(path)
    if built is None:
        raise UserError(
            "tokenised data were written but read back differently",
            where=str(path),
            fix="check the disk, or MESHTUNE_CACHE",
        )
    return built


def open_store(path: pathlib.Path) -> Store | None:
    """The store in `path`, or None if it is not there, not whole, or not what was written."""
    try:
        meta = json.loads((path / "meta.json").read_text(encoding="utf-8"))
        arrays = {}
        for name, dtype in _ARRAYS.items():
            file = path / f"{name}.bin"
            noted = meta["files"][name]
            if file.stat().st_size != noted["bytes"] or _checksum(file) != noted["crc32"]:
                return None
            arrays[name] = np.memmap(file, dtype, "r") if noted["bytes"] else np.zeros(0, dtype)
        return Store(path, **arrays, names=tuple(meta["sources"]), meta=meta["notes"])
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _publish(draft: pathlib.Path, path: pathlib.Path) -> None:
    try:
        os.rename(draft, path)
    except OSError:
        if not path.exists():
            raise
        # Another process was faster; its store holds the same.


@contextlib.contextmanager
def _writing(directory: pathlib.Path) -> Iterator[None]:
    try:
        yield
    except OSError as problem:
        raise UserError(
            f"tokenised data cannot be written: {problem.strerror or problem}",
            where=str(directory),
            fix="make room there, or set MESHTUNE_CACHE to a directory that can be written",
        ) from problem


def _write(draft: pathlib.Path, examples: Iterable[Example], note: Callable[[], dict[str, Any]]) -> None:
    sources: dict[str, int] = {}
    with contextlib.ExitStack() as stack:
        with _writing(draft.parent):
            files = {name: (draft / f"{name}.bin").open("wb", 1 << 20) for name in _ARRAYS}
        for file in files.values():
            stack.callback(_close, file)
        sums = dict.fromkeys(_ARRAYS, 0)
        sizes = dict.fromkeys(_ARRAYS, 0)

        def put(name: str, values: Sequence[float] | np.ndarray) -> None:
            data = np.asarray(values, _ARRAYS[name]).tobytes()
            with _writing(draft.parent):
                files[name].write(data)
            sums[name] = zlib.crc32(data, sums[name])
            sizes[name] += len(data)

        end = 0
        put("offsets", [0])
        for example in examples:
            put("ids", example.ids)
            put("weights", example.weights)
            put("offsets", [end := end + len(example.ids)])
            put("sources", [sources.setdefault(example.origin.source, len(sources))])
            put("records", [example.origin.record])
            hashed = hashlib.blake2b(example.ids.tobytes(), digest_size=8).digest()
            put("digests", np.frombuffer(hashed, np.uint64))
            put("values", [example.value])
        with _writing(draft.parent):
            for file in files.values():
                file.flush()
                os.fsync(file.fileno())
    written = {name: {"bytes": sizes[name], "crc32": sums[name]} for name in _ARRAYS}
    meta = {"version": VERSION, "files": written, "sources": list(sources), "notes": note()}
    with _writing(draft.parent), (draft / "meta.json").open("w", encoding="utf-8") as file:
        json.dump(meta, file)
        file.flush()
        os.fsync(file.fileno())


def _close(file: IO[bytes]) -> None:
    # What counts was flushed and synchronised before; after a failed write, closing fails once more on what is left.
    with contextlib.suppress(OSError):
        file.close()


def _checksum(file: pathlib.Path) -> int:
    total = 0
    with file.open("rb") as stream:
        while data := stream.read(1 << 22):
            total = zlib.crc32(data, total)
    return total


def _clear_abandoned(directory: pathlib.Path) -> None:
    """Remove what builds that were killed left behind, once it is a day old."""
    for draft in directory.glob(".building-*"):
        with contextlib.suppress(OSError):
            if time.time() - draft.stat().st_mtime > 86400:
                shutil.rmtree(draft, ignore_errors=True)
