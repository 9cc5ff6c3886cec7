"""Copies of a run's checkpoints on an object store, from which another machine resumes the run.

A copy is a folder named by its step. Its marker, which lists its files, is written last and deleted first, so a process
killed at any moment leaves the earlier copies usable. Orbax itself writes arrays to local paths and gs:// only; copies
by fsspec have the same files and digests on every store.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import json
import os
import pathlib
import shutil
import threading
from collections.abc import Callable, Iterator

import fsspec

from meshtune.data.readers.remote import remote_errors
from meshtune.errors import UserError, amount
from meshtune.json_text import parse_json
from meshtune.runs.output import CHECKPOINTS, HISTORY, RECIPE, ROLLOUTS, RUN, link_or_copy
from meshtune.train.checkpoint.checkpoints import read_record
from meshtune.train.report.attempts import ATTEMPTS
from meshtune.train.report.events import Event, Saved

MARKER = "copy.json"
RUN_FILES = "run/"  # in a copy: small files of the run, for resuming where its output is not
SMALL_FILES = (RUN, RECIPE, *HISTORY, ROLLOUTS, ATTEMPTS)
ROLLOUT_FOLDER = "rollouts"  # the rollouts that an online stage still needs
THREADS = 8  # files under way at once
POLL_SECONDS = 0.1


class CheckpointCopies:
    """The copies of the checkpoints of the run in `output`: the `keep` newest and, if there is one, the best.

    One checkpoint is copied at a time, in the background. Of those saved meanwhile the newest waits, and the others are
    left out. `notify` receives a sentence about each that is left out or fails. Use as a context manager, in process 0.
    """

    def __init__(self, url: str, output: pathlib.Path, *, keep: int, notify: Callable[[str], None]):
        self._url, self._output, self._keep, self._notify = url.rstrip("/"), output, keep, notify
        with remote_errors(url):
            local = {"auto_mkdir": True} if url.startswith(("file:", "local:")) else {}
            self._system, self._root = fsspec.core.url_to_fs(self._url, **local)
        self._checkpoints, self._drafts = output / CHECKPOINTS, output / f"{CHECKPOINTS}.partial"
        self._lock = threading.Lock()
        self._stopped = threading.Event()
        self._worker: threading.Thread | None = None
        self._waiting: int | None = None
        self._failure: UserError | None = None

    def __enter__(self) -> CheckpointCopies:
        return self

    def __exit__(self, *_: object) -> None:
        self._stopped.set()
        shutil.rmtree(self._drafts, ignore_errors=True)

    def check(self, *, resume: bool) -> None:
        """Writes and deletes a small file. Raises: UserError where that is not possible, and where a run that does not
        `resume` would mix its checkpoints with those of another."""
        with remote_errors(self._url):
            probe = f"{self._root}/.meshtune-{os.getpid()}"
            self._system.pipe_file(probe, b"meshtune")
            self._system.rm_file(probe)
        steps = self.steps()
        if steps and not resume:
            raise UserError(
                f"it has {amount(len(steps), 'checkpoint')} of a run already, the newest of update {steps[-1]}",
                where=f"checkpoint.copy_to: {self._url}",
                fix="resume=true continues that run; or give another address, or delete them there",
            )

    def steps(self) -> list[int]:
        """Steps of all complete copies, ascending."""
        return self._complete_steps(self._list())

    def fetch(self) -> list[int]:
        """Copies the newest checkpoint, and the best one by it, to the output where they are newer than all there, with
        the run's small files. Returns their steps, or []."""
        listed = self._list()
        steps = self._complete_steps(listed)
        local = self._local_steps()
        if not steps or steps[-1] <= max(local, default=-1):
            return []
        self._fetch_step(steps[-1], listed, with_run=True)
        best = read_record(self._checkpoints / str(steps[-1])).best
        if best is None or best.step in (*local, steps[-1]) or best.step not in steps:
            return [steps[-1]]
        self._fetch_step(best.step, listed, with_run=False)
        return [best.step, steps[-1]]

    def receive(self, event: Event) -> None:
        """Copies each checkpoint that a run saves, as a sink of its events."""
        if isinstance(event, Saved):
            self.copy(event.step)

    def close(self) -> None:
        """Ends nothing: `wait` does, once the result is written."""

    def copy(self, step: int) -> None:
        """Copies the checkpoint of a step in the background, once it is complete."""
        with self._lock:
            if self._waiting is not None:
                self._notify(f"the checkpoint of update {self._waiting} is not copied: one before it still is")
            self._waiting = step
            if self._worker is None:
                self._worker = threading.Thread(target=self._work, name="checkpoint-copies", daemon=True)
                self._worker.start()

    def wait(self) -> None:
        """Returns when the newest checkpoint is copied. Raises: UserError if it could not be."""
        while (worker := self._worker) is not None:
            worker.join()
        if self._failure is not None:
            raise self._failure

    def _work(self) -> None:
        while True:
            with self._lock:
                step, self._waiting = self._waiting, None
                if step is None:
                    self._worker = None
                    return
            try:
                with remote_errors(self._url):
                    self._copy(step)
                self._failure = None
            except UserError as error:
                self._failure = error
                self._notify(f"the checkpoint of update {step} was not copied to {self._url}: {error.what}")

    def _copy(self, step: int) -> None:
        while not (self._checkpoints / str(step)).is_dir():  # it is being written, or was thinned out
            if self._stopped.wait(POLL_SECONDS) or any(number > step for number in self._local_steps()):
                break
        with self._draft(step) as draft:
            if draft is None:
                self._notify(f"the checkpoint of update {step} is not copied: it is no longer there")
                return
            best = read_record(draft).best
            if best is not None and best.step not in (step, *self.steps()):
                with self._draft(best.step) as best_draft:
                    if best_draft is not None:
                        self._upload(best.step, best_draft)
            self._add_run_files(draft / RUN_FILES)
            self._upload(step, draft)
            self._thin_out(step, None if best is None else best.step)

    @contextlib.contextmanager
    def _draft(self, step: int) -> Iterator[pathlib.Path | None]:
        """A folder of links to the files of a checkpoint, which may be thinned out meanwhile; None if it was before."""
        draft = self._drafts / str(step)
        shutil.rmtree(draft, ignore_errors=True)
        try:
            try:
                shutil.copytree(self._checkpoints / str(step), draft, copy_function=link_or_copy)
                is_there = True
            except (FileNotFoundError, shutil.Error):
                if not any(number > step for number in self._local_steps()):
                    raise
                is_there = False
            yield draft if is_there else None
        finally:
            shutil.rmtree(draft, ignore_errors=True)

    def _upload(self, step: int, folder: pathlib.Path) -> None:
        files = {path.relative_to(folder).as_posix(): path for path in folder.rglob("*") if path.is_file()}
        content = {name: path.stat().st_size for name, path in files.items()}
        self._remove(f"{step}/{MARKER}")  # of an earlier copy
        with concurrent.futures.ThreadPoolExecutor(THREADS) as pool:
            list(pool.map(lambda name: self._put(files[name], f"{step}/{name}"), files))
        if not self._stopped.is_set():
            self._system.pipe_file(f"{self._root}/{step}/{MARKER}", json.dumps({"files": content}).encode())

    def _add_run_files(self, folder: pathlib.Path) -> None:
        folder.mkdir()
        for name in SMALL_FILES:
            if (self._output / name).is_file():
                shutil.copy2(self._output / name, folder / name)
        if (self._output / ROLLOUT_FOLDER).is_dir():
            shutil.copytree(self._output / ROLLOUT_FOLDER, folder / ROLLOUT_FOLDER, copy_function=link_or_copy)

    def _thin_out(self, step: int, best: int | None) -> None:
        """Deletes all copies but the newest up to `step` and the best: also incomplete ones, and later ones, since a
        resumed run makes those updates again."""
        listed = self._list()
        newest = [number for number in self._complete_steps(listed) if number <= step][-self._keep :]
        numbers = {int(name.partition("/")[0]) for name in listed}
        for number in sorted(numbers - {*newest, best}):
            self._remove(f"{number}/{MARKER}")
            with contextlib.suppress(FileNotFoundError):
                self._system.rm(f"{self._root}/{number}", recursive=True)

    def _fetch_step(self, step: int, listed: dict[str, int], *, with_run: bool) -> None:
        names = [name for name in listed if name.startswith(f"{step}/") and name != f"{step}/{MARKER}"]
        draft = self._drafts / str(step)
        shutil.rmtree(draft, ignore_errors=True)
        with concurrent.futures.ThreadPoolExecutor(THREADS) as pool, remote_errors(self._url):
            list(pool.map(lambda name: self._get(name, draft / name.partition("/")[2]), names))
        for name in (*SMALL_FILES, ROLLOUT_FOLDER) if with_run else ():
            if (draft / RUN_FILES / name).is_file():
                os.replace(draft / RUN_FILES / name, self._output / name)
            elif (draft / RUN_FILES / name).is_dir():
                shutil.copytree(draft / RUN_FILES / name, self._output / name, dirs_exist_ok=True)
        shutil.rmtree(draft / RUN_FILES, ignore_errors=True)
        self._checkpoints.mkdir(exist_ok=True)
        draft.rename(self._checkpoints / str(step))

    def _local_steps(self) -> list[int]:
        return [int(path.name) for path in self._checkpoints.glob("[0-9]*") if path.name.isdigit()]

    def _put(self, local: pathlib.Path, name: str) -> None:
        if not self._stopped.is_set():
            self._system.put_file(str(local), f"{self._root}/{name}")

    def _get(self, name: str, local: pathlib.Path) -> None:
        local.parent.mkdir(parents=True, exist_ok=True)
        self._system.get_file(f"{self._root}/{name}", str(local))

    def _remove(self, name: str) -> None:
        with contextlib.suppress(FileNotFoundError):
            self._system.rm_file(f"{self._root}/{name}")

    def _list(self) -> dict[str, int]:
        """Sizes of all files of copies, by name from the root."""
        with remote_errors(self._url):
            self._system.invalidate_cache()
            try:
                files = self._system.find(self._root, detail=True)
            except FileNotFoundError:
                return {}
        start = len(self._root.rstrip("/")) + 1
        sizes = {name[start:]: int(entry.get("size") or 0) for name, entry in files.items()}
        return {name: size for name, size in sizes.items() if name.partition("/")[0].isdigit() and ".." not in name}

    def _complete_steps(self, listed: dict[str, int]) -> list[int]:
        """Steps of the copies of which every file is there."""
        complete = []
        for name in listed:
            step, _, file = name.partition("/")
            if file != MARKER:
                continue
            with remote_errors(self._url):
                content = self._system.cat_file(f"{self._root}/{name}")
            try:
                files: dict[str, int] = parse_json(content, name)["files"]
                is_complete = all(listed.get(f"{step}/{file}") == size for file, size in files.items())
            except (UserError, ValueError, KeyError, TypeError, AttributeError):
                continue
            if is_complete:
                complete.append(int(step))
        return sorted(complete)
