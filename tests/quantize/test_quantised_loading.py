"""Quantised while loading: the same codes on every mesh and in several processes, and never a wide weight in memory."""

from __future__ import annotations

import json
import math
import os
import pathlib
import subprocess
import sys

import pytest

from compiling import FASTER
from weights.load_job import job, write_model

# Rows of 512 and 1024 numbers; a matrix has 32 to 64 blocks of 256 scales.
SMALL = {
    "model_type": "llama",
    "vocab_size": 256,
    "hidden_size": 512,
    "intermediate_size": 1024,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
}
MB = 1 << 20

ON_MESHES = """
import json, pathlib, sys
import jax, numpy as np
from meshtune.mesh.layout import make_mesh
from meshtune.mesh.config import MeshConfig
from meshtune.model.gather import layout_for
from meshtune.arrays.tree import flatten, unflatten
from meshtune.quantize.config import QuantizeConfig
from meshtune.families.quantised import quantised_leaves
from meshtune.model.spec import abstract_params
from meshtune.quantize.weight import QuantisedWeight
from meshtune.weights.load import load_params, load_spec

def same(ours, theirs):
    ours, theirs = jax.tree.leaves(ours), jax.tree.leaves(theirs)
    assert len(ours) == len(theirs)
    for a, b in zip(ours, theirs):
        assert a.dtype == b.dtype
        np.testing.assert_array_equal(np.asarray(a).view(np.uint8), np.asarray(b).view(np.uint8))

directory, formats, meshes = pathlib.Path(sys.argv[1]), sys.argv[2].split(","), json.loads(sys.argv[3])
spec, _ = load_spec(directory)
full = load_params(directory, spec)
configs = {"nf4": QuantizeConfig("nf4"), "int8": QuantizeConfig("int8", 32, False), "fp8": QuantizeConfig("fp8", 128)}
for config in map(configs.get, formats):
    one = load_params(directory, spec, quantize=config)
    quantised = 0
    for path, leaf in flatten(one).items():
        wide = flatten(full)[path]
        if isinstance(leaf, QuantisedWeight):
            quantised += 1
            same(leaf, QuantisedWeight.quantise(wide, config))
        else:
            same(leaf, wide)
    assert quantised == 7, "q k v o gate up down"
    for sizes in meshes:
        layout, _ = layout_for(make_mesh(MeshConfig(**sizes)), spec)
        many = load_params(directory, spec, quantize=config, layout=layout)
        same(many, one)
        described = jax.tree.leaves(unflatten(quantised_leaves(flatten(abstract_params(spec)), config, spec)))
        for leaf, array in zip(jax.tree.leaves(many), described, strict=True):
            assert leaf.sharding == layout.of(array), (leaf.shape, leaf.sharding)
        down = many["layers"]["0.0"]["mlp"]["down"]["weight"]
        share = 2 if "dp" in sizes else 1
        assert down.codes.addressable_shards[0].data.nbytes == down.codes.nbytes * share // 8
print("same")
"""


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    folder = tmp_path_factory.mktemp("small") / "model"
    write_model(folder, SMALL, 3)
    return folder


@pytest.mark.parametrize(
    ("formats", "meshes"),
    [
        ("nf4", [{"fsdp": 2, "cp": 2, "tp": 2}]),
        pytest.param("nf4,int8,fp8", [{"fsdp": 8}, {"dp": 2, "tp": 4}], marks=pytest.mark.slow),
    ],
)
def test_every_mesh_holds_the_codes_of_one_device_split_as_the_weight_would_be(small, formats, meshes):
    env = os.environ | {
        "XLA_FLAGS": f"{FASTER} --xla_force_host_platform_device_count=8",
        "JAX_PLATFORMS": "cpu",
    }
    ran = subprocess.run(
        [sys.executable, "-c", ON_MESHES, str(small), formats, json.dumps(meshes)],
        capture_output=True,
        text=True,
        env=env,
    )
    assert ran.returncode == 0, ran.stderr[-4000:]
    assert ran.stdout.splitlines()[-1] == "same"


