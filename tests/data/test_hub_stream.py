"""Data sets of a hub over HTTP as a stream that are not of parquet: downloaded once, mixed by weight, and resumed
without the hub."""

from __future__ import annotations

import json
import os
import pathlib
import subprocess
import sys

import pytest

from hub.fake_hub import TOKEN, Repository, running_hub

PROGRAM = pathlib.Path(__file__).with_name("hub_stream.py")


def repositories() -> dict[str, Repository]:
    records = [{"instruction": f"What is {n}?", "output": f"It is {n}."} for n in range(900)]
    lines = "\n".join(map(json.dumps, records)).encode()
    columns = "\n".join(["instruction,output", *(",".join(record.values()) for record in records[:200])]).encode()
    return {
        "ann/lines": Repository(files={"train.jsonl": lines}),
        "ann/columns": Repository(files={"train.csv": columns}),
    }


def read(folder: pathlib.Path, endpoint: str, start: int, stop: int):
    env = os.environ | {
        "HF_ENDPOINT": endpoint,
        "HF_TOKEN": TOKEN,
        "HF_HOME": str(folder / "hf"),
        "HF_HUB_OFFLINE": "0",
        "HF_DATASETS_OFFLINE": "0",
        "HF_HUB_DISABLE_XET": "1",
        "HF_HUB_DISABLE_TELEMETRY": "1",
        "JAX_PLATFORMS": "cpu",
        "no_proxy": "127.0.0.1",
        "PYTHONPATH": str(pathlib.Path(__file__).parents[2] / "src"),
    }
    command = [sys.executable, str(PROGRAM), str(folder), str(start), str(stop)]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_data_sets_of_the_hub_are_mixed_and_resumed_as_a_stream(tmp_path):
    with running_hub() as hub:
        hub.repositories |= repositories()
        full = read(tmp_path, hub.url, 0, 40)
        assert hub.paths("GET")
        total = sum(full["sources"].values())
        assert total > 800
        assert full["sources"]["ann/lines"] / total == pytest.approx(0.75, abs=0.05)
        assert full["records"] > 100
        downloads = len(hub.paths("GET"))
        assert read(tmp_path, hub.url, 20, 40)["hashes"] == full["hashes"][20:]
        assert not [path for path in hub.paths("GET")[downloads:] if path.endswith((".jsonl", ".csv"))]
    # The hub is gone: from the cache, with and without the journal.
    assert read(tmp_path, hub.url, 20, 40)["hashes"] == full["hashes"][20:]
    (tmp_path / "run/stream.jsonl").unlink()
    assert read(tmp_path, hub.url, 20, 40)["hashes"] == full["hashes"][20:]
