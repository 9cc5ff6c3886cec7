"""Cross-entropy over a mesh: which axes split rows and vocabulary, and what is summed over which."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
from jax.sharding import AbstractMesh, Mesh, PartitionSpec


@dataclasses.dataclass(frozen=True)
class LossSplit:
    """How the arrays of a loss lie. `rows` is the spec of [B, T], `head` those of the head's leaves, in their order.

    `vocab` is the mesh axis that splits the vocabulary, None where it is whole on every device.
    """

    mesh: Mesh | AbstractMesh
    rows: PartitionSpec
    head: tuple[PartitionSpec, ...]
    vocab: str | None = None

    @property
    def data(self) -> tuple[str, ...]:
        """The axes that split rows or positions."""
        return _names(self.rows)

    def summed_over(self, kind: Any) -> tuple[str, ...]:
        """The axes over which a result is in parts: "sum", "token" (a number of every position), "hidden", or
        ("head", n) for the gradient of leaf n."""
        vocab = () if self.vocab is None else (self.vocab,)
        if kind == "sum":
            return self.data
        if kind == "token":
            return ()
        if kind == "hidden":
            return vocab
        return self.data + tuple(axis for axis in vocab if axis not in _names(self.head[kind[1]]))

    def spec(self, kind: Any) -> PartitionSpec:
        """Where a result of this kind lies."""
        return PartitionSpec() if kind == "sum" else self.rows if kind in ("token", "hidden") else self.head[kind[1]]


def over_mesh(function: Callable[..., Any], split: LossSplit | None, results: Any) -> Callable[..., Any]:
    """`function(vocab, head leaves, hidden, targets, weights)` on each device's own rows and vocabulary, summed up.

    `results` is the tree of kinds (see `LossSplit.summed_over`; None for no result) of what it returns.
    """
    if split is None:
        return functools.partial(function, None)

    def here(*arguments: Any) -> Any:
        parts = function(split.vocab, *arguments)
        return jax.tree.map(_summed, results, parts, is_leaf=_is_kind)

    def _summed(kind: Any, part: Any) -> Any:
        axes = () if kind is None else split.summed_over(kind)
        return jax.lax.psum(part, axes) if axes else part

    specs = jax.tree.map(lambda kind: None if kind is None else split.spec(kind), results, is_leaf=_is_kind)
    in_specs = (list(split.head), split.rows, split.rows, split.rows)
    # Each result is summed over exactly the axes it is in parts over; the check cannot follow that through the loop.
    return jax.shard_map(here, mesh=split.mesh, in_specs=in_specs, out_specs=specs, check_vma=False)


def _is_kind(x: Any) -> bool:
    return x is None or isinstance(x, str) or (isinstance(x, tuple) and len(x) == 2 and x[0] == "head")


def _names(spec: PartitionSpec) -> tuple[str, ...]:
    parts = [() if part is None else (part,) if isinstance(part, str) else tuple(part) for part in spec]
    return tuple(name for part in parts for name in part)
