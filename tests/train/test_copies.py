"""Copies of checkpoints on an object store: only whole ones count, and another machine resumes from them exactly."""

from __future__ import annotations

import importlib.util
import json
import os
import pathlib
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time

import fsspec
import jax
import jax.numpy as jnp
import pytest
from checkpoint_states import bits, record_of, state_of

from compiling import FASTER
from meshtune.config.load import load_recipe
from meshtune.errors import UserError
from meshtune.runs.output import CHECKPOINTS
from meshtune.train.checkpoint.checkpoints import Best, Checkpoints
from meshtune.train.checkpoint.copies import MARKER, CheckpointCopies
from meshtune.train.report.metrics_log import TIMINGS
from meshtune.train.run import train

SCRIPT = pathlib.Path(__file__).with_name("run_and_die.py")
MEMORY = fsspec.filesystem("memory")


@pytest.fixture(params=["memory", "file"])
def store(request, tmp_path) -> str:
    if request.param == "file":
        return f"file://{tmp_path}/store/run"
    MEMORY.store.clear()
    MEMORY.pseudo_dirs[:] = [""]
    return "memory://bucket/run"


def files_of(url: str) -> set[str]:
    system, root = fsspec.core.url_to_fs(url)
    return {name[len(root) + 1 :] for name in system.find(root)}


def save_and_copy(store: str, output: pathlib.Path, steps, *, keep: int = 2, best: int | None = None) -> list[str]:
    """Saves and copies states one after another; what was said."""
    notes: list[str] = []
    with (
        Checkpoints(output / CHECKPOINTS, keep=keep) as checkpoints,
        CheckpointCopies(store, output, keep=keep, notify=notes.append) as copies,
    ):
        for step in steps:
            marked = Best(best, 1.0) if best is not None and step >= best else None
            checkpoints.save(state_of(step), record_of(step, best=marked), keep=marked and marked.step)
            copies.copy(step)
            copies.wait()
    return notes


def test_another_machine_restores_the_newest_copy_and_the_best_one_bit_for_bit(tmp_path, store):
    (tmp_path / "first").mkdir()
    (tmp_path / "first/metrics.jsonl").write_text("lines\n")
    assert save_and_copy(store, tmp_path / "first", range(1, 6), best=2) == []
    copies = CheckpointCopies(store, tmp_path / "second", keep=2, notify=print)
    assert copies.steps() == [2, 4, 5]
    assert {name.partition("/")[0] for name in files_of(store)} == {"2", "4", "5"}, "others are deleted"
    assert copies.fetch() == [2, 5]
    assert (tmp_path / "second/metrics.jsonl").read_text() == "lines\n"
    with Checkpoints(tmp_path / "second" / CHECKPOINTS, keep=2) as checkpoints:
        assert checkpoints.steps() == [2, 5]
        for step in (2, 5):
            restored = checkpoints.restore(step, jax.tree.map(jnp.zeros_like, state_of(step)))
            assert bits(restored) == bits(state_of(step))
    assert copies.fetch() == [], "the output has it already"


def test_a_copy_that_a_killed_process_left_unfinished_is_never_fetched_and_the_next_one_replaces_it(tmp_path, store):
    save_and_copy(store, tmp_path / "first", [1, 2, 3])
    system, root = fsspec.core.url_to_fs(store)
    content = json.loads(system.cat_file(f"{root}/3/{MARKER}"))
    largest = max(content["files"], key=content["files"].get)
    system.rm_file(f"{root}/3/{largest}")
    copies = CheckpointCopies(store, tmp_path / "second", keep=2, notify=print)
    assert copies.steps() == [2], "a file is missing"
    system.pipe_file(f"{root}/3/{MARKER}", b"{")
    assert copies.steps() == [2], "the marker is cut off"
    system.rm_file(f"{root}/3/{MARKER}")
    assert copies.fetch() == [2]
    save_and_copy(store, tmp_path / "second", [4])
    assert copies.steps() == [2, 4]
    assert not any(name.startswith("3/") for name in files_of(store))


def test_one_checkpoint_is_copied_at_a_time_and_the_newest_of_those_that_wait_is_next(tmp_path, monkeypatch):
    begun, may_go_on, notes = threading.Event(), threading.Event(), []

    class Slow(CheckpointCopies):
        def _upload(self, step: int, folder: pathlib.Path) -> None:
            begun.set()
            assert may_go_on.wait(60)
            super()._upload(step, folder)

    MEMORY.store.clear()
    with (
        Checkpoints(tmp_path / CHECKPOINTS, keep=1) as checkpoints,
        Slow("memory://bucket/run", tmp_path, keep=5, notify=notes.append) as copies,
    ):
        for step in (1, 2, 3):
            checkpoints.save(state_of(step), record_of(step))
            checkpoints.wait()
            copies.copy(step)
            assert begun.wait(60)
        may_go_on.set()
        copies.wait()
    assert notes[:1] == ["the checkpoint of update 2 is not copied: one before it still is"]
    assert copies.steps()[-1] == 3


