"""Checkpoints of a run in their directory: records, saving in the background, restoring, and the room that they need.

A checkpoint is a directory named by its step. It is written under a temporary name and renamed when it is complete, so
a process killed at any moment leaves the earlier checkpoints unchanged; unfinished ones are removed when the
directory is opened again. Arrays go through Orbax, asynchronously; the record is JSON. Both have digests,
which are compared before anything is restored. Frozen weights are not saved: the record names their path and hash.

Each process writes the shards of its own devices (replicated shards are written once) and reads those that its devices
need. Nothing is gathered, and mesh and number of processes may differ between the two.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import dataclasses
import errno
import importlib.metadata
import logging
import pathlib
import platform
import shutil
import sys
import time
import uuid
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any

import jax
from jaxtyping import PyTree

from meshtune.arrays.tree import Leaves, named_leaves
from meshtune.digests import DamagedError, damage_error, digest_json
from meshtune.errors import UserError
from meshtune.json_text import read_bytes, read_json
from meshtune.mesh.processes import SINGLE_PROCESS, Job, raise_collectively
from meshtune.runs.output import find_damage_collectively, find_local_damage
from meshtune.setup.memory import size_in_words
from meshtune.train.step.state import TrainState


@contextlib.contextmanager
def disk_errors(directory: pathlib.Path) -> Iterator[None]:
    """Converts disk errors to UserErrors that list the remaining checkpoints. Orbax wraps some in ValueError."""
    try:
        yield
    except (OSError, ValueError, RuntimeError) as error:
        if isinstance(error, UserError) or not (reason := disk_reason(error)):
            raise
        complete = sorted(int(path.name) for path in directory.glob("[0-9]*") if path.name.isdigit())
        remaining = (
            f"whole checkpoints there: {', '.join(map(str, complete))}" if complete else "no checkpoint was saved yet"
        )
        raise UserError(
            f"a checkpoint could not be written: {reason}{_system_text(error)}; {remaining}",
            where=str(directory),
            fix="make room or make the directory writable, then run the same command with resume=true",
        ) from error


def _system_text(error: BaseException) -> str:
    return f" ({error.strerror})" if isinstance(error, OSError) and error.errno and error.filename is None else ""


def disk_reason(error: BaseException | None) -> str | None:
    """Returns why the disk refused, if an error or one of its causes says so."""
    while error is not None:
        if isinstance(error, OSError) and error.errno in _DISK:
            return _DISK[error.errno]
        text = str(error).lower()
        for number, reason in _DISK.items():
            if any(word in text for word in (reason, errno.errorcode[number].lower(), _STRERROR[number])):
                return reason
        error = error.__cause__ or error.__context__
    return None


_DISK = {
    errno.ENOSPC: "no space left on the device",
    errno.EDQUOT: "disk quota exceeded",
    errno.EROFS: "the file system is read-only",
    errno.EACCES: "permission denied",
    errno.EPERM: "operation not permitted",
    errno.ENOTDIR: "not a directory",
    errno.EEXIST: "a file is in the way",
    errno.EIO: "input/output error",
    errno.EFBIG: "a file would be larger than is allowed here",
}
_STRERROR = {
    errno.ENOSPC: "no space left on device",
    errno.EDQUOT: "quota exceeded",
    errno.EROFS: "read-only file system",
    errno.EACCES: "permission denied",
    errno.EPERM: "operation not permitted",
    errno.ENOTDIR: "not a directory",
    errno.EEXIST: "file exists",
    errno.EIO: "input/output error",
    errno.EFBIG: "file too large",
}


UNFINISHED = "orbax-checkpoint-tmp"
DAMAGED = "checkpoints-damaged"  # beside the directory: what cannot be used is moved there, never deleted


def prepare_directory(directory: pathlib.Path, job: Job) -> None:
    """Makes the directory and removes unfinished checkpoints, on process 0.

    Raises: UserError where it cannot be written, or where a process sees another directory than process 0.
    """
    token = f"shared-{job.broadcast('checkpoints: token', uuid.uuid4().hex)}.{UNFINISHED}"
    with raise_collectively(job, "checkpoints: directory"), disk_errors(directory):
        if job.is_main_process:
            directory.mkdir(parents=True, exist_ok=True)
            for unfinished in directory.glob(f"*.{UNFINISHED}*"):
                shutil.rmtree(unfinished)
            if job.process_count > 1:
                (directory / token).mkdir()
    with raise_collectively(job, "checkpoints: shared"):
        if job.process_count > 1 and not (directory / token).is_dir():
            raise UserError(
                f"host {job.host} does not see the directory that process 0 made for checkpoints: the output is not on "
                "storage that all hosts share",
                where=str(directory),
                fix="give an output on a shared file system, mounted at the same path on every host",
            )
    if job.is_main_process and job.process_count > 1:
        (directory / token).rmdir()


def check_same_steps(steps: list[int], directory: pathlib.Path, job: Job) -> None:
    """Raises UserError where processes list different checkpoints."""
    difference = job.difference("checkpoints: steps", steps)
    if difference is not None:
        index = difference.process_index
        listed = [job.broadcast(f"checkpoints: steps of {root}", steps, root) for root in (0, index)]
        raise UserError(
            f"process 0 finds the checkpoints {listed[0]}, and process {index} finds {listed[1]}",
            where=str(directory),
            fix="wait until the shared file system shows the same on every host, and start again",
        )


def set_aside(directory: pathlib.Path, step: int, job: Job) -> pathlib.Path:
    """Moves a checkpoint out of `directory`, on process 0, and returns its new path; all processes call this."""
    target = directory.parent / DAMAGED / str(step)
    with raise_collectively(job, f"checkpoints: set {step} aside"), disk_errors(directory):
        if job.is_main_process:
            target.parent.mkdir(exist_ok=True)
            number = 1
            while target.exists():
                number += 1
                target = target.with_name(f"{step}-{number}")
            (directory / str(step)).rename(target)
    return pathlib.Path(job.broadcast("checkpoints: aside", str(target)))


PACKAGES = ("meshtune", "jax", "jaxlib", "optax", "orbax-checkpoint", "numpy")


@dataclasses.dataclass(frozen=True)
class Best:
    """The best evaluation so far: after `step` updates, with this validation loss."""

    step: int
    loss: float


@dataclasses.dataclass(frozen=True)
class Record:
    """The contents of a checkpoint except its arrays.

    `step` updates are made and as many batches are used up: together with `seed` this is the state of the random
    numbers and of the data order. `data` fingerprints the prepared examples, `base_hash` the frozen weights; `stale`
    counts evaluations since the best one; `recipe` is the resolved recipe. `kl_coef` is that of train.loop.BatchSource.
    `has_digests` is false for a record read from a checkpoint of a version that wrote none.
    """

    step: int
    seed: int
    recipe: dict[str, object]
    base_path: str
    base_hash: str
    data: str
    best: Best | None = None
    stale: int = 0
    kl_coef: float | None = None
    versions: dict[str, str] = dataclasses.field(default_factory=dict)
    has_digests: bool = True

    def to_json(self) -> dict[str, object]:
        """The record and its digest."""
        fields = dataclasses.asdict(self)
        del fields["has_digests"]
        return {"record": fields, "digest": digest_json(fields)}

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> Record:
        """The record that `to_json` gave, or an earlier version, which had no digest.

        Raises: ValueError, KeyError or TypeError where it is neither.
        """
        has_digests = "record" in value or "digest" in value
        fields = value["record"] if has_digests else value
        if has_digests and digest_json(fields) != value["digest"]:
            raise ValueError("the record does not have its digest")
        best = fields.get("best")
        return cls(**{**fields, "best": Best(**best) if best else None, "has_digests": has_digests})


def versions() -> dict[str, str]:
    """Versions of the packages that a run's numbers depend on."""
    installed = {"python": platform.python_version()}
    for name in PACKAGES:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            installed[name] = importlib.metadata.version(name)
    return installed


