"""How tokens reach their experts: sorted on one device, or exchanged between devices.

`gather`: every device takes the tokens of all its ep neighbours, computes those of its own experts, and the sums are
added and returned. `all_to_all`: a device sends each of its tokens only to the devices of its experts, in rounds of
slots: the first round has room for somewhat more than an even share of them, and the rest follows in
further rounds, which are skipped where there is nothing left.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec
from jaxtyping import Array, Float, Int

from meshtune.kernels.grouped import order_by
from meshtune.mesh.layout import Layout
from meshtune.model.block import HEADROOM
from meshtune.model.compute import ExchangeName
from meshtune.model.linear import Groups
from meshtune.translatable import Translatable

# (rows [R, D], experts [R, k], weights [R, k], parameters) -> sums [R, D] over the experts of this device
Local = Callable[[Array, Array, Array, Any], Array]

_ALIGNED = 8  # slots are a multiple of this


class Choice(NamedTuple):
    """An exchange, and why it was chosen."""

    exchange: Literal["gather", "all_to_all"]
    reason: str


def choose_exchange(requested: ExchangeName, ep: int, top_k: int) -> Choice:
    """The exchange for `top_k` experts a token over `ep` devices."""
    if requested != "auto":
        return Choice(requested, Translatable("asked for"))
    if ep >= top_k:
        reason = Translatable(
            "auto: a token has {experts} experts on {devices} devices, and goes to theirs alone",
            experts=top_k,
            devices=ep,
        )
        return Choice("all_to_all", reason)
    reason = Translatable(
        "auto: a token has {experts} experts on {devices} devices: most tokens go to most of them anyway",
        experts=top_k,
        devices=ep,
    )
    return Choice("gather", reason)


def round_slots(tokens: int, top_k: int, ep: int, experts: int) -> tuple[int, int]:
    """(slots in a round for each pair of devices, the most rounds there can be); `experts` are those of a device."""
    rows = tokens * min(top_k, experts)
    even = math.ceil(HEADROOM * tokens * top_k / ep / _ALIGNED) * _ALIGNED
    slots = max(1, min(rows, even))
    return slots, math.ceil(rows / slots)


def by_gather(
    local: Local,
    x: Float[Array, "N D"],
    experts: Int[Array, "N k"],
    weights: Float[Array, "N k"],
    node: Any,
    count: int,
) -> Float[Array, "N D"]:
    """The sum over each token's experts; this device has `count` of all experts."""
    x, experts, weights = (lax.all_gather(part, "ep", tiled=True) for part in (x, experts, weights))
    y = local(x, experts - lax.axis_index("ep") * count, weights, node)
    return lax.psum_scatter(y, "ep", tiled=True)


def by_all_to_all(
    local: Local,
    x: Float[Array, "N D"],
    experts: Int[Array, "N k"],
    weights: Float[Array, "N k"],
    node: Any,
    count: int,
    ep: int,
    mesh_axes: tuple[str, ...],
) -> Float[Array, "N D"]:
    """The sum over each token's experts; this device has `count` of all experts.

    Rounds after the first keep nothing for the backward pass, which computes them again. Whether a round is needed is
    decided for all devices of `mesh_axes` alike, as programs with collectives must.
    """
    tokens, top_k = experts.shape
    slots, rounds = round_slots(tokens, top_k, ep, count)
    flat = experts.reshape(-1)
    flat = jnp.where((flat >= 0) & (flat < ep * count), flat, ep * count)
    order, place = order_by(flat, ep * count + 1)  # by device, and on a device by expert
    device = flat // count
    sizes = jnp.sum(device[:, None] == jnp.arange(ep), axis=0, dtype=jnp.int32)
    starts = jnp.cumsum(sizes) - sizes
    rank = place - jnp.append(starts, 0)[device]  # of each choice among those for the same device

    def one_round(number: Array | int, x: Array, weights: Array, node: Any) -> Array:
        within = rank - number * slots
        is_local = (within >= 0) & (within < slots) & (device < ep)
        slot = jnp.where(is_local, device * slots + within, ep * slots)  # of each choice; the last one is none
        index = number * slots + jnp.arange(slots)
        filled = index < sizes[:, None]
        source = order[jnp.where(filled, starts[:, None] + index, 0)]
        source = jnp.where(filled, source, tokens * top_k).reshape(-1)  # the choice in each slot
        sent = _to_slots(x, source, slot), _move_rows(weights.reshape(-1), source, slot)
        of_device = jnp.take(flat % count, source, mode="fill", fill_value=count)
        rows, factors, chosen = (_exchange_slots(part) for part in (*sent, of_device))
        back = _exchange_slots(local(rows, chosen[:, None], factors[:, None], node))
        return _move_rows(back, slot, source).reshape(tokens, top_k, -1).sum(axis=1)

    y = one_round(0, x, weights, node)
    if rounds == 1:
        return y
    needed = -(-lax.pmax(jnp.max(sizes), mesh_axes) // slots)

    @functools.partial(jax.checkpoint, prevent_cse=False)
    def further(number: Array, x: Array, weights: Array, node: Any) -> Array:
        return lax.cond(number < needed, one_round, lambda _, x, *__: jnp.zeros_like(x), number, x, weights, node)

    def add(total: Array, number: Array) -> tuple[Array, None]:
        return total + further(number, x, weights, node), None

    return lax.scan(add, y, jnp.arange(1, rounds))[0]


def _exchange_slots(slots: Array) -> Array:
    """Receives from the devices of ep, given the slots to send to each: [ep * slots, ..] in the order of devices."""
    return lax.all_to_all(slots, "ep", split_axis=0, concat_axis=0, tiled=True)


def _rows(rows: Array, index: Array) -> Array:
    """rows[index], zeros for an index beyond them."""
    return jnp.take(rows, index, axis=0, mode="fill", fill_value=0)


@jax.custom_vjp
def _move_rows(rows: Array, index: Array, inverse: Array) -> Array:
    """rows[index], zeros where an index is beyond the rows. No row is taken twice: `inverse` says which result is of
    each row, and so the gradient is a gather too."""
    return _rows(rows, index)


_move_rows.defvjp(
    lambda rows, index, inverse: (_rows(rows, index), inverse),
    lambda inverse, cotangent: (_rows(cotangent, inverse), None, None),
)


@jax.custom_vjp
def _to_slots(x: Array, source: Array, slot: Array) -> Array:
    """The row of x [N, D] for each slot; `source` is the choice [N * k] in a slot, `slot` the slot of each choice."""
    return _rows(x, source // (slot.shape[0] // x.shape[0]))


def _to_slots_backward(saved: tuple[Array, Array], cotangent: Array) -> tuple[Array, None, None]:
    x, slot = saved
    return _rows(cotangent, slot).reshape(x.shape[0], -1, x.shape[1]).sum(axis=1), None, None


_to_slots.defvjp(lambda x, source, slot: (_to_slots(x, source, slot), (x, slot)), _to_slots_backward)


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
