"""Tokens sorted by expert and back, on one device and over a mesh. No token is dropped."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec
from jaxtyping import Array, Float, Int

from meshtune.kernels.row_order import order_by
from meshtune.mesh.layout import Layout
from meshtune.model.compute import ExchangeName
from meshtune.model.expert_exchange import by_all_to_all, by_gather, choose_exchange
from meshtune.model.linear import Groups

# (rows [R, D] sorted by expert, their weights [R], their groups, the experts' parameters) -> results [R, D]
Compute = Callable[[Array, Array, Groups, Any], Array]


def through_experts(
    compute: Compute,
    x: Float[Array, "N D"],
    experts: Int[Array, "N k"],
    weights: Float[Array, "N k"],
    node: Any,
    count: int,
) -> Float[Array, "N D"]:
    """The sum over a token's experts of `compute`, which multiplies by the weights itself.

    An entry of `experts` outside 0..count-1 is computed by none. Sums are always made in the same order.
    """
    flat = experts.reshape(-1)
    flat = jnp.where((flat >= 0) & (flat < count), flat, count)
    order, place = order_by(flat, count + 1)  # place: of each (token, choice) among the sorted rows
    of_row = flat[order]
    sizes = jnp.sum(flat[:, None] == jnp.arange(count), axis=0, dtype=jnp.int32)
    rows = _sorted_rows(x, order, place)
    results = compute(rows, _permute_rows(weights.reshape(-1), order, place), Groups(sizes, of_row), node)
    return _permute_rows(results, place, order).reshape(*experts.shape, -1).sum(axis=1)


@jax.custom_vjp
def _permute_rows(rows: Array, order: Array, place: Array) -> Array:
    """rows[order], whose gradient is a gather by `place`, the inverse permutation, and not a scatter."""
    return rows[order]


_permute_rows.defvjp(
    lambda rows, order, place: (rows[order], place), lambda place, cotangent: (cotangent[place], None, None)
)


@jax.custom_vjp
def _sorted_rows(x: Array, order: Array, place: Array) -> Array:
    """The rows of x [N, D], each once for every one of its k choices, in the order of experts: [N * k, D]."""
    return x[order // (order.shape[0] // x.shape[0])]


def _sorted_rows_backward(saved: tuple[Array, Array], cotangent: Array) -> tuple[Array, None, None]:
    x, place = saved
    return cotangent[place].reshape(x.shape[0], -1, x.shape[1]).sum(axis=1), None, None


_sorted_rows.defvjp(lambda x, order, place: (_sorted_rows(x, order, place), (x, place)), _sorted_rows_backward)


def over_mesh(
    compute: Compute,
    layout: Layout | None,
    x: Float[Array, "B T D"],
    experts: Int[Array, "B T k"],
    weights: Float[Array, "B T k"],
    node: Any,
    specs: Any,
    count: int,
    exchange: ExchangeName = "auto",
) -> Float[Array, "B T D"]:
    """`through_experts` for rows of a mesh; `specs` are the specs of the experts' parameters in use.

    Every device computes its own tokens, with its share of the experts' width over tp. Over ep each device holds
    count / ep experts, and tokens go to the devices of their experts and back by the `exchange`.
    """

    def local(x: Array, experts: Array, weights: Array, node: Any, split: bool, ep: int) -> Array:
        shape = x.shape
        x, experts, weights = (part.reshape(-1, part.shape[-1]) for part in (x, experts, weights))
        sums = functools.partial(through_experts, compute, count=count // ep)
        if ep == 1:
            y = sums(x, experts, weights, node)
        elif not split:  # all devices of ep have the same tokens
            y = lax.psum(sums(x, experts - lax.axis_index("ep") * (count // ep), weights, node), "ep")
        elif choose_exchange(exchange, ep, experts.shape[-1]).exchange == "gather":
            y = by_gather(sums, x, experts, weights, node, count // ep)
        else:
            assert layout is not None
            axes = tuple(str(axis) for axis in layout.mesh.axis_names)
            y = by_all_to_all(sums, x, experts, weights, node, count // ep, ep, axes)
        if layout is not None and layout.size("tp") > 1:
            y = lax.psum(y, "tp")
        return y.reshape(shape)

    if layout is None or layout.mesh.size == 1:
        return local(x, experts, weights, node, split=False, ep=1)
    rows = layout.spec(("batch", "length"), x.shape[:2])
    ep = layout.size("ep")
    batch = rows[0] if rows else None
    split = ep > 1 and "ep" in ((batch,) if isinstance(batch, str) else batch or ())
    tokens = PartitionSpec(*rows, *(None,) * (3 - len(rows)))
    function = functools.partial(local, split=split, ep=ep)
    # Sums over tp and ep are made above; the check cannot verify that through loops.
    mapped = jax.shard_map(
        function, mesh=layout.mesh, in_specs=(tokens, tokens, tokens, specs), out_specs=tokens, check_vma=False
    )
    return mapped(x, experts, weights, node)
