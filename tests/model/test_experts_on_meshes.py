"""Experts over ep, composed with fsdp, tp and cp, have the losses and gradients of one device.

On four simulated devices, in a process of their own.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import os
import pathlib
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from compiling import FASTER
from meshtune.adapters.config import FullConfig, LoraConfig
from meshtune.adapters.method import abstract, prepare
from meshtune.arrays.tree import flatten, merge, named_leaves, unflatten
from meshtune.families.quantised import quantised_leaves
from meshtune.kernels.attention import zigzag_order
from meshtune.kernels.grouped import grouped_matmul
from meshtune.mesh.config import MeshConfig
from meshtune.mesh.layout import make_mesh
from meshtune.mesh.placement import place_batch, shardings
from meshtune.model.attention import AttentionSpec
from meshtune.model.compute import Compute, ExchangeName
from meshtune.model.dispatch import over_mesh
from meshtune.model.experts import ExpertsSpec, RouterSpec
from meshtune.model.gather import layout_for
from meshtune.model.layer import LayerSpec
from meshtune.model.mlp import MlpSpec
from meshtune.model.norm import NormSpec
from meshtune.model.rope import RopeSpec
from meshtune.model.spec import ModelSpec, Stack, abstract_params, init_params
from meshtune.objectives.answers import with_layers
from meshtune.objectives.sft import sft_objective
from meshtune.quantize.config import QuantizeConfig
from meshtune.quantize.weight import QuantisedWeight

# The mesh, and how tokens are exchanged over ep.
MESHES: tuple[tuple[dict[str, int], ExchangeName], ...] = (
    ({"fsdp": 2, "ep": 2}, "all_to_all"),
    ({"ep": 2, "tp": 2}, "gather"),
    ({"ep": 2, "tp": 2}, "all_to_all"),
    ({"cp": 2, "ep": 2}, "gather"),
    ({"ep": 4}, "auto"),
)
# Of adapters a mesh on which experts and their ranks are split; tests/families/test_matrix.py has the others (slow).
ALL = {"full": MESHES, "lora": MESHES[2:3], "qlora": MESHES[2:3]}
QUICK = {"full": MESHES[:1]}  # the fast tier's
METHODS = {"full": FullConfig(train_router=True), "lora": LoraConfig(rank=4), "qlora": LoraConfig(rank=4)}
# Twice quantised scales of an expert: 512 of a matrix, two for each number of the second level.
NF4, WIDTH_OF_NF4 = QuantizeConfig("nf4", block_size=8), 128
EXPERTS_OF_SKEWED = 12  # 3 on each of 4 devices
EXPERTS = ExpertsSpec(RouterSpec(8, 3), 16, 2, bias=True, shared=MlpSpec(8), aux_loss=0.1)
SPEC = ModelSpec(
    "qwen2_moe",
    96,
    32,
    (Stack((LayerSpec(AttentionSpec(4, 2, 8, rope=RopeSpec(1e4, 8)), EXPERTS, NormSpec(1e-5)),), 2),),
    NormSpec(1e-5),
    max_length=64,
    init_std=0.3,
)


def spec_of(name):
    """The model of a method; experts in nf4 are wider."""
    if name != "qlora":
        return SPEC
    layer = SPEC.stacks[0].pattern[0]
    experts = dataclasses.replace(EXPERTS, width=WIDTH_OF_NF4)
    return dataclasses.replace(SPEC, stacks=(Stack((dataclasses.replace(layer, ffn=experts),), 2),))


def batch():
    """Four rows of two documents and some padding."""
    rng = np.random.default_rng(0)
    place = np.broadcast_to(np.arange(32), (4, 32))
    arrays = {"tokens": rng.integers(0, 96, (4, 32)), "targets": rng.integers(0, 96, (4, 32))}
    arrays |= {"positions": place % 15, "segment_ids": np.where(place >= 30, 0, 1 + place // 15)}
    arrays = {name: array.astype(np.int32) for name, array in arrays.items()}
    return arrays | {"weights": (arrays["segment_ids"] > 0).astype(np.float32)}


def gradient(name, axes, exchange: ExchangeName = "auto"):
    """(loss, gradient by path) of one device (axes None) or on a mesh."""
    method, spec = METHODS[name], spec_of(name)
    params, quantize = init_params(spec, jax.random.key(0)), None
    if name == "qlora":
        quantize, forms = NF4, quantised_leaves(flatten(abstract_params(spec)), NF4, spec)
        params = unflatten({path: quantise_like(leaf, forms[path]) for path, leaf in flatten(params).items()})
    prepared = prepare(method, spec, params, jax.random.key(1))
    leaves, tree = jax.tree.flatten(prepared.trainable)
    moved = [x + 0.05 * jax.random.normal(jax.random.key(n), x.shape) for n, x in enumerate(leaves)]
    trainable, frozen = jax.tree.unflatten(tree, moved), prepared.frozen
    arrays, layout = batch(), None
    if axes is not None:
        layout = layout_for(make_mesh(MeshConfig(**axes), jax.devices()[:4]), spec)[0]
        forms = abstract(method, spec, quantize=quantize)
        trainable = jax.device_put(trainable, shardings(forms.trainable, layout))
        frozen = jax.device_put(frozen, shardings(forms.frozen, layout))
        order = zigzag_order(32, axes["cp"]) if "cp" in axes else np.arange(32)
        arrays = place_batch({name: array[:, order] for name, array in arrays.items()}, layout, None)
    compute = Compute(loss_chunk=8, remat="full", layout=layout, expert_exchange=exchange)

    def loss(trainable, frozen, arrays):
        score = with_layers(spec, sft_objective(merge(trainable, frozen), spec, compute, arrays, None))
        return score.loss / score.weight

    value, gradients = jax.jit(jax.value_and_grad(loss))(trainable, frozen, jax.tree.map(jnp.asarray, arrays))
    return float(value), {path: np.asarray(leaf) for path, leaf in named_leaves(gradients)}


def quantise_like(leaf, form):
    return QuantisedWeight.quantise(leaf, NF4) if isinstance(form, QuantisedWeight) else leaf


def differences(name, meshes):
    """For each mesh: (relative difference of the loss, largest of a gradient relative to its largest number)."""
    loss, expected = gradient(name, None)
    results = []
    for axes, exchange in meshes:
        value, gradients = gradient(name, axes, exchange)
        worst = {
            path: float(np.abs(gradients[path] - leaf).max() / np.abs(leaf).max()) for path, leaf in expected.items()
        }
        path = max(worst, key=lambda path: worst[path])
        results.append([f"{axes} {exchange}", abs(value - loss) / loss, path, worst[path]])
    return results


def skewed_differences(exchange):
    """The largest relative differences, in values and gradients, of tokens that all go to the experts of one device,
    some of them padding: further rounds of an exchange carry them."""
    rng = np.random.default_rng(0)
    x, weight = rng.normal(size=(4, 24, 8)), rng.normal(size=(EXPERTS_OF_SKEWED, 8, 8))
    experts = rng.permuted(np.broadcast_to(np.arange(3), (4, 24, 3)), axis=-1)
    experts = np.where(np.arange(24)[:, None] > 20, EXPERTS_OF_SKEWED, experts)
    factors, cotangent = rng.uniform(0.1, 1.0, (4, 24, 3)), rng.normal(size=x.shape)
    arrays = [jnp.asarray(array, jnp.float32) for array in (x, factors, weight)]

    def value(layout, x, factors, weight):
        specs = None if layout is None else {"weight": layout.in_use(("experts", "ffn", "embed"), weight.shape).spec}

        def compute(rows, factors, groups, node):
            return factors[:, None] * jnp.tanh(grouped_matmul(rows, node["weight"], groups.sizes))

        node = {"weight": weight}
        y = over_mesh(compute, layout, x, jnp.asarray(experts), factors, node, specs, EXPERTS_OF_SKEWED, exchange)
        return jnp.sum(y * cotangent), y

    def all_of(layout):
        function = jax.value_and_grad(functools.partial(value, layout), argnums=(0, 1, 2), has_aux=True)
        (_, y), gradients = jax.jit(function)(*arrays)
        return [np.asarray(leaf) for leaf in (y, *gradients)]

    layout = layout_for(make_mesh(MeshConfig(ep=4), jax.devices()[:4]), SPEC)[0]
    return [float(np.abs(a - b).max() / np.abs(b).max()) for a, b in zip(all_of(layout), all_of(None), strict=True)]


@pytest.mark.parametrize("meshes", ["some", pytest.param("all", marks=pytest.mark.slow)])
def test_meshes_are_one_device(meshes):
    env = os.environ | {
        "XLA_FLAGS": f"{FASTER} --xla_force_host_platform_device_count=4",
        "PYTHONPATH": os.pathsep.join([str(pathlib.Path(__file__).parent.parent), *filter(None, sys.path)]),
    }
    run = subprocess.run([sys.executable, __file__, meshes], capture_output=True, text=True, env=env, timeout=600)
    assert run.returncode == 0, run.stderr[-3000:]
    answer = json.loads(run.stdout.splitlines()[-1])
    for exchange, worst in answer["skewed"].items():  # float32, a token's experts added in another order
        assert max(worst) < 1e-6, (exchange, worst)
    for method, results in answer["models"].items():
        for axes, loss, path, worst in results:  # float32, summed over devices in another order
            assert loss < 1e-6, (method, axes)
            assert worst < 2e-5, (method, axes, path)


if __name__ == "__main__":
    meshes_of = ALL if sys.argv[1] == "all" else QUICK
    cases = {"models": {name: differences(name, meshes) for name, meshes in meshes_of.items()}}
    exchanges = ("gather", "all_to_all") if sys.argv[1] == "all" else ("all_to_all",)
    print(json.dumps(cases | {"skewed": {exchange: skewed_differences(exchange) for exchange in exchanges}}))