def test_a_run_does_not_begin_where_another_has_its_checkpoints(tmp_path, store, stories260k):
    save_and_copy(store, tmp_path / "first", [1])
    CheckpointCopies(store, tmp_path / "second", keep=2, notify=print).check(resume=True)
    with pytest.raises(UserError, match="1 checkpoint of a run already, the newest of update 1"):
        train(recipe(stories260k, tmp_path / "second", store))
    assert not (tmp_path / "second").exists()


@pytest.mark.parametrize(
    ("problem", "message"),
    [
        (FileNotFoundError("The specified bucket does not exist"), "no such bucket"),
        (OSError("Unable to locate credentials"), "credentials are missing or not enough(.|\n)*AWS_ACCESS_KEY_ID"),
        (PermissionError("Access Denied"), "credentials are missing or not enough"),
    ],
)
def test_a_store_that_refuses_is_an_error_before_anything_is_trained(tmp_path, monkeypatch, problem, message):
    """As s3fs raises them (test_a_run_on_s3... has the real ones)."""

    def refuse(*arguments, **options):
        raise problem

    monkeypatch.setattr(type(MEMORY), "pipe_file", refuse)
    with pytest.raises(UserError, match=message):
        CheckpointCopies("memory://bucket/run", tmp_path, keep=2, notify=print).check(resume=False)


def test_a_copy_that_fails_is_said_and_ends_no_update_but_the_run_fails_if_it_is_the_last(tmp_path, monkeypatch):
    MEMORY.store.clear()
    notes: list[str] = []

    def refuse(*arguments, **options):
        raise OSError("connection reset")

    with (
        Checkpoints(tmp_path / CHECKPOINTS, keep=2) as checkpoints,
        CheckpointCopies("memory://bucket/run", tmp_path, keep=2, notify=notes.append) as copies,
    ):
        with monkeypatch.context() as patch:
            patch.setattr(type(MEMORY), "put_file", refuse)
            checkpoints.save(state_of(1), record_of(1))
            copies.copy(1)
            with pytest.raises(UserError, match="the address cannot be used: connection reset"):
                copies.wait()
        assert len(notes) == 1
        assert notes[0].startswith("the checkpoint of update 1 was not copied to memory://bucket/run")
        checkpoints.save(state_of(2), record_of(2))
        copies.copy(2)
        copies.wait()
    assert copies.steps() == [2]


def recipe(model, output, store, *overrides: str):
    data = output.parent / "data.jsonl"
    data.write_text("".join(json.dumps({"text": f"Once upon a time {n} cats sat."}) + "\n" for n in range(24)))
    fields = {
        "model": str(model),
        "data": {"train": str(data), "max_length": 64, "validation": 4},
        "output": str(output),
        "train": {"steps": 4, "batch_size": 4},
        "optimizer": {"learning_rate": 0.01, "schedule": "constant", "warmup_steps": 0},
        "eval": {"every": 2},
        "checkpoint": {"every": 2, "keep": 1, "copy_to": store},
    }
    return load_recipe(fields, overrides)


def learned(output: pathlib.Path) -> object:
    """Its metrics but for times, and the result's bytes."""
    rows = [json.loads(line) for line in (output / "metrics.jsonl").read_text().splitlines()]
    metrics = [{name: value for name, value in row.items() if name not in TIMINGS} for row in rows]
    return metrics, (output / "adapter/adapter_model.safetensors").read_bytes()


@pytest.mark.slow
def test_a_run_whose_machine_is_gone_goes_on_elsewhere_as_if_it_had_not_been(tmp_path, stories260k, monkeypatch):
    monkeypatch.setenv("MESHTUNE_CACHE", str(tmp_path / "cache"))
    MEMORY.store.clear()
    address = "memory://bucket/run"
    train(recipe(stories260k, tmp_path / "first", address))
    shutil.rmtree(tmp_path / "first")
    train(recipe(stories260k, tmp_path / "second", address, "resume=true", "train.steps=8"))
    train(recipe(stories260k, tmp_path / "whole", None, "train.steps=8"))
    assert learned(tmp_path / "second") == learned(tmp_path / "whole")


def test_an_address_without_a_protocol_is_an_error(tmp_path, stories260k):
    with pytest.raises(UserError, match="is no address such as s3://bucket/run"):
        recipe(stories260k, tmp_path / "out", "bucket/run")


DIE_IN_UPLOAD = """
import os, signal
import s3fs

put_file, count = s3fs.S3FileSystem.put_file, [0]

def put_and_die(self, *arguments, **options):
    count[0] += 1
    if count[0] == int(os.environ["DIE_AT"]):
        os.kill(os.getpid(), signal.SIGKILL)
    return put_file(self, *arguments, **options)

s3fs.S3FileSystem.put_file = put_and_die
"""


