"""How much of the package a reader enters to follow one piece of work from its first call to its last.

Counted are the functions that are called, by the lines of their source; see benchmarks/journeys/README.md.
"""

from __future__ import annotations

import inspect
import json
import os
import pathlib
import runpy
import subprocess
import sys
import threading
import types
from typing import NamedTuple

import pytest

import meshtune

PACKAGE = pathlib.Path(meshtune.__file__).parent
SCRIPTS = PACKAGE.parents[1] / "benchmarks" / "journeys"


class Journey(NamedTuple):
    """Files, functions and lines of functions that a script's `work()` enters."""

    files: int
    functions: int
    lines: int


LIMITS = {
    "forward": Journey(20, 90, 1035),
    "lora_step": Journey(23, 110, 1090),
    "chat": Journey(15, 131, 1080),  # a step that sees that the client has gone adds three functions of 16 lines
    "data": Journey(28, 225, 2090),  # with a manifest of sources, and shards with columns and checksums
}


def trace(script: str) -> Journey:
    """Runs `work()` of a script under a profiler of calls in all threads, in this process."""
    sys.path.insert(0, os.path.dirname(script))
    work = runpy.run_path(script)["work"]
    codes: set[types.CodeType] = set()

    def record(frame: types.FrameType, event: str, _: object) -> None:
        code = frame.f_code
        if event == "call" and code.co_filename.startswith(str(PACKAGE)) and not code.co_name.startswith("<"):
            codes.add(code)

    threading.setprofile(record)
    sys.setprofile(record)
    try:
        work()
    finally:
        sys.setprofile(None)
        threading.setprofile(None)
    lines: set[tuple[str, int]] = set()
    for code in codes:
        source, first = inspect.getsourcelines(code)
        lines |= {(code.co_filename, first + number) for number in range(len(source))}
    functions = {(code.co_filename, code.co_firstlineno) for code in codes}
    return Journey(len({file for file, _ in functions}), len(functions), len(lines))


@pytest.mark.parametrize("name", ["lora_step", "data", pytest.param("forward", marks=pytest.mark.slow)])
def test_a_reader_enters_no_more_than_this(name: str):
    """In a new process, in which nothing has been traced or compiled before."""
    command = [sys.executable, __file__, str(SCRIPTS / f"{name}.py")]
    env = os.environ | {"JAX_PLATFORMS": "cpu", "JAX_ENABLE_COMPILATION_CACHE": "false"}
    result = subprocess.run(command, env=env, check=True, capture_output=True, text=True)
    journey = Journey(*json.loads(result.stdout.splitlines()[-1]))
    assert all(1 < count <= most for count, most in zip(journey, LIMITS[name], strict=True)), journey


if __name__ == "__main__":
    print(json.dumps(trace(sys.argv[1])))
