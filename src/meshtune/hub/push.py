"""Pushes a result to the hub as one commit: checks first, then exports, then sends the files that are missing there."""

from __future__ import annotations

import dataclasses
import importlib.metadata
import json
import os
import re
import shutil
import struct
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import safetensors

from meshtune.adapters.peft_format import WEIGHTS, read_fields
from meshtune.data.tokenizer import load_tokenizer
from meshtune.digests import FILE as DIGESTS
from meshtune.digests import write_digests
from meshtune.errors import UserError
from meshtune.hub.account import CARD, RECORD, Repository, check_access, hub_errors, open_repository
from meshtune.hub.card import Base, Subject, model_card, public_base, run_facts, with_hub_licence
from meshtune.json_text import parse_json, read_json
from meshtune.runs.export import export
from meshtune.runs.output import read_run
from meshtune.runs.progress import StageProgress
from meshtune.runs.sources import START, Source, find, is_run, split_state, state_step
from meshtune.weights.ends import GENERATION, read_ends
from meshtune.weights.load import load_config

PLOT, LICENCE = "loss.png", "LICENSE"
SENT = (
    "*.safetensors", "*.json", "*.jinja", "*.model", "*.txt", "*.tiktoken", "*.gguf", "*Modelfile", "LICENSE*",
    "NOTICE*",
)  # fmt: skip
# JSON files whose strings may name files of this machine; the others are vocabularies.
CONFIGS = (
    "adapter_config.json",
    "config.json",
    "generation_config.json",
    "preprocessor_config.json",
    "processor_config.json",
    "tokenizer_config.json",
)
VOCABULARIES = ("tokenizer.json", "vocab.json", "merges.txt")
LOCAL = ("/", "~/", "./", "../")
TOKEN = re.compile(rb"\bhf_[A-Za-z0-9]{30,}")
SEARCHED_BYTES = 32 << 20  # of a file of weights: its names and metadata are in front


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

    merge: bool = False
    into: str | None = None
    format: str | None = None
    base: str | None = None
    gguf: str | None = None


@dataclasses.dataclass(frozen=True)
class Pushed:
    """A push: the repository's address, its commit, the files that it has by it and those of the source that were not
    sent. `changed` is False if the repository had all of them before."""

    url: str
    commit: str
    kind: str
    files: list[str]
    left_out: list[str]
    changed: bool


def push(
    source: str | os.PathLike[str],
    repository: str,
    *,
    base_model: str | None = None,
    run: str | None = None,
    public: bool = False,
    overwrite: bool = False,
    report: Callable[[str], None] = lambda text: None,
    progress: StageProgress | None = None,
    **export_options: Any,
) -> Pushed:
    """Pushes `source` (a finished run, an adapter, a model, a GGUF file or a folder of them) to `repository`.

    The repository is created private unless `public`. `export_options` are those of ExportOptions; an export is
    written to a temporary folder next to the source. `base_model` is the base's id on the hub, if its folder does not
    name it, and `run` the run that made a GGUF file or a model. `overwrite` allows a repository with other files,
    which stay. All is sent as one commit, with a model card. Push again after a break: files that arrived are not sent
    twice. `progress(stage, done, total)` reports the export.

    Raises UserError for a missing token and other refusals before anything is exported, and for a broken connection.
    """
    token = check_access(repository)
    options = ExportOptions(**export_options)
    package = resolve(source, options, base_model, run)
    target = open_repository(repository, token, public=public, overwrite=overwrite)
    parent = Path(source).expanduser().absolute().parent
    with tempfile.TemporaryDirectory(prefix=".push-", dir=parent if os.access(parent, os.W_OK) else None) as folder:
        if package.path is None:
            report("exporting what is to be pushed")
            package = _export(package, source, options, Path(folder) / "merged", progress)
        return send(package, target, Path(folder), report=report)


