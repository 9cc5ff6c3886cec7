"""Attention in a ring of devices, each with a part of every row.

Ring attention (Liu et al., arXiv:2310.01889). Each device keeps its shard of the queries. The shards of keys and
values, with their positions and segments, rotate from device to device, and each device adds the shard it has to its
running softmax while the next shard is being transferred. The backward pass is a second rotation, in which the
gradients of keys and values travel with them. Visibility depends on positions and segments only, so the tokens of a row
may be stored in any order. A shard that no query of a device sees costs that device only the transfer.
"""

from __future__ import annotations

import functools
from typing import NamedTuple, TypeVar

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import PartitionSpec

from meshtune.kernels.attention import online_softmax
from meshtune.kernels.attention.backend import AttentionInputs, AttentionRequest, AttentionSharding, accumulator
from meshtune.kernels.attention.blocks import (
    TokenBlocks,
    block_mask,
    from_kv_blocks,
    from_q_blocks,
    inputs_mask,
    kv_blocks,
    kv_token_blocks,
    q_blocks,
    q_token_blocks,
)
from meshtune.kernels.attention.online_softmax import (
    LOG_SUM_EXP,
    OUTPUT,
    RunningSoftmax,
    accumulate_grads,
    accumulate_keys,
    backward,
    empty_softmax,
    finish,
    forward,
    output_delta,
)

Tree = TypeVar("Tree")
FIELDS = len(AttentionInputs._fields)


class KeyShard(NamedTuple):
    """The shard of keys and values that a device has at the moment, in blocks [n, B,K,block,h]."""

    k: jax.Array
    v: jax.Array
    tokens: TokenBlocks


def run(inputs: AttentionInputs, request: AttentionRequest, sharding: AttentionSharding) -> jax.Array:
    """[B,T,H,h] in q's dtype; `sharding` is fitted and `request` is that of one device. First derivatives only."""
    return _attend(request, sharding, *inputs)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _attend(request: AttentionRequest, sharding: AttentionSharding, *inputs: jax.Array):
    return _forward(request, sharding, inputs)[0]


def _attend_forward(request: AttentionRequest, sharding: AttentionSharding, *inputs: jax.Array):
    # The names are outside the shard_map, so that a rematerialisation policy sees them and saves nothing else.
    out, log_sum_exp = _forward(request, sharding, inputs)
    out = checkpoint_name(out, OUTPUT)
    log_sum_exp = checkpoint_name(log_sum_exp, LOG_SUM_EXP)
    return out, (inputs, out, log_sum_exp)


def _attend_backward(request: AttentionRequest, sharding: AttentionSharding, residuals, d_out: jax.Array):
    inputs, out, log_sum_exp = residuals
    queries, keys, _ = sharding.specs

    def backward_local(*arrays):
        return _backward_local(request, sharding, AttentionInputs(*arrays[:FIELDS]), *arrays[FIELDS:])

    extra_in_specs = (queries, _log_sum_exp_spec(sharding), queries)
    mapped = sharding.shard_map(backward_local, extra_in_specs, (queries, keys, keys, sharding.of_heads))
    dq, dk, dv, d_sinks = mapped(*inputs, out, log_sum_exp, d_out)
    return dq, dk, dv, None, None, None, None, None, d_sinks, None, None


_attend.defvjp(_attend_forward, _attend_backward)


def _forward(request: AttentionRequest, sharding: AttentionSharding, inputs: tuple[jax.Array, ...]):
    def forward_local(*arrays):
        return _forward_local(request, sharding, AttentionInputs(*arrays))

    return sharding.shard_map(forward_local, (), (sharding.specs[0], _log_sum_exp_spec(sharding)))(*inputs)


def _log_sum_exp_spec(sharding: AttentionSharding) -> PartitionSpec:
    """Of the log-sum-exp of each row of scores, in blocks [n, B,K,R]."""
    return PartitionSpec(sharding.length, sharding.batch or None, sharding.heads, None)


