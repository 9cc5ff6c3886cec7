"""Runs `meshtune` on a host called HOST, in a separate namespace: `host_that_prepares.py HOST LOG OTHER ...`.

Appends the number of every shard that is written to LOG, and then waits until the other host, whose log is OTHER, has
written as many of its share of SHARE shards: the reading of one does not depend on which is faster.
"""

from __future__ import annotations

import pathlib
import runpy
import socket
import sys
import time

from meshtune.data.tokenise import ShardTask
from meshtune.data.tokens import Tokenize

SHARE = 2
host, log, peer_log, *sys.argv[1:] = sys.argv[1:]
socket.sethostname(host)


def count_written(file: str) -> int:
    path = pathlib.Path(file)
    return len(path.read_text().split()) if path.exists() else 0


make = ShardTask.make


def make_and_log(task: ShardTask, tokenize: Tokenize) -> pathlib.Path:
    shard = make(task, tokenize)
    with open(log, "a") as lines:
        lines.write(f"{task.file.stem.removeprefix('shard-')}\n")
    deadline = time.monotonic() + 120
    while count_written(peer_log) < min(count_written(log), SHARE) and time.monotonic() < deadline:
        time.sleep(0.02)
    return shard


ShardTask.make = make_and_log
runpy.run_module("meshtune", run_name="__main__")