@pytest.mark.parametrize("how", [{}, pytest.param({"broadcast": True}, marks=pytest.mark.slow)])
def test_processes_agree_on_the_scales_of_a_matrix_that_each_reads_in_part(small, how):
    """Scales are quantised relative to the mean of a whole matrix, while a process reads only the half it holds."""
    (alone,) = job(small, 1, {"fsdp": 4}, devices=4, digests=True, quantize="nf4")
    results = job(small, 2, {"fsdp": 4}, devices=2, digests=True, quantize="nf4", **how)
    assert set().union(*(result["digests"] for result in results)) == set(alone["digests"])
    for result in results:
        assert result["digests"].items() <= alone["digests"].items()
        # Half of the linear layers; of the short rows of embedding and head, split by columns, whole rows are read.
        assert how or result["report"]["read"] < 0.54 * alone["report"]["read"]


GATHERED = """
import re
import jax, jax.numpy as jnp
from meshtune.adapters.config import LoraConfig
from meshtune.adapters.method import abstract
from meshtune.mesh.layout import make_mesh
from meshtune.mesh.config import MeshConfig
from meshtune.model.gather import layout_for
from meshtune.model.compute import Compute
from meshtune.model.decoder import forward
from meshtune.model.inputs import Inputs
from model_specs import llama_layer, llama_spec
from meshtune.arrays.tree import merge
from meshtune.quantize.config import QuantizeConfig

spec = llama_spec(64, 512, llama_layer(1024, 8, 4, 64), 3, dtype="bfloat16")
layout, _ = layout_for(make_mesh(MeshConfig(fsdp=4, tp=2)), spec)
arrays = abstract(LoraConfig(rank=2), spec, quantize=QuantizeConfig("nf4"))
compute = Compute(dtype="bfloat16", remat="selective", attention="direct", layout=layout)

def loss(trainable, frozen, tokens):
    hidden = forward(merge(trainable, frozen), spec, compute, Inputs(tokens, tokens, tokens)).hidden
    return hidden.astype(jnp.float32).sum()

def like(tree):
    return jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=layout.of(a)), tree)

tokens = jax.ShapeDtypeStruct((8, 32), jnp.int32, sharding=layout.sharding(("batch", "length"), (8, 32)))
text = jax.jit(jax.grad(loss)).lower(like(arrays.trainable), like(arrays.frozen), tokens).compile().as_text()
for kind, shape in re.findall(r"= \\(?(\\w+)\\[([\\d,]*)\\][^=]*? all-gather", text):
    print("gathered", kind, shape)
"""


def test_what_a_layer_gathers_are_codes_and_scales_of_8_bits():
    env = os.environ | {
        "XLA_FLAGS": f"{FASTER} --xla_force_host_platform_device_count=8",
        "JAX_PLATFORMS": "cpu",
        "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
    }
    ran = subprocess.run([sys.executable, "-c", GATHERED], capture_output=True, text=True, env=env)
    assert ran.returncode == 0, ran.stderr[-4000:]
    gathered = [line.split() for line in ran.stdout.splitlines() if line.startswith("gathered")]
    assert sum(kind == "u8" for _, kind, _ in gathered) >= 2 * 7
    for _, kind, shape in gathered:
        small = math.prod(map(int, shape.split(","))) <= 3 * 2 * 1024  # of all layers' adapters, or tokens
        assert kind == "u8" or small, f"{kind}[{shape}] is neither codes nor scales"


# 0.4 billion parameters, 730 MB in bfloat16, nearly all in linear layers.
WIDE = SMALL | {"hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 6, "num_attention_heads": 16}
WIDE |= {"head_dim": 128}


@pytest.mark.slow
@pytest.mark.parametrize(("format", "processes"), [("nf4", 1), ("nf4", 2), ("int8", 1)])
def test_the_full_precision_model_is_never_in_memory(tmp_path_factory: pytest.TempPathFactory, format, processes):
    """The kernel's own figure of peak memory: beyond the codes, a few blocks of 16 MB and what compiling takes."""
    folder: pathlib.Path = tmp_path_factory.mktemp("wide") / "model"
    full = write_model(folder, WIDE, 3)
    results = job(folder, processes, {"fsdp": processes}, quantize=format, timeout=500)
    total = sum(result["local"] for result in results)
    assert total < {"nf4": 0.28, "int8": 0.54}[format] * full
    for result in results:
        over = result["peak"] - result["before"] - result["local"]
        print(json.dumps({"full": full // MB, "local": result["local"] // MB, "over": over // MB}))
        assert over < 300 * MB
        assert result["peak"] - result["before"] < 0.9 * full
