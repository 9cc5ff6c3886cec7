"""Optimizers switch on the roles of arrays: each expert is a separate matrix, and an unknown role is refused."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from optimizer_problems import CONSTANT, SPEC

from meshtune.adapters.config import FullConfig
from meshtune.adapters.method import abstract
from meshtune.arrays.spec import ArraySpec
from meshtune.errors import UserError
from meshtune.optim.build import OPTIMIZERS, OptimizerConfig, make_optimizer

EXPERTS, LAYERS = 3, 2
BY_PARAMETER = [name for name, entry in OPTIMIZERS.items() if entry.by_parameter]


def config(name, **options):
    return OptimizerConfig(name, 1e-2, CONSTANT, weight_decay=0.1, rank=4, update_gap=2, momentum=0.5, **options)


def stack(role, shape, axes):
    return ArraySpec((LAYERS, *shape), "float32", ("layers", *axes), role=role)


def run_updates(name, tree, specs, steps=3):
    """(parameters, state) after updates with gradients that depend on the parameters."""
    optimizer, _ = make_optimizer(config(name), steps, specs, SPEC)

    @jax.jit
    def step(tree, state):
        gradients = jax.tree.map(lambda leaf: jnp.sin(7 * leaf) + 0.1, tree)
        changes, state = optimizer.update(gradients, state, tree)
        return jax.tree.map(jnp.add, tree, changes), state

    state = optimizer.init(tree)
    for _ in range(steps):
        tree, state = step(tree, state)
    return tree, state


# APOLLO's random projections belong to a layer of a path, so they are others in another stack: see the next test.
@pytest.mark.parametrize("name", [name for name in BY_PARAMETER if name != "apollo"])
def test_experts_are_updated_as_if_each_were_a_matrix_of_its_own(name):
    """Six matrices of 32 x 160, once as experts of two layers and once as a stack of six layers, bit for bit but for
    the order of sums within a batched product: 1e-6 of values of order 1."""
    numbers = jnp.asarray(np.random.default_rng(0).normal(size=(LAYERS, EXPERTS, 32, 160)), jnp.float32)
    flat = numbers.reshape(LAYERS * EXPERTS, 32, 160)
    experts = stack("experts", (EXPERTS, 32, 160), ("experts", "ffn", "embed"))
    matrices = ArraySpec(flat.shape, "float32", ("layers", "ffn", "embed"), role="matrix")
    got, _ = run_updates(name, {"w": numbers}, {"w": experts})
    expected, _ = run_updates(name, {"w": flat}, {"w": matrices})
    np.testing.assert_allclose(got["w"].reshape(flat.shape), expected["w"], rtol=0, atol=1e-6)


def test_every_expert_has_random_projections_of_its_own():
    """Equal experts with equal gradients are moved differently by APOLLO, whose projections are drawn."""
    numbers = jnp.broadcast_to(jnp.linspace(-1, 1, 16 * 24).reshape(16, 24), (LAYERS, EXPERTS, 16, 24))
    experts = stack("experts", (EXPERTS, 16, 24), ("experts", "ffn", "embed"))
    tree, _ = run_updates("apollo", {"w": numbers}, {"w": experts}, steps=1)
    rows = np.asarray(tree["w"]).reshape(-1, 16 * 24)
    assert len(np.unique(rows, axis=0)) == LAYERS * EXPERTS


def test_state_of_experts_keeps_their_axis_and_matches_its_specs():
    experts = stack("experts", (EXPERTS, 64, 160), ("experts", "ffn", "embed"))
    for name, key, shape, axes in (
        ("adamw8bit", "m_largest", (2, 3, 64, 1), ("layers", "experts", "ffn", "embed")),
        ("galore", "m", (2, 3, 4, 160), ("layers", "experts", "rank", "embed")),
        ("adam_mini", "v", (2, 3, 64), ("layers", "experts", "ffn")),
        ("muon", "momentum", (2, 3, 64, 160), ("layers", "experts", "ffn", "embed")),
    ):
        optimizer, _ = make_optimizer(config(name), 1, {"w": experts})
        spec = optimizer.specs({"w": experts})["kept"]["w"][key]
        assert (spec.shape, spec.axes, spec.role) == (shape, axes, "state")
        state = optimizer.init({"w": jnp.zeros(experts.shape)})["kept"]["w"][key]
        assert state.shape == shape


# What distinguishes each optimizer's state of a matrix from AdamW's, and the roles that have AdamW's.
@pytest.mark.parametrize(
    ("name", "mark", "elementwise"),
    [
        ("muon", "momentum", ("router", "vector", "table", "head", "conv")),
        ("adamw8bit", "m_largest", ("router", "vector", "table", "conv")),
        ("galore", "projector", ("router", "vector", "table", "head", "conv")),
        ("apollo", "norm", ("router", "vector", "table", "head", "conv")),
    ],
)
def test_roles_that_are_no_matrices_have_adamw(name, mark, elementwise):
    shapes = {"vector": ((160,), ("embed",)), "conv": ((160, 64), ("embed", "width"))}
    specs = {
        role: stack(role, *shapes.get(role, ((64, 160), ("out", "embed"))))
        for role in ("matrix", "router", "vector", "table", "head", "conv")
    }
    states = make_optimizer(config(name), 1, specs)[0].specs(specs)["kept"]
    assert {role for role, state in states.items() if mark not in state} == set(elementwise)
    assert all(set(states[role]) == {"m", "v"} for role in elementwise)


def test_adam_mini_has_a_moment_a_head_of_queries_and_keys_of_a_real_model():
    arrays = abstract(FullConfig(), SPEC)
    optimizer, _ = make_optimizer(config("adam_mini"), 1, arrays.trainable, arrays.spec)
    states = optimizer.specs(arrays.trainable)["kept"]
    moments = {path.split("/", 2)[2]: state["v"].shape for path, state in states.items() if path.startswith("layers/")}
    assert moments["attn/q/weight"] == moments["attn/k/weight"] == (3, 2)  # layers, heads
    assert moments["attn/v/weight"] == moments["attn/o/weight"] == (3, 8)  # layers, rows
    assert moments["attn_norm/weight"] == (3,)


@pytest.mark.parametrize("name", list(OPTIMIZERS))
@pytest.mark.parametrize("role", ["state", "hologram"])
def test_an_unknown_role_is_refused_by_name(name, role):
    tree = {"layers": {"0.0": {"mixer": {"w": stack(role, (8, 8), ("out", "in"))}}}}
    with pytest.raises(UserError, match=rf"(?s){name} .*role '{role}'.*layers/0.0/mixer/w.*optimizer.name") as error:
        make_optimizer(config(name), 1, tree, SPEC)
    assert error.value.fix


@pytest.mark.parametrize("name", ["muon", "adamw8bit", "adam_mini", "galore", "apollo"])
def test_a_role_that_is_new_to_the_house_is_refused_where_optimizers_switch_on_roles(name, monkeypatch):
    monkeypatch.setattr("meshtune.optim.build.PARAMETER_ROLES", frozenset({"hologram"}))
    with pytest.raises(UserError, match=rf"{name} has no rule for arrays of role 'hologram'"):
        make_optimizer(config(name), 1, {"w": stack("hologram", (8, 8), ("out", "in"))})


def test_badam_refuses_a_stack_whose_turn_would_never_come():
    arrays = abstract(FullConfig(), SPEC)
    tower = {"vision": {"layers": {"0.0": {"w": stack("matrix", (8, 8), ("out", "in"))}}}}
    with pytest.raises(UserError, match=r"vision/layers/0\.0/w is in another stack"):
        make_optimizer(config("badam"), 1, arrays.trainable | tower, arrays.spec)


def test_a_stack_is_told_by_its_axes_and_not_by_its_path():
    """A tower's stack at another path is updated layer by layer: Muon orthogonalises each matrix, and its norms have a
    moment a layer."""
    matrix = stack("matrix", (8, 6), ("out", "in"))
    tree = {"vision": {"blocks": {"w": matrix, "norm": stack("vector", (6,), ("in",))}}}
    optimizer, _ = make_optimizer(config("muon"), 1, tree)
    assert optimizer.stacked == {"vision/blocks/w", "vision/blocks/norm"}
    one_layer = make_optimizer(dataclasses.replace(config("adamw"), in_backward=True), 1, tree)[0].gradients(tree)
    assert {path: leaf.shape for path, leaf in one_layer.items()} == {
        "vision/blocks/w": (8, 6),
        "vision/blocks/norm": (6,),
    }
