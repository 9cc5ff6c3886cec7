"""A command line of meshtune in this process, for tests that prove no more than what it prints and how it ends."""

from __future__ import annotations

import contextlib
import io
import subprocess
import sys

import pytest

from meshtune.cli.main import main


def run(*arguments: object, **environment: str) -> subprocess.CompletedProcess[str]:
    """Returns the exit status and both outputs of `meshtune ARGUMENTS`, in lines of 160 characters without colours."""
    command, status = [str(argument) for argument in arguments], 0
    output, errors = io.StringIO(), io.StringIO()
    with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stdout(output), contextlib.redirect_stderr(errors):
        patch.setattr(sys, "excepthook", sys.excepthook)  # main sets another one
        for name, value in {"COLUMNS": "160", "NO_COLOR": "1", **environment}.items():
            patch.setenv(name, value)
        try:
            main(command)
        except SystemExit as end:
            status = int(end.code or 0)
    return subprocess.CompletedProcess(command, status, output.getvalue(), errors.getvalue())
