"""The step that `plan` compiles is the step that `train` runs: their StableHLO is identical."""

from __future__ import annotations

import json
import os
import pathlib
import subprocess
import sys

import jax
import numpy as np
import pytest
from jax.sharding import AxisType

from meshtune.config.load import load_recipe
from meshtune.config.recipe import Recipe
from meshtune.errors import UserError
from meshtune.plan.program import step_of

FOLDER = pathlib.Path(__file__).parent

CASES = {
    "lora": ["data.max_length=64", "train.batch_size=8", "train.micro_batch=4"],
    "dropout, bf16": ["data.max_length=64", "train.batch_size=4", "compute.precision=mixed", "method.dropout=0.1"],
    "full, unpacked": ["data.max_length=48", "data.packing=false", "train.batch_size=4", "method=full"],
    "mesh": ["data.max_length=64", "train.batch_size=8", "mesh.fsdp=2", "mesh.tp=2", "mesh.cp=2", "mesh.dp=1"],
}


class _Reached(Exception):
    """Raised where training would compile its step."""


def trained_text(recipe: Recipe) -> tuple[str, int, float]:
    """(the StableHLO that `train` itself would compile, its row length, the share of learned positions): weights, data
    and optimizer are real."""
    from meshtune.train import task
    from meshtune.train.run import train

    lowered: list[tuple[str, int, float]] = []

    def stop(parts, step, state, batch):
        text = step.lower(state, parts.model.frozen, batch, np.int32(0)).as_text()
        lowered.append((text, parts.data.train.row_length, parts.data.report.learned_share))
        raise _Reached

    original = task._compile
    task._compile = stop
    try:
        train(recipe)
    except _Reached:
        return lowered[0]
    finally:
        task._compile = original
    raise AssertionError("train did not compile")


def assert_same_program(name: str, folder: str) -> None:
    from meshtune.quickstart import recipe as quickstart

    always = ("eval.every=null", "train.steps=7", "train.epochs=null")
    recipe = quickstart(pathlib.Path(folder) / "run", *CASES[name], *always)
    real, length, learned = trained_text(recipe)
    planned = step_of(recipe, length=length, learned=learned)
    assert planned.lower().as_text() == real
    assert planned.length == length
    assert sum(sizes["device"] for sizes in planned.breakdown().values()) > 0


@pytest.mark.parametrize("name", [name for name in CASES if name != "mesh"])
def test_the_planned_step_is_the_trained_step(name, tmp_path):
    assert_same_program(name, str(tmp_path))


@pytest.mark.slow
def test_the_planned_step_is_the_trained_step_on_a_mesh(tmp_path):
    env = os.environ | {"XLA_FLAGS": "--xla_force_host_platform_device_count=8", "PYTHONPATH": str(FOLDER)}
    code = "import sys, test_program; test_program.assert_same_program('mesh', sys.argv[1])"
    ran = subprocess.run([sys.executable, "-c", code, str(tmp_path)], capture_output=True, text=True, env=env)
    assert ran.returncode == 0, ran.stderr[-3000:]


@pytest.fixture
def llama(tmp_path) -> dict:
    """The fields of a recipe for a model with a config but no weights."""
    config = {
        "model_type": "llama", "vocab_size": 96, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64, "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0, "hidden_act": "silu", "tie_word_embeddings": False, "torch_dtype": "bfloat16",
    }  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(config))
    return {"model": str(tmp_path), "data": {"train": "none.jsonl", "max_length": 32}, "output": str(tmp_path / "o")}


def test_neither_weights_nor_data_are_read(llama):
    program = step_of(Recipe.model_validate(llama | {"train": {"batch_size": 6, "micro_batch": 3}}))
    state, _, batch, _ = program.arguments
    assert {name: (leaf.shape, str(leaf.dtype)) for name, leaf in batch.items()} == {
        name: ((2, 3, 32), "float32" if name == "weights" else "int32")
        for name in ("tokens", "targets", "positions", "segment_ids", "weights")
    }
    parts = program.breakdown()
    # Adam's state is two arrays per trained array, and a count or two.
    assert 0 < parts["optimizer"]["device"] - 2 * parts["trained"]["device"] <= 16
    adapter = state.trainable["layers"]["0.0"]["attn"]["q"]["adapter"]
    assert {str(leaf.dtype) for leaf in jax.tree.leaves(adapter)} == {"float32"}


def test_a_mesh_for_another_number_of_devices_is_refused(llama):
    with pytest.raises(UserError, match="the mesh fsdp=3 is for 3 devices"):
        step_of(Recipe.model_validate(llama | {"mesh": {"fsdp": 3}, "train": {"batch_size": 3}}))


def test_offloaded_arrays_are_no_part_of_explicit_sharding():
    """JAX 0.11 makes an AbstractMesh explicit unless told otherwise, and an update by rows then mixes two shardings."""
    recipe = load_recipe("examples/headline/8b-qlora.yaml", ["compute.offload=[optimizer]"])
    state, *_ = step_of(recipe).arguments
    shardings = {leaf.sharding for leaf in jax.tree.leaves(state.opt_state) if leaf.sharding is not None}
    offloaded = [sharding for sharding in shardings if sharding.memory_kind == "pinned_host"]
    assert offloaded
    assert {kind for sharding in offloaded for kind in sharding.mesh.axis_types} == {AxisType.Auto}
