"""Names of outputs that are proposed: runs/MODEL-1 and on, the first that no run has and none is to have."""

from __future__ import annotations

import pathlib
import re
from collections.abc import Mapping
from typing import Any

from meshtune.board.job import read_jobs
from meshtune.board.workspace import Workspace


def propose_output(workspace: Workspace, model: Mapping[str, Any]) -> str:
    """An output for a run that tunes `model`, a recipe's section as it is written out."""
    name = pathlib.Path(str(model.get("path") or model.get("adapter") or "run")).name.removesuffix(".gguf")
    name = re.sub(r"[^\w.-]+", "-", name).strip(".-") or "run"
    planned = {job.output for job in read_jobs(workspace.jobs)}
    number = 1
    while (path := workspace.root / "runs" / f"{name}-{number}").exists() or path in planned:
        number += 1
    return workspace.shown(path)
