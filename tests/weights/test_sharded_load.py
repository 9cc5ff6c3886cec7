"""Loading onto meshes of 8 simulated devices, and in several processes: the same numbers, and each process reads only
its own part."""

from __future__ import annotations

import json
import pathlib
import shutil
import subprocess
import sys

import pytest

from weights import sharded_load_cases
from weights.load_job import job, write_model
from weights.sharded_load_cases import MESHES, PREPARED

# 8 query heads and 4 key heads of 8: with tp=8 the key heads are fewer.
SHAPE = {
    "vocab_size": 128,
    "hidden_size": 64,
    "intermediate_size": 112,
    "num_hidden_layers": 3,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 8,
}


def run_cases(model: pathlib.Path, *how: str) -> dict:
    result = model.parent / "result.json"
    program = [sys.executable, str(pathlib.Path(sharded_load_cases.__file__)), str(model), str(result), *how]
    ran = subprocess.run(program, capture_output=True, text=True, timeout=540)
    assert ran.returncode == 0, ran.stderr
    return json.loads(result.read_text())


@pytest.fixture(scope="module")
def results(make_model):
    model = make_model("llama", "bfloat16", 40_000, attention_bias=False, mlp_bias=False, **SHAPE)
    assert len(list(model.glob("*.safetensors"))) > 3
    return run_cases(model)


@pytest.mark.parametrize("mesh", MESHES)
def test_on_every_mesh_parameters_are_those_of_one_device_and_lie_as_the_layout_says(mesh, results):
    got = results["loaded"][mesh]
    assert got["leaves"] == 12
    assert got["other"] == []
    assert got["misplaced"] == []


@pytest.mark.parametrize("mesh", MESHES)
def test_every_number_is_read_once_whoever_holds_it(mesh, results):
    got = results["loaded"][mesh]
    assert got["report"]["read"] == got["model"]
    assert list(got["report"]["placed"].values()) == got["placed"]
    assert f"MiB read from {got['report']['files']} files" in got["line"]