def _forward_local(request: AttentionRequest, sharding: AttentionSharding, inputs: AttentionInputs):
    """One device's output [B,T,H,h] and log-sum-exp, in blocks."""
    inputs = sharding.with_local_key_heads(inputs, request)
    if request.ring == 1:
        results = forward(request, inputs.q, inputs.k, inputs.v, inputs_mask(request, inputs))
        return online_softmax.in_blocks(request, *results, inputs.sinks)
    q, queries, shard = q_blocks(request, inputs.q), q_token_blocks(request, inputs), _key_shard(request, inputs)

    def accumulate_shard(running: RunningSoftmax, shard: KeyShard) -> RunningSoftmax:
        mask = block_mask(request, queries, shard.tokens, inputs.slopes)

        def accumulate_query_block(_, xs):
            running_i, q_i, tokens_i, visits = xs
            keys = shard.k, shard.v, mask.keys
            return None, accumulate_keys(request, running_i, q_i, tokens_i, *keys, visits, mask.slopes)

        def accumulate(running: RunningSoftmax) -> RunningSoftmax:
            return jax.lax.scan(accumulate_query_block, None, (running, q, mask.queries, mask.visits))[1]

        return jax.lax.cond(mask.visible.any(), accumulate, lambda running: running, running)

    def step(carry, _):
        running, shard = carry
        next_shard = rotate(shard, sharding)
        return (accumulate_shard(running, shard), next_shard), None

    (running, shard), _ = jax.lax.scan(step, (empty_softmax(q), shard), None, length=request.ring - 1)
    out, log_sum_exp = finish(accumulate_shard(running, shard))
    return online_softmax.in_blocks(request, from_q_blocks(request, out.astype(q.dtype)), log_sum_exp, inputs.sinks)


def _backward_local(
    request: AttentionRequest,
    sharding: AttentionSharding,
    inputs: AttentionInputs,
    out: jax.Array,
    log_sum_exp: jax.Array,
    d_out: jax.Array,
):
    """One device's gradients of q, k and v, and those of all devices of sinks."""
    d_sinks = online_softmax.grads_in_blocks(request, inputs.sinks, out, log_sum_exp, d_out)
    kv_heads, kv_dtype, sum_dtype = inputs.k.shape[2], inputs.k.dtype, accumulator(inputs.k.dtype)
    inputs = sharding.with_local_key_heads(inputs, request)
    if request.ring == 1:
        mask = inputs_mask(request, inputs)
        dq, *d_keys = backward(request, inputs.q, inputs.k, inputs.v, mask, out, log_sum_exp, d_out, sum_dtype)
    else:
        dq, *d_keys = _backward_in_ring(request, sharding, inputs, out, log_sum_exp, d_out)
    dk, dv = (sharding.sum_key_heads(x, kv_heads, request).astype(kv_dtype) for x in d_keys)
    return dq, dk, dv, None if d_sinks is None else sharding.sum_over_tokens(d_sinks)


def _backward_in_ring(
    request: AttentionRequest,
    sharding: AttentionSharding,
    inputs: AttentionInputs,
    out: jax.Array,
    log_sum_exp: jax.Array,
    d_out: jax.Array,
):
    sum_dtype = accumulator(inputs.q.dtype)
    q, queries, shard = q_blocks(request, inputs.q), q_token_blocks(request, inputs), _key_shard(request, inputs)
    delta = q_blocks(request, output_delta(out, d_out))[..., 0]
    d_out = q_blocks(request, d_out)

    def shard_grads(dq: jax.Array, shard: KeyShard):
        mask = block_mask(request, queries, shard.tokens, inputs.slopes)

        def compute(dq):
            return accumulate_grads(request, q, d_out, log_sum_exp, delta, shard.k, shard.v, mask, dq, sum_dtype)

        def skip(dq):
            return dq, (jnp.zeros(shard.k.shape, sum_dtype), jnp.zeros(shard.v.shape, sum_dtype))

        return jax.lax.cond(mask.visible.any(), compute, skip, dq)

    def step(carry, _):
        # A shard's gradients follow it one step behind, so that no computation waits for a transfer.
        dq, previous_grads, shard = carry
        next_shard, shard_total = rotate((shard, previous_grads), sharding)
        dq, grads = shard_grads(dq, shard)
        return (dq, jax.tree.map(jnp.add, shard_total, grads), next_shard), None

    dq, grads = shard_grads(jnp.zeros(q.shape, sum_dtype), shard)
    carry = dq, grads, rotate(shard, sharding)
    (dq, grads, _), _ = jax.lax.scan(step, carry, None, length=request.ring - 1)
    d_keys = rotate(grads, sharding)  # back to the device that the shard belongs to
    return from_q_blocks(request, dq).astype(inputs.q.dtype), *(from_kv_blocks(request, x) for x in d_keys)


def _key_shard(request: AttentionRequest, inputs: AttentionInputs) -> KeyShard:
    return KeyShard(kv_blocks(request, inputs.k), kv_blocks(request, inputs.v), kv_token_blocks(request, inputs))


def rotate(tree: Tree, sharding: AttentionSharding) -> Tree:
    """Passes the arrays to the next device of the ring; returns those of the previous one."""
    size = sharding.size(sharding.length)
    return jax.lax.ppermute(tree, sharding.length, [(i, (i + 1) % size) for i in range(size)])
