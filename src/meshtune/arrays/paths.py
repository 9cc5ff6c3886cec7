"""Names of the leaves of a tree that may hold registered pytree nodes, such as adapters, beside dicts."""

from __future__ import annotations

from typing import Any

import jax
from jaxtyping import PyTree

KeyPath = tuple[jax.tree_util.KeyEntry, ...]


def path_name(path: KeyPath) -> str:
    """A jax key path in the form of the parameter tree's own paths: layers/0.0/attn/q/adapter/a."""
    return jax.tree_util.keystr(path, simple=True, separator="/")


def named_leaves(tree: PyTree) -> list[tuple[str, Any]]:
    """(path, leaf) of every leaf, in the tree's order."""
    return [(path_name(path), leaf) for path, leaf in jax.tree_util.tree_flatten_with_path(tree)[0]]
