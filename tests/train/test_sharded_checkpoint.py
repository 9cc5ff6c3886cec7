"""Checkpoints of states that are spread over devices and processes, on simulated devices and real processes (gloo)."""

import signal

import numpy as np
import pytest
from sharded_job import run, run_well

PROGRAM = "sharded_checkpoint_cases.py"
LEAVES = 38  # of the state of full tuning: step, optimizer's count, 12 weights and their two moments
SLOW = [(4, 1, "fsdp=4"), (2, 2, "fsdp=2,cp=2"), (1, 1, "fsdp=1")]  # processes, devices of each, mesh


def test_a_state_moves_from_mesh_to_mesh_bit_for_bit(tmp_path):
    """Restored on each mesh from what the one before saved, compared shard by shard with what the first one held."""
    meshes = ["fsdp=8", "fsdp=4", "fsdp=1", "fsdp=4,tp=2", "dp=2,fsdp=2,tp=2", "fsdp=2,cp=2,tp=2", "tp=4", "dp=8"]
    (results,) = run_well(PROGRAM, str(tmp_path), "chain", "full", *meshes, devices=8)
    assert [line["mesh"] for line in results] == meshes[1:]
    sizes = [int(np.prod([int(part.split("=")[1]) for part in mesh.split(",")])) for mesh in meshes[1:]]
    assert [line["checked"] for line in results] == [LEAVES * size for size in sizes]


@pytest.mark.parametrize("places", [[(1, 4, "dp=2,tp=2")], pytest.param(SLOW, marks=pytest.mark.slow)])
def test_a_state_moves_between_numbers_of_processes_bit_for_bit(tmp_path, places):
    """From 2 processes of 2 devices to others, and to meshes of another shape."""
    run_well(PROGRAM, str(tmp_path), "save", "fsdp=2,tp=2", "lora", "1", processes=2, devices=2)
    written = {path.name for path in (tmp_path / "1/state").glob("ocdbt.process_*")}
    assert written == {"ocdbt.process_0", "ocdbt.process_1"}
    for processes, devices, mesh in places:
        results = run_well(PROGRAM, str(tmp_path), "restore", mesh, "lora", "1", processes=processes, devices=devices)
        assert len(results) == processes
        assert {line["latest"] for lines in results for line in lines} == {1}


@pytest.mark.parametrize(
    ("processes", "devices", "mesh", "readers"),
    [
        (2, 1, "dp=2", [1, 0]),
        pytest.param(4, 1, "dp=2,fsdp=2", [1, 1, 0, 0], marks=pytest.mark.slow),
        pytest.param(2, 2, "dp=4", [1, 0], marks=pytest.mark.slow),
        pytest.param(2, 2, "fsdp=4", [1, 1], marks=pytest.mark.slow),
    ],
)
def test_one_replica_reads_a_checkpoint_and_the_others_receive_the_same_bits(
    tmp_path, processes, devices, mesh, readers
):
    run_well(PROGRAM, str(tmp_path), "save", "fsdp=2", "lora", "1", devices=2)
    results = run_well(
        PROGRAM, str(tmp_path), "restore by replica", mesh, "lora", "1", processes=processes, devices=devices
    )
    assert [lines[0]["reads"] for lines in results] == readers
    assert all("does not fit this run" in lines[1]["refused"] for lines in results)


@pytest.mark.slow
def test_what_several_devices_hold_is_written_once(tmp_path):
    """With dp=2 each process holds the whole state, and each writes half of it: random numbers do not compress."""
    run_well(PROGRAM, str(tmp_path), "save", "dp=2", "full", "1", processes=2)
    sizes = [
        sum(path.stat().st_size for path in (tmp_path / f"1/state/ocdbt.process_{n}").rglob("*") if path.is_file())
        for n in (0, 1)
    ]
    total = 3 * 4 * (2 * 128 * 64 + 2 * (2 * 64 * 64 + 2 * 32 * 64 + 3 * 64 * 128 + 2 * 64) + 64)
    assert 0.85 * total < sum(sizes) < 1.1 * total, (sizes, total)
    assert max(sizes) < 0.6 * total


def test_a_process_killed_in_the_middle_of_a_save_leaves_the_last_good_one(tmp_path):
    ended = run(PROGRAM, str(tmp_path), "die", "fsdp=2,tp=2", "1", processes=2, devices=2)
    assert ended[1][0] == -signal.SIGKILL
    assert ended[0][0] == 75
    assert "process 1 of 2" in ended[0][2]
    assert not any(lines for _, lines, _ in ended)
    assert {path.name for path in tmp_path.iterdir()} == {"1", "2.orbax-checkpoint-tmp"}  # it was half-written
    shown = run_well(PROGRAM, str(tmp_path), "restore wide", "fsdp=2", "full", "1", devices=2)
    assert shown[0][0]["latest"] == 1
    assert {path.name for path in tmp_path.iterdir()} == {"1"}


@pytest.mark.slow
def test_a_disk_that_is_full_for_one_process_is_an_error_on_all(tmp_path):
    """First before anything is written, then in the middle of it: a limit on process 1's files replaces the full
    disk."""
    ended = run(PROGRAM, str(tmp_path), "no room", "fsdp=2,tp=2", processes=2, devices=2, timeout=300)
    for process, (_, lines, errors) in enumerate(ended):
        refused = lines[0]["refused"]
        assert "no space left on the device (it needs 1.3 MiB, and 1000 B are free)" in refused
        assert refused.startswith("process 1 of 2: ") == (process == 0)
        assert "a file would be larger than is allowed here; whole checkpoints there: 1" in errors
    assert "process 1 of 2" in ended[0][2]
    assert all(code != 0 for code, _, _ in ended)


def test_directories_that_are_not_shared_are_found_at_once(tmp_path):
    for name in ("0", "1"):
        (tmp_path / name).mkdir()
    ended = run(PROGRAM, str(tmp_path / "{process}"), "save", "fsdp=2", "lora", "1", processes=2, timeout=300)
    assert all("not on storage that all hosts share" in errors for _, _, errors in ended)


@pytest.mark.slow
@pytest.mark.parametrize("processes", [1, 2])
def test_memory_is_flat_over_fifty_saves(tmp_path, processes):
    """Some 30 MB a save: one copy leaked each time would be 900 MB over the last thirty, and 60 MB are allowed."""
    results = run_well(PROGRAM, str(tmp_path), "fifty", "fsdp=8", processes=processes, devices=8 // processes)
    for lines in results:
        assert lines[0]["bytes"] > 30e6 / processes
        used = lines[1]["used"]
        assert max(used[40:]) - max(used[10:20]) < 60e6, [int(n / 1e6) for n in used]
