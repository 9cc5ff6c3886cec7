"""Several LoRA adapters over one base in one batch, whose rows select theirs, or none.

At each weight the factors of all adapters lie side by side along the rank, so that weights are read once for all rows,
whatever they select. A row's narrow product is multiplied by its adapter's scale, and by zero in the ranks of others.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float, PyTree

from meshtune.adapters.kind import Weight
from meshtune.adapters.lora import widen
from meshtune.arrays.tree import Tree
from meshtune.model.linear import matmul


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class MultiLoRA:
    """The LoRAs of N adapters on one weight: A [R, in] and B [out, R], where R is the sum of their ranks.

    `scales` [N, R] are each adapter's scale in its own ranks, zero in the others, and `row_scales` [B, R] those of the
    rows of a batch; [1, R] is for all rows. Stacked layers lead all arrays.
    """

    a: Any
    b: Any
    scales: Any
    row_scales: Any

    def apply(
        self,
        x: Float[Array, "B *T i"],
        weight: Weight,
        key: Array | None = None,
        out: DTypeLike | None = None,
        fixed: PyTree = None,
    ) -> Float[Array, "B *T o"]:
        """The linear layer of every row with its adapter, without its bias, in `out` or x's dtype. Nothing is
        dropped."""
        y, narrow = matmul(x, weight, out), matmul(x, self.a)
        rows, rank = self.row_scales.shape
        assert rows in (1, x.shape[0]), f"adapters are selected for {rows} rows, of {x.shape[0]}"
        factors = self.row_scales.astype(narrow.dtype).reshape(rows, *(1,) * (x.ndim - 2), rank)
        # Selected, not multiplied by zero: what overflows in another row's adapter is none of this row's.
        return jnp.add(y, widen(jnp.where(factors == 0, 0, narrow * factors), self.b, y.dtype))

    def in_use(self, gathered: Callable[..., Array], axes: tuple[str, ...]) -> MultiLoRA:
        """The adapters laid out for computing by `gathered(array, *axes)`; `axes` are the weight's, (.., out, in)."""
        *lead, out, into = axes
        a, b = gathered(self.a, *lead, "rank", into), gathered(self.b, *lead, out, "rank")
        return dataclasses.replace(self, a=a, b=b)

    def of_rows(self, selection: Float[Array, "B N"]) -> MultiLoRA:
        """The same adapters; every row selects those where `selection` is one."""
        highest = jax.lax.Precision.HIGHEST
        row_scales = jnp.einsum("bn,...nr->...br", selection, self.scales, precision=highest)
        return dataclasses.replace(self, row_scales=row_scales)


def select(params: Tree, selection: Float[Array, "B N"] | None) -> Tree:
    """Parameters whose MultiLoRAs select adapters for the rows of a batch; None: the parameters unchanged."""
    if selection is None:
        return params

    def leaf(node: Any) -> Any:
        return node.of_rows(selection) if _is_multi(node) else node

    return jax.tree.map(leaf, params, is_leaf=_is_multi)


def adapter_count(params: Tree) -> int:
    """N, the number of adapters among which the rows of a batch select; 0 where there is nothing to select."""
    leaves = jax.tree.leaves(params, is_leaf=_is_multi)
    return next((leaf.scales.shape[-2] for leaf in leaves if _is_multi(leaf)), 0)


def _is_multi(leaf: Any) -> bool:
    return isinstance(leaf, MultiLoRA)
