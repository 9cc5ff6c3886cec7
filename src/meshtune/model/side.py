"""What a layer is given beside the residual stream, and is differentiated in every path.

A tree `side` has arrays [B, T, ..] by name, which all layers read as they are; under BY_LAYER arrays [L, B, T, ..], of
which each layer is given its part under the same name; and under SHARED the memories (keys and values, [B, S, ..]) that
earlier layers have stored for later ones, by name. Only a layer that is not scanned over may store one.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
from jax import lax
from jaxtyping import Array

from meshtune.arrays.tree import Tree
from meshtune.errors import UserError

BY_LAYER, SHARED = "by_layer", "shared_memory"


def of_layer(side: Tree, index: Array | int) -> Tree:
    """What layer number `index` is given."""
    parts = jax.tree.map(lambda leaf: lax.dynamic_index_in_dim(leaf, index, keepdims=False), side.get(BY_LAYER, {}))
    return for_all(side) | parts


def for_all(side: Tree) -> Tree:
    """What all layers are given alike."""
    return {name: array for name, array in side.items() if name != BY_LAYER}


def of_tokens(side: Tree) -> Tree:
    """What belongs to the tokens of a layer's input, and is cut into chunks with them."""
    return {name: array for name, array in side.items() if name != SHARED}


def by_groups(side: Tree, first: int, repeats: int, width: int) -> Tree:
    """The parts under BY_LAYER for layers `first` and following, [repeats, width, B, T, ..]."""
    return jax.tree.map(
        lambda leaf: leaf[first : first + repeats * width].reshape(repeats, width, *leaf.shape[1:]),
        side.get(BY_LAYER, {}),
    )


def with_stored(side: Tree, stored: Mapping[str, Any]) -> Tree:
    """With the memories that a layer has stored."""
    return side | {SHARED: {**side.get(SHARED, {}), **stored}} if stored else side


def without_stored(side: Tree) -> Tree:
    """What enters the first layer."""
    return {name: array for name, array in side.items() if name != SHARED}


def without_memory(side: Tree, name: str) -> Tree:
    """What entered the layer that stored the memory `name`."""
    memories = {stored: memory for stored, memory in side[SHARED].items() if stored != name}
    return without_stored(side) | ({SHARED: memories} if memories else {})


def check_side(side: Tree, read: frozenset[str], family: str) -> None:
    """Raises: UserError where what enters the first layer is not what layers `read`, by name."""
    given = for_all(side).keys() | side.get(BY_LAYER, {}).keys()
    if given != read:
        unread, missing = sorted(given - read), sorted(read - given)
        problem = f"side input '{unread[0]}' is read by no layer" if unread else f"side input '{missing[0]}' is missing"
        raise UserError(f"{problem} of this {family}", where="Inputs.side", fix=f"it takes: {sorted(read) or 'none'}")
