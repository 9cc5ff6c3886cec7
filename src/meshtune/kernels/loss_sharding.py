"""How a mesh shards a loss: which axes split rows and vocabulary, and which results are summed over which axes."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
from jax.sharding import AbstractMesh, Mesh, PartitionSpec
from jaxtyping import PyTree

# What a result is: "sum" (a scalar), "token" (a number per position), "hidden" (like the hidden states), or ("head", n)
# (the gradient of leaf n of the head).
ResultKind = str | tuple[str, int]


@dataclasses.dataclass(frozen=True)
class LossSharding:
    """The sharding of a loss's arrays. `rows` is the spec of [B, T], `head` those of the head's leaves in order.

    `vocab` is the mesh axis that splits the vocabulary, or None.
    """

    mesh: Mesh | AbstractMesh
    rows: PartitionSpec
    head: tuple[PartitionSpec, ...]
    vocab: str | None = None

    def reduction_axes(self, kind: ResultKind) -> tuple[str, ...]:
        """The axes over which a result is a partial sum on each device."""
        vocab = () if self.vocab is None else (self.vocab,)
        if kind == "sum":
            return _axes(self.rows)
        if kind == "token":
            return ()
        if kind == "hidden":
            return vocab
        return _axes(self.rows) + tuple(axis for axis in vocab if axis not in _axes(self.head[_leaf(kind)]))

    def spec(self, kind: ResultKind) -> PartitionSpec:
        """The sharding of a result."""
        if kind == "sum":
            return PartitionSpec()
        return self.rows if kind in ("token", "hidden") else self.head[_leaf(kind)]


def over_mesh(function: Callable[..., Any], sharding: LossSharding | None, results: PyTree) -> Callable[..., Any]:
    """Maps `function(vocab axis, head leaves, hidden, targets, weights)` over devices and sums its partial results.

    `results` is the tree of kinds of what it returns (None for no result). Without a split the function is called as it
    is, with a vocab axis of None.
    """
    if sharding is None:
        return functools.partial(function, None)

    def local(*arguments: PyTree) -> PyTree:
        return jax.tree.map(sum_over_axes, results, function(sharding.vocab, *arguments), is_leaf=_is_kind)

    def sum_over_axes(kind: ResultKind | None, partial: jax.Array) -> jax.Array:
        axes = () if kind is None else sharding.reduction_axes(kind)
        return jax.lax.psum(partial, axes) if axes else partial

    specs = jax.tree.map(lambda kind: None if kind is None else sharding.spec(kind), results, is_leaf=_is_kind)
    in_specs = (list(sharding.head), sharding.rows, sharding.rows, sharding.rows)
    # Each result is summed over exactly the axes over which it is partial; the check cannot verify that through loops.
    return jax.shard_map(local, mesh=sharding.mesh, in_specs=in_specs, out_specs=specs, check_vma=False)


def _is_kind(x: object) -> bool:
    return x is None or isinstance(x, str) or (isinstance(x, tuple) and len(x) == 2 and x[0] == "head")


def _leaf(kind: ResultKind) -> int:
    assert not isinstance(kind, str), kind
    return kind[1]


def _axes(spec: PartitionSpec) -> tuple[str, ...]:
    entries = [() if entry is None else (entry,) if isinstance(entry, str) else tuple(entry) for entry in spec]
    return tuple(axis for entry in entries for axis in entry)
