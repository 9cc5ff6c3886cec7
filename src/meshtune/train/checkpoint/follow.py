"""Digests of files that are still being written: each block is hashed as soon as it is complete, during the writing."""

from __future__ import annotations

import contextlib
import os
import threading
from pathlib import Path

from meshtune.digests import BLOCK_BYTES, FileDigest, digest_files, hash_block, list_files

POLL_SECONDS = 0.02
END_BYTES = 4096  # of a block, which are compared again when the file is complete


class Follower:
    """Hashes the files below `directory` whose names begin with `prefix`, while something else writes them.

    Each file must be written once, from start to end, as tensorstore writes its data files. Where the end of a block
    has changed since it was hashed, the file was not, and the block is hashed again. A context manager, which lasts as
    long as the writing.
    """

    def __init__(self, directory: Path, prefix: str):
        self._directory, self._prefix = directory, prefix
        self._sizes: dict[str, int] = {}
        self._blocks: dict[tuple[str, int], tuple[int, bytes]] = {}
        self._ends: dict[tuple[str, int], bytes] = {}
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._follow, name="digests", daemon=True)
        self._thread.start()

    def __enter__(self) -> Follower:
        return self

    def __exit__(self, *_: object) -> None:
        """The files are complete, or will not be: nothing more is hashed during their writing."""
        self._stopped.set()
        self._thread.join()

    def digests(self) -> dict[str, FileDigest]:
        """The digests of all files, once they are complete. Raises: OSError if one cannot be read."""
        names = [name for name in list_files(self._directory) if name.startswith(self._prefix)]
        for block, end in self._ends.items():
            removed = block[0] not in names  # a lock, by its writer
            if removed or _end(self._directory / block[0], block[1], self._blocks[block][0]) != end:
                del self._blocks[block]
        return digest_files(self._directory, names, self._blocks)

    def _follow(self) -> None:
        while not self._stopped.wait(POLL_SECONDS):
            # What cannot be read now is read again at the end, where an error is raised.
            with contextlib.suppress(OSError):
                for name in list_files(self._directory):
                    if name.startswith(self._prefix):
                        self._hash_complete(name)

    def _hash_complete(self, name: str) -> None:
        """Hashes the new blocks of a file; the last, shorter one once the file has stopped growing."""
        path = self._directory / name
        size = path.stat().st_size
        grows, self._sizes[name] = size != self._sizes.get(name), size
        for start in range(0, size, BLOCK_BYTES):
            count = min(BLOCK_BYTES, size - start)
            block = (name, start)
            if self._stopped.is_set() or self._blocks.get(block, (0, b""))[0] == count:
                continue
            if count == BLOCK_BYTES or not grows:
                end = _end(path, start, count)
                self._blocks[block] = count, hash_block(path, start, count)
                self._ends[block] = end


def _end(path: Path, start: int, count: int) -> bytes:
    """The last bytes of the block of `count` bytes from `start`."""
    size = min(END_BYTES, count)
    descriptor = os.open(path, os.O_RDONLY)
    try:
        return os.pread(descriptor, size, start + count - size)
    finally:
        os.close(descriptor)
