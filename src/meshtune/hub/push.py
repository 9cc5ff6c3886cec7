"""Pushes a result to the hub as one commit: checks first, then packs, then sends what is not there yet."""

from __future__ import annotations

import dataclasses
import importlib.metadata
import json
import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from meshtune.data.tokenizer import load_tokenizer
from meshtune.hub.account import CARD, RECORD, Repository, check_access, hub_errors, open_repository
from meshtune.hub.base_model import with_hub_licence
from meshtune.hub.card import Subject, model_card
from meshtune.hub.contents import PublicNames, check_contents, local_paths, stage
from meshtune.hub.facts import run_facts
from meshtune.hub.package import ExportOptions, Package, packed, resolve
from meshtune.runs.progress import StageProgress, of_stage
from meshtune.weights.ends import GENERATION, read_ends

if TYPE_CHECKING:
    from huggingface_hub import CommitOperationAdd

PLOT, LICENCE = "loss.png", "LICENSE"
LARGE = 1 << 20  # bytes from which a file is sent by itself


@dataclasses.dataclass(frozen=True)
class Pushed:
    """A push: the repository's address, its commit, the files that it has by it and those of the source that were not
    sent. `changed` is False where the repository held all of them before."""

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
    merge: bool = False,
    into: str | None = None,
    format: str | None = None,
    base: str | None = None,
    gguf: str | None = None,
    base_model: str | None = None,
    run: str | None = None,
    public: bool = False,
    overwrite: bool = False,
    report: Callable[[str], None] = lambda text: None,
    progress: StageProgress | None = None,
) -> Pushed:
    """Pushes `source` (a finished run, an adapter, a model, a GGUF file or a folder of them) to `repository`.

    The repository is created private unless `public`. `merge`, `into`, `format`, `base` and `gguf` are those of
    `runs.export.export`; that is written to a temporary folder beside the source. `base_model` is the base's id on the
    hub, where its folder does not say it, and `run` the run that made a GGUF file or a model. `overwrite` allows a
    repository with other files, which stay. All is sent as one commit, with a model card. A push that broke is pushed
    again: files that arrived are not sent twice. `progress(stage, done, total)` is told how far each stage is.

    Raises UserError for a missing token and other refusals before anything is packed, and for a connection that breaks.
    """
    token = check_access(repository)
    options = ExportOptions(merge, into, format, base, gguf)
    package = resolve(source, options, base_model, run)
    target = open_repository(repository, token, public=public, overwrite=overwrite)
    beside = Path(source).expanduser().absolute().parent
    with tempfile.TemporaryDirectory(prefix=".push-", dir=beside if os.access(beside, os.W_OK) else None) as folder:
        if package.path is None:
            report("exporting what is to be pushed")
        package = packed(package, source, options, Path(folder) / "merged", progress)
        return send(package, target, Path(folder), report=report, progress=of_stage(progress, "sending"))


def send(
    package: Package,
    target: Repository,
    folder: Path,
    *,
    message: str = "",
    report: Callable[[str], None],
    progress: Callable[[int, int], None] | None = None,
) -> Pushed:
    """Sends a package as one commit; `folder` is for files that are rewritten on the way. Files that are large for git
    arrive one by one before the commit; `progress(done, total)` counts the bytes of those that have.

    Raises UserError where a file holds a token or names a local path, and as `account.hub_errors` does.
    """
    from huggingface_hub import CommitOperationAdd, CommitOperationDelete

    assert package.path is not None
    base = with_hub_licence(package.base, target.api) if package.base else None
    names = PublicNames(_names(package))
    staged = folder / "staged"
    staged.mkdir()
    paths, left_out = stage(package.path, staged, names)
    files: dict[str, Path | bytes] = dict(paths)
    run = run_facts(package.run, base) if package.run and base else None
    if run and package.step is not None:
        run = dataclasses.replace(run, steps=package.step)
    if run and run.plot:
        files[PLOT] = run.plot
    if base and base.licence and base.licence.file and package.kind != "adapter" and LICENCE not in files:
        files[LICENCE] = base.licence.file
    subject = Subject(target.name, package.kind, base, run, sorted(files), package.scored, _ends(package.path))
    files[CARD] = model_card(subject).encode()
    files[RECORD] = _record(package, sorted({*files, RECORD}))
    check_contents(files, target.token, local_paths(package.path, package.run, package.directory, folder))
    if base and base.hub_id is None:
        places = "the card and adapter_config.json" if package.kind == "adapter" else "the card"
        report(
            f"{places} will call the base '{base.name}', which is not an id on the hub: give its id with --base-model "
            "(hub.base_model)"
        )
    report(f"sending {len(files)} files to {target.url}")
    operations = [
        CommitOperationAdd(name, content if isinstance(content, bytes) else str(content))
        for name, content in sorted(files.items())
    ]
    _send_large(target, operations, progress or (lambda done, total: None))
    stale = sorted((target.pushed & target.files) - set(files))
    with hub_errors(target.name):
        commit = target.api.create_commit(
            target.name,
            [*operations, *(CommitOperationDelete(name, is_folder=False) for name in stale)],
            commit_message=message or f"Push {package.kind} with Meshtune",
            parent_commit=target.head,
        )
    return Pushed(target.url, commit.oid, package.kind, sorted(files), left_out, commit.oid != target.head)


def _send_large(target: Repository, operations: list[CommitOperationAdd], progress: Callable[[int, int], None]) -> None:
    """Sends the contents of large files, which are seen in the repository once a commit names them."""
    sizes = {operation.path_in_repo: operation.upload_info.size for operation in operations}
    done, total = 0, sum(sizes.values())
    for operation in operations:
        progress(done, total)
        if sizes[operation.path_in_repo] >= LARGE:
            with hub_errors(target.name):
                target.api.preupload_lfs_files(target.name, [operation])
        done += sizes[operation.path_in_repo]
    progress(total, total)


def _ends(path: Path) -> list[str]:
    """The tokens at which texts of a result end, where its folder names them."""
    if not ((path / GENERATION).is_file() and (path / "tokenizer.json").is_file()):
        return []
    tokenizer = load_tokenizer(path)
    return [str(tokenizer.convert_ids_to_tokens(id_)) for id_ in read_ends(path)]


def _names(package: Package) -> dict[str, str]:
    """What the paths of the base are called elsewhere."""
    if package.base is None:
        return {}
    spelled = Path(package.base.path).expanduser()
    paths = {package.base.path, str(spelled), str(spelled.absolute()), str(spelled.resolve())}
    if package.directory is not None:
        paths |= {str(package.directory), str(package.directory.resolve())}
    return dict.fromkeys(paths, package.base.name)


def _record(package: Package, files: list[str]) -> bytes:
    """meshtune.json: what this push wrote, by which the next one knows its own files."""
    base = package.base
    fields = {
        "version": importlib.metadata.version("meshtune"),
        "kind": package.kind,
        "base": None if base is None else {"name": base.name, "revision": base.revision, "hash": base.hash},
        "files": files,
    }
    return json.dumps(fields, indent=2).encode() + b"\n"
