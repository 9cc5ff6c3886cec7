"""Several adapters of one base in a batch, each row with its own.

At each weight the factors of all adapters lie side by side along the rank, so that weights are read once for all rows,
whatever they select. A row's narrow product is multiplied by its adapter's scale, and by zero in the ranks of others.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike
from jaxtyping import Array, Float, PyTree

from meshtune.adapters.kind import Weight
from meshtune.adapters.lora import LoRA, widen
from meshtune.adapters.method import held_weight
from meshtune.adapters.peft_format import LoadedAdapter, check_copies
from meshtune.adapters.placement import place_arrays
from meshtune.arrays.spec import ArraySpec
from meshtune.arrays.tree import Tree, flatten, stack_path, unflatten
from meshtune.mesh.layout import Layout
from meshtune.model.linear import matmul
from meshtune.model.spec import ModelSpec, abstract_params


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


@dataclasses.dataclass(frozen=True, eq=False)
class AdapterSet:
    """A base with adapters that share a batch. `names` are theirs, in the order of their numbers."""

    params: Tree
    names: tuple[str, ...]

    @classmethod
    def over(
        cls, params: Tree, spec: ModelSpec, adapters: Mapping[str, LoadedAdapter], layout: Layout | None = None
    ) -> AdapterSet:
        """The base `params` with adapters for which `needs_own_batch` has no reason; its arrays are not copied.

        `layout` is that of `params`; the adapters themselves are on the default device. Raises UserError where an
        adapter carries weights of its base that are not this base's.
        """
        for adapter in adapters.values():
            check_copies(params, spec, adapter)
        combined = _combine_adapters(spec, list(adapters.values()))
        leaves = {path: _place_adapter(path, leaf, spec, layout) for path, leaf in combined.items()}
        return cls(unflatten(flatten(params) | leaves), tuple(adapters))

    def number(self, name: str) -> int | None:
        """The number of an adapter, which a request names; None for the base without an adapter."""
        return self.names.index(name) if name in self.names else None


def needs_own_batch(adapter: LoadedAdapter, base: ModelSpec) -> str | None:
    """Why an adapter cannot share a batch with others over a base; None if it can."""
    leaves = flatten(adapter.trainable).values()
    if adapter.config.adapter != "lora":
        return f"its adapters are of the kind {adapter.config.adapter}"
    if adapter.frozen or not all(isinstance(leaf, LoRA) for leaf in leaves):
        return "it has modules or rows that were trained in full"
    if (adapter.spec.tied, adapter.spec.scored) != (base.tied, base.scored):
        return "it has a head of its own"
    if any(leaf.a.ndim > 3 for leaf in leaves):
        return "it adapts experts"
    if not all(np.isfinite(array).all() for array in jax.tree.leaves(adapter.trainable)):
        return "its weights hold NaN or infinity"
    return None


class _Factors(NamedTuple):
    """A LoRA of one weight: a [r, in], b [out, r]."""

    a: np.ndarray
    b: np.ndarray
    scale: float


# A root, a layer's number (None: outside of the layers) and the path of a node.
_Place = tuple[str, int | None, str]


def _factors(adapter: LoadedAdapter) -> dict[_Place, _Factors]:
    """An adapter's LoRAs by place, however its layers are stacked."""
    numbers = adapter.spec.layer_numbers()
    factors: dict[_Place, _Factors] = {}
    for path, leaf in flatten(adapter.trainable).items():
        node = path.rpartition("/")[0]
        a, b = np.asarray(leaf.a), np.asarray(leaf.b)
        if (place := stack_path(node)) is None:
            factors["", None, node] = _Factors(a, b, leaf.scale)
            continue
        rows = enumerate(numbers[place.root, place.key])
        factors |= {(place.root, layer, place.site): _Factors(a[n], b[n], leaf.scale) for n, layer in rows}
    return factors


def _combine_adapters(spec: ModelSpec, adapters: Sequence[LoadedAdapter]) -> dict[str, MultiLoRA]:
    """The MultiLoRAs of a base by path, of NumPy's arrays. Where the layers of one stack differ in rank, the smaller
    ones are filled up with zeros."""
    factors = [_factors(adapter) for adapter in adapters]
    places = dict.fromkeys(place for of_adapter in factors for place in of_adapter)
    leaves: dict[str, MultiLoRA] = {}
    for node in (node for _, layer, node in places if layer is None):
        parts = [[of_adapter.get(("", None, node))] for of_adapter in factors]
        leaves[f"{node}/adapter"] = jax.tree.map(lambda array: array[0], _side_by_side(parts))
    for (root, key), numbers in spec.layer_numbers().items():
        for site in dict.fromkeys(site for place, layer, site in places if place == root and layer in numbers):
            parts = [[of_adapter.get((root, number, site)) for number in numbers] for of_adapter in factors]
            leaves[f"{root}/layers/{key}/{site}/adapter".removeprefix("/")] = _side_by_side(parts)
    return leaves


def _side_by_side(parts: Sequence[Sequence[_Factors | None]]) -> MultiLoRA:
    """The adapters of one weight in the layers of a stack, from `parts`: of each adapter, in each layer."""
    present = [[part for part in layers if part is not None] for layers in parts]
    ranks = [max((len(part.a) for part in layers), default=0) for layers in present]
    sample = next(part for layers in present for part in layers)
    count, rank = len(parts[0]), sum(ranks)
    a = np.zeros((count, rank, sample.a.shape[1]), sample.a.dtype)
    b = np.zeros((count, sample.b.shape[0], rank), sample.b.dtype)
    scales = np.zeros((count, len(parts), rank), np.float32)
    for number, layers in enumerate(parts):
        start = sum(ranks[:number])
        for layer, part in enumerate(layers):
            if part is not None:
                ranks_of_part = slice(start, start + len(part.a))
                a[layer, ranks_of_part], b[layer, :, ranks_of_part] = part.a, part.b
                scales[layer, number, ranks_of_part] = part.scale
    return MultiLoRA(a, b, scales, np.zeros((count, 1, rank), np.float32))


def _place_adapter(path: str, leaf: MultiLoRA, spec: ModelSpec, layout: Layout | None) -> MultiLoRA:
    """A MultiLoRA on the devices, sharded like the weight that it adapts."""
    arrays = flatten(abstract_params(spec))
    node = path.removesuffix("/adapter")
    weight = arrays[held_weight(node, spec)]
    *lead, out, into = weight.axes

    def form(array: np.ndarray, *axes: str) -> ArraySpec:
        return ArraySpec(array.shape, str(array.dtype), axes, role=weight.role)

    forms = MultiLoRA(
        form(leaf.a, *lead, "rank", into),
        form(leaf.b, *lead, out, "rank"),
        form(leaf.scales, *lead, "whole", "whole"),
        form(leaf.row_scales, *lead, "whole", "whole"),
    )
    return place_arrays(leaf, forms, layout)
