"""Tokenised documents on disk: a folder of shards and their manifest. A process opens only the shards it reads.

A shard is a safetensors file: `documents` are the bytes of each document (ids, weights, extra), one after another, and
the other tensors are columns, with a value for each. Loss weights of 0 and 1 take a bit. A shard depends only on its
samples and is written under another name until it is complete, so a store is the same, bit for bit, however many
processes and hosts write it and wherever they are interrupted. `manifest.json` is written last: without it a folder is
unfinished.

Opening a store reads the manifest and the lengths. Files are mapped as their documents are read, and a document is
checked against its checksum whenever it is read.
"""

from __future__ import annotations

import bisect
import contextlib
import functools
import hashlib
import itertools
import json
import mmap
import os
import pathlib
import shutil
import struct
import tempfile
import time
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from safetensors.numpy import save

from meshtune.cache import cache_folder
from meshtune.data.conversation import Origin
from meshtune.data.tokens import Example
from meshtune.errors import UserError
from meshtune.lazy import LazyFunction

fetch_shard = LazyFunction("meshtune.data.remote_store:fetch_shard")
# Of everything that turns documents into tokens. It is part of every fingerprint: raising it makes earlier runs
# impossible to resume.
VERSION = 4
LAYOUT = 1  # of the files of a store: those of another one are written again
DIGEST_BYTES = 16  # of a sample
MANIFEST = "manifest.json"
LENGTHS = "lengths.bin"
ORIGIN = "origin.json"  # in a store that was fetched: where its shards are
SHARD_NAME = "shard-{:05}.safetensors"
SHARD = 4096  # samples
_MOST_SHARDS = 4096
_OPEN = 400  # shards that a process has open at once: each takes a file descriptor
_DRAFT = ".draft-"
_ABANDONED = 14  # days after which what an interrupted preparation left is removed
_DTYPES = {"U8": np.uint8, "U16": np.uint16, "U32": np.uint32, "U64": np.uint64, "F32": np.float32}
# Of each document: its first byte, its length in tokens, whether its weights are float32 instead of bits, the bytes of
# its extra, a digest of ids and extra to find copies, its record, the index of its source among the shard's names, its
# value (see tokens.Example), and a CRC-32 of all of these and the document.
_COLUMNS = {
    "begins": np.int64,
    "lengths": np.int64,
    "scaled": np.int64,
    "extra_lengths": np.int64,
    "digests": np.uint64,
    "records": np.int64,
    "sources": np.int64,
    "values": np.float32,
    "checks": np.int64,
}
_FACTS = struct.Struct("<4qQ2qf")  # all columns but the checksum


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


def cache_directory(override: str | os.PathLike[str] | None = None) -> pathlib.Path:
    """The directory of tokenised data, in `override`, $MESHTUNE_CACHE or ~/.cache/meshtune."""
    return pathlib.Path(override or cache_folder()).expanduser() / "tokens"


def shard_size(samples: int) -> int:
    """The samples of each shard of a store of `samples`: SHARD, or that times the least power of two with which
    _MOST_SHARDS are enough."""
    size = SHARD
    while samples > size * _MOST_SHARDS:
        size *= 2
    return size


class DamagedStore(UserError):
    """A file of a store differs from the one that was written."""


def damage_error(file: pathlib.Path, problem: object) -> DamagedStore:
    """The error for a file of a store."""
    return DamagedStore(
        f"tokenised data are damaged: {file.name}: {problem}",
        where=str(file.parent),
        fix="start again, which prepares what is damaged again; check the disk, or set MESHTUNE_CACHE to another one",
    )


