"""Two hosts, each with its own name (a UTS namespace), prepare data for one run, sharing a cache and not."""

from __future__ import annotations

import json
import os
import pathlib
import subprocess
import sys

import pytest

from mesh.job import free_port
from meshtune.data.store import SHARD

PROGRAM = pathlib.Path(__file__).with_name("host_that_prepares.py")
MODEL = pathlib.Path(__file__).parents[2] / "src/meshtune/quickstart/model"
SHARDS = 4


def namespaces_are_allowed() -> bool:
    try:
        return subprocess.run(["unshare", "--uts", "true"], capture_output=True).returncode == 0
    except OSError:
        return False


def prepare(folder: pathlib.Path, caches: list[str]) -> tuple[list[list[int]], list[dict[str, bytes]], list[float]]:
    """The shards that each host made, the files of its store, and the losses of the run."""
    folder.mkdir()
    recipe = folder / "recipe.yaml"
    fields = {
        "model": {"path": str(MODEL), "chat_template": "plain"},
        "data": {"train": str(folder.parent / "data.jsonl"), "max_length": 64},
        "train": {"steps": 2, "batch_size": 8},
        "mesh": {"fsdp": 2},
        "sample": {"prompts": []},
        "output": str(folder / "run"),
    }
    recipe.write_text(json.dumps(fields))
    common = {
        "JAX_PLATFORMS": "cpu",
        "MESHTUNE_COORDINATOR": f"localhost:{free_port()}",
        "MESHTUNE_PROCESSES": "2",
        "MESHTUNE_DATA_PROCESSES": "1",  # those of tasks do not write the log
        "PYTHONPATH": str(pathlib.Path(__file__).parents[2] / "src"),
    }
    inherited = {name: value for name, value in os.environ.items() if name != "XLA_FLAGS"}
    logs = [folder / f"made-{host}" for host in range(2)]
    running = []
    for host, cache in enumerate(caches):
        # Gloo looks up the host's own name, so the name is an address.
        arguments = [f"127.0.0.{1 + host}", str(logs[host]), str(logs[1 - host]), "train", str(recipe)]
        env = inherited | common | {"MESHTUNE_PROCESS": str(host), "MESHTUNE_CACHE": str(folder / cache)}
        command = ["unshare", "--uts", sys.executable, str(PROGRAM), *arguments]
        running.append(subprocess.Popen(command, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True))
    outputs = [process.communicate(timeout=500)[0] for process in running]
    assert [process.returncode for process in running] == [0, 0], "\n".join(outputs)
    parts = [sorted(int(line) for line in log.read_text().split()) for log in logs]
    stores = []
    for cache in caches:
        (store,) = (folder / cache / "tokens").glob("[!.m]*")
        stores.append({file.name: file.read_bytes() for file in store.iterdir()})
    rows = [json.loads(line) for line in (folder / "run/metrics.jsonl").read_text().splitlines()]
    return parts, stores, [row["loss"] for row in rows if row["kind"] == "train"]


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.skipif(not namespaces_are_allowed(), reason="a host's name needs a namespace of its own")
def test_two_hosts_prepare_their_shares_of_a_common_cache_and_everything_without_one(tmp_path: pathlib.Path):
    records = [{"instruction": f"What is {n}?", "output": f"It is {n}."} for n in range(SHARDS * SHARD - 100)]
    (tmp_path / "data.jsonl").write_text("\n".join(map(json.dumps, records)))
    shared, shared_stores, losses = prepare(tmp_path / "shared", ["cache", "cache"])
    apart, stores, losses_apart = prepare(tmp_path / "apart", ["cache-0", "cache-1"])
    assert shared == [[0, 2], [1, 3]]
    assert apart == [[0, 1, 2, 3], [0, 1, 2, 3]]
    assert stores[0] == stores[1] == shared_stores[0]
    assert len(losses) == 2
    assert losses == losses_apart
