"""Merges adapters into the weights they adapt."""

from __future__ import annotations

import functools

import jax
from jaxtyping import PyTree

from meshtune.adapters.kind import Adapter
from meshtune.adapters.method import SHARED, used_up
from meshtune.arrays.tree import Tree, unflatten
from meshtune.model.inputs import ROWS, TokenRows
from meshtune.quantize.weight import QuantisedWeight


def merge_adapters(params: Tree) -> Tree:
    """The whole tree without adapters, their effect added to the weights; `params` is used up.

    The sum is made in float32, one stacked weight at a time and in the weight's own memory, and kept in its dtype.
    Quantised weights, adapted or not, become plain ones: their dequantised numbers.
    A tied head has no weight to hold the sum: its adapter comes with one (LoadedAdapter.mergeable).
    """
    weights = used_up(params)
    for path in [path for path in weights if path.endswith("/adapter")]:
        node = path.removesuffix("/adapter")
        assert f"{node}/weight" in weights, f"{node} is tied and has an adapter"
        weight, shared = weights.pop(f"{node}/weight"), weights.get(SHARED)
        fixed = weights.pop(f"{node}/fixed", None) if shared is None else shared.cut(weight.shape)
        weights[f"{node}/weight"] = _fold(weight, weights.pop(path), fixed)
    weights.pop(SHARED, None)
    for path in [path for path in weights if path.endswith(f"/{ROWS}")]:
        weight_path = f"{path.removesuffix(ROWS)}weight"
        weights[weight_path] = _with_rows(weights.pop(weight_path), weights.pop(path))
    for path, leaf in weights.items():
        if isinstance(leaf, QuantisedWeight):
            weights[path] = _plain(leaf).block_until_ready()
    return unflatten(weights)


def _fold(weight: jax.Array | QuantisedWeight, adapter: Adapter, fixed: PyTree) -> jax.Array:
    if isinstance(weight, QuantisedWeight):
        return _fold_quantised(weight, adapter, fixed).block_until_ready()
    return _fold_in_place(weight, adapter, fixed)


@functools.partial(jax.jit, donate_argnums=0)
def _with_rows(weight: jax.Array, rows: TokenRows) -> jax.Array:
    return rows.merge(weight)


@functools.partial(jax.jit, donate_argnums=0)
def _fold_in_place(weight: jax.Array, adapter: Adapter, fixed: PyTree) -> jax.Array:
    return adapter.merge(weight, fixed)


@jax.jit
def _fold_quantised(weight: QuantisedWeight, adapter: Adapter, fixed: PyTree) -> jax.Array:
    return adapter.merge(weight.dequantise("float32"), fixed).astype(weight.dtype)


@jax.jit
def _plain(weight: QuantisedWeight) -> jax.Array:
    return weight.dequantise()