@pytest.mark.parametrize("mesh", ["fsdp=8", "fsdp=4 tp=2", "fsdp=2 cp=2 tp=2"])
def test_a_device_holds_an_eighth_and_the_norms(mesh, results):
    """Two norms in each of 3 layers and the last one, of 64 bfloat16, are everywhere."""
    got, norms = results["loaded"][mesh], (3 * 2 + 1) * 64 * 2
    assert set(got["placed"]) == {(got["model"] - norms) // 8 + norms}


def assert_prepared(got: dict) -> None:
    assert got["leaves"] >= 12
    assert got["other"] == []
    assert got["misplaced"] == []
    assert got["emptied"]


@pytest.mark.parametrize(("mesh", "method"), PREPARED)
def test_prepared_on_a_mesh_is_prepared_on_one_device(mesh, method, results):
    """Bit for bit, an adapter's random start too; float32 trainables and adapters lie as the layout says."""
    assert_prepared(results["prepared"][f"{mesh}, {method}"])


@pytest.mark.slow
def test_every_method_prepared_on_other_meshes_with_biases(make_model):
    results = run_cases(make_model("llama", "bfloat16", 40_000, **SHAPE), "slow")
    assert len(results["prepared"]) == 4
    for got in results["prepared"].values():
        assert_prepared(got)


SMALL = {
    "model_type": "llama",
    "vocab_size": 512,
    "hidden_size": 2048,
    "intermediate_size": 2816,
    "num_hidden_layers": 2,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
}
MB = 1 << 20


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    folder = tmp_path_factory.mktemp("small") / "model"
    return folder, write_model(folder, SMALL, 3)


@pytest.fixture(scope="module")
def alone(small):
    """A single process's arrays of the model, as hashes of the slices of 4 devices along fsdp."""
    (members,) = job(small[0], 1, {"fsdp": 4}, devices=4, digests=True)
    assert members["report"]["read"] == small[1]
    return members["digests"]


def assert_same(digests: dict[str, str], alone: dict[str, str]) -> None:
    assert digests.items() <= alone.items()


@pytest.mark.parametrize(("processes", "devices"), [(2, 2), pytest.param(4, 1, marks=pytest.mark.slow)])
def test_a_process_reads_what_its_devices_hold_and_no_more(small, alone, processes, devices):
    members = job(small[0], processes, {"fsdp": 4}, devices=devices, digests=True)
    assert set().union(*(member["digests"] for member in members)) == set(alone)
    for member in members:
        assert_same(member["digests"], alone)
        assert member["report"]["read"] == member["distinct"]
        assert member["report"]["files"] == 3
        assert member["distinct"] < 1.02 * small[1] / processes
        over = member["peak"] - member["before"] - member["local"]
        assert over < 250 * MB, "a few blocks of 16 MB, and what compiling takes"


@pytest.mark.parametrize(
    ("processes", "group", "readers"),
    [(2, None, {0}), *(pytest.param(4, *group, marks=pytest.mark.slow) for group in ((2, {0, 2}), (None, {0})))],
)
def test_with_broadcast_one_process_of_a_group_reads(small, alone, processes, group, readers):
    members = job(small[0], processes, {"fsdp": 4}, devices=4 // processes, digests=True, broadcast=True, group=group)
    assert {number for number, member in enumerate(members) if member["report"]["read"]} == readers
    assert {number for number, member in enumerate(members) if member["report"]["files"]} == readers
    for member in members:
        assert_same(member["digests"], alone)
        assert member["report"]["read"] <= small[1]
        assert member["peak"] - member["before"] - member["local"] < 300 * MB


@pytest.mark.parametrize(
    ("mesh", "processes"), [({"dp": 2}, 2), pytest.param({"dp": 2, "fsdp": 2}, 4, marks=pytest.mark.slow)]
)
def test_one_replica_reads_for_the_others(small, mesh, processes):
    """The bytes read by all processes are those of one replica."""
    members = job(small[0], processes, mesh, digests=True, replicas=True)
    (single,) = job(small[0], 1, mesh, devices=processes, digests=True)
    reading, receiving = members[: processes // 2], members[processes // 2 :]
    assert [member["report"]["read"] for member in reading] == [member["distinct"] for member in reading]
    assert {(member["report"]["read"], member["report"]["files"]) for member in receiving} == {(0, 0)}
    assert [member["digests"] for member in receiving] == [member["digests"] for member in reading]
    for member in members:
        assert_same(member["digests"], single["digests"])


def test_with_broadcast_what_is_wrong_is_said_on_every_process(small, tmp_path):
    for file in small[0].iterdir():
        (tmp_path / file.name).symlink_to(file)
    (tmp_path / "config.json").unlink()
    (tmp_path / "config.json").write_text(json.dumps(SMALL | {"intermediate_size": 2820, "dtype": "bfloat16"}))
    members = job(tmp_path, 2, {"fsdp": 2}, broadcast=True)
    assert members[0] == members[1]
    assert "config.json and the weights disagree" in members[0]["error"]


# 1.5 billion parameters, 3 GB in bfloat16.
LARGE = SMALL | {
    "vocab_size": 128256,
    "intermediate_size": 8192,
    "num_hidden_layers": 16,
    "num_attention_heads": 32,
    "head_dim": 64,
}


@pytest.fixture(scope="module")
def large(tmp_path_factory):
    base = tmp_path_factory.mktemp("large")
    if shutil.disk_usage(base).free < 6 << 30:
        pytest.skip("needs 6 GiB of disk")
    yield base / "model", write_model(base / "model", LARGE, 4)
    shutil.rmtree(base)


@pytest.mark.slow
@pytest.mark.parametrize(("processes", "broadcast"), [(1, False), (2, False), (4, False), (4, True)])
def test_a_model_of_3_gb_takes_host_memory_for_a_few_blocks_only(large, processes, broadcast):
    """Beyond the memory before and the arrays themselves, which on a CPU are host memory too.

    The requirement is 2 GiB and the largest local shard of a tensor; a few blocks of 16 MB and the compiler
    take some 200 MB.
    """
    members = job(large[0], processes, {"fsdp": processes}, timeout=500, broadcast=broadcast)
    assert sum(member["local"] for member in members) >= large[1]
    for number, member in enumerate(members):
        assert member["peak"] - member["before"] - member["local"] < 400 * MB
        expected = member["distinct"] if not broadcast else large[1] * (number == 0)
        assert member["report"]["read"] == expected