@pytest.fixture
def s3(monkeypatch):
    """A bucket of a real S3 server, and the environment with which s3fs finds it."""
    if any(importlib.util.find_spec(name) is None for name in ("moto", "flask", "s3fs")):
        pytest.skip("moto[s3], flask, flask-cors and s3fs are not installed")
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    server = subprocess.Popen(
        [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port)], stderr=subprocess.DEVNULL
    )
    keys = {"AWS_ACCESS_KEY_ID": "key", "AWS_SECRET_ACCESS_KEY": "secret", "AWS_DEFAULT_REGION": "us-east-1"}
    for name, value in (keys | {"AWS_ENDPOINT_URL": f"http://127.0.0.1:{port}"}).items():
        monkeypatch.setenv(name, value)
    import s3fs

    try:
        for _ in range(300):
            with socket.socket() as client:
                if client.connect_ex(("127.0.0.1", port)) == 0:
                    break
            time.sleep(0.2)
        s3fs.S3FileSystem.clear_instance_cache()
        s3fs.S3FileSystem().mkdir("bucket")
        yield "s3://bucket/run"
    finally:
        server.kill()
        server.wait()


@pytest.mark.slow
def test_a_run_on_s3_killed_in_the_middle_of_a_copy_goes_on_from_the_one_before_it(tmp_path, stories260k, s3):
    script = tmp_path / "die.py"
    script.write_text(DIE_IN_UPLOAD)

    def live(name: str, copy_to: str | None, die_at: int = -1) -> int:
        config = recipe(stories260k, tmp_path / name, copy_to, "resume=true", "train.steps=8")
        file = tmp_path / f"{name}.json"
        file.write_text(json.dumps(config.model_dump(mode="json")))
        environment = os.environ | {
            "XLA_FLAGS": FASTER, "MESHTUNE_CACHE": str(tmp_path / "cache"), "DIE_AT": str(die_at)
        }  # fmt: skip
        command = [sys.executable, str(SCRIPT), str(file), "never", *([str(script)] if copy_to else [])]
        done = subprocess.run(command, env=environment, capture_output=True, text=True)
        assert done.returncode in (0, -signal.SIGKILL), done.stdout[-3000:] + done.stderr[-5000:]
        return done.returncode

    assert live("first", s3) == 0
    copies = CheckpointCopies(s3, tmp_path / "first", keep=1, notify=print)
    assert copies.steps()[-1] == 8
    files = sum(name.startswith("8/") for name in files_of(s3))
    fsspec.core.url_to_fs(s3)[0].rm("bucket/run", recursive=True)

    assert live("killed", s3, die_at=files + files // 2) == -signal.SIGKILL, "in the second copy"
    steps = copies.steps()
    assert len(steps) == 1, "the one before is whole, and not yet deleted"
    assert steps[0] < 8
    shutil.rmtree(tmp_path / "killed")
    assert live("elsewhere", s3) == 0
    assert copies.steps()[-1] == 8
    assert live("whole", None) == 0
    assert learned(tmp_path / "elsewhere") == learned(tmp_path / "whole")


@pytest.mark.slow
def test_what_a_real_s3_server_refuses_is_a_clear_error(tmp_path, s3, monkeypatch):
    missing = CheckpointCopies("s3://no-such-bucket/run", tmp_path, keep=1, notify=print)
    with pytest.raises(UserError, match="there is no such bucket, folder or file"):
        missing.check(resume=False)
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name)
    for name, value in {"AWS_EC2_METADATA_DISABLED": "true", "HOME": str(tmp_path)}.items():
        monkeypatch.setenv(name, value)
    import s3fs

    s3fs.S3FileSystem.clear_instance_cache()
    with pytest.raises(UserError, match=r"credentials are missing or not enough(.|\n)*AWS_ACCESS_KEY_ID"):
        CheckpointCopies("s3://bucket/run", tmp_path, keep=1, notify=print).check(resume=False)


@pytest.mark.slow
def test_two_processes_go_on_elsewhere_from_a_copy_that_one_of_them_reads(tmp_path, stories260k):
    def launch(name: str, *overrides: str) -> pathlib.Path:
        mesh = ("mesh.dp=2", "model.load=replica", "resume=true")
        store = None if name == "whole" else f"file://{tmp_path}/store"
        config = recipe(stories260k, tmp_path / name, store, *mesh, *overrides)
        file = tmp_path / f"{name}.json"
        file.write_text(json.dumps(config.model_dump(mode="json")))
        environment = os.environ | {"JAX_PLATFORMS": "cpu", "MESHTUNE_CACHE": str(tmp_path / "cache")}
        command = [sys.executable, "-m", "meshtune", "launch", "local", "-n", "2", str(file)]
        done = subprocess.run(command, env=environment, capture_output=True, text=True)
        assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
        return tmp_path / name

    shutil.rmtree(launch("first"))
    assert learned(launch("elsewhere", "train.steps=8")) == learned(launch("whole", "train.steps=8"))
