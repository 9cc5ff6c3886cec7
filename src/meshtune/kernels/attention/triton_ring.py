"""Flash attention over a mesh; if rows are sharded over devices, keys and values circulate in a ring.

As in `ring`, but the computation on a shard is one kernel call. The forward pass returns the shard's output with its
log-sum-exp, from which the results of two shards are merged. The backward pass takes the log-sum-exp over all shards
and returns the gradients that this shard contributes.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import PartitionSpec

from meshtune.kernels.attention import online_softmax
from meshtune.kernels.attention.backend import AttentionInputs, AttentionRequest, AttentionSharding
from meshtune.kernels.attention.online_softmax import LOG_SUM_EXP, OUTPUT
from meshtune.kernels.attention.ring import rotate
from meshtune.kernels.attention.triton import without_order
from meshtune.kernels.attention.triton_kernels import backward, forward, padded_delta

FIELDS = len(AttentionInputs._fields)


class KeyShard(NamedTuple):
    """The shard of keys and values that a device has at the moment, with its tokens: fields of AttentionInputs."""

    k: jax.Array
    v: jax.Array
    kv_positions: jax.Array
    kv_segments: jax.Array


def run(
    inputs: AttentionInputs, request: AttentionRequest, sharding: AttentionSharding, *, interpret: bool = False
) -> jax.Array:
    """[B,T,H,h] in q's dtype; `sharding` is fitted and `request` is that of one device. First derivatives only."""
    return _attend(request, sharding, interpret, *without_order(inputs, request))


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1, 2))
def _attend(request: AttentionRequest, sharding: AttentionSharding, interpret: bool, *inputs):
    return _forward(request, sharding, interpret, inputs)[0]


def _attend_forward(request: AttentionRequest, sharding: AttentionSharding, interpret: bool, *inputs):
    # The names are outside the shard_map, so that a rematerialisation policy sees them and saves nothing else.
    out, log_sum_exp = _forward(request, sharding, interpret, inputs)
    out = checkpoint_name(out, OUTPUT)
    log_sum_exp = checkpoint_name(log_sum_exp, LOG_SUM_EXP)
    return out, (inputs, out, log_sum_exp)


def _attend_backward(request: AttentionRequest, sharding: AttentionSharding, interpret: bool, residuals, d_out):
    inputs, out, log_sum_exp = residuals
    queries, keys, _ = sharding.specs

    def backward_local(*arrays):
        return _backward_local(request, sharding, interpret, AttentionInputs(*arrays[:FIELDS]), *arrays[FIELDS:])

    extra_in_specs = (queries, _log_sum_exp_spec(sharding), queries)
    mapped = sharding.shard_map(backward_local, extra_in_specs, (queries, keys, keys, sharding.of_heads))
    dq, dk, dv, d_sinks = mapped(*inputs, out, log_sum_exp, d_out)
    return dq, dk, dv, None, None, None, None, None, d_sinks, None, None


_attend.defvjp(_attend_forward, _attend_backward)


def _forward(request: AttentionRequest, sharding: AttentionSharding, interpret: bool, inputs):
    def forward_local(*arrays):
        return _forward_local(request, sharding, interpret, AttentionInputs(*arrays))

    return sharding.shard_map(forward_local, (), (sharding.specs[0], _log_sum_exp_spec(sharding)))(*inputs)


def _log_sum_exp_spec(sharding: AttentionSharding) -> PartitionSpec:
    """Of the log-sum-exp of each query and head [B,H,T]."""
    return PartitionSpec(sharding.batch or None, sharding.heads, sharding.length)


def _forward_local(request: AttentionRequest, sharding: AttentionSharding, interpret: bool, inputs: AttentionInputs):
    """One device's output [B,T,H,h] and log-sum-exp [B,H,T padded]."""
    inputs = sharding.with_local_key_heads(inputs, request)
    if request.ring == 1:
        return online_softmax.by_head(*forward(request, inputs, inputs.q.dtype, interpret), inputs.sinks)

    def attend_shard(shard: KeyShard):
        return forward(request, _with_shard(inputs, shard), jnp.float32, interpret)

    def step(carry, _):
        merged, shard = carry
        next_shard = rotate(shard, sharding)
        return (_merge(merged, attend_shard(shard)), next_shard), None

    shard = KeyShard(inputs.k, inputs.v, inputs.kv_positions, inputs.kv_segments)
    carry = attend_shard(shard), rotate(shard, sharding)
    (merged, shard), _ = jax.lax.scan(step, carry, None, length=request.ring - 2)
    out, log_sum_exp = _merge(merged, attend_shard(shard))
    return online_softmax.by_head(out.astype(inputs.q.dtype), log_sum_exp, inputs.sinks)


def _merge(first: tuple[jax.Array, jax.Array], second: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
    """The output and log-sum-exp over two shards of the keys, from those over each; a shard without a visible key
    has weight 0."""
    (out1, lse1), (out2, lse2) = first, second
    maximum = jnp.maximum(lse1, lse2)
    weight1, weight2 = jnp.exp(lse1 - maximum), jnp.exp(lse2 - maximum)
    total = weight1 + weight2

    def weigh(out: jax.Array, weight: jax.Array) -> jax.Array:
        return out * (weight / total)[:, :, : out.shape[1]].swapaxes(1, 2)[..., None]

    return weigh(out1, weight1) + weigh(out2, weight2), maximum + jnp.log(total)


def _backward_local(
    request: AttentionRequest, sharding: AttentionSharding, interpret: bool, inputs: AttentionInputs, out, lse, d_out
):
    """One device's gradients of q, k and v, and those of all devices of sinks."""
    kv_heads, kv_dtype = inputs.k.shape[2], inputs.k.dtype
    inputs = sharding.with_local_key_heads(inputs, request)
    delta = padded_delta(out, d_out, lse.shape[2])
    d_sinks = online_softmax.grads_by_head(inputs.sinks, lse, delta)
    dtypes = (jnp.float32,) * 3

    def shard_grads(shard: KeyShard):
        dq, dk, dv = backward(request, _with_shard(inputs, shard), lse, delta, d_out, dtypes, interpret)
        return dq, (dk, dv)

    def step(carry, _):
        # A shard's gradients follow it one step behind, so that no computation waits for a transfer.
        dq, previous_grads, shard = carry
        next_shard, shard_total = rotate((shard, previous_grads), sharding)
        dq_share, grads = shard_grads(shard)
        return (dq + dq_share, jax.tree.map(jnp.add, shard_total, grads), next_shard), None

    shard = KeyShard(inputs.k, inputs.v, inputs.kv_positions, inputs.kv_segments)
    dq, d_keys = shard_grads(shard)
    if request.ring > 1:
        carry = dq, d_keys, rotate(shard, sharding)
        (dq, d_keys, _), _ = jax.lax.scan(step, carry, None, length=request.ring - 1)
        d_keys = rotate(d_keys, sharding)  # back to the device that the shard belongs to
    dk, dv = (sharding.sum_key_heads(x, kv_heads, request).astype(kv_dtype) for x in d_keys)
    d_sinks = None if d_sinks is None else sharding.sum_over_tokens(d_sinks)
    return dq.astype(inputs.q.dtype), dk, dv, d_sinks


def _with_shard(inputs: AttentionInputs, shard: KeyShard) -> AttentionInputs:
    return inputs._replace(**shard._asdict())
