"""Adapters switch on the roles of weights: what cannot have one is refused by name, never left out silently."""

from __future__ import annotations

import dataclasses

import pytest
from optimizer_problems import SPEC

from meshtune.adapters.config import LoraConfig
from meshtune.adapters.method import abstract
from meshtune.adapters.registry import ADAPTERS
from meshtune.adapters.targets import Module, adapter_targets, modules
from meshtune.arrays.spec import ArraySpec
from meshtune.arrays.tree import named_leaves
from meshtune.errors import UserError


def among(**roles):
    """Modules of one layer: q_proj is a matrix, the others have the roles given."""
    shapes = {"vector": ((32,), ("embed",)), "experts": ((4, 64, 32), ("experts", "ffn", "embed"))}
    specs = {"q_proj": ArraySpec((64, 32), "float32", ("heads", "embed"), role="matrix")}
    for name, role in roles.items():
        shape, axes = shapes.get(role, ((64, 32), ("ffn", "embed")))
        specs[name] = ArraySpec(shape, "float32", axes, role=role)
    return {
        f"model.layers.0.{name}": Module(f"model.layers.0.{name}", f"layers/0.0/{name}", 0, 0, {"weight": spec})
        for name, spec in specs.items()
    }


def target_names(targets, modules):
    return [name.rpartition(".")[2] for name in adapter_targets(LoraConfig(targets=targets), modules)]


def test_all_linear_is_every_matrix_and_nothing_else():
    modules = among(norm="vector", embed="table", lm_head="head", gate="router", conv1d="conv", up_proj="matrix")
    assert target_names("all-linear", modules) == ["q_proj", "up_proj"]


def test_a_head_is_adapted_where_it_is_named():
    assert target_names(("lm_head", "q_proj"), among(lm_head="head")) == ["q_proj", "lm_head"]


@pytest.mark.parametrize("targets", ["all-linear", ("q_proj", "experts")])
def test_experts_are_never_left_out(targets):
    assert target_names(targets, among(experts="experts")) == ["q_proj", "experts"]
    assert target_names("q_proj", among(experts="experts")) == ["q_proj"]


@pytest.mark.parametrize("role", ["router", "conv", "vector", "table"])
def test_what_is_no_linear_layer_is_refused_where_it_is_named(role):
    with pytest.raises(UserError, match="'it' is not a linear layer"):
        target_names("it", among(it=role))


@pytest.mark.parametrize("targets", ["all-linear", "it"])
def test_an_unknown_role_is_refused_by_name(targets):
    with pytest.raises(UserError, match=r"(?s)lora has no rule for arrays of role 'hologram'.*layers/0.0/it/weight"):
        target_names(targets, among(it="hologram"))


@pytest.mark.parametrize("kind", [kind for kind in ADAPTERS if kind != "loftq"])
def test_arrays_of_adapters_have_roles(kind):
    """Factors and rotations those of their weights, so that optimizers treat them alike; lengths and scales vectors."""
    options = {"oft": {"oft_block_size": 8}, "vera": {}}.get(kind, {"rank": 4})
    spec = dataclasses.replace(SPEC, tied=False)
    arrays = abstract(LoraConfig(adapter=kind, targets=("all-linear", "lm_head"), **options), spec)
    leaves = dict(named_leaves(arrays.trainable))
    roles = {path: (leaf.role, "head" if path.startswith("head/") else "matrix") for path, leaf in leaves.items()}
    vectors = ("magnitude", "lambda_b", "lambda_d")
    for path, (role, expected) in roles.items():
        assert role == ("vector" if path.endswith(vectors) else expected), path
    assert {path for path, leaf in leaves.items() if leaf.is_stacked} == {p for p in leaves if p.startswith("layers/")}


def test_the_adapter_of_a_tied_head_is_a_heads():
    """Its weight is the embedding, a table, which adamw8bit treats otherwise than a head."""
    assert SPEC.tied
    assert modules(SPEC)["lm_head"].role == "head"
    arrays = abstract(LoraConfig(rank=4, targets=("lm_head",)), SPEC)
    assert {leaf.role for _, leaf in named_leaves(arrays.trainable)} == {"head"}
