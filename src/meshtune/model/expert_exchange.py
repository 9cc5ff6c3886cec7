"""How the tokens of a layer of experts reach the devices of their experts, over the mesh axis ep. No token is dropped.

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
from jaxtyping import Array, Float, Int

from meshtune.kernels.row_order import order_by
from meshtune.model.compute import ExchangeName
from meshtune.translatable import Translatable

# (rows [R, D], experts [R, k], weights [R, k], parameters) -> sums [R, D] over the experts of this device
Local = Callable[[Array, Array, Array, Any], Array]

HEADROOM = 1.5  # slots of a round over an even share of the rows
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
