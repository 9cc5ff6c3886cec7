"""Exports from meshes of 8 simulated devices, and from two processes, equal those of one device."""

import pathlib

import numpy as np
import pytest
import torch
import transformers
from peft import PeftModel
from sharded_export_cases import LORA, train_model
from sharded_job import run_well

from meshtune.adapters.config import FullConfig
from meshtune.arrays.tree import merge
from meshtune.weights.verify import probe, probe_logits

PROGRAM = "sharded_export_cases.py"
# tp=8 keeps the 4 key and value heads whole on each device; cp splits weights beside fsdp.
MESH, SLOW_MESHES = "fsdp=2,cp=2,tp=2", ["fsdp=8", "tp=8"]
SHARDS = [f"model-{number:05d}-of-00004.safetensors" for number in range(1, 5)]


@pytest.fixture(scope="module")
def base(tmp_path_factory) -> pathlib.Path:
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=128,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=8,
        num_key_value_heads=4,
        max_position_embeddings=64,
        initializer_range=0.2,
    )
    path = tmp_path_factory.mktemp("base")
    transformers.LlamaForCausalLM(config).save_pretrained(path)
    return path


@pytest.fixture(scope="module")
def exported_run(base, tmp_path_factory):
    """(folder with a folder for each mesh, what the process said)"""
    path = tmp_path_factory.mktemp("exported")
    (outputs,) = run_well(PROGRAM, str(base), str(path), "one", MESH, devices=8)
    return path, outputs


def files(folder: pathlib.Path) -> dict[str, bytes]:
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_a_mesh_exports_the_bytes_of_one_device(exported_run):
    path, _ = exported_run
    check_files(path, MESH)


@pytest.mark.slow
def test_other_meshes_export_the_bytes_of_one_device(base, tmp_path):
    run_well(PROGRAM, str(base), str(tmp_path), "one", *SLOW_MESHES, devices=8)
    for mesh in SLOW_MESHES:
        check_files(tmp_path, mesh)


def check_files(path, mesh):
    expected = files(path / "one")
    adapter = ["adapter_config.json", "adapter_model.safetensors", "digests.json", "tokenizer.json"]
    model = ["config.json", "digests.json", "generation_config.json", "model.safetensors", "tokenizer.json"]
    assert sorted(expected) == [*(f"adapter/{name}" for name in adapter), *(f"model/{name}" for name in model)]
    actual = files(path / mesh)
    assert {name: actual[name] for name in expected} == expected


def test_transformers_and_peft_compute_what_was_trained(exported_run, base):
    """1e-4 on logits of order 1: the two programs order float32 sums differently."""
    path, _ = exported_run
    place = path / MESH

    def theirs(model: torch.nn.Module) -> np.ndarray:
        with torch.no_grad():
            return model.eval()(torch.tensor(np.asarray(probe(prepared.spec)[0]))).logits.numpy()

    _, prepared = train_model(base, FullConfig())
    expected = probe_logits(merge(prepared.trainable, prepared.frozen), prepared.spec)
    for name in ("model", "shards"):
        model = transformers.AutoModelForCausalLM.from_pretrained(place / name, attn_implementation="eager")
        np.testing.assert_allclose(theirs(model), expected, atol=1e-4, rtol=1e-4)
    _, prepared = train_model(base, LORA)
    expected = probe_logits(merge(prepared.trainable, prepared.frozen), prepared.spec)
    model = transformers.AutoModelForCausalLM.from_pretrained(base, attn_implementation="eager")
    before = theirs(model)
    np.testing.assert_allclose(
        theirs(PeftModel.from_pretrained(model, str(place / "adapter"))), expected, atol=1e-4, rtol=1e-4
    )
    assert np.abs(before - expected).max() > 0.1


@pytest.mark.slow
def test_two_processes_share_the_files_and_an_error_and_export_the_same_bytes(exported_run, base, tmp_path):
    path, several = exported_run
    outputs = run_well(PROGRAM, str(base), str(tmp_path), "fsdp=2,tp=2", processes=2, devices=2)
    assert files(tmp_path / "fsdp=2,tp=2") == files(path / MESH)
    single = ["adapter_model.safetensors", "model.safetensors"]
    for lines, written in zip((*outputs, several), (single + SHARDS[::2], SHARDS[1::2], single + SHARDS), strict=True):
        done = next(line for line in lines if "written" in line)
        assert done["written"] == written
        assert done["difference"] == 0.0
    place = str(tmp_path / "fsdp=2,tp=2/full")
    assert [lines[-1]["refused"] for lines in outputs] == [
        f"process 1 of 2: cannot write {place}: No space left on device",
        f"cannot write {place}: No space left on device",
    ]  # and the program has seen that neither the directory nor a part of it is there


def test_blocks_are_cut_where_they_lie(exported_run):
    """The program of a block: nothing larger than the block goes from device to device or is made on one."""
    _, outputs = exported_run
    for line in outputs:
        if "largest" in line:
            assert line["moved"], line
            assert line["largest"] <= line["block"], line
    assert sum("largest" in line for line in outputs) == 1