def send(
    package: Package, target: Repository, folder: Path, *, message: str = "", report: Callable[[str], None]
) -> Pushed:
    """Sends a package as one commit; `folder` is for files that are written on the way.

    Raises UserError for a file that holds a token or names a local path, and as `account.hub_errors` does.
    """
    assert package.path is not None
    base = with_hub_licence(package.base, target.api) if package.base else None
    staged = folder / "staged"
    staged.mkdir()
    left_out = stage(package.path, staged, PublicNames(_names(package)))
    run = run_facts(package.run, base) if package.run and base else None
    if run and package.step is not None:
        run = dataclasses.replace(run, steps=package.step)
    if run and run.plot:
        (staged / PLOT).symlink_to(run.plot.resolve())
    if base and base.licence and base.licence.file and package.kind != "adapter" and not (staged / LICENCE).exists():
        (staged / LICENCE).symlink_to(base.licence.file.resolve())
    names = _files(staged)
    subject = Subject(target.name, package.kind, base, run, names, package.scored, _ends(package.path))
    (staged / CARD).write_text(model_card(subject), encoding="utf-8")
    names = sorted({*names, CARD, RECORD})
    (staged / RECORD).write_bytes(_record(package, names))
    check_contents(staged, target.token, local_paths(package.path, package.run, package.directory, folder))
    if base and base.hub_id is None:
        places = "the card and adapter_config.json" if package.kind == "adapter" else "the card"
        report(
            f"{places} will call the base '{base.name}', which is not an id on the hub: give its id with --base-model "
            "(hub.base_model)"
        )
    report(f"sending {len(names)} files to {target.url}")
    stale = sorted((target.pushed & target.files) - set(names))
    with hub_errors(target.name):
        commit = target.api.upload_folder(
            repo_id=target.name,
            folder_path=staged,
            commit_message=message or f"Push {package.kind} with Meshtune",
            parent_commit=target.head,
            delete_patterns=[name.replace("[", "[[]") for name in stale] or None,
        )
    return Pushed(target.url, commit.oid, package.kind, names, left_out, commit.oid != target.head)


def resolve(source: str | os.PathLike[str], options: ExportOptions, base_model: str | None, run: str | None) -> Package:
    """Resolves what `source` (a run, adapter, model, GGUF file or folder of them) has to push; writes nothing.

    `base_model` is the id of the base on the hub, `run` the run that made a GGUF file or model, for its card. Raises
    UserError for a run that is not finished, and for a source that cannot be pushed as asked.
    """
    path = Path(source).expanduser()
    if _is_gguf(path):
        _refuse_merge(options, source)
        maker = _check_finished(Path(run).expanduser()) if run else None
        return Package("gguf", path, run_base(maker, base_model) if maker else _base_of(base_model), maker, None)
    made, state = split_state(path)
    step = None if state is None else state_step(made, state)
    if is_run(made):
        maker = made if state is not None else _check_finished(made)
    else:
        maker = _check_finished(Path(run).expanduser()) if run else None
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


def _export(
    package: Package,
    source: str | os.PathLike[str],
    options: ExportOptions,
    folder: Path,
    progress: StageProgress | None = None,
) -> Package:
    """Exports a merged model, or GGUF files, to `folder`, verified there; returns the package with its files."""
    to = folder
    if options.gguf is not None:
        to = folder / f"{Path(source).expanduser().absolute().name.replace('@', '-')}-{options.gguf.upper()}.gguf"
    exported = export(source, to, **dataclasses.asdict(options), progress=progress)
    return dataclasses.replace(package, path=folder if options.gguf is not None else exported.path)


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


def _check_finished(run: Path) -> Path:
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
    recorded = _metadata_of(source.adapter / WEIGHTS).get("base") or {}
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
    """Reads the base of a merged model from its files; None if they do not name it."""
    first = next(iter(sorted(directory.glob("*.safetensors"))), None)
    merged = (_metadata_of(first) if first else {}).get("merged") or {}
    if not merged.get("base"):
        return _base_of(base_model)
    return public_base(merged["base"], hub_id=base_model, revision=None, hash=merged.get("hash"), directory=None)


