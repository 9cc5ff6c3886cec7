"""What there is to push: an adapter, a whole model, an adapter merged into its base, or GGUF files."""

from __future__ import annotations

import dataclasses
import os
from pathlib import Path
from typing import Any

import safetensors

from meshtune.adapters.peft_format import WEIGHTS, read_fields
from meshtune.errors import UserError
from meshtune.hub.base_model import Base, public_base
from meshtune.json_text import parse_json
from meshtune.runs.export import export
from meshtune.runs.output import read_run
from meshtune.runs.progress import StageProgress
from meshtune.runs.sources import START, Source, find, is_run
from meshtune.runs.states import split_state, state_step
from meshtune.weights.load import load_config


@dataclasses.dataclass(frozen=True)
class Package:
    """A result to push.

    `kind` is adapter, model, merged or gguf, `path` its folder or file (None until it is exported), `run` the directory
    of the run that made it, and `directory` that of its base. `step` is the update after which it is pushed, where that
    is not the run's result.
    """

    kind: str
    path: Path | None
    base: Base | None
    run: Path | None
    directory: Path | None
    scored: bool = False
    step: int | None = None


@dataclasses.dataclass(frozen=True)
class ExportOptions:
    """How a source is exported before it is pushed, as `meshtune export` has them."""

    merge: bool
    into: str | None
    format: str | None
    base: str | None
    gguf: str | None


def resolve(source: str | os.PathLike[str], options: ExportOptions, base_model: str | None, run: str | None) -> Package:
    """Resolves what `source` (a run, adapter, model, GGUF file or folder of them) has to push; writes nothing.

    `base_model` is the id of the base on the hub, `run` the run that made a GGUF file or model, for its card. Raises
    UserError for a run that is not finished, and for a source that cannot be pushed as asked.
    """
    path = Path(source).expanduser()
    if _is_gguf(path):
        _refuse_merge(options, source)
        maker = _finished(Path(run).expanduser()) if run else None
        return Package("gguf", path, run_base(maker, base_model) if maker else _named(base_model), maker, None)
    made, state = split_state(path)
    step = None if state is None else state_step(made, state)
    if is_run(made):
        maker = made if state is not None else _finished(made)
    else:
        maker = _finished(Path(run).expanduser()) if run else None
    package = _of_source(path, source, options, base_model, maker)
    return dataclasses.replace(package, step=step)


def _of_source(
    path: Path,
    source: str | os.PathLike[str],
    options: ExportOptions,
    base_model: str | None,
    maker: Path | None,
) -> Package:
    resolved = find(path) if options.base is None else find(options.base, path)
    scored = bool(_architecture(resolved).endswith("ForSequenceClassification"))
    if resolved.adapter is None:
        if options.gguf is None:
            _refuse_merge(options, source)
        base = run_base(maker, base_model) if maker else _model_base(resolved.base, base_model)
        if options.gguf is not None:
            return Package("gguf", None, base, maker, resolved.base)
        return Package("model", resolved.base, base, maker, None, scored)
    base = run_base(maker, base_model) if maker else _adapter_base(resolved, base_model)
    if options.gguf is not None:
        return Package("gguf", None, base, maker, resolved.base)
    if options.merge:
        return Package("merged", None, base, maker, resolved.base, scored)
    if maker is not None and (maker / START).is_dir():
        raise UserError(
            "this adapter belongs to a base that the run made itself (base/ in it), which is not on the hub",
            where=str(maker),
            fix="add --merge to push the whole model",
        )
    return Package("adapter", resolved.adapter, base, maker, resolved.base, scored)


def packed(
    package: Package,
    source: str | os.PathLike[str],
    options: ExportOptions,
    folder: Path,
    progress: StageProgress | None = None,
) -> Package:
    """The package with its files; a merged model, and GGUF files, are written to `folder` and verified there."""
    if package.path is not None:
        return package
    if options.gguf is not None:
        file = folder / f"{Path(source).expanduser().absolute().name.replace('@', '-')}-{options.gguf.upper()}.gguf"
        export(
            source,
            file,
            merge=options.merge,
            into=options.into,
            base=options.base,
            gguf=options.gguf,
            progress=progress,
        )
        return dataclasses.replace(package, path=folder)
    done = export(
        source,
        folder,
        merge=options.merge,
        into=options.into,
        format=options.format,
        base=options.base,
        progress=progress,
    )
    return dataclasses.replace(package, path=done.path)


