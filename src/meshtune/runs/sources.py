"""Resolves what a path names: a model, an adapter, a run or one of its states."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from meshtune.config.load import load_recipe
from meshtune.config.sections import VisionSection
from meshtune.errors import UserError
from meshtune.hooks import WRITE_STATE
from meshtune.json_text import read_json
from meshtune.mesh.config import MeshConfig
from meshtune.runs.output import CHECKPOINTS, RESULT_DIGEST, check_result, is_run, read_run
from meshtune.weights.ends import read_ends
from meshtune.weights.hub import HUB_ID, MODEL, locate, modelscope_id

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


ADAPTER_CONFIG = "adapter_config.json"
TOKENIZER = "tokenizer.json"
START = "base"  # in a run: the model it started from, where that was made by the run itself


@dataclasses.dataclass(frozen=True)
class Source:
    """The directories to load from. `tokenizer` is a directory or hub id; `chat_template` replaces the tokenizer's.
    `vision` is the section of a run that says how large its pictures were."""

    base: Path
    adapter: Path | None
    tokenizer: str
    chat_template: str | None
    vision: VisionSection | None = None

    @property
    def ends(self) -> tuple[int, ...]:
        """The ids at which the adapter's training taught answers to end, where its folder names any."""
        return () if self.adapter is None else read_ends(self.adapter)


def find(
    path: str | os.PathLike[str],
    adapter: str | os.PathLike[str] | None = None,
    *,
    revision: str | None = None,
    chat_template: str | None = None,
    tokenizer: str | None = None,
) -> Source:
    """Resolves a model directory, hub id, adapter directory or run directory, optionally with a separate adapter.

    RUN@best and RUN@STEP are a run in the state with the lowest validation loss, and after an update.

    `chat_template` and `tokenizer` (a directory or hub id) replace the model's own.

    Directories with digests (results of runs and exports, the base that a run wrote) are verified.

    Raises: UserError for a path that does not exist, an adapter whose base is not found, or a run without a result;
    DamagedError for files that do not match their digests.
    """
    source = _find(path, adapter, revision, chat_template)
    return source if tokenizer is None else dataclasses.replace(source, tokenizer=tokenizer)


def _find(
    path: str | os.PathLike[str],
    adapter: str | os.PathLike[str] | None,
    revision: str | None,
    chat_template: str | None,
) -> Source:
    directory = Path(path).expanduser()
    if adapter is not None:
        chosen = Path(adapter).expanduser()
        if not chosen.exists() and _is_hub_id(os.fspath(adapter)):
            chosen = _pushed_adapter(os.fspath(adapter), None) or chosen
        chosen, state = split_state(chosen)
        vision = _vision(_recipe(chosen)) if is_run(chosen) else None
        if is_run(chosen):
            chosen = _result(chosen) if state is None else state_result(chosen, state)
        if not (chosen / ADAPTER_CONFIG).is_file():
            raise UserError(
                f"there is no adapter at '{adapter}': "
                + ("it has no adapter_config.json" if chosen.is_dir() else "no such directory"),
                where=str(chosen.absolute()),
                fix="give the directory with adapter_config.json and adapter_model.safetensors",
            )
        check_result(chosen)
        base = _locate(path, revision)
        return Source(base, chosen, _tokenizer(chosen, base), chat_template, vision)
    if not directory.exists() and _is_hub_id(os.fspath(path)):
        directory = _pushed_adapter(os.fspath(path), revision) or directory
    directory, state = split_state(directory)
    if is_run(directory):
        result = _result(directory) if state is None else state_result(directory, state)
        recipe = _recipe(directory)
        model, vision = recipe.get("model") or {}, _vision(recipe)
        adapted = (result / ADAPTER_CONFIG).is_file()
        if start_folder := next(
            (folder / START for folder in (directory, result.parent) if (folder / START).is_dir()), None
        ):
            model = model | {"path": str(start_folder), "revision": None}
        base = _base(result, model.get("path"), revision or model.get("revision")) if adapted else _locate(result)
        if (result / TOKENIZER).is_file():  # as it was trained with, chat template included
            return Source(base, result if adapted else None, str(result), chat_template, vision)
        named = model.get("tokenizer") or (base if adapted else model.get("path")) or base
        template = chat_template or model.get("chat_template")
        return Source(base, result if adapted else None, str(named), template, vision)
    if (directory / ADAPTER_CONFIG).is_file():
        check_result(directory)
        base = _base(directory, None, None if directory != Path(path).expanduser() else revision)
        return Source(base, directory, _tokenizer(directory, base), chat_template)
    base = _locate(path, revision)
    return Source(base, None, str(base), chat_template)


