"""Rollouts that other processes generate: real runs of GRPO with real replicas, of which one is killed."""

from __future__ import annotations

import contextlib
import functools
import json
import os
import pathlib
import signal
import subprocess
import sys
import time
from collections.abc import Iterator

import numpy as np
import psutil
import pytest

from command import run
from compiling import FASTER
from meshtune.arrays.tree import flatten, unflatten
from meshtune.config.sections import RolloutSection
from meshtune.errors import StopRequested, UserError
from meshtune.mesh.processes import SINGLE_PROCESS
from meshtune.rollout.generate import Completion
from meshtune.rollout.replicas import (
    RolloutReplicas,
    block_spans,
    changing_arrays,
    compute_blocks,
    requests,
    result_file,
    with_arrays,
)

MESHTUNE = [sys.executable, "-m", "meshtune"]
REWARD = """
def letters(completions, **columns):
    return [text.count("e") / max(1, len(text)) for text in completions]
"""


def recipe(folder: pathlib.Path, model: pathlib.Path, name: str, steps: int, **rollout: object) -> pathlib.Path:
    (folder / "reward.py").write_text(REWARD)
    prompts = ["Once upon a time", "One day, a dog", "Lily and Tom", "The big tree"]
    (folder / "prompts.jsonl").write_text("".join(json.dumps({"prompt": text}) + "\n" for text in prompts))
    fields = {
        "model": str(model),
        "data": {"train": str(folder / "prompts.jsonl"), "max_length": 48},
        "stage": {"kind": "grpo", "beta": 0.05},
        "rollout": {"prompts": 4, "samples": 3, "max_tokens": 12, **rollout},
        "rewards": [f"{folder}/reward.py:letters"],
        "method": {"kind": "lora", "rank": 4},
        "optimizer": {"learning_rate": 0.01, "warmup_steps": 0},
        "train": {"steps": steps},
        "sample": {"prompts": []},
        "output": str(folder / name),
    }
    file = folder / f"{name}.json"
    file.write_text(json.dumps(fields))
    return file


