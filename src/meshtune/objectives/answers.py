"""Log-probabilities of the answers in a batch, computed from packed rows."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from meshtune.arrays.tree import Tree, split
from meshtune.kernels.log_probs import log_probs
from meshtune.model.block import Sums
from meshtune.model.compute import Compute
from meshtune.model.decoder import forward, head_params
from meshtune.model.gather import loss_sharding
from meshtune.model.inputs import inputs_of
from meshtune.model.spec import ModelSpec
from meshtune.objectives.score import Batch, logits_of
from meshtune.objectives.segments import max_segments, segment_min, segment_sum, to_tokens


class AnswerLogProbs(NamedTuple):
    """Log-probabilities of the two segments of every unit.

    `first` and `second` [B, U] are the log-probabilities of the answers, `lengths` a pair of [B, U] with the answers'
    lengths in tokens, `unit_mask` [B, U] is 1 where a unit exists. `nll` is the batch's weighted cross-entropy (see
    score.Batch), summed. `layers` are the layers' sums.
    """

    first: Float[Array, "B U"]
    second: Float[Array, "B U"]
    lengths: tuple[Float[Array, "B U"], Float[Array, "B U"]]
    unit_mask: Float[Array, "B U"]
    nll: Float[Array, ""]
    layers: Sums


def answer_log_probs(
    params: Tree, spec: ModelSpec, compute: Compute, batch: Batch, rng: Array | None, *, tail: float | None = None
) -> AnswerLogProbs:
    """Sums log p(token) over the tokens of each answer, which are those with a weight above 0.

    A unit that does not exist gets a log-probability of -1 and a length of 1, so that no loss computed from it is
    infinite. With `tail`, tokens beyond the length of the unit's shorter answer are multiplied by that factor, as in
    length-desensitised DPO (https://arxiv.org/abs/2409.06411).
    """
    segments, trained = batch["segment_ids"], batch["weights"] > 0
    mask = trained | (batch["nll"] > 0) if "nll" in batch else trained
    token_log_probs, added = _log_probs(params, spec, compute, batch, mask, rng)
    count, unit_mask = max_segments(batch), batch["units"]
    lengths = segment_sum(trained.astype(jnp.float32), segments, count)
    factors = trained.astype(jnp.float32)
    if tail is not None:
        factors = factors * _tail_factors(batch, lengths, tail)
    sums = segment_sum(token_log_probs * factors, segments, count)
    first, second = (jnp.where(unit_mask > 0, side, -1.0) for side in by_side(sums))
    first_length, second_length = (jnp.maximum(side, 1.0) for side in by_side(lengths))
    nll = -jnp.sum(token_log_probs * batch["nll"]) if "nll" in batch else jnp.float32(0.0)
    return AnswerLogProbs(first, second, (first_length, second_length), unit_mask, nll, added)


def reference_log_probs(
    params: Tree, spec: ModelSpec, compute: Compute, batch: Batch, *, tail: float | None = None
) -> tuple[Float[Array, "B U"], Float[Array, "B U"]]:
    """The reference model's log-probabilities of both answers of every unit.

    They are read from the batch where it has them, and otherwise computed by the model without its adapters. No
    gradient flows through them.
    """
    if "reference" in batch:
        first, second = by_side(batch["reference"])
    else:
        base = jax.tree.map(jax.lax.stop_gradient, without_adapters(params))
        without_nll = {name: array for name, array in batch.items() if name != "nll"}
        first, second, *_ = answer_log_probs(base, spec, compute, without_nll, None, tail=tail)
    first, second = (jnp.where(batch["units"] > 0, side, -1.0) for side in (first, second))
    return jax.lax.stop_gradient(first), jax.lax.stop_gradient(second)


def without_adapters(params: Tree) -> Tree:
    """The parameters without adapters: the model that training started from, where only adapters are trained."""
    return split(params, lambda path: path.rpartition("/")[2] == "adapter")[1]


def by_side(values: Float[Array, "B S"], unit_segments: int = 2) -> tuple[Float[Array, "B U"], ...]:
    """Splits values per segment into those of the first segment of every unit, those of the second, and so on."""
    sides = values.reshape(values.shape[0], -1, unit_segments)
    return tuple(sides[..., side] for side in range(unit_segments))


def _log_probs(
    params: Tree, spec: ModelSpec, compute: Compute, batch: Batch, mask: Array, rng: Array | None
) -> tuple[Float[Array, "B T"], Sums]:
    """The log-probability of every target in `mask`, and the layers' sums."""
    inputs = inputs_of(batch)
    hidden, _, sums = forward(params, spec, compute, inputs, rng=rng)
    head = head_params(params, spec, hidden)
    sharding = None if compute.layout is None else loss_sharding(head, spec, compute.layout, mask.shape)
    options = {"chunk": compute.loss_chunk, "sharding": sharding}
    return log_probs(logits_of(spec), head, hidden, batch["targets"], mask, **options), sums


def _tail_factors(batch: Batch, lengths: Float[Array, "B S"], tail: float) -> Float[Array, "B T"]:
    """1 up to the length of the unit's shorter answer, `tail` beyond it."""
    segments, positions = batch["segment_ids"], batch["positions"].astype(jnp.float32)
    starts = segment_min(jnp.where(batch["weights"] > 0, positions, jnp.inf), segments, lengths.shape[-1])
    shorter = jnp.repeat(jnp.minimum(*by_side(lengths)), 2, axis=-1)
    ends = jnp.where(jnp.isfinite(starts), starts + shorter, 0.0)
    return jnp.where(positions < to_tokens(ends, segments), 1.0, tail)
