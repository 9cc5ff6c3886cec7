"""A command that uses a model finds the programs that the same command compiled before."""

from __future__ import annotations

import json
import os
import pathlib
import subprocess
import sys

import pytest

# Counts what JAX finds in its cache of compiled programs, and what it compiles and keeps.
COUNTING = """
import json, sys
import jax
from meshtune.cli.main import main

counts = {}

def count(event, **_):
    counts[event.rpartition("/")[2]] = counts.get(event.rpartition("/")[2], 0) + 1

jax.monitoring.register_event_listener(count)
try:
    main(sys.argv[1:])
except SystemExit as end:
    assert not end.code
print(json.dumps(counts), file=sys.stderr)
"""


def generate(model: pathlib.Path, **env: str) -> tuple[str, dict[str, int]]:
    command = [sys.executable, "-c", COUNTING, "generate", str(model), "--no-chat", "-p", "Once", "-n", "8"]
    cleared = {name: value for name, value in os.environ.items() if "COMPILATION_CACHE" not in name}
    settings = {"PYTHONPATH": os.pathsep.join(filter(None, sys.path)), "JAX_PLATFORMS": "cpu"}
    done = subprocess.run(command, env=cleared | settings | env, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout, json.loads(done.stderr.splitlines()[-1])


@pytest.mark.slow
def test_the_second_start_compiles_nothing_of_the_first_and_says_the_same(stories260k, tmp_path):
    first, compiled = generate(stories260k, MESHTUNE_CACHE=str(tmp_path))
    (folder,) = (tmp_path / "programs").iterdir()
    programs = {path.name for path in folder.iterdir()}
    assert any(name.startswith("jit_decode-") for name in programs)
    assert compiled.get("cache_hits", 0) == 0
    second, events = generate(stories260k, MESHTUNE_CACHE=str(tmp_path))
    assert second == first
    assert events["cache_hits"] >= 2  # reading the prompt, and decoding
    second_folder = tmp_path / "others"
    for env in ({"JAX_ENABLE_COMPILATION_CACHE": "false"}, {"JAX_COMPILATION_CACHE_DIR": str(second_folder)}):
        generate(stories260k, MESHTUNE_CACHE=str(tmp_path / "none"), **env)
    assert not (tmp_path / "none").exists(), "JAX's own settings come first"
