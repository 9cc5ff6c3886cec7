"""Lists models, adapters, runs and GGUF files in the folders of a board, and proposes names of outputs."""

from __future__ import annotations

import os
import pathlib
import re
from collections.abc import Mapping
from typing import Any

from meshtune.board.follow import is_run, run_json
from meshtune.board.job import read_jobs
from meshtune.board.workspace import FOLDER, Workspace

DEPTH = 4  # folders below a root
MOST_FOLDERS = 3000


def catalogue(workspace: Workspace) -> list[dict[str, Any]]:
    """{path, kind} of each: run, adapter, model or gguf; runs come first, the newest of them before the others.

    The search ends after MOST_FOLDERS folders.
    """
    entries: list[tuple[float, dict[str, Any]]] = []
    visited = 0
    pending = [(folder, 0) for folder in (workspace.root, *workspace.readable)]
    while pending and visited < MOST_FOLDERS:
        folder, depth = pending.pop(0)
        visited += 1
        try:
            content = sorted(os.scandir(folder), key=lambda entry: entry.name)
        except OSError:
            continue
        names = {entry.name for entry in content}
        shown = workspace.shown(folder) if folder != workspace.root else "."
        path = pathlib.Path(folder)
        if is_run(path):
            time = next(entry.stat().st_mtime for entry in content if entry.name in ("run.json", "recipe.yaml"))
            entries.append((-time, {"path": shown, "kind": "run", "status": run_json(path).get("status")}))
            continue
        kind = "adapter" if "adapter_config.json" in names else "model" if _is_model(names) else None
        if kind is not None:
            entries.append((1.0 if kind == "adapter" else 2.0, {"path": shown, "kind": kind}))
            continue
        for entry in content:
            if entry.path == str(workspace.root):
                continue  # the root inside of a --read folder was the first
            if entry.name.endswith(".gguf") and entry.is_file():
                entries.append((3.0, {"path": workspace.shown(pathlib.Path(entry.path)), "kind": "gguf"}))
            elif depth < DEPTH and not entry.name.startswith((".", FOLDER)) and entry.is_dir(follow_symlinks=False):
                pending.append((pathlib.Path(entry.path), depth + 1))
    return [fields for _, fields in sorted(entries, key=lambda entry: entry[0])]


def _is_model(names: set[str]) -> bool:
    return "config.json" in names and any(name.endswith((".safetensors", ".safetensors.index.json")) for name in names)


def propose_output(workspace: Workspace, model: Mapping[str, Any]) -> str:
    """An output for a run that tunes `model`, a recipe's section as it is written out."""
    name = pathlib.Path(str(model.get("path") or model.get("adapter") or "run")).name.removesuffix(".gguf")
    name = re.sub(r"[^\w.-]+", "-", name).strip(".-") or "run"
    planned = {job.output for job in read_jobs(workspace.jobs)}
    number = 1
    while (path := workspace.root / "runs" / f"{name}-{number}").exists() or path in planned:
        number += 1
    return workspace.shown(path)
