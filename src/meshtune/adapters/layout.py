"""How layers are stacked when a method treats them differently.

Arrays are stacked over layers, so all layers of a stack must be trained, adapted and ranked alike. Where a choice
differs from layer to layer, the stacks are split at the boundaries; nothing else in the model changes.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Hashable, Mapping
from typing import Any

import jax
import jax.numpy as jnp

from meshtune.adapters.targets import modules
from meshtune.arrays.tree import Leaves, Tree, flatten, unflatten
from meshtune.model.spec import ModelSpec, stacks_of


def uniform(spec: ModelSpec, choice: Mapping[str, Hashable]) -> ModelSpec:
    """The spec with stacks split where needed, so that `choice` (by HF module name) is the same within a stack.

    A module that is not in `choice` differs from those that are.
    """
    signature: list[dict[str, Hashable]] = [{} for _ in range(spec.layers)]
    by_node: dict[str, set[Hashable]] = {}
    for name, module in modules(spec).items():
        if module.layer is not None:
            signature[module.layer][module.site] = choice.get(name)
            by_node.setdefault(module.node, set()).add(choice.get(name))
    if all(len(choices) == 1 for choices in by_node.values()):
        return spec
    flat = [layer for stack in spec.stacks for _ in range(stack.repeats) for layer in stack.pattern]
    starts = [at for at in range(spec.layers) if at == 0 or signature[at] != signature[at - 1]]
    parts = [flat[start:end] for start, end in zip(starts, [*starts[1:], spec.layers], strict=True)]
    return dataclasses.replace(spec, stacks=tuple(stack for part in parts for stack in stacks_of(part)))


def restack(params: Tree, old: ModelSpec, new: ModelSpec) -> Tree:
    """Converts parameters from the stacks of `old` to those of `new`. `params` is consumed: at most one stacked leaf
    exists twice."""
    if old == new:
        return params
    row_of = {n: (key, row) for key, _, _, numbers in old.positions() for row, n in enumerate(numbers)}
    outside, layers = dict(params), params.pop("layers")
    del outside["layers"]
    params.clear()
    sites: dict[str, None] = {}
    for key in list(layers):
        layers[key] = flatten(layers[key])
        sites |= dict.fromkeys(layers[key])
    moved: dict[str, Tree] = {key: {} for key, *_ in new.positions()}
    for site in sites:
        source = {key: leaves.pop(site) for key, leaves in layers.items() if site in leaves}
        for key, _, _, numbers in new.positions():
            moved[key][site] = _rows(source, [row_of[n] for n in numbers])
        jax.block_until_ready([leaves[site] for leaves in moved.values()])
    return outside | {"layers": {key: unflatten(leaves) for key, leaves in moved.items()}}


def _rows(source: Leaves, positions: list[tuple[str, int]]) -> Any:
    """Rows of stacked leaves, as (stack, row), of each array where a leaf is a pytree."""
    if not isinstance(next(iter(source.values())), jax.Array):
        parts = {key: jax.tree.leaves(leaf) for key, leaf in source.items()}
        numbers = range(len(next(iter(parts.values()))))
        arrays = [_rows({key: leaves[n] for key, leaves in parts.items()}, positions) for n in numbers]
        return jax.tree.unflatten(jax.tree.structure(next(iter(source.values()))), arrays)
    keys = {key for key, _ in positions}
    if len(keys) == 1:
        rows = [row for _, row in positions]
        stack = source[keys.pop()]
        if rows == list(range(stack.shape[0])):
            return stack
        return stack[rows[0] : rows[-1] + 1] if rows == list(range(rows[0], rows[-1] + 1)) else stack[jnp.array(rows)]
    return jnp.stack([source[key][row] for key, row in positions])
