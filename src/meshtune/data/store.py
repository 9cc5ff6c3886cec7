"""The on-disk cache of tokenised documents: flat memory-mapped arrays with checksums, made in parts that an interrupted
preparation keeps.

Every array has a checksum in meta.json, and meta.json its own digest. Both are checked when a store is opened; a
damaged store is rebuilt, and says so.

A preparation that was killed reads back the parts that it had finished. A part depends only on its samples, so the
result is the same, bit for bit, wherever it was interrupted and however many threads or processes worked on it. Memory
is that of a few parts.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import hashlib
import itertools
import json
import os
import pathlib
import queue
import shutil
import tempfile
import time
import zipfile
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import numpy as np

from meshtune.cache import cache_folder
from meshtune.data.conversation import Origin, Sample
from meshtune.data.tokens import Example, TokenCounts, Tokenize
from meshtune.errors import UserError
from meshtune.weights.publish import is_locked, lock

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
    "digests": np.uint64,  # [documents]: of ids and extras, to find copies
    "values": np.float32,  # [documents]: see tokens.Example
}
_EXTRAS = {"extras": np.uint8, "extra_offsets": np.int64}  # [bytes], [documents + 1]; only where a document has any


@dataclasses.dataclass(frozen=True)
class ExampleArrays:
    """Consecutive examples as arrays: `ids` int32 and `weights` float32 [tokens]; `lengths` and `records` int64,
    `sources` int32, which index `names`, and `values` float64 [examples]; `extras` uint8 [bytes] and `extra_lengths`
    int64 [examples], both empty if no example has any."""

    ids: np.ndarray
    weights: np.ndarray
    lengths: np.ndarray
    sources: np.ndarray
    records: np.ndarray
    values: np.ndarray
    names: tuple[str, ...]
    extras: np.ndarray = dataclasses.field(default_factory=lambda: np.zeros(0, np.uint8))
    extra_lengths: np.ndarray = dataclasses.field(default_factory=lambda: np.zeros(0, np.int64))

    @classmethod
    def of(cls, examples: Sequence[Example]) -> ExampleArrays:
        """The arrays of some examples."""
        names: dict[str, int] = {}
        extras = [example.extra for example in examples]
        return cls(
            np.concatenate([np.zeros(0, np.int32), *(example.ids for example in examples)]),
            np.concatenate([np.zeros(0, np.float32), *(example.weights for example in examples)]),
            np.array([len(example.ids) for example in examples], np.int64),
            np.array([names.setdefault(example.origin.source, len(names)) for example in examples], np.int32),
            np.array([example.origin.record for example in examples], np.int64),
            np.array([example.value for example in examples], np.float64),
            tuple(names),
            np.frombuffer(b"".join(extras), np.uint8),
            np.array([len(extra) for extra in extras] if any(extras) else [], np.int64),
        )

    def __iter__(self) -> Iterator[Example]:
        edges = np.cumsum([0, *self.lengths]).tolist()
        extra_edges = np.cumsum([0, *(self.extra_lengths if len(self.extra_lengths) else self.lengths * 0)]).tolist()
        for index, (source, record, value) in enumerate(zip(self.sources, self.records, self.values, strict=True)):
            span, extra = slice(*edges[index : index + 2]), slice(*extra_edges[index : index + 2])
            origin = Origin(self.names[source], int(record))
            yield Example(self.ids[span], self.weights[span], origin, float(value), self.extras[extra].tobytes())


class DamagedStore(Exception):
    """A store whose files are not those that were written."""


@dataclasses.dataclass(frozen=True)
class Store:
    """Examples by index, from memory-mapped arrays.

    `meta` is the builder's own record (counts). `damage` describes the damaged store that this one
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
    extras: np.ndarray | None = None
    extra_offsets: np.ndarray | None = None

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def __getitem__(self, index: int) -> Example:
        span, extra = slice(*self.offsets[index : index + 2]), b""
        if self.extras is not None and self.extra_offsets is not None:
            extra = self.extras[slice(*self.extra_offsets[index : index + 2])].tobytes()
        return Example(self.ids[span], self.weights[span], self.origin(index), float(self.values[index]), extra)

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
    build: Callable[[], tuple[Iterable[ExampleArrays], Callable[[], dict[str, object]]]],
    cache: str | os.PathLike[str] | None = None,
    is_current: Callable[[Mapping[str, Any]], bool] = lambda meta: True,
) -> Store:
    """The store of `key`, built if it does not exist or is damaged, or if its metadata is not current.

    `build()` returns arrays of examples and a function that is called after the last, for the metadata to record. A
    store becomes visible only once it is complete. Raises UserError if the cache cannot be written.
    """
    path = cache_directory(cache) / key
    store, damage = _open(path)
    if store is not None and is_current(store.meta):
        return store
    with _cache_errors(path.parent):
        path.parent.mkdir(parents=True, exist_ok=True)
        _remove_abandoned(path.parent)
        draft = pathlib.Path(tempfile.mkdtemp(dir=path.parent, prefix=".building-"))
    try:
        with lock(draft):
            _write(draft, *build())
        with _cache_errors(path.parent):
            if store is not None:
                shutil.rmtree(path, ignore_errors=True)
            _publish(draft, path)
    finally:
        shutil.rmtree(draft, ignore_errors=True)
    built, problem = _open(path)
    if built is None:
        raise _lost_error(path, problem)
    return dataclasses.replace(built, damage=damage and f"the tokenised data in {path} are damaged ({damage})")


