"""A plan on failures, saves and restarts of Llamas on many devices, and what breaks first."""

from __future__ import annotations

import pathlib

import pytest
from llamas import llama, recipe_file

from command import run
from meshtune.costs.hardware import find_target
from meshtune.costs.reliability import Reliability, reliability_of
from meshtune.errors import UserError
from meshtune.setup.search import predict_candidate, workload_of

DAY = 86400


def reliability(
    folder: pathlib.Path, model: str, method: str, target: str, mesh: str, *overrides: str, **options: float
) -> Reliability:
    """The plan of seven days with a given mesh, 1,024 rows of 4,096 tokens an update, by the estimate."""
    sizes = [f"mesh.{axis}" for axis in mesh.split()]
    batch = ("train.batch_size=1024", "train.micro_batch=1024", "compute.remat=full")
    recipe = llama(folder, model, f"method.kind={method}", *sizes, *batch, *overrides)
    machine = find_target(target)
    predicted = predict_candidate(recipe, machine, workload_of(recipe, machine.device.backend, machine.device.arch))
    return reliability_of(predicted.candidate, predicted.roofline.seconds, 7 * DAY, **options)


# Model, method, target, mesh; bytes of a save and of a restart. Full tuning stores 12 bytes a weight: float32, and two
# moments. Every replica (dp) reads the base, 2 bytes a weight, and the checkpoint.
ROWS = [
    ("8B", "full", "64x8xH100", "fsdp=512", 12 * 8.03e9, 12 * 8.03e9, ["saves"]),
    ("70B", "full", "64x8xH100", "fsdp=512", 12 * 70.55e9, 12 * 70.55e9, ["saves"]),
    ("405B", "full", "512x8xH100", "dp=4 fsdp=256 tp=4", 12 * 405.85e9, 4 * 12 * 405.85e9, ["saves", "storage"]),
    ("405B", "lora", "512x8xH100", "dp=256 fsdp=4 tp=4", None, 256 * 2 * 405.85e9, ["saves", "restarts"]),
    ("8B", "lora", "8xH100", "fsdp=8", None, 2 * 8.03e9, []),
]


@pytest.mark.parametrize("row", ROWS, ids=lambda row: "-".join(row[:3]))
def test_bytes_of_saves_and_restarts_and_what_breaks_first(tmp_path: pathlib.Path, row):
    model, method, target, mesh, save, restart, breaking = row
    run = reliability(tmp_path, model, method, target, mesh)
    if save is not None:
        assert run.save_bytes == pytest.approx(save, rel=0.01)
    assert run.restart_bytes == pytest.approx(restart, rel=0.02)
    assert [limit.name for limit in run.limits if limit.load > 1] == breaking, run.limits
    assert run.goodput >= run.default_goodput - 0.01


def test_failures_follow_the_number_of_devices_or_mtbf(tmp_path: pathlib.Path):
    row = ("8B", "lora", "64x8xH100", "dp=64 fsdp=8")
    run = reliability(tmp_path, *row)
    assert run.mtbf / 3600 == pytest.approx(99, abs=0.5)
    often = reliability(tmp_path, *row, mtbf=1800.0)
    assert often.failures == pytest.approx(336)
    assert often.interval < run.interval
    assert often.goodput < run.goodput
    assert often.limits[0].load > 1
    faster = reliability(tmp_path, *row, mtbf=1800.0, storage=100e9)
    assert faster.restart_seconds < often.restart_seconds


def test_one_replica_reads_the_base_and_the_checkpoint_for_all(tmp_path: pathlib.Path):
    row = ("405B", "lora", "512x8xH100", "dp=256 fsdp=4 tp=4")
    run = reliability(tmp_path, *row, "model.load=replica")
    assert run.restart_bytes == pytest.approx(2 * 405.85e9 + run.save_bytes, rel=0.02)


def test_a_stream_is_limited_by_what_each_host_tokenises(tmp_path: pathlib.Path):
    run = reliability(tmp_path, "8B", "lora", "64x8xH100", "fsdp=512", "data.streaming=true")
    (stream,) = [limit for limit in run.limits if limit.name == "stream"]
    assert stream.load == pytest.approx(8 / 77, rel=0.3)  # a core tokenises for 77 H100


@pytest.mark.parametrize(("option", "value"), [("mtbf", 0.0), ("storage", 0.0), ("mtbf", float("nan"))])
def test_times_that_are_not_positive_are_refused(tmp_path: pathlib.Path, option: str, value: float):
    with pytest.raises(UserError, match=f"is not above 0\\s+where: --{option}"):
        reliability(tmp_path, "1B", "lora", "8xH100", "fsdp=8", **{option: value})


def test_a_plan_of_days_prints_its_goodput_and_what_breaks_first(tmp_path: pathlib.Path):
    recipe = recipe_file(tmp_path, "1B")
    command = ["plan", recipe, "mesh.dp=2", "mesh.fsdp=4", "--target", "8xH100", "--estimate", "--days", 7]
    text = run(*command).stdout
    assert "7.0 days on 8xH100" in text
    assert "goodput" in text
    assert "best between saves" in text
    assert "first, " in text
    done = run(*command, "--mtbf", 0)
    assert (done.returncode, "0 is not above 0" in done.stderr) == (2, True), done.stderr
    done = run("plan", recipe, "--target", "8xH100", "--estimate", "--mtbf", 5)
    assert (done.returncode, "give --days as well" in done.stderr) == (2, True), done.stderr


def test_pods_are_slices_and_hosts_must_divide_into_them(tmp_path: pathlib.Path):
    assert find_target("1024x4xTPUv6e").slices == 16
    assert find_target("1024x4xTPUv5p").slices == 1
    assert find_target("512x8xH100").slices == 1
    assert find_target("4x4xTPUv5p", slices=2).slices == 2
    with pytest.raises(UserError, match="do not make 3 equal slices; a pod of TPUv5p has 8960"):
        find_target("4x4xTPUv5p", slices=3)
    with pytest.raises(UserError, match="dp=1 across it, which does not divide by 16"):
        reliability(tmp_path, "8B", "lora", "1024x4xTPUv6e", "fsdp=4096")
    pods = reliability(tmp_path, "8B", "lora", "1024x4xTPUv6e", "dp=16 fsdp=64 tp=4")
    assert pods.goodput > 0.5