@contextlib.contextmanager
def started(*command: object, **variables: str) -> Iterator[subprocess.Popen[str]]:
    env = os.environ | {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": FASTER} | variables
    line = [*MESHTUNE, *map(str, command)]
    process = subprocess.Popen(line, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    try:
        yield process
    finally:
        for child in psutil.Process(process.pid).children(recursive=True) if process.poll() is None else []:
            child.kill()
        process.kill()


def finish(process: subprocess.Popen[str]) -> str:
    output, _ = process.communicate(timeout=400)
    assert process.returncode == 0, output
    return output


def adapter(output: pathlib.Path) -> bytes:
    return (output / "adapter/adapter_model.safetensors").read_bytes()


def wait_for(file: pathlib.Path, *processes: subprocess.Popen[str]) -> None:
    deadline = time.monotonic() + 300
    while not file.exists():
        assert {process.poll() for process in processes} == {None}
        assert time.monotonic() < deadline
        time.sleep(0.02)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_run_has_the_same_bits_with_one_replica_and_with_two_of_which_one_is_killed(stories260k, tmp_path):
    one = recipe(tmp_path, stories260k, "one", 30, replicas=True, rows=3)
    with started("serve-rollouts", one) as replica, started("train", one) as trainer:
        finish(trainer)
        finish(replica)
    two = recipe(tmp_path, stories260k, "two", 30, replicas=True, rows=3)
    with started("train", two) as trainer, started("serve-rollouts", two, "--replicas", 2) as launcher:
        wait_for(tmp_path / "two/rollouts/00000002.npz", trainer, launcher)
        (victim,) = [child for child in psutil.Process(launcher.pid).children() if "2/2" in child.cmdline()]
        victim.send_signal(signal.SIGKILL)
        finish(trainer)
        assert "replica 2 of 2 was ended by SIGKILL" in finish(launcher)
    assert adapter(tmp_path / "one") == adapter(tmp_path / "two")


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_replica_with_one_block_has_the_bits_of_a_run_that_generates_by_itself(stories260k, tmp_path):
    own = recipe(tmp_path, stories260k, "own", 4)
    with started("train", own) as trainer:
        finish(trainer)
    other = recipe(tmp_path, stories260k, "other", 4, replicas=True, rows=12)
    with started("serve-rollouts", other) as replica, started("train", other) as trainer:
        finish(trainer)
        finish(replica)
    assert adapter(tmp_path / "own") == adapter(tmp_path / "other")


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_two_processes_that_were_stopped_while_they_waited_have_the_bits_of_one_with_two_devices(stories260k, tmp_path):
    """The replica is killed, so that the run waits for its next one when SIGTERM comes."""
    one, two = (recipe(tmp_path, stories260k, name, 8, replicas=True, rows=6) for name in ("one", "two"))
    devices = f"{FASTER} --xla_force_host_platform_device_count=2"
    with started("serve-rollouts", one) as replica, started("train", one, "mesh.fsdp=2", XLA_FLAGS=devices) as trainer:
        finish(trainer)
        finish(replica)
    launch = ("launch", "local", "-n", 2, "-d", 1, two, "mesh.fsdp=2")
    with started("serve-rollouts", two) as replica, started(*launch) as trainer:
        wait_for(tmp_path / "two/rollouts/00000002.npz", trainer, replica)
        replica.kill()
        time.sleep(3)
        trainer.terminate()
        output, _ = trainer.communicate(timeout=120)
        assert (trainer.returncode, "saved after update" in output) == (143, True), output
    with started("serve-rollouts", two) as replica, started(*launch, "resume=true") as trainer:
        assert "resuming after update" in finish(trainer)
        finish(replica)
    assert adapter(tmp_path / "one") == adapter(tmp_path / "two")


@pytest.mark.slow
def test_a_replica_needs_no_memory_for_updates(stories260k, tmp_path):
    file = recipe(tmp_path, stories260k, "large", 1, replicas=True, rows=6, samples=10**6)
    done = run("train", file, "train.micro_batch=4000000")
    assert (done.returncode, "of memory on each device" in done.stderr) == (2, True), done.stderr
    with started("serve-rollouts", file, "train.micro_batch=4000000") as replica:
        assert replica.stdout is not None
        assert any(line.startswith("replica 1/1 generates") for line in replica.stdout)


TREE = {"layers": {"0.0": {"q": {"weight": np.zeros((2, 3), np.float32), "adapter": np.ones(2, np.float32)}}}}
CHANGING = frozenset({"layers/0.0/q/adapter"})


def test_weights_that_updates_change_are_sent_and_put_in_their_places():
    jax = pytest.importorskip("jax")
    tree = jax.tree.map(jax.numpy.asarray, TREE)
    (sent,) = changing_arrays(tree, CHANGING, None)
    assert sent.tolist() == [1, 1]
    received = flatten(with_arrays(tree, CHANGING, [sent * 2]))
    assert received["layers/0.0/q/adapter"].tolist() == [2, 2]
    assert received["layers/0.0/q/weight"] is flatten(tree)["layers/0.0/q/weight"]
    assert unflatten(received).keys() == tree.keys()
    with pytest.raises(UserError, match="trains other parameters"):
        with_arrays(tree, CHANGING, [np.ones(3, np.float32)])


def test_blocks_do_not_depend_on_the_replicas_and_are_joined_in_order(tmp_path):
    """The replica is simulated in the run's progress: it computes one block at each look, the last block first."""
    options = RolloutSection(rows=4, samples=2)
    replicas = RolloutReplicas(tmp_path / "r", options, CHANGING, None, SINGLE_PROCESS, print, {"base": "x"})

    def compute(request, number):
        span = block_spans(request)[number]
        pairs = zip(request["prompts"][span], request["seeds"][span], strict=True)
        return [[Completion([*ids, seed], [-0.1] * (len(ids) + 1), "stop") for seed in seeds] for ids, seeds in pairs]

    def look(done, total):
        request = next(requests(tmp_path / "r"))
        assert [len(request["prompts"][span]) for span in block_spans(request)] == [2, 2, 1]
        if done == 0:
            compute_blocks(tmp_path / "r", request, 2, compute)
            result_file(tmp_path / "r", request, 1).unlink()  # as of a replica that died
        else:
            compute_blocks(tmp_path / "r", request, 0, compute)

    groups = replicas.draw(
        TREE, [[n] for n in range(5)], 2, frozenset(), lambda *place: 10 * place[0] + place[1], [""] * 5, look
    )
    assert [[completion.ids for completion in group] for group in groups] == [
        [[n, 10 * n], [n, 10 * n + 1]] for n in range(5)
    ]
    assert list((tmp_path / "r").glob("0*")) == []
    compute_blocks(tmp_path / "r", next(requests(tmp_path / "r")), 0, compute)  # it is complete
    assert list((tmp_path / "r").glob("0*")) == []
    replicas.close()


def test_a_run_that_waits_stops_by_a_signal_and_its_replicas_end_unless_a_scheduler_sent_it(tmp_path):
    replicas = RolloutReplicas(tmp_path, RolloutSection(), CHANGING, None, SINGLE_PROCESS, print, {})
    draw = functools.partial(replicas.draw, TREE, [[1]], 1, frozenset(), lambda *place: 0, [""])
    for number, continues in ((signal.SIGTERM, True), (signal.SIGINT, False)):
        with pytest.raises(StopRequested) as stop:
            draw(stop_signal=lambda number=number: number)
        assert stop.value.number == number
        replicas.close(number)
        assert ("end" not in json.loads((tmp_path / "request.json").read_text())) == continues


def test_an_error_of_a_replica_is_the_runs(tmp_path):
    replicas = RolloutReplicas(tmp_path, RolloutSection(), CHANGING, None, SINGLE_PROCESS, print, {})

    def fails(request, number):
        raise UserError("the logits are not finite", where=request["where"][number], fix="lower the learning rate")

    def look(done, total):
        compute_blocks(tmp_path, next(requests(tmp_path)), 0, fails)

    with pytest.raises(UserError, match=r"not finite[\s\S]*prompt 0[\s\S]*lower"):
        replicas.draw(TREE, [[1]], 1, frozenset(), lambda *place: 0, ["prompt 0"], look)


def test_replicas_are_refused_where_they_have_nothing_to_do(stories260k, tmp_path):
    file = recipe(tmp_path, stories260k, "own", 1)
    done = run("serve-rollouts", file)
    assert (done.returncode, "set rollout.replicas=true" in done.stderr) == (2, True), done.stderr
    done = run("train", file, "rollout.replicas=true", "rollout.environment=tools.py:Shop")
    assert (done.returncode, "replicas call no tools" in done.stderr) == (2, True), done.stderr
