"""Stochastic rounding: unbiased, the same bits however a parameter is updated, and no optimizer's updates are lost."""

from __future__ import annotations

import os
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from optimizer_problems import CONSTANT, abstract_of, tree_of

from compiling import FASTER
from meshtune.arrays.tree import flatten
from meshtune.optim.build import OPTIMIZERS, OptimizerConfig, make_optimizer
from meshtune.optim.optimizer import add_updates, round_stochastically

SHAPES = {"layers/0.0/mlp/up/weight": (2, 48, 32), "norm/weight": (32,)}
STEPS = 30


def test_every_number_is_rounded_to_a_neighbour_and_right_on_average():
    values = np.random.default_rng(0).normal(size=64).astype(np.float32)
    keys = jax.random.split(jax.random.key(0), 4096)
    rounded = np.asarray(jax.jit(jax.vmap(lambda key: round_stochastically(values, key)))(keys), np.float32)
    below = (values.view(np.uint32) & 0xFFFF0000).view(np.float32)
    above = ((values.view(np.uint32) & 0xFFFF0000) + 0x10000).view(np.float32)
    assert np.all((rounded == below) | (rounded == above))
    unit = np.abs(above - below)
    assert np.all(np.abs(rounded.mean(axis=0) - values) < 5 * unit * 0.5 / np.sqrt(len(keys)))


def test_what_bfloat16_holds_and_what_is_not_finite_stay():
    exact = jnp.asarray([0.0, -0.0, 1.0, -2.5, 3e38, np.inf, -np.inf, np.nan], jnp.bfloat16)
    for key in jax.random.split(jax.random.key(1), 8):
        rounded = round_stochastically(exact.astype(jnp.float32), key)
        np.testing.assert_array_equal(np.asarray(rounded, np.float32), np.asarray(exact, np.float32))


def run(name: str, dtype: str, stochastic: bool):
    """How far the weights came in STEPS updates by a gradient that is always the same, by path."""
    rng = np.random.default_rng(0)
    start = {path: jnp.asarray(rng.normal(size=shape), jnp.bfloat16) for path, shape in SHAPES.items()}
    tree = tree_of({path: leaf.astype(dtype) for path, leaf in start.items()})
    gradients = tree_of({path: jnp.asarray(rng.normal(size=shape), jnp.float32) for path, shape in SHAPES.items()})
    rate = 1.0 if name == "prodigy" else 3e-5
    config = OptimizerConfig(name, rate, CONSTANT, rank=8, stochastic_rounding=stochastic, state_dtype="float32")
    optimizer, _ = make_optimizer(config, 1000, abstract_of(tree))

    @jax.jit
    def steps(tree, state):
        def step(carry, count):
            tree, state = carry
            extra = {"curvature": lambda: gradients} if optimizer.needs_hessian else {}
            changes, state = optimizer.update(gradients, state, tree, **extra)
            return (add_updates(tree, changes, count, optimizer.stacked, optimizer.rounding), state), None

        return jax.lax.scan(step, (tree, state), jnp.arange(STEPS))[0][0]

    after = flatten(steps(tree, optimizer.init(tree)))
    return {path: np.asarray(after[path], np.float32) - np.asarray(leaf, np.float32) for path, leaf in start.items()}


def along(moved, expected):
    """How far something moved along `expected`, as a share of it."""
    return float((moved * expected).sum() / (expected * expected).sum())


SLOW = [pytest.param(name, marks=pytest.mark.slow) for name in OPTIMIZERS if name not in ("adamw", "badam")]


@pytest.mark.parametrize("name", ["adamw", *SLOW])
def test_small_updates_are_lost_without_it_and_kept_on_average_with_it(name):
    path = "layers/0.0/mlp/up/weight"
    expected = run(name, "float32", False)[path]
    assert np.abs(expected).max() > 0
    assert along(run(name, "bfloat16", False)[path], expected) < 0.5
    # Of 3072 numbers, each of which moves by some units or none: the mean is known to a few percent.
    share = along(run(name, "bfloat16", True)[path], expected)
    # Prodigy's rate is the largest of its estimates, each of which has the noise of the weights.
    assert share > 1 if name == "prodigy" else share == pytest.approx(1, abs=0.2)


