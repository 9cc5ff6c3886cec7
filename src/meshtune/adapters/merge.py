"""Adapters folded into the weights they adapt."""

from __future__ import annotations

import functools
from typing import Any

import jax

from meshtune.adapters.method import used_up
from meshtune.errors import UserError
from meshtune.model.tree import Tree, unflatten
from meshtune.quantize.weight import QuantisedWeight


def merged(params: Tree) -> Tree:
    """The whole tree without adapters, their effect added to the weights; `params` is used up.

    The sum is made in float32, one stacked weight at a time and in the weight's own memory, and kept in its dtype.
    Quantised weights, adapted or not, become plain ones: the numbers that their codes stand for.
    Raises UserError for an adapter on the head of a tied model, which has no weight of its own to hold the sum.
    """
    weights = used_up(params)
    for path in [path for path in weights if path.endswith("/adapter")]:
        node = path.removesuffix("/adapter")
        if f"{node}/weight" not in weights:
            raise UserError(
                "the adapter on lm_head cannot be merged: the model's head is tied to its embedding",
                where="lm_head",
                fix="export the adapter instead of the merged model, or train without lm_head in method.targets",
            )
        weights[f"{node}/weight"] = _fold(weights.pop(f"{node}/weight"), weights.pop(path))
    for path, leaf in weights.items():
        if isinstance(leaf, QuantisedWeight):
            weights[path] = _plain(leaf).block_until_ready()
    return unflatten(weights)


def _fold(weight: jax.Array | QuantisedWeight, adapter: Any) -> jax.Array:
    if isinstance(weight, QuantisedWeight):
        return _fold_quantised(weight, adapter).block_until_ready()
    return _fold_in_place(weight, adapter)


@functools.partial(jax.jit, donate_argnums=0)
def _fold_in_place(weight: jax.Array, adapter: Any) -> jax.Array:
    return adapter.merge(weight)


@jax.jit
def _fold_quantised(weight: QuantisedWeight, adapter: Any) -> jax.Array:
    return adapter.merge(weight.dequantise("float32")).astype(weight.dtype)


@jax.jit
def _plain(weight: QuantisedWeight) -> jax.Array:
    return weight.dequantise()
