"""The states of a run that its checkpoints keep, named RUN@best and RUN@STEP, as adapters or models to use."""

from __future__ import annotations

import os
from pathlib import Path

from meshtune.errors import UserError
from meshtune.hooks import WRITE_STATE
from meshtune.json_text import read_json
from meshtune.runs.output import CHECKPOINTS, is_run, read_run

MARK, BEST = "@", "best"


def split_state(path: str | os.PathLike[str]) -> tuple[Path, str | None]:
    """(the run, the name of its state) of RUN@best, RUN@STEP or RUN/checkpoints/STEP; (the path, None) of any other."""
    directory = Path(path).expanduser()
    if directory.name.isdecimal() and directory.parent.name == CHECKPOINTS and is_run(directory.parent.parent):
        return directory.parent.parent, directory.name
    run, mark, name = str(directory).rpartition(MARK)
    if not mark or not run or os.sep in name or directory.exists() or not is_run(Path(run)):
        return directory, None
    return Path(run), name


def state_result(run: Path, name: str) -> Path:
    """The directory of the adapter or model that a run was in the state `name`, written where it is not there yet.

    Raises UserError for a state that is not kept, naming those that are, and as train.result.states does.
    """
    return WRITE_STATE(run, state_step(run, name))


def state_step(run: Path, name: str) -> int:
    """The number of updates before the state `name` of a run. Raises UserError where it is not kept."""
    steps, where = kept_steps(run), f"{run}{MARK}{name}"
    states = ", ".join(f"{run}{MARK}{step}" for step in steps)
    fix = f"give one that is kept: {states}" if steps else f"it keeps no checkpoints: give its result, {run}"
    if name != BEST and not name.isdecimal():
        raise UserError(f"'{name}' names no state of a run", where=where, fix=f"{fix}; or the best, {run}{MARK}{BEST}")
    step = best_step(run) if name == BEST else int(name)
    if step is None:
        raise UserError(
            "the run has no best state: nothing was evaluated while it trained",
            where=where,
            fix=f"{fix}; data.validation and eval.every are what a run is evaluated with",
        )
    if step not in steps:
        best = " (the best by its validation loss; checkpoint.keep_best was off)" * (name == BEST)
        raise UserError(f"the state after update {step}{best} is not kept", where=str(run / CHECKPOINTS), fix=fix)
    return step


def kept_steps(run: Path) -> list[int]:
    """The updates after which a run's state is kept, ascending."""
    folders = (run / CHECKPOINTS).glob("[0-9]*")
    return sorted(int(path.name) for path in folders if path.name.isdecimal() and (path / "record").is_dir())


def best_step(run: Path) -> int | None:
    """The update after which the validation loss was lowest; None where there was none."""
    for step in reversed(kept_steps(run)):
        try:
            content = read_json(run / CHECKPOINTS / str(step) / "record" / "metadata")
            best = content.get("record", content).get("best")
            return None if best is None else int(best["step"])
        except (UserError, ValueError, KeyError, TypeError, AttributeError, OverflowError):
            continue  # damaged: an earlier one may say it
    best = read_run(run).get("best")
    step = best.get("step") if isinstance(best, dict) else None
    return step if isinstance(step, int) else None
