"""Rows of the embedding, or of the output head, that are trained while the others stay as they are."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
from jaxtyping import Array, Float

from meshtune.arrays.spec import ArraySpec
from meshtune.arrays.tree import Tree

ROWS = "rows"  # their place in the node of the weight they belong to


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class TokenRows:
    """`values` [n, D] stand in the place of the rows `ids` of the weight [V, D] beside them."""

    values: Any
    ids: tuple[int, ...] = dataclasses.field(metadata={"static": True})

    @classmethod
    def abstract(cls, weight: ArraySpec, ids: tuple[int, ...], dtype: str) -> TokenRows:
        """With an ArraySpec for the array."""
        return cls(ArraySpec((len(ids), weight.shape[1]), dtype, ("whole", weight.axes[1]), role=weight.role), ids)

    def of(self, weight: Float[Array, "V D"]) -> Array:
        """The rows as the weight has them, in this one's dtype."""
        return weight[jax.numpy.asarray(self.ids)].astype(self.values.dtype)

    def merge(self, weight: Float[Array, "V D"]) -> Float[Array, "V D"]:
        """The weight with these rows, in its own dtype."""
        values = self.values.astype(weight.dtype)
        first = self.ids[0]
        if self.ids == tuple(range(first, first + len(self.ids))):
            return jax.lax.dynamic_update_slice(weight, values, (first, 0))
        return weight.at[jax.numpy.asarray(self.ids)].set(values)


def table(node: Tree) -> Array:
    """The weight of an embedding's or a head's node, with the rows that are trained apart."""
    rows = node.get(ROWS)
    return node["weight"] if rows is None else rows.merge(node["weight"])


def folded(params: Tree) -> Tree:
    """Parameters whose tables hold the rows that were trained apart: for many forward passes."""
    nodes = {name: node for name, node in params.items() if isinstance(node, dict) and ROWS in node}
    tables = {name: node | {"weight": jax.jit(table)(node)} for name, node in nodes.items()}
    return params | {name: {key: leaf for key, leaf in node.items() if key != ROWS} for name, node in tables.items()}
