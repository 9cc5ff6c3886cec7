"""Paths of trees: which of them lie in stacked layers, and where."""

from __future__ import annotations

import pytest

from meshtune.arrays.tree import flatten, layer_site, stack_path, unflatten
from meshtune.model.spec import abstract_params
from model_specs import llama_layer, llama_spec


@pytest.mark.parametrize(
    ("path", "place", "site"),
    [
        ("layers/0.1/attn/q/weight", ("", "0.1", "attn/q/weight"), "attn/q/weight"),
        ("vision/layers/2.0/mlp/up", ("vision", "2.0", "mlp/up"), "mlp/up"),
        ("layers/0.0", ("", "0.0", ""), ""),
        ("embed/weight", None, "embed/weight"),
        ("per_layer/table/layers/weight", None, "per_layer/table/layers/weight"),
    ],
)
def test_a_path_is_taken_apart_by_root_stack_and_site(path, place, site):
    assert stack_path(path) == place
    assert layer_site(path) == site


def test_paths_of_stacked_arrays_are_those_in_layers():
    spec = llama_spec(32, 16, llama_layer(24, 4, 2, 4), 3)
    arrays = flatten(abstract_params(spec))
    assert {path for path, array in arrays.items() if array.is_stacked} == {p for p in arrays if stack_path(p)}
    assert flatten(unflatten(arrays)) == arrays