def _metadata_of(file: Path) -> dict[str, Any]:
    """Reads Meshtune's metadata of a safetensors file; {} for files of other programs.

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


def _base_of(base_model: str | None) -> Base | None:
    return None if base_model is None else Base(base_model, base_model, base_model)


def _architecture(source: Source) -> str:
    if source.adapter is not None and read_fields(source.adapter).get("task_type") == "SEQ_CLS":
        return "ForSequenceClassification"
    names = load_config(source.base).get("architectures")
    return str(names[0]) if isinstance(names, list) and names else ""


class PublicNames:
    """Public names of paths of this machine: by `names` (path -> name), any other by its last part."""

    def __init__(self, names: Mapping[str, str]):
        self._names = dict(names)

    def of(self, text: str) -> str:
        if text in self._names:
            return self._names[text]
        return Path(text).name if text.startswith(LOCAL) else text

    def within(self, value: Any) -> Any:
        """A JSON value whose strings name no path of this machine."""
        if isinstance(value, dict):
            return {key: self.within(entry) for key, entry in value.items()}
        if isinstance(value, list):
            return [self.within(entry) for entry in value]
        return self.of(value) if isinstance(value, str) else value


def stage(source: Path, staged: Path, names: PublicNames) -> list[str]:
    """Puts the files of `source` (a folder, or one file) into `staged`: links, or copies without local paths.

    The digests of a result are written again if its files have changed. Returns the names of the files that are not
    sent: hidden files, code, pickles.
    """
    left_out, rewritten = [], False
    for path in sorted(source.rglob("*")) if source.is_dir() else [source]:
        name = path.relative_to(source).as_posix() if source.is_dir() else path.name
        if not path.is_file() or name in (DIGESTS, CARD):
            continue
        if any(part.startswith(".") for part in name.split("/")) or not any(path.match(kind) for kind in SENT):
            left_out.append(name)
            continue
        copy = staged / name
        copy.parent.mkdir(parents=True, exist_ok=True)
        if _rewrite(path, copy, names):
            rewritten = True
        else:
            copy.symlink_to(path.resolve())
    if (source / DIGESTS).is_file():
        if rewritten or left_out:
            write_digests(staged)
        else:
            (staged / DIGESTS).symlink_to((source / DIGESTS).resolve())
    return left_out


def _files(folder: Path) -> list[str]:
    return sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file())


def _rewrite(path: Path, copy: Path, names: PublicNames) -> bool:
    """Writes `copy` without paths of this machine; False, and nothing is written, where `path` names none."""
    if path.suffix == ".safetensors":
        return _rewrite_header(path, copy, names)
    if path.name not in CONFIGS:
        return False
    fields = read_json(path)
    public = names.within(fields)
    if public == fields:
        return False
    copy.write_text(json.dumps(public, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
    return True


def _rewrite_header(path: Path, copy: Path, names: PublicNames) -> bool:
    with path.open("rb") as file:
        (length,) = struct.unpack("<Q", file.read(8))
        header = json.loads(file.read(length))
        metadata = header.get("__metadata__") or {}
        public = {key: _public_text(value, names) for key, value in metadata.items()}
        if public == metadata:
            return False
        text = json.dumps(header | {"__metadata__": public}, separators=(",", ":"), ensure_ascii=False).encode()
        text += b" " * (-len(text) % 8)  # the data that follow stay aligned
        with copy.open("wb") as output:
            output.write(struct.pack("<Q", len(text)) + text)
            shutil.copyfileobj(file, output, 16 << 20)
    return True


def _public_text(value: str, names: PublicNames) -> str:
    """A value of a safetensors file's metadata: JSON, or plain text."""
    try:
        parsed = json.loads(value)
    except ValueError:
        return names.of(value)
    public = names.within(parsed)
    return value if public == parsed else json.dumps(public)


def check_contents(folder: Path, token: str, paths: Sequence[str]) -> None:
    """Raises UserError for a file of `folder` that holds a token of the hub, or one of these `paths` of this machine.

    Vocabularies, which may hold any text, are searched only for tokens; of weights the first 32 MiB are read.
    """
    sought = [path.encode() for path in paths if len(path) > 1]
    for name in _files(folder):
        with (folder / name).open("rb") as file:
            text = file.read(SEARCHED_BYTES if name.endswith((".safetensors", ".gguf")) else -1)
        if token.encode() in text or TOKEN.search(text):
            raise UserError(
                f"'{name}' holds a token of the hub", where=name, fix="take it out of the file; nothing was pushed"
            )
        local = next((path for path in sought if Path(name).name not in VOCABULARIES and _names_path(path, text)), None)
        if local is not None:
            raise UserError(
                f"'{name}' names a path of this machine: {local.decode()}",
                where=name,
                fix="take it out of the file; nothing was pushed",
            )


def _names_path(path: bytes, text: bytes) -> bool:
    return re.search(rb"(?<![\w.-])" + re.escape(path) + rb"(?![\w.-])", text) is not None


def local_paths(*paths: str | os.PathLike[str] | None) -> list[str]:
    """Absolute forms of paths, and this user's home and working directory."""
    given = [Path(path).expanduser().absolute() for path in paths if path is not None and os.fspath(path)]
    every = [*given, *(path.resolve() for path in given), Path.home(), Path.cwd()]
    return sorted({str(path) for path in every if len(path.parts) > 1}, key=lambda path: -len(path))


def _ends(path: Path) -> list[str]:
    """The tokens at which texts of a result end, where its folder names them."""
    if not ((path / GENERATION).is_file() and (path / "tokenizer.json").is_file()):
        return []
    tokenizer = load_tokenizer(path)
    return [str(tokenizer.convert_ids_to_tokens(id_)) for id_ in read_ends(path)]


def _names(package: Package) -> dict[str, str]:
    """Public names of the paths of the base."""
    if package.base is None:
        return {}
    spelled = Path(package.base.path).expanduser()
    paths = {package.base.path, str(spelled), str(spelled.absolute()), str(spelled.resolve())}
    if package.directory is not None:
        paths |= {str(package.directory), str(package.directory.resolve())}
    return dict.fromkeys(paths, package.base.name)


def _record(package: Package, files: list[str]) -> bytes:
    """Returns meshtune.json: the files of this push, so that the next one can replace them."""
    base = package.base
    fields = {
        "version": importlib.metadata.version("meshtune"),
        "kind": package.kind,
        "base": None if base is None else {"name": base.name, "revision": base.revision, "hash": base.hash},
        "files": files,
    }
    return json.dumps(fields, indent=2).encode() + b"\n"
