"""How much code a chat request enters up to its first token, traced: what a reader of the server has to follow."""

from __future__ import annotations

import asyncio
import inspect
import runpy
import sys
import threading
from pathlib import Path
from types import CodeType, FrameType

import meshtune

ROOT = Path(__file__).resolve().parents[2]
SOURCE = str(Path(meshtune.__file__).parent)
FILES, FUNCTIONS, LINES = 15, 138, 1255  # at most


def test_a_chat_request_enters_few_functions_to_its_first_token():
    """The work of benchmarks/journeys/chat.py, whose programs are compiled before."""
    script = runpy.run_path(str(ROOT / "benchmarks/journeys/chat.py"))
    codes: set[CodeType] = set()

    def trace(frame: FrameType, event: str, _: object) -> None:
        code = frame.f_code
        if event == "call" and code.co_filename.startswith(SOURCE) and not code.co_name.startswith("<"):
            codes.add(code)

    threading.setprofile(trace)
    sys.setprofile(trace)
    try:
        text = asyncio.run(script["serve_once"](script["MODELS"]))
    finally:
        sys.setprofile(None)
        threading.setprofile(None)
    assert text
    lines: set[tuple[str, int]] = set()
    for code in codes:
        source, first = inspect.getsourcelines(code)
        lines |= {(code.co_filename, number) for number in range(first, first + len(source))}
    assert len({code.co_filename for code in codes}) <= FILES
    assert len(codes) <= FUNCTIONS
    assert len(lines) <= LINES
