"""Digests of the files in a directory, stored with them and verified when they are read.

They detect damage by disks, copies and interrupted writes. They do not protect against forgery: XXH3 is not a
cryptographic hash; it was chosen for its speed of several gigabytes per second and core.
"""

from __future__ import annotations

import concurrent.futures
import dataclasses
import json
import mmap
import os
from collections.abc import Mapping, Sequence
from pathlib import Path

import xxhash

from meshtune.errors import UserError
from meshtune.json_text import read_json

FILE = "digests.json"
EDITED = ("config.json", ".jinja", "README.md", "Modelfile")  # ends of the names of files that people change
ALGORITHM = "xxh3_128"
BLOCK_BYTES = 64 << 20  # hashed by one thread; a file's digest is that of its blocks' digests
BUFFER_BYTES = 256 << 10  # stays in a core's cache between reading and hashing
POPULATE_BYTES = 4 << 20  # mapped pages that are made present at once
POPULATE_READ = 22  # MADV_POPULATE_READ of Linux 5.14, which Python's mmap does not name
THREADS = min(8, os.cpu_count() or 1)


class DamagedError(UserError):
    """A file does not match its digest: it is missing, shorter, longer, or has other contents."""

    @property
    def reason(self) -> str:
        """Returns the error's message without the file name."""
        return self.what.partition(" is damaged: ")[2]


@dataclasses.dataclass(frozen=True)
class FileDigest:
    """The size of a file in bytes, and the digest of its contents."""

    size: int
    digest: str


def list_files(directory: Path) -> list[str]:
    """Paths of all files below `directory`, relative to it and sorted, without the file of digests itself."""
    paths = (path.relative_to(directory).as_posix() for path in directory.rglob("*") if path.is_file())
    return sorted(path for path in paths if path != FILE)


# Digests of blocks by (file name, offset), each with the number of bytes that it covers.
Blocks = Mapping[tuple[str, int], tuple[int, bytes]]


def digest_files(directory: Path, names: Sequence[str], known: Blocks | None = None) -> dict[str, FileDigest]:
    """Computes the digests of files, in parallel over their blocks; the `known` ones are not read again.

    Raises: OSError if a file cannot be read.
    """
    sizes = {name: (directory / name).stat().st_size for name in names}
    blocks = [(name, start) for name, size in sizes.items() for start in range(0, max(1, size), BLOCK_BYTES)]

    def digest(block: tuple[str, int]) -> bytes:
        name, start = block
        expected = min(BLOCK_BYTES, sizes[name] - start)
        count, content = (known or {}).get(block, (-1, b""))
        return content if count == expected else hash_block(directory / name, start, expected)

    with concurrent.futures.ThreadPoolExecutor(THREADS) as pool:
        hashed = list(pool.map(digest, blocks))
    joined: dict[str, xxhash.xxh3_128] = {name: xxhash.xxh3_128() for name in names}
    for (name, _), content in zip(blocks, hashed, strict=True):
        joined[name].update(content)
    return {name: FileDigest(sizes[name], joined[name].hexdigest()) for name in names}


def digest_bytes(content: bytes) -> str:
    """Computes the digest of bytes in memory, as 32 hex digits."""
    return xxhash.xxh3_128_hexdigest(content)


def digest_json(value: object) -> str:
    """Computes the digest of a JSON value, independent of the order of keys."""
    return digest_bytes(json.dumps(value, sort_keys=True, separators=(",", ":")).encode())


def write_digests(directory: Path, digests: Mapping[str, FileDigest] | None = None) -> str:
    """Writes digests.json for `digests` (default: of all files), atomically; returns the digest of digests.json."""
    digests = digest_files(directory, list_files(directory)) if digests is None else digests
    files = {name: dataclasses.asdict(digest) for name, digest in sorted(digests.items())}
    checksum = digest_json(files)
    content = json.dumps({"algorithm": ALGORITHM, "files": files, "digest": checksum}, indent=1) + "\n"
    draft = directory / f".{FILE}.partial"
    with draft.open("w", encoding="utf-8") as stream:
        stream.write(content)
        stream.flush()
        os.fsync(stream.fileno())
    os.replace(draft, directory / FILE)
    return checksum


def read_digests(directory: Path) -> tuple[dict[str, FileDigest], str]:
    """Reads the digests of a directory; returns them with the digest of digests.json itself.

    Raises: DamagedError where digests.json is missing or damaged.
    """
    path = directory / FILE
    try:
        fields = read_json(path)
        files, checksum = fields["files"], fields["digest"]
        if fields["algorithm"] != ALGORITHM or digest_json(files) != checksum:
            raise ValueError("it does not have the contents that were written")
        return {name: FileDigest(**digest) for name, digest in files.items()}, checksum
    except (UserError, ValueError, KeyError, TypeError, AttributeError) as error:
        reason = "it is not what was written" if path.exists() else "it is missing"
        raise DamagedError(f"{FILE} is damaged: {reason}", where=str(path)) from error


