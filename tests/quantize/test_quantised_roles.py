"""Quantisation switches on roles: matrices and experts of stacks alone are quantised, an unknown role is refused."""

from __future__ import annotations

from types import SimpleNamespace

import jax.numpy as jnp
import numpy as np
import pytest

from meshtune.arrays.spec import ArraySpec
from meshtune.errors import UserError
from meshtune.families.quantised import is_quantised, quantised_leaves
from meshtune.quantize.config import QuantizeConfig
from meshtune.quantize.formats import FORMATS
from meshtune.quantize.weight import QuantisedWeight

EXPERTS = ArraySpec((2, 3, 16, 128), "float32", ("layers", "experts", "ffn", "embed"), role="experts")


def of_role(role, *, stacked=True):
    shape, axes = ((2, 64, 64), ("layers", "out", "in")) if stacked else ((64, 64), ("out", "in"))
    return ArraySpec(shape, "float32", axes, role=role)


def test_matrices_and_experts_of_stacks_are_quantised():
    roles = ("matrix", "experts", "router", "vector", "table", "head", "conv")
    assert {role for role in roles if is_quantised("layers/0.0/w", of_role(role))} == {"matrix", "experts"}
    assert not is_quantised("projector/weight", of_role("matrix", stacked=False))


@pytest.mark.parametrize("role", ["state", "hologram"])
def test_an_unknown_role_is_refused_by_name(role):
    with pytest.raises(
        UserError, match=rf"quantize has no rule for arrays of role '{role}', such as layers/0.0/mixer/w"
    ):
        is_quantised("layers/0.0/mixer/w", of_role(role))


def test_a_router_and_a_convolution_of_a_model_stay_as_they_are(monkeypatch):
    """Next to a matrix of the same shape, which is quantised, in a model whose tree has them."""
    tree = {"layers": {"0.0": {role: {"weight": of_role(role)} for role in ("matrix", "router", "conv")}}}
    names = {f"layers/0.0/{role}": [f"model.layers.{n}.{role}" for n in (0, 1)] for role in tree["layers"]["0.0"]}
    monkeypatch.setattr("meshtune.families.quantised.abstract_params", lambda spec: tree)
    monkeypatch.setattr("meshtune.families.quantised.module_names", lambda spec: names)
    leaves = {f"{node}/weight": tree["layers"]["0.0"][node.rpartition("/")[2]]["weight"] for node in names}
    spec = SimpleNamespace(published=None)
    quantised = quantised_leaves(leaves, QuantizeConfig("nf4"), spec)  # pyright: ignore[reportArgumentType]
    assert {path for path, leaf in quantised.items() if isinstance(leaf, QuantisedWeight)} == {
        "layers/0.0/matrix/weight"
    }


@pytest.mark.parametrize("format", list(FORMATS))
@pytest.mark.parametrize("double", [True, False])
def test_experts_are_quantised_one_by_one(format, double):
    """Codes, scales and the mean of the scales of an expert are those of its matrix quantised by itself, bit for
    bit."""
    config = QuantizeConfig(format, 64, double)
    numbers = jnp.asarray(np.random.default_rng(0).normal(size=EXPERTS.shape), jnp.float32)
    experts = QuantisedWeight.quantise(numbers, config)
    for layer, expert in np.ndindex(2, 3):
        alone = QuantisedWeight.quantise(numbers[layer, expert], config)
        np.testing.assert_array_equal(experts.dequantise()[layer, expert], alone.dequantise())
    form = QuantisedWeight.abstract(EXPERTS, config)
    assert (form.codes.shape, form.codes.axes, form.codes.role) == (experts.codes.shape, EXPERTS.axes, "experts")
    assert form.scales.shape == experts.scales.shape
    if double:
        assert (form.nested.shape, form.offset.shape) == (experts.nested.shape, experts.offset.shape)
