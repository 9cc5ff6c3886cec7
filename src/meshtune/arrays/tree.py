"""Trees of parameters: nested dicts with string keys, and the names of their leaves."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
from jaxtyping import PyTree

Tree = dict[str, Any]
Leaves = dict[str, Any]  # a tree without branches: {path: leaf}


def flatten(tree: Tree, prefix: str = "") -> Leaves:
    """{"a": {"b": x}} -> {"a/b": x}, in the tree's own order."""
    flat: Leaves = {}
    for key, value in tree.items():
        path = f"{prefix}{key}"
        if isinstance(value, dict):
            flat |= flatten(value, f"{path}/")
        else:
            flat[path] = value
    return flat


def unflatten(flat: Leaves) -> Tree:
    """The inverse of `flatten`."""
    tree: Tree = {}
    for path, value in flat.items():
        node = tree
        *parents, last = path.split("/")
        for key in parents:
            node = node.setdefault(key, {})
        node[last] = value
    return tree


def map_leaves(function: Callable[[Any], Any], tree: Tree) -> Tree:
    """A tree of the function's results, in the tree's own order, which jax.tree.map would change."""
    return {
        key: map_leaves(function, value) if isinstance(value, dict) else function(value) for key, value in tree.items()
    }


def split(tree: Tree, chosen: Callable[[str], bool]) -> tuple[Tree, Tree]:
    """(the leaves whose path is chosen, the others), both as trees without empty branches."""
    flat = flatten(tree)
    return (
        unflatten({path: leaf for path, leaf in flat.items() if chosen(path)}),
        unflatten({path: leaf for path, leaf in flat.items() if not chosen(path)}),
    )


def merge(first: Tree, second: Tree) -> Tree:
    """One tree with the leaves of both; a leaf both have is a defect and raises KeyError."""
    merged = dict(first)
    for key, value in second.items():
        if key not in merged:
            merged[key] = value
        elif isinstance(merged[key], dict) and isinstance(value, dict):
            merged[key] = merge(merged[key], value)
        else:
            raise KeyError(f"both trees have a leaf at '{key}'")
    return merged


KeyPath = tuple[jax.tree_util.KeyEntry, ...]


def path_name(path: KeyPath) -> str:
    """A jax key path in the form of the parameter tree's own paths: layers/0.0/attn/q/adapter/a."""
    return jax.tree_util.keystr(path, simple=True, separator="/")


def named_leaves(tree: PyTree) -> list[tuple[str, Any]]:
    """(path, leaf) of every leaf, in the tree's order."""
    return [(path_name(path), leaf) for path, leaf in jax.tree_util.tree_flatten_with_path(tree)[0]]


class StackPath(NamedTuple):
    """Where an array of stacked layers is: under which root ("" for the decoder, else such as "vision"), in which stack
    and position of its pattern ("0.1"), and where in a layer ("attn/q/weight")."""

    root: str
    key: str
    site: str


def stack_path(path: str) -> StackPath | None:
    """Takes the path of a node or leaf of stacked layers apart, "layers/0.1/attn/q" or "vision/layers/0.0/mlp/up"; None
    outside of layers."""
    parts = path.split("/")
    at = parts.index("layers") if "layers" in parts[:2] else len(parts)
    if at + 1 >= len(parts):
        return None
    return StackPath("/".join(parts[:at]), parts[at + 1], "/".join(parts[at + 2 :]))


def layer_site(path: str) -> str:
    """Where in a layer a node or leaf is, the same in every layer; outside of layers the path itself."""
    place = stack_path(path)
    return path if place is None else place.site
