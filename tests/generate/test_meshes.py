"""The scheduler on a mesh gives the tokens of one device. On four simulated devices, in a process of their own."""

from __future__ import annotations

import os
import subprocess
import sys

import jax
import numpy as np
from transformers import LlamaConfig

from meshtune.arrays.tree import Tree
from meshtune.families import model_spec
from meshtune.generate.config import Sampling
from meshtune.generate.engine import Engine
from meshtune.generate.request import Generation
from meshtune.mesh.axes import make_mesh
from meshtune.mesh.config import MeshConfig
from meshtune.mesh.placement import shardings
from meshtune.model.compute import Compute
from meshtune.model.init import init_params
from meshtune.model.sharding import layout_for
from meshtune.model.spec import ModelSpec, abstract_params

Answers = list[tuple[list[int], list[float | None]]]  # of each request its tokens and their log-probabilities


def answers(params: Tree, spec: ModelSpec, compute: Compute) -> Answers:
    """Five requests over three rows, greedy and drawn, let in while others decode."""
    engine = Engine(params, spec, compute)
    scheduler, rng = engine.scheduler(rows=3), np.random.default_rng(0)
    generations: list[Generation] = []
    for number, length in enumerate((3, 20, 1, 9, 33)):
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
    for axes in ({"tp": 2}, {"fsdp": 2, "tp": 2}):
        devices = jax.devices()[: int(np.prod(list(axes.values())))]
        layout = layout_for(make_mesh(MeshConfig(**axes), devices), spec)[0]
        placed = jax.device_put(params, shardings(abstract_params(spec), layout))
        split = answers(placed, spec, Compute(layout=layout))
        for (ids, scores), (expected, numbers) in zip(split, alone, strict=True):
            assert ids == expected, (axes, ids, expected)
            np.testing.assert_allclose(np.asarray(scores, float), np.asarray(numbers, float), atol=1e-4)


def test_a_mesh_generates_what_one_device_does():
    env = os.environ | {
        "XLA_FLAGS": "--xla_force_host_platform_device_count=4 --xla_backend_optimization_level=0",
        "JAX_PLATFORMS": "cpu",
        "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
    }
    done = subprocess.run([sys.executable, __file__], env=env, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr[-3000:]


if __name__ == "__main__":
    compare()
