"""Flash attention over a mesh; where rows are split over devices, its kernels meet the parts that go round the ring.

As in `ring`, but what a device does with the part it holds is one call of the kernels: the forward pass gives the
part's output with its log-sum-exp, which two parts need to be put together, and the backward pass takes the log-sum-exp
over all parts and gives what this part adds.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import PartitionSpec

from meshtune.kernels.attention.products import LOG_SUM_EXP, OUTPUT
from meshtune.kernels.attention.request import AttentionInputs, AttentionRequest
from meshtune.kernels.attention.ring import own_key_heads, passed_on
from meshtune.kernels.attention.split import AttentionSplit, over_mesh
from meshtune.kernels.attention.triton_calls import backward, forward, slopes_of


class Held(NamedTuple):
    """The part of keys and values that a device has at the moment, and whose they are."""

    k: jax.Array
    v: jax.Array
    kv_positions: jax.Array
    kv_segments: jax.Array


def run(
    inputs: AttentionInputs, request: AttentionRequest, split: AttentionSplit, *, interpret: bool = False
) -> jax.Array:
    """[B,T,H,h] in q's dtype; `split` is fitted and `request` that of one device. First derivatives only."""
    return _attend(request, split, interpret, *inputs)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1, 2))
def _attend(request: AttentionRequest, split: AttentionSplit, interpret: bool, *inputs):
    return _forward(request, split, interpret, inputs)[0]


def _attend_forward(request: AttentionRequest, split: AttentionSplit, interpret: bool, *inputs):
    # Outside the shard_map, so that a rematerialisation policy sees the names and nothing else is saved.
    out, log_sum_exp = _forward(request, split, interpret, inputs)
    out = checkpoint_name(out, OUTPUT)
    log_sum_exp = checkpoint_name(log_sum_exp, LOG_SUM_EXP)
    return out, (inputs, out, log_sum_exp)


def _attend_backward(request: AttentionRequest, split: AttentionSplit, interpret: bool, saved, d_out):
    inputs, out, log_sum_exp = saved
    queries, keys, _ = split.specs

    def here(*arrays):
        return _backward_here(request, split, interpret, AttentionInputs(*arrays[:8]), *arrays[8:])

    more_in = (queries, _numbers_spec(split), queries)
    dq, dk, dv = over_mesh(here, split, more_in, (queries, keys, keys))(*inputs, out, log_sum_exp, d_out)
    return dq, dk, dv, None, None, None, None, None


_attend.defvjp(_attend_forward, _attend_backward)


def _forward(request: AttentionRequest, split: AttentionSplit, interpret: bool, inputs):
    def here(*arrays):
        return _forward_here(request, split, interpret, AttentionInputs(*arrays))

    return over_mesh(here, split, (), (split.specs[0], _numbers_spec(split)))(*inputs)


def _numbers_spec(split: AttentionSplit) -> PartitionSpec:
    """Of a number for each query and head [B,H,T]."""
    return PartitionSpec(split.batch or None, split.heads, split.length)


def _forward_here(request: AttentionRequest, split: AttentionSplit, interpret: bool, inputs: AttentionInputs):
    inputs = own_key_heads(request, split, inputs)
    if request.ring == 1:
        return forward(request, inputs, inputs.q.dtype, interpret)

    def meet(held: Held):
        return forward(request, _holding(inputs, held), jnp.float32, interpret)

    def step(carry, _):
        running, held = carry
        arriving = passed_on(held, split)
        return (_together(running, meet(held)), arriving), None

    held = Held(inputs.k, inputs.v, inputs.kv_positions, inputs.kv_segments)
    carry = meet(held), passed_on(held, split)
    (running, held), _ = jax.lax.scan(step, carry, None, length=request.ring - 2)
    out, log_sum_exp = _together(running, meet(held))
    return out.astype(inputs.q.dtype), log_sum_exp


def _together(one: Any, other: Any):
    """The output and log-sum-exp over two parts of the keys from those over each. Nothing seen weighs nothing."""
    (out, lse), (more_out, more_lse) = one, other
    top = jnp.maximum(lse, more_lse)
    share, more_share = jnp.exp(lse - top), jnp.exp(more_lse - top)
    total = share + more_share

    def weighed(out, share):
        return out * (share / total)[:, :, : out.shape[1]].swapaxes(1, 2)[..., None]

    return weighed(out, share) + weighed(more_out, more_share), top + jnp.log(total)


def _backward_here(
    request: AttentionRequest, split: AttentionSplit, interpret: bool, inputs: AttentionInputs, out, lse, d_out
):
    whole, inputs = inputs.k, own_key_heads(request, split, inputs)
    delta = slopes_of(out, d_out, lse.shape[2])
    sums = (jnp.float32,) * 3

    def meet(held: Held):
        dq, dk, dv = backward(request, _holding(inputs, held), lse, delta, d_out, sums, interpret)
        return dq, (dk, dv)

    def step(carry, _):
        # The gradients of a part follow it one step behind, so that nothing on its way is waited for here.
        dq, behind, held = carry
        arriving, caught_up = passed_on((held, behind), split)
        more, mine = meet(held)
        return (dq + more, jax.tree.map(jnp.add, caught_up, mine), arriving), None

    held = Held(inputs.k, inputs.v, inputs.kv_positions, inputs.kv_segments)
    dq, d_keys = meet(held)
    if request.ring > 1:
        carry = dq, d_keys, passed_on(held, split)
        (dq, d_keys, _), _ = jax.lax.scan(step, carry, None, length=request.ring - 1)
        d_keys = passed_on(d_keys, split)
    dk, dv = (split.sum_key_heads(x, whole.shape[2], request).astype(whole.dtype) for x in d_keys)
    return dq.astype(inputs.q.dtype), dk, dv


def _holding(inputs: AttentionInputs, held: Held) -> AttentionInputs:
    return inputs._replace(**held._asdict())