def write_shard(
    file: pathlib.Path,
    examples: Iterable[Example],
    notes: Callable[[], Mapping[str, object]],
    check: Callable[[], None] = lambda: None,
) -> None:
    """Writes a shard. It is held in memory, and has its name once it is complete.

    `notes()`, for its metadata, and `check()` are called after the last example. Raises UserError if the file cannot be
    written, and what `examples` and `check` raise.
    """
    documents, rows, names = bytearray(), list[list[int | float]](), dict[str, int]()
    for example in examples:
        source = names.setdefault(example.origin.source, len(names))
        data, facts = _encode(example, source, len(documents))
        documents += data
        rows.append([*facts, _checksum(data, facts)])
    check()
    # Objects, since a table of float64 would round digests.
    columns = zip(_COLUMNS.items(), np.array(rows, object).reshape(-1, len(_COLUMNS)).T, strict=True)
    tensors, least = {"documents": np.frombuffer(documents, np.uint8)}, dict[str, int | float]()
    for (name, dtype), column in columns:
        values = column.astype(dtype)
        least[name] = values.min().item() if len(values) and values.dtype.kind != "f" else 0
        values -= values.dtype.type(least[name])
        if values.any():
            is_float = values.dtype.kind == "f"
            tensors[name] = values if is_float else values.astype(np.min_scalar_type(int(values.max())))
    metadata = {"layout": LAYOUT, "size": len(rows), "least": least, "names": list(names), "notes": notes()}
    text = json.dumps(metadata)  # one item with its checksum: several have no fixed order in the file
    with _cache_errors(file.parent):
        file.parent.mkdir(parents=True, exist_ok=True)
        write_file(file, save(tensors, {"meshtune": f"{zlib.crc32(text.encode())} {text}"}))


def _encode(example: Example, source: int, begin: int) -> tuple[bytes, list[int | float]]:
    """The bytes of a document, and its columns but for the checksum."""
    ids, weights = np.asarray(example.ids, np.int32).tobytes(), np.asarray(example.weights, np.float32)
    is_mask = bool(((weights == 0) | (weights == 1)).all())
    data = ids + (np.packbits(weights != 0) if is_mask else weights).tobytes() + example.extra
    digest = int.from_bytes(hashlib.blake2b(ids + example.extra, digest_size=8).digest(), "little")
    value = float(np.float32(example.value))
    return data, [
        begin,
        len(weights),
        int(not is_mask),
        len(example.extra),
        digest,
        example.origin.record,
        source,
        value,
    ]


def _checksum(data: bytes, facts: Sequence[int | float]) -> int:
    return zlib.crc32(_FACTS.pack(*facts), zlib.crc32(data))


