"""The on-disk cache of tokenised documents: flat memory-mapped arrays, keyed by a hash of everything they depend on.

Every array has a checksum in meta.json, and meta.json a digest of its own. Both are checked as a store is opened; a
damaged store is built anew, and says so.
"""

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
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import IO, Any

import numpy as np

from meshtune.cache import cache_folder
from meshtune.data.conversation import Origin
from meshtune.data.tokens import Example
from meshtune.errors import UserError
from meshtune.weights.file_lock import is_locked, lock

# Of everything that turns documents into tokens. It is part of every fingerprint: raising it makes earlier runs
# impossible to resume. Stores with other metadata are recognised by their digest.
VERSION = 4
DIGEST_BYTES = 16  # of a sample
META = "meta.json"
_GROUP = 1 << 16  # tokens written at once, at least one example
_ABANDONED = {".building-*": 1, ".parts-*": 14}  # days after which what a killed preparation left is removed
_ARRAYS = {
    "ids": np.int32,  # [tokens]
    "weights": np.float32,  # [tokens]
    "offsets": np.int64,  # [documents + 1]
    "sources": np.int32,  # [documents]: index into meta.json's sources
    "records": np.int64,  # [documents]
    "digests": np.uint64,  # [documents]: of ids, to find copies
    "values": np.float32,  # [documents]: see tokens.Example
}


class DamagedStore(Exception):
    """A store whose files are not those that were written."""


@dataclasses.dataclass(frozen=True)
class Store:
    """Examples by index, from memory-mapped arrays.

    `meta` is what the builder recorded beside them (counts). `damage` describes the damaged store that this one
    replaced, if there was one.
    """

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
    damage: str | None = None

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def __getitem__(self, index: int) -> Example:
        start, end = self.offsets[index], self.offsets[index + 1]
        return Example(self.ids[start:end], self.weights[start:end], self.origin(index), float(self.values[index]))

    def origin(self, index: int) -> Origin:
        """The record that document `index` was made from."""
        return Origin(self.names[self.sources[index]], int(self.records[index]))

    @property
    def lengths(self) -> np.ndarray:
        """Tokens of each document, int64 [documents]."""
        return np.diff(self.offsets)


def cache_directory(override: str | os.PathLike[str] | None = None) -> pathlib.Path:
    """The directory of tokenised data, in `override`, $MESHTUNE_CACHE or ~/.cache/meshtune."""
    return pathlib.Path(override or cache_folder()).expanduser() / "tokens"


def sample_digest(sample: object) -> bytes:
    """A hash of everything that a sample holds, DIGEST_BYTES long."""
    # The repr of dataclasses of strings, numbers, tuples and dicts is their complete content.
    return hashlib.blake2b(repr(sample).encode("utf-8", "surrogatepass"), digest_size=DIGEST_BYTES).digest()


def fingerprint(*parts: str) -> str:
    """A hash of everything that tokens depend on: the contents of the documents, the tokenizer, options."""
    digest = hashlib.sha256(f"meshtune tokens {VERSION}".encode())
    for part in parts:
        digest.update(hashlib.sha256(part.encode()).digest())
    return digest.hexdigest()[:32]


def open_or_build(
    key: str,
    build: Callable[[], tuple[Iterable[Example], Callable[[], dict[str, object]]]],
    cache: str | os.PathLike[str] | None = None,
    is_current: Callable[[Mapping[str, Any]], bool] = lambda meta: True,
) -> Store:
    """The store of `key`, built if it does not exist or is damaged, or if its metadata is not current.

    `build()` returns the examples and a function that is called after the last of them, for the metadata to record. A
    store becomes visible only once it is complete. Raises UserError if the cache cannot be written.
    """
    path = cache_directory(cache) / key
    damage = None
    try:
        store = open_store(path)
    except DamagedStore as problem:
        store, damage = None, f"the tokenised data in {path} are damaged ({problem})"
    if store is not None and is_current(store.meta):
        return store
    with _cache_errors(path.parent):
        path.parent.mkdir(parents=True, exist_ok=True)
        _remove_abandoned(path.parent)
        draft = pathlib.Path(tempfile.mkdtemp(dir=path.parent, prefix=".building-"))
    try:
        with lock(draft):
            examples, meta = build()
            _write(draft, examples, meta)
        with _cache_errors(path.parent):
            if store is not None:
                shutil.rmtree(path, ignore_errors=True)
            _publish(draft, path)
    finally:
        shutil.rmtree(draft, ignore_errors=True)
    try:
        built = open_store(path)
    except DamagedStore as problem:
        built, damage = None, str(problem)
    if built is None:
        raise UserError(
            f"tokenised data cannot be read back as they were written: {damage or 'they are gone'}",
            where=str(path),
            fix="check the disk, or set MESHTUNE_CACHE to a directory on another one",
        )
    return dataclasses.replace(built, damage=damage)


def open_store(path: pathlib.Path) -> Store | None:
    """The store in `path`; None if it does not exist, or is of an earlier version, without a digest.

    Raises DamagedStore, naming the file, if its contents are not those that were written.
    """
    if not path.exists():
        return None
    meta = _read_meta(path / META)
    if meta is None:
        return None
    arrays = {}
    for name, dtype in _ARRAYS.items():
        file = path / f"{name}.bin"
        recorded = meta["files"][name]
        try:
            size = file.stat().st_size
            if size != recorded["bytes"]:
                raise DamagedStore(f"{file.name} has {size:,} bytes, not {recorded['bytes']:,}")
            if _checksum(file) != recorded["crc32"]:
                raise DamagedStore(f"{file.name} does not match its checksum")
            arrays[name] = np.memmap(file, dtype, "r") if size else np.zeros(0, dtype)
        except OSError as problem:
            raise DamagedStore(f"{file.name}: {problem.strerror or problem}") from problem
    return Store(path, **arrays, names=tuple(meta["sources"]), meta=meta["notes"])