__all__ = ["Best", "Checkpoints", "Record", "disk_reason", "versions"]

POLL_SECONDS = 0.02
MARGIN = 256 * 1024  # bytes of a checkpoint that are not arrays
TIMEOUT = 3600  # seconds the slowest process's writing may take; a process that is lost ends the others at once
# Orbax measures by the clock of the machine, which may jump by years: what was never set begins in 1970.
ORBAX_TIMEOUT = 100 * 365 * 86400
METADATA, COMMITTED = "_CHECKPOINT_METADATA", b"Checkpoint commit was successful"  # Orbax's own
LOSS_SCALE = "loss_scale/"  # in the names of arrays
FIX = "delete this directory, or move it away, to continue from the checkpoint before it"


def read_record(checkpoint: pathlib.Path) -> Record:
    """Reads the record in the folder of a checkpoint. Raises: DamagedError for a damaged record."""
    path = checkpoint / "record" / "metadata"
    try:
        return Record.from_json(read_json(path))
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        reason = "it is not what was written" if path.exists() else "it is missing"
        raise damage_error(checkpoint, {"record/metadata": reason}, FIX) from error


class Checkpoints:
    """The checkpoints of a run in one directory: the `keep` newest and, if one is marked, the best.

    `save` returns when the arrays may be overwritten and writes in the background; a failure there is raised by the
    next call. Use as a context manager, or call `close`.

    With several processes each opens the same directory, on storage they share, and all make the same calls in the same
    order (`check`, `path`, `latest` and `steps` apart). A write that fails is raised on the process it fails on, which
    `job` tells the others. With `by_replica` one replica under dp reads for the others what is restored.
    """

    def __init__(
        self, directory: str | pathlib.Path, *, keep: int, job: Job = SINGLE_PROCESS, by_replica: bool = False
    ):
        self.directory = pathlib.Path(directory).absolute()
        self._by_replica = by_replica
        self._job = job
        self._hashing = self._hash_newest()
        import orbax.checkpoint as ocp  # late: importing it takes seconds

        from meshtune.train.checkpoint.state_handler import StateHandler

        _quiet_orbax()
        self._best: int | None = None
        self._newest: int | None = None  # that this process saved
        self._failed: BaseException | None = None
        self._verified: set[int] = set()
        prepare_directory(self.directory, job)
        # Naming the processes makes Orbax wait for them through the coordination service. Its other way is a collective
        # operation on the devices, which from its background thread could come between those of the training step.
        among = set(range(job.process_count)) if job.process_count > 1 else None
        barrier = None if among is None else self._barrier(ocp.multihost.get_barrier_sync_fn(processes=among))
        asynchronous = ocp.options.AsyncOptions(timeout_secs=ORBAX_TIMEOUT, barrier_sync_fn=barrier)
        several = ocp.options.MultiprocessingOptions(primary_host=0, active_processes=among)
        with disk_errors(self.directory):
            self._manager = ocp.CheckpointManager(
                self.directory,
                item_handlers={
                    "state": StateHandler(process_index=job.process_index, options=several),
                    "record": ocp.JsonCheckpointHandler(multiprocessing_options=several),
                },
                options=ocp.CheckpointManagerOptions(
                    create=False,
                    preservation_policy=_Newest(keep, self),
                    async_options=asynchronous,
                    multiprocessing_options=several,
                ),
            )
        check_same_steps(self.steps(), self.directory, job)

    def latest(self) -> int | None:
        """The step of the newest whole checkpoint, or None."""
        return self._manager.latest_step()

    def steps(self) -> list[int]:
        """Steps of all whole checkpoints, ascending."""
        return sorted(self._manager.all_steps())

    def path(self, step: int) -> pathlib.Path:
        """Where the checkpoint of a step is or will be."""
        return self.directory / str(step)

    def save(self, state: TrainState, record: Record, *, keep: int | None = None) -> None:
        """Starts to save; waits first for a save still under way. The checkpoint of step `keep` is not thinned out.

        Raises: UserError if this or the previous save could not be written; earlier checkpoints are as they were.
        """
        import orbax.checkpoint as ocp

        from meshtune.train.checkpoint.state_handler import StateSave

        with disk_errors(self.directory):
            # Not `together`: where this process's part of the previous save failed, the others still wait for it.
            self._manager.wait_until_finished()
        self.check_room(state)
        with disk_errors(self.directory):
            self._best = keep
            self._manager.save(
                record.step,
                args=ocp.args.Composite(
                    state=StateSave(_by_name(state)),  # pyright: ignore[reportCallIssue]
                    record=ocp.args.JsonSave(record.to_json()),  # pyright: ignore[reportCallIssue]
                ),
                force=True,
            )
        self._newest = record.step

    @property
    def writing(self) -> bool:
        """Whether the last save is still being written, by any process."""
        return self._newest is not None and not self.path(self._newest).exists()

    def wait_written(self, seconds: float) -> bool:
        """Waits for the save under way, `seconds` at most; whether none is left. Raises as `check`.

        Processes other than 0 do not wait: they may see the files much later than they are there, and 0 decides.
        """
        until = time.monotonic() + seconds
        while self._job.is_main_process and self.writing and time.monotonic() < until:
            self.check()
            time.sleep(POLL_SECONDS)
        return not self.writing

    def check_room(self, state: TrainState) -> None:
        """Raises: UserError, on all processes alike, where the disk has no room for a checkpoint of `state`."""
        with raise_collectively(self._job, "room for a checkpoint"), disk_errors(self.directory):
            self._check_room(state)

    def check(self) -> None:
        """Raises: UserError if a save in the background has failed on this process. Waits for nothing."""
        with disk_errors(self.directory):
            if self._failed is not None:
                raise self._failed
            self._manager.check_for_errors()

    def wait(self) -> None:
        """Returns when everything is on disk. Raises: UserError if it could not be written."""
        with disk_errors(self.directory):
            self._manager.wait_until_finished()
            self._manager.check_for_errors()

    def record(self, step: int) -> Record:
        """The record of a step's checkpoint. Raises: DamagedError for a damaged record."""
        return read_record(self.path(step))

    def verify(self, step: int) -> bool:
        """Compares every file of a checkpoint with its digest, each process a share of them; all processes call this.

        False for a checkpoint of an earlier version, which has no digests. Raises: DamagedError, on all processes.
        """
        damage: dict[str, str] = {}
        has_digests = True
        try:
            record = self.record(step)
            has_digests = record.has_digests
            if record.step != step:
                damage["record/metadata"] = f"it is of update {record.step}"
        except DamagedError as error:
            damage["record/metadata"] = error.reason
        damage = self._job.merge(f"checkpoint {step}: record", damage)
        if has_digests and not damage:
            hashing = self._hashing.pop(step, None)
            local = None if hashing is None else hashing.result()
            state = find_damage_collectively(self.path(step) / "state", self._job, required=True, local=local)
            damage = {f"state/{name}": reason for name, reason in state.items()}
        if damage:
            raise damage_error(self.path(step), damage, FIX)
        self._verified.add(step)
        return has_digests

    def damaged_markers(self, step: int) -> list[str]:
        """Files that tell Orbax that a checkpoint is whole, and no longer do; nothing is restored from them."""
        folder, names = self.path(step), list[str]()
        for name in ("commit_success.txt", "record/commit_success.txt", "state/commit_success.txt"):
            if (folder / name).is_file() and not read_bytes(folder / name).startswith(COMMITTED):
                names.append(name)
        try:
            handlers = read_json(folder / METADATA).get("item_handlers")
        except UserError:
            handlers = None
        if not isinstance(handlers, dict) or handlers.keys() != {"record", "state"}:
            names.append(METADATA)
        return names

    def set_aside(self, step: int) -> pathlib.Path:
        """Moves a damaged checkpoint out of the directory, and returns where it is now; all processes call this."""
        target = set_aside(self.directory, step, self._job)
        self._manager.reload()
        return target

    def restore(self, step: int, like: TrainState) -> TrainState:
        """The saved state of a step, placed as the arrays (or ShapeDtypeStructs with shardings) of `like` are.

        The scale of the loss is that of `like` where the checkpoint has none: compute.precision may have changed.

        Raises: DamagedError if the checkpoint is damaged, UserError if it is of another model, method or optimizer.
        """
        if step not in self._verified:
            self.verify(step)
        target = _by_name(jax.tree.map(_abstract, like))
        with self._reading(step):
            saved = self._check_same_arrays(step, target)
            target = {name: leaf for name, leaf in target.items() if name in saved}
            restored = self._restore(step, target)
        saved_step = int(restored["step"])
        if saved_step != step:
            raise damage_error(self.path(step), {"state": f"it is of update {saved_step}"}, FIX)
        leaves = [restored.get(name, leaf) for name, leaf in named_leaves(like)]
        return jax.tree.unflatten(jax.tree.structure(like), leaves)

    def _restore(self, step: int, target: Leaves) -> Leaves:
        import orbax.checkpoint as ocp

        from meshtune.train.checkpoint.replica import replica_mesh, restore_by_replica
        from meshtune.train.checkpoint.state_handler import StateRestore

        mesh = replica_mesh(target) if self._by_replica and self._job.process_count > 1 else None
        if mesh is not None:
            return restore_by_replica(self.path(step) / "state", target, mesh, self._job)
        restored = self._manager.restore(
            step,
            args=ocp.args.Composite(
                state=StateRestore(  # pyright: ignore[reportCallIssue]
                    item=target,  # pyright: ignore[reportCallIssue]
                    restore_args=ocp.checkpoint_utils.construct_restore_args(target),  # pyright: ignore[reportCallIssue]
                    partial_restore=True,  # pyright: ignore[reportCallIssue]
                )
            ),
        )
        return restored["state"]

    def close(self) -> None:
        """Waits for saves under way and gives up the directory. Raises as `wait` does."""
        with disk_errors(self.directory):
            self._manager.close()

    def __enter__(self) -> Checkpoints:
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        if kind is None:
            self.close()
        else:
            # Another error is on its way; a failing save must not hide it.
            with contextlib.suppress(UserError):
                self.close()

    def _hash_newest(self) -> dict[int, concurrent.futures.Future[dict[str, str]]]:
        """Begins to hash this process's share of the newest checkpoint, so that `verify` need not; by its step."""
        steps = [int(path.name) for path in self.directory.glob("[0-9]*") if path.name.isdigit()]
        if not steps:
            return {}
        pool = concurrent.futures.ThreadPoolExecutor(1, "digests")
        state = self.path(max(steps)) / "state"
        hashing = pool.submit(find_local_damage, state, self._job, required=True)
        pool.shutdown(wait=False)
        return {max(steps): hashing}

    def _barrier(self, wait: Callable[..., None]) -> Callable[..., None]:
        """Where Orbax's background threads wait for the other processes."""

        def barrier(*, key: str, timeout_ms: int) -> None:
            # After a failure here Orbax waits all the same, and keeps the error until the others have come. They never
            # will: they wait for this process's part. So it goes on, and the job ends with its error.
            self._failed = self._failed or sys.exc_info()[1]
            if self._failed is None:
                wait(key=key, timeout_ms=min(timeout_ms, TIMEOUT * 1000))

        return barrier

    def _check_room(self, state: TrainState) -> None:
        """Asks the disk first: Orbax, refused half-way, prints tracebacks and leaves threads that wait for minutes."""
        probe = self.directory / f"room-{self._job.process_index}.{UNFINISHED}"
        probe.mkdir()
        probe.rmdir()
        # Of all processes together: they write to the same storage.
        need = sum(leaf.nbytes for leaf in jax.tree.leaves(state)) + MARGIN
        free = shutil.disk_usage(self.directory).free
        if free < need:
            raise OSError(errno.ENOSPC, f"it needs {size_in_words(need)}, and {size_in_words(free)} are free")

    def _check_same_arrays(self, step: int, target: Leaves) -> Collection[str]:
        """The names of the saved arrays, which are those of `target` but for the scale of the loss."""
        saved = self._manager.item_metadata(step)["state"].tree
        in_checkpoint = {name: (tuple(leaf.shape), str(leaf.dtype)) for name, leaf in saved.items()}
        in_run = {name: (tuple(leaf.shape), str(leaf.dtype)) for name, leaf in target.items()}
        for name in sorted(in_checkpoint.keys() | in_run.keys()):
            if not name.startswith(LOSS_SCALE) and in_checkpoint.get(name) != in_run.get(name):
                raise UserError(
                    f"the checkpoint does not fit this run: '{name}' is {_describe(in_checkpoint.get(name))} there and "
                    f"{_describe(in_run.get(name))} here",
                    where=str(self.path(step)),
                    fix="resume with the recipe the run was started with, or start anew with overwrite=true",
                )
        return in_checkpoint

    @contextlib.contextmanager
    def _reading(self, step: int) -> Iterator[None]:
        try:
            yield
        except UserError:
            raise
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise DamagedError(
                f"the checkpoint cannot be read: {_first_line(error)}", where=str(self.path(step)), fix=FIX
            ) from error


