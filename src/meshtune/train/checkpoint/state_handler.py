"""How Orbax writes a run's arrays, with a digest of every file. Imported late: Orbax takes seconds to import."""

from __future__ import annotations

import dataclasses
import json
import pathlib
from collections.abc import Sequence
from typing import Any

import orbax.checkpoint as ocp

from meshtune.digests import FileDigest, digest_files, list_files, write_digests
from meshtune.train.checkpoint.follow import Follower

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
