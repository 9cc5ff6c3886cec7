"""Run state on disk: everything a run needs to go on as if it had never stopped.

A checkpoint is a directory named by its step. It is written beside its place and renamed when it is whole, so a
process killed at any moment leaves the checkpoints that were whole before; what it left half-written is removed when
the directory is opened again. Arrays go through Orbax, asynchronously; what is not an array is JSON beside them.
Frozen weights are not in it: the record refers to them by path and hash.
"""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import importlib.metadata
import logging
import pathlib
import platform
import shutil
from collections.abc import Iterator, Sequence
from typing import Any

import jax

from meshtune.errors import UserError
from meshtune.optim.paths import named_leaves
from meshtune.train.memory import size_in_words
from meshtune.train.step import TrainState

MARGIN = 256 * 1024  # bytes of a checkpoint that are not arrays
PACKAGES = ("meshtune", "jax", "jaxlib", "optax", "orbax-checkpoint", "numpy")


@dataclasses.dataclass(frozen=True)
class Best:
    """The best evaluation so far: after `step` updates, with this validation loss."""

    step: int
    loss: float


@dataclasses.dataclass(frozen=True)
class Record:
    """What a checkpoint holds beside arrays.

    `step` updates are made and as many batches are used up: together with `seed` it is the state of the random numbers
    and of the data order. `data` fingerprints the prepared examples, `base_hash` the frozen weights; `stale` counts
    evaluations since the best one; `recipe` is the resolved recipe.
    """

    step: int
    seed: int
    recipe: dict[str, Any]
    base_path: str
    base_hash: str
    data: str
    best: Best | None = None
    stale: int = 0
    versions: dict[str, str] = dataclasses.field(default_factory=dict)

    @classmethod
    def from_json(cls, value: dict[str, Any]) -> Record:
        best = value.get("best")
        return cls(**{**value, "best": Best(**best) if best else None})


def versions() -> dict[str, str]:
    """Versions of what decides a run's numbers."""
    found = {"python": platform.python_version()}
    for name in PACKAGES:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found[name] = importlib.metadata.version(name)
    return found


class Checkpoints:
    """The checkpoints of a run in one directory: the `keep` newest and, if one is marked, the best.

    `save` returns when the arrays may be overwritten and writes in the background; a failure there is raised by the
    next call. Use as a context manager, or call `close`.
    """

    def __init__(self, directory: str | pathlib.Path, *, keep: int):
        import orbax.checkpoint as ocp  # late: importing it takes seconds

        _quiet_orbax()
        self.directory = pathlib.Path(directory).absolute()
        self._best: int | None = None
        with _disk_errors(self.directory):
            self.directory.mkdir(parents=True, exist_ok=True)
            for unfinished in self.directory.glob("*.orbax-checkpoint-tmp*"):
                shutil.rmtree(unfinished)
            self._manager = ocp.CheckpointManager(
                self.directory,
                item_handlers={"state": ocp.PyTreeCheckpointHandler(), "record": ocp.JsonCheckpointHandler()},
                options=ocp.CheckpointManagerOptions(preservation_policy=_Newest(keep, self)),
            )

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

        with _disk_errors(self.directory):
            self._manager.wait_until_finished()
            self._best = keep
            self._check_room(state)
            self._manager.save(
                record.step,
                args=ocp.args.Composite(
                    state=ocp.args.PyTreeSave(_by_name(state)),  # pyright: ignore[reportCallIssue]
                    record=ocp.args.JsonSave(dataclasses.asdict(record)),  # pyright: ignore[reportCallIssue]
                ),
                force=True,
            )

    def wait(self) -> None:
        """Returns when everything is on disk. Raises: UserError if it could not be written."""
        with _disk_errors(self.directory):
            self._manager.wait_until_finished()
            self._manager.check_for_errors()

    def record(self, step: int) -> Record:
        """What the checkpoint of a step says beside its arrays."""
        import orbax.checkpoint as ocp

        with self._reading(step):
            restored = self._manager.restore(step, args=ocp.args.Composite(record=ocp.args.JsonRestore()))  # pyright: ignore[reportCallIssue]
            return Record.from_json(restored["record"])

    def restore(self, step: int, like: TrainState) -> TrainState:
        """The saved state of a step, placed as the arrays (or ShapeDtypeStructs with shardings) of `like` are.

        Raises: UserError if the checkpoint is damaged or is of another model, method or optimizer.
        """
        import orbax.checkpoint as ocp

        target = _by_name(jax.tree.map(_abstract, like))
        with self._reading(step):
            self._check_same_arrays(step, target)
            restored = self._manager.restore(
                step,
                args=ocp.args.Composite(
                    state=ocp.args.PyTreeRestore(  # pyright: ignore[reportCallIssue]
                        item=target,  # pyright: ignore[reportCallIssue]
                        restore_args=ocp.checkpoint_utils.construct_restore_args(target),  # pyright: ignore[reportCallIssue]
                    )
                ),
            )
        leaves = [restored["state"][name] for name, _ in named_leaves(like)]
        return jax.tree.unflatten(jax.tree.structure(like), leaves)

    def close(self) -> None:
        """Waits for saves under way and gives up the directory. Raises as `wait` does."""
        with _disk_errors(self.directory):
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

    def _check_room(self, state: TrainState) -> None:
        """Asks the disk first: Orbax, refused half-way, prints tracebacks and leaves threads that wait for minutes."""
        probe = self.directory / "room.orbax-checkpoint-tmp"
        probe.mkdir()
        probe.rmdir()
        need = sum(leaf.nbytes for leaf in jax.tree.leaves(state)) + MARGIN
        free = shutil.disk_usage(self.directory).free
        if free < need:
            raise OSError(errno.ENOSPC, f"it needs {size_in_words(need)}, and {size_in_words(free)} are free")

    def _check_same_arrays(self, step: int, target: dict[str, Any]) -> None:
        saved = self._manager.item_metadata(step)["state"].tree
        found = {name: (tuple(leaf.shape), str(leaf.dtype)) for name, leaf in saved.items()}
        wanted = {name: (tuple(leaf.shape), str(leaf.dtype)) for name, leaf in target.items()}
        for name in sorted(found.keys() | wanted.keys()):
            if found.get(name) != wanted.get(name):
                raise UserError(
                    f"the checkpoint does not fit this run: '{name}' is {_described(found.get(name))} there and "
                    f"{_described(wanted.get(name))} here",
                    where=str(self.path(step)),
                    fix="resume with the recipe the run was started with, or start anew with overwrite=true",
                )

    @contextlib.contextmanager
    def _reading(self, step: int) -> Iterator[None]:
        try:
            yield
        except UserError:
            raise
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise UserError(
                f"the checkpoint cannot be read: {_first_line(error)}",
                where=str(self.path(step)),
                fix="delete this directory to go on from the checkpoint before it",
            ) from error


