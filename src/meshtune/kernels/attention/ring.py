"""Blockwise attention over a mesh; where rows are split over devices, keys and values go round a ring of them.

Ring attention (Liu et al., arXiv:2310.01889). Each device keeps its part of the queries. The parts of the keys and
values, with their positions and segments, move on from device to device, and each device adds what it holds to its
running softmax; the next part is on its way meanwhile. The backward pass is a second round, in which the gradients of
keys and values travel with them. Positions and segments alone decide who sees whom, so rows may be held in any order.
A part that no query of a device sees costs it the transfer alone.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import PartitionSpec

from meshtune.kernels.attention.blocks import (
    Tokens,
    bounds,
    from_kv_blocks,
    from_q_blocks,
    kv_blocks,
    kv_tokens,
    meeting,
    q_blocks,
    q_tokens,
    rows_of,
)
from meshtune.kernels.attention.products import (
    LOG_SUM_EXP,
    OUTPUT,
    Running,
    add_keys,
    backward,
    finish,
    forward,
    gradients,
    nothing_yet,
    output_slope,
)
from meshtune.kernels.attention.request import AttentionInputs, AttentionRequest
from meshtune.kernels.attention.split import AttentionSplit, over_mesh
from meshtune.kernels.attention.visibility import accumulator


class Held(NamedTuple):
    """The part of keys and values that a device has at the moment, in blocks [n, B,K,block,h]."""

    k: jax.Array
    v: jax.Array
    tokens: Tokens


def run(inputs: AttentionInputs, request: AttentionRequest, split: AttentionSplit) -> jax.Array:
    """[B,T,H,h] in q's dtype; `split` is fitted and `request` that of one device. First derivatives only."""
    return _attend(request, split, *inputs)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _attend(request: AttentionRequest, split: AttentionSplit, *inputs):
    return _forward(request, split, inputs)[0]


def _attend_forward(request: AttentionRequest, split: AttentionSplit, *inputs):
    # Outside the shard_map, so that a rematerialisation policy sees the names and nothing else is saved.
    out, log_sum_exp = _forward(request, split, inputs)
    out = checkpoint_name(out, OUTPUT)
    log_sum_exp = checkpoint_name(log_sum_exp, LOG_SUM_EXP)
    return out, (inputs, out, log_sum_exp)


def _attend_backward(request: AttentionRequest, split: AttentionSplit, saved, d_out):
    inputs, out, log_sum_exp = saved
    queries, keys, _ = split.specs

    def here(*arrays):
        return _backward_here(request, split, AttentionInputs(*arrays[:8]), *arrays[8:])

    more_in = (queries, _row_spec(split), queries)
    dq, dk, dv = over_mesh(here, split, more_in, (queries, keys, keys))(*inputs, out, log_sum_exp, d_out)
    return dq, dk, dv, None, None, None, None, None


_attend.defvjp(_attend_forward, _attend_backward)


def _forward(request: AttentionRequest, split: AttentionSplit, inputs):
    def here(*arrays):
        return _forward_here(request, split, AttentionInputs(*arrays))

    return over_mesh(here, split, (), (split.specs[0], _row_spec(split)))(*inputs)


def _row_spec(split: AttentionSplit) -> PartitionSpec:
    """Of a number for each row of scores, in blocks [n, B,K,R]."""
    return PartitionSpec(split.length, split.batch or None, split.heads, None)