class Shard(Sequence[Example]):
    """The documents of one file by index, mapped. `notes` are what its writer recorded. Raises: DamagedStore,
    OSError."""

    def __init__(self, file: pathlib.Path):
        self.file = file
        with file.open("rb") as stream:
            self.bytes = os.fstat(stream.fileno()).st_size
            self._map = mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ) if self.bytes else b""
        try:
            start = 8 + int.from_bytes(self._map[:8], "little")
            header = json.loads(self._map[8:start])
            checksum, _, text = header.pop("__metadata__")["meshtune"].partition(" ")
            if int(checksum) != zlib.crc32(text.encode()):
                raise ValueError("its metadata do not match their checksum")
            metadata = json.loads(text)
            self._start, self._end = (start + offset for offset in header.pop("documents")["data_offsets"])
            columns = {
                name: np.frombuffer(
                    self._map, _DTYPES[item["dtype"]], item["shape"][0], start + item["data_offsets"][0]
                )
                for name, item in header.items()
            }
            self._size = metadata["size"]
            self._table = [(columns.get(name), metadata["least"][name]) for name in _COLUMNS]
            self.names, self.notes, self.layout = metadata["names"], metadata["notes"], metadata["layout"]
        except (ValueError, LookupError, TypeError) as problem:
            raise damage_error(file, problem) from problem

    def __len__(self) -> int:
        return self._size

    def __getitem__(self, index: int) -> Example:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Reads a document. Raises: DamagedStore."""
        if not 0 <= index < self._size:
            raise IndexError(index)
        try:
            *facts, check = [least if column is None else column.item(index) + least for column, least in self._table]
            begin, length, scaled, extra_length, _, record, source, value = facts
            stop = 4 * length + (4 * length if scaled else (length + 7) // 8)
            data = self._map[self._start + begin : self._start + begin + stop + extra_length]
            if _checksum(data, facts) != check:
                raise ValueError(f"document {index} does not match its checksum")
            ids, origin = np.frombuffer(data, np.int32, length), Origin(self.names[source], record)
            if scaled:
                weights = np.frombuffer(data, np.float32, length, 4 * length)
            else:
                bits = np.frombuffer(data, np.uint8, stop - 4 * length, 4 * length)
                weights = np.unpackbits(bits, count=length).astype(np.float32)
        except (ValueError, LookupError, TypeError, struct.error) as problem:
            with contextlib.suppress(OSError):
                self.file.unlink()  # the next start finds it missing, and writes it again
            raise damage_error(self.file, problem) from problem
        return Example(ids, weights, origin, value, data[stop:])

    def column(self, name: str) -> np.ndarray:
        """The values of a column (see _COLUMNS) for all documents."""
        values, least = self._table[list(_COLUMNS).index(name)]
        column = np.full(self._size, least, _COLUMNS[name])
        return column if values is None else column + values.astype(column.dtype)


@functools.lru_cache(maxsize=_OPEN)
def _open_shard(file: pathlib.Path) -> Shard:
    """The shard in a file of a complete store, which is downloaded if it is elsewhere. Raises: DamagedStore,
    UserError."""
    try:
        if not file.exists() and (file.parent / ORIGIN).exists():
            fetch_shard(file)
        return Shard(file)
    except OSError as problem:
        raise damage_error(file, problem.strerror) from problem


class Store(Sequence[Example]):
    """The documents of all shards by index. `lengths` int32 are the tokens of each, `meta` the notes of the manifest,
    `files` those of shards, `damage` describes the damage for which it was prepared again, if there was any."""

    def __init__(self, path: pathlib.Path, manifest: Mapping[str, Any], lengths: np.ndarray):
        self.path, self.lengths, self.meta = path, lengths, manifest["notes"]
        self.damage: str | None = None
        self.files = [path / SHARD_NAME.format(number) for number in range(len(manifest["shards"]))]
        self._ends = list(itertools.accumulate(shard["documents"] for shard in manifest["shards"]))

    def __len__(self) -> int:
        return len(self.lengths)

    def __getitem__(self, index: int) -> Example:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Reads a document. Raises: DamagedStore."""
        shard, place = self._locate(index)
        return shard[place]

    def _locate(self, index: int) -> tuple[Shard, int]:
        if not 0 <= index < len(self):
            raise IndexError(index)
        number = bisect.bisect_right(self._ends, index)
        return _open_shard(self.files[number]), index - (self._ends[number - 1] if number else 0)

    def origin(self, index: int) -> Origin:
        """The record that document `index` was made from."""
        return self[index].origin

    def column(self, name: str) -> np.ndarray:
        """A column (see _COLUMNS) of all documents."""
        columns = [_open_shard(file).column(name) for file in self.files]
        return np.concatenate([np.zeros(0, _COLUMNS[name]), *columns])

    @property
    def digests(self) -> np.ndarray:
        """A digest of the ids and extra of each document, uint64."""
        return self.column("digests")

    def firsts(self) -> list[int]:
        """The first document of each source."""
        firsts: dict[str, int] = {}
        for file, end in zip(self.files, self._ends, strict=True):
            shard = _open_shard(file)
            for source, place in zip(*np.unique(shard.column("sources"), return_index=True), strict=True):
                firsts.setdefault(shard.names[source], end - len(shard) + int(place))
        return sorted(firsts.values())


def publish_store(path: pathlib.Path, shards: Sequence[pathlib.Path], notes: Mapping[str, object]) -> Store:
    """Writes the manifest of a folder with all its shards, and opens it. Hosts that prepare the same data may do so at
    once: they write the same. Raises UserError if the cache cannot be written."""
    recorded, lengths = list[dict[str, int]](), [np.zeros(0, np.int32)]
    for shard in map(Shard, shards):  # each takes a file descriptor
        lengths.append(shard.column("lengths").astype(np.int32))
        recorded.append({"documents": len(shard), "tokens": int(lengths[-1].sum()), "bytes": shard.bytes})
    complete = np.concatenate(lengths)
    data = complete.astype(np.min_scalar_type(int(complete.max(initial=0)))).tobytes()
    content = {"layout": LAYOUT, "lengths": zlib.crc32(data), "shards": recorded, "notes": notes}
    with _cache_errors(path.parent):
        write_file(path / LENGTHS, data)
        write_json(path / MANIFEST, content)
        for file in {*path.iterdir()} - {path / MANIFEST, path / LENGTHS, *shards}:
            if not file.name.startswith(_DRAFT):  # another host may be writing it
                file.unlink(missing_ok=True)  # of an earlier layout, or the lock of a shard
    _open_shard.cache_clear()
    store, problem = open_store(path)
    if store is None:
        raise damage_error(path / MANIFEST, problem or "it is gone")
    return store