class _NotOrbax(logging.Filter):
    """Keeps Orbax's own tracebacks off the screen: what goes wrong there is raised here, in one message."""

    def filter(self, record: logging.LogRecord) -> bool:
        return "orbax" not in record.pathname


def _quiet_orbax() -> None:
    logger = logging.getLogger("absl")
    if not any(isinstance(one, _NotOrbax) for one in logger.filters):
        logger.addFilter(_NotOrbax())


class _Newest:
    """Orbax's preservation policy: the newest `keep` steps and the one marked best."""

    def __init__(self, keep: int, owner: Checkpoints):
        self._keep, self._owner = keep, owner

    def should_preserve(self, checkpoints: Sequence[Any], *, context: Any) -> list[bool]:
        newest = sorted((one.step for one in checkpoints), reverse=True)[: self._keep]
        return [one.step in newest or one.step == self._owner._best for one in checkpoints]


def _by_name(state: Any) -> dict[str, Any]:
    return dict(named_leaves(state))


def _abstract(leaf: Any) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=leaf.sharding)


def _described(found: tuple[tuple[int, ...], str] | None) -> str:
    return "absent" if found is None else f"{found[1]}{list(found[0])}"


@contextlib.contextmanager
def _disk_errors(directory: pathlib.Path) -> Iterator[None]:
    """What the disk refuses, as an error that says what is still there. Orbax wraps some of these in ValueError."""
    try:
        yield
    except (OSError, ValueError, RuntimeError) as error:
        if isinstance(error, UserError) or not (reason := disk_reason(error)):
            raise
        whole = sorted(int(path.name) for path in directory.glob("[0-9]*") if path.name.isdigit())
        kept = f"whole checkpoints there: {', '.join(map(str, whole))}" if whole else "no checkpoint was saved yet"
        raise UserError(
            f"a checkpoint could not be written: {reason}{_measured(error)}; {kept}",
            where=str(directory),
            fix="make room or make the directory writable, then run the same command with resume=true",
        ) from error


def _measured(error: BaseException) -> str:
    return f" ({error.strerror})" if isinstance(error, OSError) and error.errno and error.filename is None else ""


def disk_reason(error: BaseException | None) -> str | None:
    """Why the disk refused, if that is what is behind an error; looks through the errors that caused it."""
    while error is not None:
        if isinstance(error, OSError) and error.errno in _DISK:
            return _DISK[error.errno]
        text = str(error).lower()
        for number, words in _DISK.items():
            if any(word in text for word in (words, errno.errorcode[number].lower(), _STRERROR[number])):
                return words
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
}


def _first_line(error: BaseException) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]