def _lost_error(path: pathlib.Path, problem: str | None) -> UserError:
    return UserError(
        f"tokenised data cannot be read back as they were written: {problem or 'they are gone'}",
        where=str(path),
        fix="check the disk, or set MESHTUNE_CACHE to a directory on another one",
    )


def _open(path: pathlib.Path) -> tuple[Store | None, str | None]:
    """The store in `path`, None if there is none or it is damaged, and its damage."""
    try:
        return open_store(path), None
    except DamagedStore as problem:
        return None, str(problem)


def open_store(path: pathlib.Path) -> Store | None:
    """The store in `path`; None if it does not exist, or is of an earlier version, without a digest.

    Raises DamagedStore, naming the file, if its contents are not those that were written.
    """
    meta = _read_meta(path / META) if path.exists() else None
    if meta is None:
        return None
    arrays = {name: _read_array(path / f"{name}.bin", name, recorded) for name, recorded in meta["files"].items()}
    return Store(path, names=tuple(meta["sources"]), meta=meta["notes"], **arrays)  # pyright: ignore[reportArgumentType]


def _read_array(file: pathlib.Path, name: str, recorded: Mapping[str, int]) -> np.ndarray:
    dtype = (_ARRAYS | _EXTRAS)[name]
    try:
        size = file.stat().st_size
        if size != recorded["bytes"]:
            raise DamagedStore(f"{file.name} has {size:,} bytes, not {recorded['bytes']:,}")
        if _checksum(file) != recorded["crc32"]:
            raise DamagedStore(f"{file.name} does not match its checksum")
        return np.memmap(file, dtype, "r") if size else np.zeros(0, dtype)
    except OSError as problem:
        raise DamagedStore(f"{file.name}: {problem.strerror or problem}") from problem


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
        if _open(path)[0] is None:
            shutil.rmtree(path)
            os.rename(draft, path)


@contextlib.contextmanager
def _cache_errors(directory: pathlib.Path) -> Iterator[None]:
    try:
        yield
    except OSError as problem:
        fix = "free space there, or set MESHTUNE_CACHE to a directory that can be written"
        what = f"tokenised data cannot be written: {problem.strerror or problem}"
        raise UserError(what, where=str(directory), fix=fix) from problem


class _ArrayFile:
    """A file of an array that is written in pieces; its size and checksum."""

    def __init__(self, path: pathlib.Path, dtype: type):
        self.path, self.dtype, self.size, self.checksum = path, dtype, 0, 0
        with _cache_errors(path.parent.parent):
            self._file = path.open("wb", 1 << 20)

    def append(self, values: Sequence[float] | np.ndarray) -> None:
        data = np.asarray(values, self.dtype).tobytes()
        with _cache_errors(self.path.parent.parent):
            self._file.write(data)
        self.checksum, self.size = zlib.crc32(data, self.checksum), self.size + len(data)

    def synchronise(self) -> None:
        with _cache_errors(self.path.parent.parent):
            self._file.flush()
            os.fsync(self._file.fileno())

    def close(self) -> None:
        # The contents were flushed and synchronised before; after a failed write, closing fails again on what is left.
        with contextlib.suppress(OSError):
            self._file.close()


