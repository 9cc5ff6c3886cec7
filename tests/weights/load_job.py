"""Starts the processes of load_member.py and collects what they say; writes large random models cheaply."""

from __future__ import annotations

import json
import math
import os
import pathlib
import socket
import struct
import subprocess
import sys
from typing import Any

import numpy as np

from compiling import FASTER
from meshtune.families import model_spec
from meshtune.families import tensors as table_of

MEMBER = pathlib.Path(__file__).with_name("load_member.py")
# A process inherits its peak memory from the one that it is forked from: let that be a shell, not one with torch.
SHELL = ["sh", "-c", '"$@"; exit $?', "sh"]


def job(model: pathlib.Path, processes: int, mesh: dict[str, int], timeout: float = 120, **order: Any) -> list[Any]:
    """Returns what each process reported. Raises AssertionError if one fails or hangs."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    order_text = json.dumps({"model": str(model), "mesh": mesh, "processes": processes, "port": port, **order})
    running = [
        subprocess.Popen(
            [*SHELL, sys.executable, str(MEMBER), order_text, str(number)],
            env=os.environ | {"OMP_NUM_THREADS": "1", "XLA_FLAGS": FASTER},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for number in range(processes)
    ]
    results = []
    try:
        for process in running:
            out, errors = process.communicate(timeout=timeout)
            assert process.returncode == 0, errors[-3000:]
            results.append(json.loads(out.splitlines()[-1]))
    finally:
        for process in running:
            process.kill()
            process.wait()
    return results


def header(tensors: list[tuple[str, tuple[int, ...]]], dtype: str, itemsize: int) -> bytes:
    """The start of a safetensors file: length and header."""
    at, entries = 0, {}
    for name, shape in tensors:
        size = math.prod(shape) * itemsize
        entries[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [at, at + size]}
        at += size
    text = json.dumps(entries).encode()
    text += b" " * (-len(text) % 8)
    return struct.pack("<Q", len(text)) + text


def write_model(folder: pathlib.Path, config: dict[str, Any], shards: int, *, sparse: bool = False) -> int:
    """A bfloat16 checkpoint of random numbers in [-0.02, 0.02), 1 MB of them repeated; `sparse`: holes for numbers.

    Gives the bytes of all tensors.
    """
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config | {"dtype": "bfloat16"}))
    tensors = [(entry.name, entry.view.tensor) for entry in table_of(model_spec(config, "bfloat16"))]
    total = 2 * sum(math.prod(shape) for _, shape in tensors)
    groups: list[list[tuple[str, tuple[int, ...]]]] = [[] for _ in range(shards)]
    for number, tensor in enumerate(tensors):
        groups[number * shards // len(tensors)].append(tensor)
    rng, weight_map = np.random.default_rng(0), {}
    for number, group in enumerate(groups, 1):
        file = folder / f"model-{number:05d}-of-{shards:05d}.safetensors"
        weight_map |= {name: file.name for name, _ in group}
        start, size = header(group, "BF16", 2), 2 * sum(math.prod(shape) for _, shape in group)
        with file.open("wb") as stream:
            stream.write(start)
            if sparse:
                stream.truncate(len(start) + size)
                continue
            drawn = rng.uniform(-0.02, 0.02, (1 << 19) + 3).astype(np.float32).view(np.uint32) >> 16
            block = drawn.astype(np.uint16).tobytes()  # of an odd size, so that rows differ
            for at in range(0, size, len(block)):
                stream.write(block[: size - at])
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return total