def test_an_update_in_the_backward_pass_draws_the_same_bits():
    rng = np.random.default_rng(0)
    tree = tree_of({path: jnp.asarray(rng.normal(size=shape), jnp.bfloat16) for path, shape in SHAPES.items()})
    gradients = jax.tree.map(lambda leaf: leaf.astype(jnp.float32), tree)
    config = OptimizerConfig("adamw", 1e-4, CONSTANT, stochastic_rounding=True)
    optimizer, _ = make_optimizer(config, 10, abstract_of(tree))
    assert optimizer.update_param is not None
    state = optimizer.init(tree)
    changes, _ = optimizer.update(gradients, state, tree)
    updated = flatten(add_updates(tree, changes, jnp.int32(0), optimizer.stacked, optimizer.rounding))
    for path, leaf in flatten(tree).items():
        for layer in range(2) if path in optimizer.stacked else [None]:
            gradient, parameter, expected = (
                tree if layer is None else tree[layer] for tree in (flatten(gradients)[path], leaf, updated[path])
            )
            layer_state = jax.tree.map(lambda x, layer=layer: x if layer is None else x[layer], state["kept"][path])
            new, _ = optimizer.update_param(path, gradient, layer_state, parameter, jnp.int32(0), jnp.int32(layer or 0))
            np.testing.assert_array_equal(np.asarray(new, np.float32), np.asarray(expected, np.float32))
    assert not optimizer.row_separable, "parts of a matrix would all draw the same bits"


def test_every_update_layer_and_parameter_draws_other_bits():
    config = OptimizerConfig("adamw", 1e-4, CONSTANT, stochastic_rounding=True)
    tree = tree_of({path: jnp.ones(shape, jnp.bfloat16) for path, shape in SHAPES.items()})
    optimizer, _ = make_optimizer(config, 10, abstract_of(tree))
    between = jnp.full(SHAPES["norm/weight"], 1 + 2**-9, jnp.float32)  # half-way between two numbers

    def draw_bits(path: str, layer: int, count: int, seed: int = 0) -> bytes:
        rounding = (
            optimizer.rounding
            if not seed
            else make_optimizer(
                OptimizerConfig("adamw", 1e-4, CONSTANT, stochastic_rounding=True, seed=seed), 10, abstract_of(tree)
            )[0].rounding
        )
        return np.asarray(rounding(between, jnp.dtype("bfloat16"), path, jnp.int32(layer), jnp.int32(count))).tobytes()

    draws = [
        draw_bits("a", 0, 0),
        draw_bits("a", 1, 0),
        draw_bits("a", 0, 1),
        draw_bits("b", 0, 0),
        draw_bits("a", 0, 0, seed=1),
    ]
    assert len(set(draws)) == len(draws)
    assert draw_bits("a", 0, 0) == draws[0], "a resumed run draws what the run would have drawn"


@pytest.mark.slow
def test_bits_do_not_depend_on_the_mesh():
    program = """
import jax, jax.numpy as jnp, numpy as np
from jax.sharding import NamedSharding, PartitionSpec
from meshtune.optim.optimizer import add_updates, stochastic
mesh = jax.make_mesh((2, 2), ("a", "b"))
tree = {"layers": jnp.ones((3, 8, 16), jnp.bfloat16)}
updates = jax.tree.map(lambda leaf: jnp.full(leaf.shape, 1e-3, jnp.float32), tree)
def add(tree, updates):
    return add_updates(tree, updates, jnp.int32(5), {"layers"}, stochastic(7))
one = jax.jit(add)(tree, updates)["layers"]
for spec in (PartitionSpec(None, "a", "b"), PartitionSpec(None, ("a", "b"))):
    put = lambda tree: jax.device_put(tree, NamedSharding(mesh, spec))
    split = jax.jit(add)(put(tree), put(updates))["layers"]
    assert len(split.sharding.device_set) == 4
    np.testing.assert_array_equal(np.asarray(one, np.float32), np.asarray(split, np.float32))
assert len(np.unique(np.asarray(one, np.float32))) > 1
"""
    flags = f"{FASTER} --xla_force_host_platform_device_count=4"
    environment = os.environ | {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": flags}
    done = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