def _read_meta(file: pathlib.Path) -> dict[str, Any] | None:
    try:
        meta = json.loads(file.read_text(encoding="utf-8"))
    except OSError as problem:
        raise DamagedStore(f"{file.name}: {problem.strerror or problem}") from problem
    except (ValueError, RecursionError) as problem:
        raise DamagedStore(f"{file.name} is not JSON") from problem
    if not isinstance(meta, dict) or "digest" not in meta:
        return None
    if meta.pop("digest") != _digest(meta):
        raise DamagedStore(f"{file.name} does not match its digest")
    return meta


def _digest(meta: Mapping[str, object]) -> str:
    return hashlib.sha256(json.dumps(meta, sort_keys=True).encode()).hexdigest()


def _publish(draft: pathlib.Path, path: pathlib.Path) -> None:
    """Moves a complete draft to its place, unless another process was faster: its store has the same contents."""
    try:
        os.rename(draft, path)
    except OSError:
        if not path.exists():
            raise
        with contextlib.suppress(DamagedStore):
            if open_store(path) is not None:
                return
        shutil.rmtree(path)
        os.rename(draft, path)


@contextlib.contextmanager
def _cache_errors(directory: pathlib.Path) -> Iterator[None]:
    try:
        yield
    except OSError as problem:
        raise UserError(
            f"tokenised data cannot be written: {problem.strerror or problem}",
            where=str(directory),
            fix="free space there, or set MESHTUNE_CACHE to a directory that can be written",
        ) from problem


def _write(draft: pathlib.Path, examples: Iterable[Example], meta: Callable[[], dict[str, object]]) -> None:
    sources: dict[str, int] = {}
    with contextlib.ExitStack() as stack:
        with _cache_errors(draft.parent):
            files = {name: (draft / f"{name}.bin").open("wb", 1 << 20) for name in _ARRAYS}
        for file in files.values():
            stack.callback(_close, file)
        checksums = dict.fromkeys(_ARRAYS, 0)
        sizes = dict.fromkeys(_ARRAYS, 0)

        def append(name: str, values: Sequence[float] | np.ndarray) -> None:
            data = np.asarray(values, _ARRAYS[name]).tobytes()
            with _cache_errors(draft.parent):
                files[name].write(data)
            checksums[name] = zlib.crc32(data, checksums[name])
            sizes[name] += len(data)

        end = 0
        append("offsets", [0])
        for group in _groups(examples):
            append("ids", np.concatenate([example.ids for example in group]))
            append("weights", np.concatenate([example.weights for example in group]))
            ends = end + np.cumsum([len(example.ids) for example in group])
            append("offsets", ends)
            end = int(ends[-1])
            append("sources", [sources.setdefault(example.origin.source, len(sources)) for example in group])
            append("records", [example.origin.record for example in group])
            hashed = (hashlib.blake2b(example.ids.tobytes(), digest_size=8).digest() for example in group)
            append("digests", np.frombuffer(b"".join(hashed), np.uint64))
            append("values", [example.value for example in group])
        with _cache_errors(draft.parent):
            for file in files.values():
                file.flush()
                os.fsync(file.fileno())
    recorded = {name: {"bytes": sizes[name], "crc32": checksums[name]} for name in _ARRAYS}
    content = {"version": VERSION, "files": recorded, "sources": list(sources), "notes": meta()}
    content = json.loads(json.dumps(content))  # as it will be read, so that the digest is of what is read
    with _cache_errors(draft.parent), (draft / META).open("w", encoding="utf-8") as file:
        json.dump({**content, "digest": _digest(content)}, file)
        file.flush()
        os.fsync(file.fileno())


def _groups(examples: Iterable[Example]) -> Iterator[list[Example]]:
    """Consecutive examples, in lists of about _GROUP tokens."""
    group: list[Example] = []
    tokens = 0
    for example in examples:
        group.append(example)
        tokens += len(example.ids)
        if tokens >= _GROUP:
            yield group
            group, tokens = [], 0
    if group:
        yield group


def _close(file: IO[bytes]) -> None:
    # The contents were flushed and synchronised before; after a failed write, closing fails again on what is left.
    with contextlib.suppress(OSError):
        file.close()


def _checksum(file: pathlib.Path) -> int:
    checksum = 0
    with file.open("rb") as stream:
        while data := stream.read(1 << 22):
            checksum = zlib.crc32(data, checksum)
    return checksum


def _remove_abandoned(directory: pathlib.Path) -> None:
    """Removes drafts and parts of builds that were killed and not started again."""
    for pattern, days in _ABANDONED.items():
        for draft in directory.glob(pattern):
            with contextlib.suppress(OSError):
                # A clock may have jumped: a draft that is being written is none that was abandoned.
                if time.time() - draft.stat().st_mtime > days * 86400 and not is_locked(draft):
                    shutil.rmtree(draft, ignore_errors=True)
