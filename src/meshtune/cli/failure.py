"""How failures are printed: a user's mistake in three lines, a defect of ours with a way to report it."""

from __future__ import annotations

import os
import platform
import sys
import tempfile
import traceback
from collections.abc import Sequence
from importlib import metadata
from types import TracebackType

from rich.console import Console
from rich.text import Text

from meshtune.errors import UserError, path_error

REPORT = "open an issue with the command, this message and that file"


# By verb, what takes less memory, the mildest first.
SMALLER_MODEL = "--quantize int8 or nf4, or more devices (mesh.tp=2)"
LESS_MEMORY = {
    "train": "a smaller train.micro_batch (the result stays the same), compute.remat=full, a smaller data.max_length",
    "generate": f"fewer prompts at once, fewer --max-tokens, --cache int8, {SMALLER_MODEL}",
    "chat": f"fewer --max-tokens, --cache int8, {SMALLER_MODEL}",
    "serve": f"fewer --rows, --cache int8, {SMALLER_MODEL}",
    "predict": f"fewer --rows, fewer --max-tokens, {SMALLER_MODEL}",
    "eval": f"fewer --rows, fewer --max-tokens, {SMALLER_MODEL}",
}
ELSE = "end other programs on this machine, or use one with more memory"


def explain(error: BaseException, arguments: Sequence[str]) -> UserError | None:
    """Turns an error of a path or of memory in the command `arguments` into a UserError; other errors give None."""
    if isinstance(error, UserError):
        return error
    if isinstance(error, OSError) and (refused := path_error(error)):
        return refused
    from meshtune.setup.shortage import as_shortage, ran_out

    verb = next((argument for argument in arguments if not argument.startswith("-")), "")
    return as_shortage(error, "; ".join(filter(None, [LESS_MEMORY.get(verb), ELSE]))) if ran_out(error) else None


def show(error: UserError) -> None:
    """Print the problem, its place and the fix on stderr."""
    console = Console(stderr=True, highlight=False, soft_wrap=True)
    console.print(Text.assemble(("error: ", "bold red"), error.what))
    for label, text in (("where", error.where), ("fix", error.fix)):
        if text:
            console.print(Text.assemble((f"{label}: ".rjust(7), "bold cyan" if label == "fix" else "bold"), text))


def report_defect(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    """A `sys.excepthook`: an unexpected exception is our defect; its traceback goes to a file, not to the screen."""
    text = "".join(traceback.format_exception(kind, error, trace))
    console = Console(stderr=True, highlight=False, soft_wrap=True)
    summary = str(error).strip().splitlines()
    console.print(
        Text.assemble(
            ("This is a defect in Meshtune, not in what you did: ", "bold red"),
            f"{kind.__name__}: {summary[0] if summary else 'no message'}",
        )
    )
    console.print(
        Text.assemble(("traceback: ", "bold"), _write_report(text) or "could not be written; add --debug to see it")
    )
    console.print(Text.assemble((" to do: ".rjust(11), "bold cyan"), REPORT))


def _write_report(text: str) -> str | None:
    """Writes traceback and versions to a file; returns its path, or None where no file can be written."""
    versions = f"meshtune {metadata.version('meshtune')}, Python {platform.python_version()}, {platform.platform()}\n"
    try:
        handle, path = tempfile.mkstemp(prefix="meshtune-defect-", suffix=".txt")
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            file.write(f"{versions}command: {' '.join(sys.argv)}\n\n{text}")
    except OSError:
        return None
    return path
