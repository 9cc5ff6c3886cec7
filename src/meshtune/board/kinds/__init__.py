"""What a job can be: a kind is a file here, and a line in KINDS."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from meshtune.board.kinds.evaluate import prepare_eval, prepare_predict
from meshtune.board.kinds.export import prepare_export, prepare_push
from meshtune.board.kinds.serve import prepare_serve
from meshtune.board.kinds.train import prepare_train
from meshtune.board.kinds.prepared import Prepared
from meshtune.board.workspace import Workspace

# From the body of a request to the command. Raises: UserError for whatever is wrong with it.
KINDS: dict[str, Callable[[Workspace, dict[str, Any]], Prepared]] = {
    "train": prepare_train,
    "serve": prepare_serve,
    "eval": prepare_eval,
    "predict": prepare_predict,
    "export": prepare_export,
    "push": prepare_push,
}
