"""Runs `meshtune` on a host called HOST, in a separate namespace: `host_that_prepares.py HOST LOG OTHER ...`.

Appends the name of every part that is written to LOG, and then waits until the other host, whose log is OTHER, has
written as many of its share of SHARE parts: the reading of one does not depend on which is faster.
"""

from __future__ import annotations

import pathlib
import runpy
import socket
import sys
import time

import meshtune.data.store
from meshtune.data.store import Part, write_part

SHARE = 2
host, log, peer_log, *sys.argv[1:] = sys.argv[1:]
socket.sethostname(host)


def count_written(file: str) -> int:
    path = pathlib.Path(file)
    return len(path.read_text().split()) if path.exists() else 0


def write_and_log(file: pathlib.Path, part: Part) -> None:
    write_part(file, part)
    with open(log, "a") as lines:
        lines.write(f"{file.stem}\n")
    deadline = time.monotonic() + 120
    while count_written(peer_log) < min(count_written(log), SHARE) and time.monotonic() < deadline:
        time.sleep(0.02)


meshtune.data.store.write_part = write_and_log
runpy.run_module("meshtune", run_name="__main__")
