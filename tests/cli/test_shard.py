"""`meshtune shard`, from nothing but a config."""

from __future__ import annotations

import json
import time

import pytest

import command

LLAMA_405B = {
    "model_type": "llama", "vocab_size": 128256, "hidden_size": 16384, "intermediate_size": 53248,
    "num_hidden_layers": 126, "num_attention_heads": 128, "num_key_value_heads": 8, "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-5, "rope_theta": 500000.0, "hidden_act": "silu", "tie_word_embeddings": False,
    "attention_bias": False, "mlp_bias": False, "torch_dtype": "bfloat16",
}  # fmt: skip


@pytest.fixture(scope="module")
def recipe(tmp_path_factory):
    folder = tmp_path_factory.mktemp("405b")
    (folder / "config.json").write_text(json.dumps(LLAMA_405B))
    file = folder / "recipe.yaml"
    file.write_text(f"model: {folder}\ndata: nothing.jsonl\noutput: {folder}/out\n")
    return file


def shard(*arguments):
    return command.run("shard", *arguments)


def test_405b_over_eight_devices_is_told_in_seconds(recipe):
    began = time.process_time()
    ran = shard(recipe, "--target", "8xMI300X", "mesh.fsdp=8")
    used = time.process_time() - began
    assert ran.returncode == 0, ran.stderr
    for phrase in ("8xMI300X", "fsdp=8", "layers/0.0/attn/q/weight", "layers heads embed", "- fsdp -", "whole on each"):
        assert phrase in ran.stdout, phrase
    assert "each device holds 95.1 GiB: frozen 94.5 GiB" in ran.stdout
    assert "% of the 192 GiB" in ran.stdout
    # Of processor time, not of the clock, which others on the machine would stretch; a minute would be a defect.
    assert used < 20


def test_json_adds_up(recipe):
    ran = shard(recipe, "--target", "2x8xH100", "--json", "mesh.dp=2", "mesh.fsdp=4", "mesh.tp=2")
    assert ran.returncode == 0, ran.stderr
    report = json.loads(ran.stdout)
    assert report["mesh"] == {"dp": 2, "fsdp": 4, "cp": 1, "ep": 1, "tp": 2}
    assert report["device_bytes"] == sum(entry["device_bytes"] for entry in report["arrays"])
    assert abs(report["breakdown"]["frozen"] - 405.85e9 * 2 / 8) < 0.1e9
    assert report["device_bytes"] > report["device_capacity"]
    first = next(entry for entry in report["arrays"] if entry["path"] == "layers/0.0/mlp/down/weight")
    assert first["spec"] == [None, "fsdp", "tp"]


def test_a_picture_names_the_devices_that_hold_each_block(recipe):
    ran = shard(recipe, "--target", "4xH200", "mesh.fsdp=2", "mesh.tp=2")
    lines = ran.stdout.splitlines()
    at = next(n for n, line in enumerate(lines) if "mlp/down/weight: each of 126 layers, 16384 x 53248" in line)
    assert "0 │ 1" in lines[at + 2]
    assert "2 │ 3" in lines[at + 4]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--target", "8xMI300"], "no device is called 'MI300'"),
        (["--target", "8xMI300X", "mesh.fsdp=3"], "the mesh fsdp=3 is for 3 devices, and there are 8"),
        (["--target", "8xMI300X", "mesh.fdsp=8"], "fsdp"),
        (["--target", "6xMI300X", "mesh.tp=6", "train.batch_size=6"], "tp=6 does not divide"),
        (["--target", "8xMI300X", "mesh.fsdp=8", "train.batch_size=4"], "cannot be split over dp x fsdp = 8"),
    ],
)
def test_what_cannot_be_is_one_message_and_exit_2(recipe, arguments, message):
    began = time.monotonic()
    ran = shard(recipe, *arguments)
    assert ran.returncode == 2, ran.stdout + ran.stderr
    assert message in ran.stderr
    assert "Traceback" not in ran.stderr
    assert time.monotonic() - began < 60


@pytest.mark.parametrize("mesh", ["mesh.ep=2", "mesh.ep=-1"])
def test_ep_for_a_dense_model_is_an_error_that_does_not_ask_for_more_devices(recipe, mesh):
    done = shard(recipe, "--target", "H100", mesh)
    assert done.returncode == 2
    assert "this llama model is dense: it has none" in done.stderr
    assert "leave mesh.ep out" in done.stderr
    assert "start the job" not in done.stderr


def test_a_picture_of_experts_says_how_many_there_are(tmp_path):
    mixtral = LLAMA_405B | {"model_type": "mixtral", "num_local_experts": 8, "num_experts_per_tok": 2}
    mixtral |= {"num_hidden_layers": 3, "router_aux_loss_coef": 0.02, "output_router_logits": False}
    for name in ("attention_bias", "mlp_bias"):
        del mixtral[name]
    (tmp_path / "config.json").write_text(json.dumps(mixtral))
    ran = shard(f"model={tmp_path}", "data=d.jsonl", "output=o", "--target", "4xH200", "mesh.ep=4")
    assert ran.returncode == 0, ran.stderr
    assert "each of 3 layers, each of 8 experts, " in ran.stdout