class _NotOrbax(logging.Filter):
    """Keeps Orbax's own tracebacks off the screen: what goes wrong there is raised here, in one message."""

    def filter(self, record: logging.LogRecord) -> bool:
        return "orbax" not in record.pathname


def _quiet_orbax() -> None:
    logger = logging.getLogger("absl")
    if not any(isinstance(filter_, _NotOrbax) for filter_ in logger.filters):
        logger.addFilter(_NotOrbax())


class _Newest:
    """Orbax's preservation policy: the newest `keep` steps and the one marked best."""

    def __init__(self, keep: int, owner: Checkpoints):
        self._keep, self._owner = keep, owner

    def should_preserve(self, checkpoints: Sequence[Any], *, context: Any) -> list[bool]:
        newest = sorted((checkpoint.step for checkpoint in checkpoints), reverse=True)[: self._keep]
        return [checkpoint.step in newest or checkpoint.step == self._owner._best for checkpoint in checkpoints]


def _by_name(state: PyTree) -> Leaves:
    return dict(named_leaves(state))


def _abstract(leaf: jax.Array) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=leaf.sharding)


def _describe(array: tuple[tuple[int, ...], str] | None) -> str:
    return "absent" if array is None else f"{array[1]}{list(array[0])}"


def _first_line(error: BaseException) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]
