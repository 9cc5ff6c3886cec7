"""What a job can be: a kind is a file here, and a line in KINDS."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from meshtune.board.kinds import evaluate, export, serve, train
from meshtune.board.kinds.prepared import Prepared
from meshtune.board.workspace import Workspace

# From the body of a request to the command. Raises: UserError for whatever is wrong with it.
KINDS: dict[str, Callable[[Workspace, dict[str, Any]], Prepared]] = {
    "train": train.prepare,
    "serve": serve.prepare,
    "eval": evaluate.prepare_eval,
    "predict": evaluate.prepare_predict,
    "export": export.prepare_export,
    "push": export.prepare_push,
}
