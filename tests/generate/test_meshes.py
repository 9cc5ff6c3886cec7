"""The scheduler on a mesh gives the tokens of one device. On four simulated devices, in a process of their own."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from transformers import LlamaConfig

from compiling import FASTER
from meshtune.arrays.tree import Tree
from meshtune.cli.model_options import parse_mesh
from meshtune.errors import UserError
from meshtune.families import model_spec
from meshtune.generate import programs
from meshtune.generate.api import load
from meshtune.generate.engine import Engine
from meshtune.generate.request import Generation, Sampling
from meshtune.mesh.config import MeshConfig
from meshtune.mesh.layout import make_mesh
from meshtune.mesh.placement import shardings
from meshtune.model.compute import Compute
from meshtune.model.gather import layout_for
from meshtune.model.spec import ModelSpec, abstract_params, init_params

Answers = list[tuple[list[int], list[float | None]]]  # of each request its tokens and their log-probabilities


def answers(params: Tree, spec: ModelSpec, compute: Compute) -> Answers:
    """Four requests over two rows, greedy and drawn, let in while others decode."""
    engine = Engine(params, spec, compute)
    scheduler, rng = engine.scheduler(rows=2), np.random.default_rng(0)
    generations: list[Generation] = []
    for number, length in enumerate((3, 20, 1, 17)):
        sampling = Sampling(temperature=0.8, seed=number) if number % 2 else None
        prompt = rng.integers(0, spec.vocab, length).tolist()
        request = engine.request(prompt, sampling, max_tokens=9, stop_ids=[], alternatives=0)
        generations.append(scheduler.submit(request))
        scheduler.step(3)
    while not scheduler.idle:
        scheduler.step(3)
    return [(g.ids, [token.log_probability for token in g.tokens]) for g in generations]


def compare() -> None:
    """Sums over devices round otherwise: log-probabilities within 1e-4, and no draw of these is that close."""
    config = LlamaConfig(
        vocab_size=96,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=128,
        architectures=["LlamaForCausalLM"],
    )
    spec = model_spec(config.to_dict())
    params = init_params(spec, jax.random.key(0))
    alone = answers(params, spec, Compute())
    layout = layout_for(make_mesh(MeshConfig(fsdp=2, tp=2), jax.devices()[:4]), spec)[0]
    placed = jax.device_put(params, shardings(abstract_params(spec), layout))
    split = answers(placed, spec, Compute(layout=layout))
    for (ids, scores), (expected, numbers) in zip(split, alone, strict=True):
        assert ids == expected, (ids, expected)
        np.testing.assert_allclose(np.asarray(scores, float), np.asarray(numbers, float), atol=1e-4)
    check_rows_are_written_locally(params, spec)


def check_rows_are_written_locally(params: Tree, spec: ModelSpec) -> None:
    """A decode step of rows that a mesh splits sends no keys: arrays of more dimensions than the tokens [B, STEPS]."""
    rows, layout = 2, layout_for(make_mesh(MeshConfig(dp=2), jax.devices()[:2]), spec)[0]
    compute, placed = Compute(layout=layout), jax.device_put(params, shardings(abstract_params(spec), layout))
    layers, lengths = programs.empty_layers(spec, compute, rows, 16), np.ones(rows, np.int32)
    feed: Any = programs.Feed(lengths, lengths, lengths, np.full((rows, 1), -1, np.int32))  # pyright: ignore
    switches, knobs = programs.compiled_form([Sampling()] * rows)
    arrays: Any = (placed, layers, programs.Counts.empty(rows), feed, knobs, np.int32(4), np.bool_(False))
    options = {"spec": spec, "compute": compute, "switches": switches, "alternatives": None}
    text = programs.decode.lower(*arrays, **options).compile().as_text()
    shapes = re.findall(r"\[([\d,]*)\]\S* all-gather\(", text)
    assert shapes, "the tokens are gathered"
    assert all(shape.count(",") < 2 for shape in shapes), shapes


def on_four_devices(script: str | Path, *arguments: object) -> None:
    env = os.environ | {
        "XLA_FLAGS": f"{FASTER} --xla_force_host_platform_device_count=4",
        "JAX_PLATFORMS": "cpu",
        "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
    }
    command = [sys.executable, str(script), *map(str, arguments)]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stderr[-3000:]


def test_a_mesh_generates_what_one_device_does():
    on_four_devices(__file__)


@pytest.mark.slow
def test_adapters_quantised_bases_and_the_command_line_on_meshes(stories260k, tmp_path):
    """tp, fsdp and both: see mesh_cases."""
    from test_adapter_sets import OPTIONS, in_peft

    for name in OPTIONS:
        in_peft(stories260k, name).save_pretrained(tmp_path / name)
    on_four_devices(Path(__file__).with_name("mesh_cases.py"), stories260k, tmp_path, "all")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["hello"], "'hello' is not mesh.AXIS=SIZE"),
        (["method.rank=2"], "is not mesh.AXIS=SIZE"),
        (["mesh.tp=two"], "'two' is no number of devices"),
        (["mesh.tp=2", "mesh.tp=4"], "mesh.tp is given twice"),
        (["mesh.pp=2"], "a mesh has no axis 'pp'"),
        (["mesh.tp=0"], "a mesh cannot have 0 devices along tp"),
    ],
)
def test_a_mesh_that_cannot_be_read_is_an_error(arguments, message):
    with pytest.raises(UserError, match=message):
        parse_mesh(arguments, "run")


def test_a_mesh_that_the_devices_or_the_model_do_not_allow_is_an_error(stories260k):
    for mesh, message in (
        ({"tp": 3}, "the mesh tp=3 is for 3 devices"),
        ({"cp": 2}, "cp=2 splits the sequences of training"),
        ({"ep": 2}, "ep=2 shards experts, and this llama model is dense"),
    ):
        with pytest.raises(UserError, match=message):
            load(stories260k, mesh=mesh)


if __name__ == "__main__":
    compare()