def find_damage(directory: Path, digests: Mapping[str, FileDigest]) -> dict[str, str]:
    """Describes the damage of each file that does not match `digests`; {} if all match."""
    damage: dict[str, str] = {}
    readable: list[str] = []
    for name, digest in digests.items():
        try:
            size = (directory / name).stat().st_size
        except OSError as error:
            damage[name] = "it is missing" if isinstance(error, FileNotFoundError) else _reason(error)
            continue
        if size != digest.size:
            damage[name] = f"it is {size:,} bytes long, and {digest.size:,} were written"
        else:
            readable.append(name)
    try:
        current = digest_files(directory, readable)
    except OSError:  # one of them: find out which
        current = {}
        for name in readable:
            try:
                current |= digest_files(directory, [name])
            except OSError as error:
                damage[name] = _reason(error)
    changed = [name for name in current if current[name] != digests[name]]
    return damage | dict.fromkeys(changed, "its contents are not those that were written")


def check_directory(directory: Path, *, expected: str | None = None, fix: str) -> bool:
    """Verifies every file of a directory; returns False if it has no digests and `expected` is None.

    `expected` is the digest of digests.json itself, if another file recorded it.

    Raises: DamagedError with the names of the files that do not match.
    """
    if expected is None and not (directory / FILE).exists():
        return False
    try:
        digests, checksum = read_digests(directory)
    except DamagedError as error:
        raise DamagedError(error.what, where=error.where, fix=fix) from error
    if expected not in (None, checksum):
        raise DamagedError(f"{FILE} is damaged: it is of other files", where=str(directory / FILE), fix=fix)
    if damage := find_damage(directory, digests):
        raise damage_error(directory, damage, fix)
    return True


def damage_error(directory: Path, damage: Mapping[str, str], fix: str) -> DamagedError:
    """Builds the error for the files that `find_damage` reports."""
    first, *further = sorted(damage)
    summary = (
        f" ({len(further)} more: {', '.join(further[:3])}{', ...' if len(further) > 3 else ''})" if further else ""
    )
    verb = "was changed since it was written" if _is_edited(directory / first) else "is damaged"
    return DamagedError(f"{first} {verb}: {damage[first]}{summary}", where=str(directory / first), fix=fix)


def _is_edited(path: Path) -> bool:
    """Whether a file that is not what was written is one that people edit, and still whole."""
    if not path.name.endswith(EDITED):
        return False
    try:
        text = path.read_text(encoding="utf-8")
        return not path.name.endswith(".json") or isinstance(json.loads(text), dict)
    except (OSError, ValueError, RecursionError):
        return False


def share(digests: Mapping[str, FileDigest], index: int, count: int) -> dict[str, FileDigest]:
    """Returns the files that process `index` of `count` verifies; files are dealt out from largest to smallest."""
    largest_first = sorted(digests, key=lambda name: (-digests[name].size, name))
    return {name: digests[name] for name in largest_first[index::count]}


def _reason(error: OSError) -> str:
    return f"it cannot be read ({error.strerror or error})"


def hash_block(path: Path, start: int, count: int) -> bytes:
    """Computes the digest of `count` bytes from `start`, or as many as there are. Raises: OSError."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        count = min(count, os.fstat(descriptor).st_size - start)
        digest = _hash_mapped(descriptor, start, count) if count > 0 else None
        return _hash_read(descriptor, start, count) if digest is None else digest
    finally:
        os.close(descriptor)


def _hash_mapped(descriptor: int, start: int, count: int) -> bytes | None:
    """Computes the digest of `count` bytes in a memory map, which avoids the copy that dominates `_hash_read`'s time.

    Pages are populated first with madvise, because accessing an unreadable page would kill the process with a signal.
    Returns None if that fails or is not supported; the bytes must then be read.
    """
    hasher = xxhash.xxh3_128()
    try:
        with mmap.mmap(descriptor, count, prot=mmap.PROT_READ, offset=start) as pages:
            for at in range(0, count, POPULATE_BYTES):
                size = min(POPULATE_BYTES, count - at)
                pages.madvise(POPULATE_READ, at, size)
                with memoryview(pages) as content:
                    hasher.update(content[at : at + size])
    except (OSError, ValueError):
        return None
    return hasher.digest()


def _hash_read(descriptor: int, start: int, count: int) -> bytes:
    """Computes the digest of at most `count` bytes from `start`, reading it in pieces. Raises: OSError."""
    hasher, buffer = xxhash.xxh3_128(), memoryview(bytearray(BUFFER_BYTES))
    stop = start + count
    while start < stop:
        size = os.preadv(descriptor, [buffer[: min(BUFFER_BYTES, stop - start)]], start)
        if not size:
            break
        hasher.update(buffer[:size])
        start += size
    return hasher.digest()