def _is_hub_id(text: str) -> bool:
    return HUB_ID.match(text) is not None or modelscope_id(text) is not None


def _pushed_adapter(repository: str, revision: str | None) -> Path | None:
    """The directory of an adapter on the hub, downloaded; None where the repository holds none."""
    directory = locate(repository, revision, allow=(*MODEL, ADAPTER_CONFIG))
    return directory if (directory / ADAPTER_CONFIG).is_file() else None


def _locate(path: str | os.PathLike[str], revision: str | None = None) -> Path:
    """Returns the directory of a model, downloaded if needed; verifies its digests if it has any."""
    directory = Path(path).expanduser()
    if directory.is_dir():
        check_result(directory)
    return locate(path, revision)


def _result(run: Path) -> Path:
    """Returns the directory of a run's result after verifying the digests recorded in run.json."""
    for name, mark in (("adapter", ADAPTER_CONFIG), ("model", "config.json")):
        if (run / name / mark).is_file():
            fields = read_run(run)
            check_result(run / name, fields.get(RESULT_DIGEST) if fields.get("result") == name else None)
            return run / name
    raise UserError(
        "this run has no result yet: neither adapter/ nor model/ is in it",
        where=str(run.absolute()),
        fix="let it finish: `meshtune train` with the same recipe and resume=true",
    )


def _recipe(run: Path) -> dict[str, Any]:
    """Reads the run's recipe; {} if recipe.yaml does not exist."""
    file = run / "recipe.yaml"
    if not file.is_file():
        return {}
    from meshtune.config.load import load_recipe

    return load_recipe(file).model_dump(mode="json")


def _vision(recipe: Mapping[str, Any]) -> VisionSection | None:
    section = recipe.get("vision")
    return None if section is None else VisionSection.model_validate(section)


def _base(adapter: Path, named: str | None, revision: str | None) -> Path:
    """Locates an adapter's base: the one named by the run, otherwise the one recorded in adapter_config.json."""
    config = read_json(adapter / ADAPTER_CONFIG)
    recorded = named or config.get("base_model_name_or_path")
    if not recorded:
        raise UserError(
            "the adapter does not say which model it is for",
            where=f"{adapter / ADAPTER_CONFIG}, field base_model_name_or_path",
            fix="give both: the base as the model, and this directory as the adapter",
        )
    text = os.path.expanduser(str(recorded))
    # A relative path was meant from where the adapter was trained; the adapter may lie beside its base by now, in the
    # run that made both or elsewhere.
    for candidate in (Path(text), adapter / text, adapter.parent / text, adapter.parent / Path(text).name):
        if candidate.is_dir() or (candidate.is_file() and candidate.suffix == ".gguf"):
            return _locate(candidate)
    if _is_hub_id(text) and not text.startswith((".", "/")):
        return locate(text, revision or config.get("revision"))
    raise UserError(
        f"the adapter's base model is not here: '{recorded}'",
        where=f"{adapter / ADAPTER_CONFIG}, field base_model_name_or_path",
        fix="give both: where the base is now as the model, and this directory as the adapter",
    )


def _tokenizer(result: Path, otherwise: str | os.PathLike[str]) -> str:
    """The tokenizer saved with a result is the one it was trained with."""
    return str(result if (result / TOKENIZER).is_file() else otherwise)


def run_mesh(path: str | os.PathLike[str]) -> MeshConfig:
    """The mesh of the run at `path` for a model that generates: the devices of cp, which splits the sequences of
    training, go to fsdp, which splits parameters alike.

    Raises UserError where `path` is no run with a recipe, or its recipe leaves the mesh open.
    """
    directory, _ = split_state(path)
    if not (is_run(directory) and (directory / "recipe.yaml").is_file()):
        raise UserError(
            "only a run says which mesh it was tuned on, and this is none",
            where=str(path),
            fix="give the axes, such as mesh.tp=2",
        )
    recipe = load_recipe(str(directory / "recipe.yaml"))
    if recipe.mesh == "auto":
        raise UserError(
            "the run has not chosen its mesh yet", where=str(directory / "recipe.yaml"), fix="give it, as in mesh.tp=2"
        )
    joined = -1 if -1 in (recipe.mesh.fsdp, recipe.mesh.cp) else recipe.mesh.fsdp * recipe.mesh.cp
    return dataclasses.replace(recipe.mesh, fsdp=joined, cp=1)