def _write(draft: pathlib.Path, groups: Iterable[ExampleArrays], meta: Callable[[], dict[str, object]]) -> None:
    with contextlib.ExitStack() as stack:
        files: dict[str, _ArrayFile] = {}
        for name, dtype in (_ARRAYS | _EXTRAS).items():
            files[name] = _ArrayFile(draft / f"{name}.bin", dtype)
            stack.callback(files[name].close)
        sources = _write_arrays(files, groups)
        for file in files.values():
            file.synchronise()
    if not files["extras"].size:
        for name in _EXTRAS:
            files.pop(name).path.unlink()
    recorded = {name: {"bytes": file.size, "crc32": file.checksum} for name, file in files.items()}
    content = {"version": VERSION, "files": recorded, "sources": sources, "notes": meta()}
    content = json.loads(json.dumps(content))  # as it will be read, so that the digest is of what is read
    with _cache_errors(draft.parent), (draft / META).open("w", encoding="utf-8") as file:
        json.dump({**content, "digest": _digest(content)}, file)
        file.flush()
        os.fsync(file.fileno())


def _write_arrays(files: Mapping[str, _ArrayFile], groups: Iterable[ExampleArrays]) -> list[str]:
    """Writes groups of examples; returns the names of their sources."""
    sources, ends = dict[str, int](), {"offsets": 0, "extra_offsets": 0}
    for name, end in ends.items():
        files[name].append([end])
    for arrays in groups:
        indices = np.array([sources.setdefault(name, len(sources)) for name in arrays.names], np.int32)
        extra_lengths = arrays.extra_lengths if len(arrays.extra_lengths) else arrays.lengths * 0
        for name, lengths in {"offsets": arrays.lengths, "extra_offsets": extra_lengths}.items():
            group_ends = ends[name] + np.cumsum(lengths)
            files[name].append(group_ends)
            ends[name] += int(lengths.sum())
        files["sources"].append(indices[arrays.sources])
        for name in ("ids", "weights", "records", "values", "extras"):
            files[name].append(getattr(arrays, name))
        documents = np.split(arrays.ids, np.cumsum(arrays.lengths)[:-1]) if len(arrays.lengths) else []
        extras = np.split(arrays.extras, np.cumsum(extra_lengths)[:-1]) if len(documents) else []
        contents = (ids.tobytes() + extra.tobytes() for ids, extra in zip(documents, extras, strict=True))
        hashed = (hashlib.blake2b(content, digest_size=8).digest() for content in contents)
        files["digests"].append(np.frombuffer(b"".join(hashed), np.uint64))
    return list(sources)


def group_examples(examples: Iterable[Example]) -> Iterator[ExampleArrays]:
    """The arrays of consecutive examples, in groups of about _GROUP tokens."""
    group: list[Example] = []
    tokens = 0
    for example in examples:
        group.append(example)
        tokens += len(example.ids)
        if tokens >= _GROUP:
            yield ExampleArrays.of(group)
            group, tokens = [], 0
    if group:
        yield ExampleArrays.of(group)


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


PART = 2048  # samples
_UNREADABLE = (OSError, ValueError, KeyError, EOFError, zipfile.BadZipFile)


@dataclasses.dataclass(frozen=True)
class Part:
    """The examples of consecutive samples, their counts, and whether any sample was a conversation."""

    examples: ExampleArrays
    counts: TokenCounts
    conversation: bool


Convert = Callable[[Tokenize, Iterable[Sample]], Iterable[Example]]
MakePart = Callable[[Sequence[Sample]], Part]


def make_part(samples: Iterable[Sample], tokenize: Tokenize, convert: Convert) -> Part:
    """The part of `samples`. Raises what `convert` raises."""
    tokenize.counts = TokenCounts()
    examples = ExampleArrays.of(list(convert(tokenize, samples)))
    return Part(examples, tokenize.counts, tokenize.saw_conversation)


