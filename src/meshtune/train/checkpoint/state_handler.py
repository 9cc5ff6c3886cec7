"""The arrays of a checkpoint as files, written and read by every process."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import logging
import os
import pathlib
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import orbax.checkpoint as ocp

from meshtune.digests import (
    BLOCK_BYTES,
    DamagedError,
    FileDigest,
    damage_error,
    digest_files,
    find_damage,
    hash_block,
    list_files,
    read_digests,
    write_digests,
)
from meshtune.errors import UserError

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


PROCESS_FILES = "ocdbt.process_{}/"  # Orbax's name for the directory that a process writes its shards to
PROCESS_DIGESTS = "digests.process_{}.json"


class StateHandler(ocp.PyTreeCheckpointHandler):
    """Orbax's handler for trees of arrays; adds digests.json to the files before the checkpoint gets its name.

    Each process hashes the files with its own shards while they are written, from its page cache. Process 0 hashes what
    it writes for all, and joins the digests.
    """

    def __init__(self, *, process_index: int, options: ocp.options.MultiprocessingOptions):
        super().__init__(multiprocessing_options=options)
        self._process_index = process_index

    async def async_save(self, directory: Any, *args: Any, **options: Any) -> list[Any]:
        """Starts to write; the futures are those of writing, followed by hashing."""
        futures = await super().async_save(directory, *args, **options) or []
        return [_Hashed(futures, pathlib.Path(getattr(directory, "path", directory)), self._process_index)]

    def finalize(self, directory: Any) -> None:
        """On process 0, when all processes have written: merges their indices and writes digests.json."""
        super().finalize(directory)
        folder = pathlib.Path(directory)
        drafts = list(folder.glob(PROCESS_DIGESTS.format("*")))
        digests: dict[str, FileDigest] = {}
        for draft in drafts:
            digests |= {name: FileDigest(**fields) for name, fields in json.loads(draft.read_bytes()).items()}
            draft.unlink()
        write_digests(
            folder, digests | digest_files(folder, [name for name in list_files(folder) if name not in digests])
        )


@ocp.args.register_with_handler(StateHandler, for_save=True)
@dataclasses.dataclass
class StateSave(ocp.args.PyTreeSave):
    """Arguments of StateHandler.save."""


@ocp.args.register_with_handler(StateHandler, for_restore=True)
@dataclasses.dataclass
class StateRestore(ocp.args.PyTreeRestore):
    """Arguments of StateHandler.restore."""


class _Hashed:
    """The future of a save on one process: its files are written, and their digests."""

    def __init__(self, futures: Sequence[Any], directory: pathlib.Path, process_index: int):
        self._futures = futures
        self._draft = directory / PROCESS_DIGESTS.format(process_index)
        self._follower = Follower(directory, PROCESS_FILES.format(process_index))

    def result(self, timeout: float | None = None) -> None:
        with self._follower:
            for future in self._futures:
                future.result(timeout)
        digests = {name: dataclasses.asdict(digest) for name, digest in self._follower.digests().items()}
        self._draft.write_text(json.dumps(digests), encoding="utf-8")

    def cancel(self) -> bool | None:
        """Nothing can be cancelled."""
        return None


FIX = "take another state that is kept"


def read_arrays(state: pathlib.Path, shapes: Mapping[str, tuple[int, ...]]) -> dict[str, np.ndarray]:
    """The arrays of a checkpoint's folder `state` with these names and shapes, whole, whatever mesh wrote them.

    Raises: DamagedError for files that changed since they were written, UserError for other arrays.
    """
    import orbax.checkpoint as ocp

    state = state.absolute()  # Orbax looks elsewhere for a relative one
    digests, _ = read_digests(state)
    if damage := find_damage(state, digests):
        raise damage_error(state, damage, FIX)
    logging.getLogger("absl").setLevel(logging.ERROR)  # it warns of a file that a whole checkpoint has elsewhere
    reader = ocp.Checkpointer(ocp.PyTreeCheckpointHandler())
    try:
        saved = reader.metadata(state).item_metadata.tree  # pyright: ignore[reportOptionalMemberAccess]
        for name, shape in shapes.items():
            if name not in saved or tuple(saved[name].shape) != shape:
                actual = tuple(saved[name].shape) if name in saved else "absent"
                raise UserError(
                    f"the checkpoint is not of this run's recipe: '{name}' is {actual} there, "
                    f"and {shape} by the recipe",
                    where=str(state.parent),
                    fix=FIX,
                )
        items = {name: saved[name] for name in shapes}
        as_numpy = dict.fromkeys(items, ocp.RestoreArgs(restore_type=np.ndarray))
        return reader.restore(state, ocp.args.PyTreeRestore(items, restore_args=as_numpy, partial_restore=True))
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise DamagedError(f"the checkpoint cannot be read: {reason}", where=str(state.parent), fix=FIX) from error