def _is_gguf(path: Path) -> bool:
    if path.suffix == ".gguf":
        if not path.is_file():
            raise UserError("there is no such file", where=str(path), fix="give a GGUF file, a run, or a folder")
        return True
    return path.is_dir() and not (path / "config.json").is_file() and any(path.glob("*.gguf"))


def _refuse_merge(options: ExportOptions, source: str | os.PathLike[str]) -> None:
    if any((options.merge, options.into, options.format, options.base, options.gguf)):
        raise UserError(
            "there is nothing to export: this is pushed as it is",
            where=str(source),
            fix="leave --merge, --into, --format, --base and --gguf out",
        )


def _finished(run: Path) -> Path:
    if not is_run(run):
        raise UserError("this is not the output of a run", where=str(run), fix="give the directory of a run")
    status = read_run(run).get("status")
    if status != "finished":
        raise UserError(
            f"this run is not finished: its status is '{status}'",
            where=str(run),
            fix="let it finish: `meshtune train` with the same recipe and resume=true",
        )
    return run


def run_base(run: Path, base_model: str | None = None) -> Base:
    """The base that a run started from, as its recipe and run.json name it."""
    from meshtune.config.load import load_recipe

    recipe = load_recipe(run / "recipe.yaml")
    recorded: dict[str, Any] = read_run(run).get("base") or {}
    hash = recorded.get("hash") if recorded.get("path") == recipe.model.path else None
    directory = Path(recipe.model.path).expanduser()
    return public_base(
        recipe.model.path,
        hub_id=base_model,
        revision=recipe.model.revision,
        hash=hash,
        directory=directory if directory.is_dir() else None,
    )


def _adapter_base(source: Source, base_model: str | None) -> Base:
    assert source.adapter is not None
    fields = read_fields(source.adapter)
    recorded = _record(source.adapter / WEIGHTS).get("base") or {}
    path = recorded.get("path") or fields.get("base_model_name_or_path") or source.base
    revision = fields.get("revision")
    return public_base(
        str(path),
        hub_id=base_model,
        revision=revision if isinstance(revision, str) else None,
        hash=recorded.get("hash"),
        directory=source.base,
    )


def _model_base(directory: Path, base_model: str | None) -> Base | None:
    """What the files of a merged model say of its base; None where they say nothing."""
    first = next(iter(sorted(directory.glob("*.safetensors"))), None)
    merged = (_record(first) if first else {}).get("merged") or {}
    if not merged.get("base"):
        return _named(base_model)
    return public_base(merged["base"], hub_id=base_model, revision=None, hash=merged.get("hash"), directory=None)


def _record(file: Path) -> dict[str, Any]:
    """What Meshtune wrote into the metadata of a safetensors file; {} for files of other programs.

    Raises UserError for metadata under its name that are of another form.
    """
    with safetensors.safe_open(str(file), framework="np") as opened:
        record = parse_json((opened.metadata() or {}).get("meshtune", "{}"), str(file))
    parts = [record.get(name) or {} for name in ("base", "merged")] if isinstance(record, dict) else [record]
    for part in parts:
        if not isinstance(part, dict) or not all(
            isinstance(part.get(key), str | None) for key in ("path", "base", "hash")
        ):
            raise UserError("its metadata 'meshtune' are not what Meshtune writes", where=str(file), fix="remove them")
    return record


def _named(base_model: str | None) -> Base | None:
    return None if base_model is None else Base(base_model, base_model, base_model)


def _architecture(source: Source) -> str:
    if source.adapter is not None and read_fields(source.adapter).get("task_type") == "SEQ_CLS":
        return "ForSequenceClassification"
    names = load_config(source.base).get("architectures")
    return str(names[0]) if isinstance(names, list) and names else ""
