"""What a model makes of the answers in a batch: the log-probability of each, from packed rows."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from meshtune.arrays.tree import Tree, split
from meshtune.kernels.log_probs import log_probs
from meshtune.model.compute import Compute
from meshtune.model.decoder import head_logits, head_params, hidden_states
from meshtune.model.in_use import loss_split
from meshtune.model.spec import ModelSpec
from meshtune.objectives.score import Batch
from meshtune.objectives.segments import least, slots, to_tokens, totals


class Answers(NamedTuple):
    """Of every unit's two segments: `first` and `second` log-probabilities, `lengths` of their answers in tokens, all
    [B, U]; `there` is 1 where there is a unit. `nll` is the sum of a batch's weighted cross-entropy (score.Batch)."""

    first: Float[Array, "B U"]
    second: Float[Array, "B U"]
    lengths: tuple[Float[Array, "B U"], Float[Array, "B U"]]
    there: Float[Array, "B U"]
    nll: Float[Array, ""]


def answers(
    params: Tree, spec: ModelSpec, compute: Compute, batch: Batch, rng: Array | None, *, tail: float | None = None
) -> Answers:
    """Sums of log p(token) over the tokens of each answer (those with a weight). A unit that is not there has a
    log-probability of -1 and a length of 1, so that nothing made of it is infinite.

    With `tail` tokens of an answer beyond the length of the unit's other answer count by that much only, as in
    length-desensitised DPO (https://arxiv.org/abs/2409.06411).
    """
    segments, learned = batch["segment_ids"], batch["weights"] > 0
    wanted = learned | (batch["nll"] > 0) if "nll" in batch else learned
    found = _log_probs(params, spec, compute, batch, wanted, rng)
    count, there = slots(batch), batch["units"]
    lengths = totals(learned.astype(jnp.float32), segments, count)
    counted = learned.astype(jnp.float32)
    if tail is not None:
        counted = counted * _tailed(batch, lengths, tail)
    summed = totals(found * counted, segments, count)
    first, second = (jnp.where(there > 0, part, -1.0) for part in pairs(summed))
    one, other = (jnp.maximum(part, 1.0) for part in pairs(lengths))
    nll = -jnp.sum(found * batch["nll"]) if "nll" in batch else jnp.float32(0.0)
    return Answers(first, second, (one, other), there, nll)


def reference(
    params: Tree, spec: ModelSpec, compute: Compute, batch: Batch, *, tail: float | None = None
) -> tuple[Float[Array, "B U"], Float[Array, "B U"]]:
    """The reference's log-probabilities of both answers: those in the batch, or else those of the model without its
    adapters. No gradient flows through them."""
    if "reference" in batch:
        first, second = pairs(batch["reference"])
    else:
        base = jax.tree.map(jax.lax.stop_gradient, without_adapters(params))
        plain = {name: array for name, array in batch.items() if name != "nll"}
        first, second, *_ = answers(base, spec, compute, plain, None, tail=tail)
    first, second = (jnp.where(batch["units"] > 0, part, -1.0) for part in (first, second))
    return jax.lax.stop_gradient(first), jax.lax.stop_gradient(second)


def without_adapters(params: Tree) -> Tree:
    """The weights alone. With a method that changes nothing but adapters this is the model it started from."""
    return split(params, lambda path: path.rpartition("/")[2] == "adapter")[1]


def pairs(each: Float[Array, "B S"]) -> tuple[Float[Array, "B U"], Float[Array, "B U"]]:
    """What belongs to the first and to the second segment of every unit."""
    both = each.reshape(each.shape[0], -1, 2)
    return both[..., 0], both[..., 1]


def _log_probs(params: Tree, spec: ModelSpec, compute: Compute, batch: Batch, wanted: Array, rng: Array | None):
    hidden = hidden_states(params, spec, compute, batch["tokens"], batch["positions"], batch["segment_ids"], rng=rng)
    head = head_params(params, spec)
    divided = loss_split(head, spec, compute.layout, wanted.shape)
    return log_probs(head_logits, head, hidden, batch["targets"], wanted, chunk=compute.loss_chunk, split=divided)


def _tailed(batch: Batch, lengths: Float[Array, "B S"], tail: float) -> Float[Array, "B T"]:
    """1 within the length that both answers of a unit have, `tail` beyond it."""
    segments, places = batch["segment_ids"], batch["positions"].astype(jnp.float32)
    begins = least(jnp.where(batch["weights"] > 0, places, jnp.inf), segments, lengths.shape[-1])
    shared = jnp.repeat(jnp.minimum(*pairs(lengths)), 2, axis=-1)
    end = jnp.where(jnp.isfinite(begins), begins + shared, 0.0)
    return jnp.where(places < to_tokens(end, segments), 1.0, tail)