def write_store(path: pathlib.Path, examples: Iterable[Example], notes: Callable[[], Mapping[str, object]]) -> Store:
    """Writes and opens a store of one shard. Raises UserError as `write_shard`."""
    write_shard(path / SHARD_NAME.format(0), examples, dict)
    return publish_store(path, [path / SHARD_NAME.format(0)], notes())


def open_store(path: pathlib.Path) -> tuple[Store | None, str | None]:
    """The store in `path`; None if there is none, if it is of another layout, or if it is damaged, and the damage.

    Reads the manifest and the lengths, and no more than the sizes of the shards.
    """
    try:
        manifest = read_json(path / MANIFEST)
        if manifest is None or manifest["layout"] != LAYOUT:
            return None, None
        data = (path / LENGTHS).read_bytes()
        if zlib.crc32(data) != manifest["lengths"]:
            return None, f"{LENGTHS} does not match its checksum"
        is_fetched = (path / ORIGIN).exists()
        for number, shard in enumerate(manifest["shards"]):
            file = path / SHARD_NAME.format(number)
            if is_fetched and not file.exists():
                continue
            if file.stat().st_size != shard["bytes"]:
                return None, f"{file.name} has {file.stat().st_size:,} bytes, not {shard['bytes']:,}"
    except OSError as problem:
        return None, f"{pathlib.Path(problem.filename).name}: {problem.strerror}"
    except ValueError as problem:
        return None, str(problem)
    documents = sum(shard["documents"] for shard in manifest["shards"])
    width = len(data) // max(1, documents)
    return Store(path, manifest, np.frombuffer(data, f"u{width or 1}").astype(np.int32)), None


def remove_damaged(path: pathlib.Path) -> None:
    """Removes the manifest of a store, and those of its shards that do not match their checksums."""
    (path / MANIFEST).unlink(missing_ok=True)
    for file in path.glob(SHARD_NAME.replace("{:05}", "*")):
        try:
            for _ in Shard(file):
                pass
        except UserError:
            file.unlink(missing_ok=True)


def write_json(file: pathlib.Path, content: Mapping[str, object]) -> None:
    """Writes a JSON object with a digest of its content. Raises: OSError."""
    content = json.loads(json.dumps(content))  # as it will be read, since the digest is of the object that is read
    write_file(file, json.dumps({**content, "digest": _digest(content)}).encode())


def read_json(file: pathlib.Path) -> dict[str, Any] | None:
    """An object of `write_json`; None if there is no file. Raises ValueError, which names the file, if it is damaged,
    and OSError."""
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    except (ValueError, RecursionError):
        raise ValueError(f"{file.name} is not JSON") from None
    if not isinstance(content, dict) or content.pop("digest", None) != _digest(content):
        raise ValueError(f"{file.name} does not match its digest")
    return content


def _digest(content: Mapping[str, object]) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def write_file(file: pathlib.Path, data: bytes) -> None:
    """Writes a file under another name until it is complete and on the disk. Raises: OSError."""
    descriptor, draft = tempfile.mkstemp(dir=file.parent, prefix=_DRAFT)
    try:
        with os.fdopen(descriptor, "wb") as stream:
            stream.write(data)
            stream.flush()
            os.fsync(stream.fileno())
        os.replace(draft, file)
    except OSError:
        pathlib.Path(draft).unlink(missing_ok=True)
        raise


@contextlib.contextmanager
def _cache_errors(directory: pathlib.Path) -> Iterator[None]:
    try:
        yield
    except OSError as problem:
        fix = "free space there, or set MESHTUNE_CACHE to a directory that can be written"
        what = f"tokenised data cannot be written: {problem.strerror or problem}"
        raise UserError(what, where=str(directory), fix=fix) from problem


def remove_abandoned(directory: pathlib.Path) -> None:
    """Removes what interrupted preparations have left in a cache for more than two weeks."""
    for path in (*directory.glob("*/"), *directory.glob(f"*/{_DRAFT}*")):
        with contextlib.suppress(OSError):
            is_old = time.time() - path.stat().st_mtime > _ABANDONED * 86400
            if is_old and path.is_file():
                path.unlink()
            elif is_old and path.name != "manifests" and not (path / MANIFEST).exists():
                shutil.rmtree(path, ignore_errors=True)