def _forward_here(request: AttentionRequest, split: AttentionSplit, inputs: AttentionInputs):
    """One device's output [B,T,H,h] and log-sum-exp, in blocks."""
    inputs = own_key_heads(request, split, inputs)
    if request.ring == 1:
        return forward(request, inputs.q, inputs.k, inputs.v, rows_of(inputs, request))
    q, queries, held = q_blocks(request, inputs.q), q_tokens(request, inputs), _held(request, inputs)

    def meet(running: Running, held: Held) -> Running:
        rows = meeting(request, queries, held.tokens, inputs.slopes)

        def one_q_block(_, this):
            running_i, q_i, tokens_i, start, stop = this
            keys = held.k, held.v, rows.keys
            return None, add_keys(request, running_i, q_i, tokens_i, *keys, start, stop, rows.slopes)

        def add(running: Running) -> Running:
            return jax.lax.scan(one_q_block, None, (running, q, rows.queries, *bounds(rows.seen)))[1]

        return jax.lax.cond(rows.seen.any(), add, lambda running: running, running)

    def step(carry, _):
        running, held = carry
        arriving = passed_on(held, split)
        return (meet(running, held), arriving), None

    (running, held), _ = jax.lax.scan(step, (nothing_yet(q), held), None, length=request.ring - 1)
    out, log_sum_exp = finish(meet(running, held))
    return from_q_blocks(request, out.astype(q.dtype)), log_sum_exp


def _backward_here(request: AttentionRequest, split: AttentionSplit, inputs: AttentionInputs, out, log_sum_exp, d_out):
    """One device's gradients of q, k and v."""
    whole, sums = inputs.k, accumulator(inputs.k.dtype)
    inputs = own_key_heads(request, split, inputs)
    if request.ring == 1:
        rows = rows_of(inputs, request)
        dq, *d_keys = backward(request, inputs.q, inputs.k, inputs.v, rows, out, log_sum_exp, d_out, sums)
    else:
        dq, *d_keys = _backward_in_ring(request, split, inputs, out, log_sum_exp, d_out)
    dk, dv = (split.sum_key_heads(x, whole.shape[2], request).astype(whole.dtype) for x in d_keys)
    return dq, dk, dv


def _backward_in_ring(
    request: AttentionRequest, split: AttentionSplit, inputs: AttentionInputs, out, log_sum_exp, d_out
):
    sums = accumulator(inputs.q.dtype)
    q, queries, held = q_blocks(request, inputs.q), q_tokens(request, inputs), _held(request, inputs)
    delta = q_blocks(request, output_slope(out, d_out))[..., 0]
    d_out = q_blocks(request, d_out)

    def meet(dq, held: Held):
        rows = meeting(request, queries, held.tokens, inputs.slopes)

        def add(dq):
            return gradients(request, q, d_out, log_sum_exp, delta, held.k, held.v, rows, dq, sums)

        def leave(dq):
            return dq, (jnp.zeros(held.k.shape, sums), jnp.zeros(held.v.shape, sums))

        return jax.lax.cond(rows.seen.any(), add, leave, dq)

    def step(carry, _):
        # The gradients of a part follow it one step behind, so that nothing on its way is waited for here.
        dq, behind, held = carry
        arriving, caught_up = passed_on((held, behind), split)
        dq, mine = meet(dq, held)
        return (dq, jax.tree.map(jnp.add, caught_up, mine), arriving), None

    dq, behind = meet(jnp.zeros(q.shape, sums), held)
    carry = dq, behind, passed_on(held, split)
    (dq, behind, _), _ = jax.lax.scan(step, carry, None, length=request.ring - 1)
    home = passed_on(behind, split)
    return from_q_blocks(request, dq).astype(inputs.q.dtype), *(from_kv_blocks(request, x) for x in home)


def own_key_heads(request: AttentionRequest, split: AttentionSplit, inputs: AttentionInputs) -> AttentionInputs:
    k, v = (split.own_key_heads(x, request) for x in (inputs.k, inputs.v))
    return inputs._replace(k=k, v=v)


def _held(request: AttentionRequest, inputs: AttentionInputs) -> Held:
    return Held(kv_blocks(request, inputs.k), kv_blocks(request, inputs.v), kv_tokens(request, inputs))


def passed_on(tree: Any, split: AttentionSplit) -> Any:
    """What the device before in the ring holds."""
    size = split.size(split.length)
    return jax.lax.ppermute(tree, split.length, [(i, (i + 1) % size) for i in range(size)])