def tokenised_parts(
    samples: Sequence[Sample],
    makers: Sequence[MakePart],
    directory: pathlib.Path | None,
    progress: Callable[[int], None],
    share: tuple[int, int] = (0, 1),
) -> Iterator[Part]:
    """The parts of `samples` in order, each made by one of `makers`; each maker serves one thread.

    Finished parts are in `directory` (None: nowhere) until the caller removes it. With a `share` of (index, hosts) this
    host makes its share of the parts first, then reads those that other hosts have put into the same directory by then.
    `progress` is told the number of samples done. Raises what `makers` raise for the first part in which one does.
    """
    idle: queue.SimpleQueue[MakePart] = queue.SimpleQueue()
    for make in makers:
        idle.put(make)

    def work(start: int) -> Part:
        file = None if directory is None else directory / f"{start:012}.npz"
        stored = None if file is None else read_part(file)
        if stored is not None:
            return stored
        make = idle.get()
        try:
            part = make([samples[index] for index in range(start, min(start + PART, len(samples)))])
        finally:
            idle.put(make)
        if file is not None:
            write_part(file, part)
        return part

    host, hosts = share
    starts = range(0, len(samples), PART)
    with ThreadPoolExecutor(len(makers), "tokenise") as pool:
        shared = 0
        for _ in (
            _submit_ahead(pool, work, starts[host::hosts], len(makers)) if hosts > 1 and directory is not None else ()
        ):
            shared = min(shared + PART, len(samples))
            progress(shared)
        for index, part in enumerate(_submit_ahead(pool, work, starts, len(makers))):
            progress(max(shared, index * PART))
            yield part
        progress(len(samples))


def _submit_ahead(
    pool: ThreadPoolExecutor, work: Callable[[int], Part], starts: Sequence[int], threads: int
) -> Iterator[Part]:
    """The results of `work` in order; a few are computed ahead."""
    remaining = iter(starts)
    pending: collections.deque[Future[Part]] = collections.deque()
    try:
        pending.extend(pool.submit(work, start) for start in itertools.islice(remaining, threads + 1))
        while pending:
            part = pending.popleft().result()
            if (start := next(remaining, None)) is not None:
                pending.append(pool.submit(work, start))
            yield part
    finally:
        for future in pending:
            future.cancel()


def add_counts(total: TokenCounts, part: TokenCounts) -> None:
    """Adds the counts of a part to `total`."""
    for field in dataclasses.fields(TokenCounts):
        if field.name != "first":
            setattr(total, field.name, getattr(total, field.name) + getattr(part, field.name))
    total.first = part.first | total.first


def write_part(file: pathlib.Path, part: Part) -> None:
    """Writes a part, which becomes visible only once it is complete. A disk that refuses is no error: the part is then
    tokenised again after an interruption."""
    arrays = vars(part.examples).copy()
    names = list(arrays.pop("names"))
    meta = {"counts": dataclasses.asdict(part.counts), "conversation": part.conversation, "sources": names}
    with contextlib.suppress(OSError):
        file.parent.mkdir(parents=True, exist_ok=True)
        descriptor, draft = tempfile.mkstemp(dir=file.parent, suffix=".draft")
        try:
            with os.fdopen(descriptor, "wb") as stream:
                np.savez(stream, meta=np.frombuffer(json.dumps(meta).encode(), np.uint8), **arrays)
            os.replace(draft, file)
        except OSError:
            pathlib.Path(draft).unlink(missing_ok=True)


def read_part(file: pathlib.Path) -> Part | None:
    """A part that was written; None if there is none, or if it does not match its checksums."""
    try:
        with np.load(file, allow_pickle=False) as stored:
            arrays = {name: stored[name] for name in stored.files}  # checks the CRC-32 of each
        meta = json.loads(arrays.pop("meta").tobytes())
        counts = TokenCounts(**meta["counts"])
        counts.skipped = [(origin, reason) for origin, reason in counts.skipped]
        return Part(ExampleArrays(**arrays, names=tuple(meta["sources"])), counts, meta["conversation"])
    except (*_UNREADABLE, TypeError, IndexError):
        return None
