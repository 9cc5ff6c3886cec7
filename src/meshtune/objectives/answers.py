"""Summed losses of batches, and log-probabilities of the answers in packed rows.

A row of T positions holds segments 1, 2, ...; values per segment are an array [B, S]. The reductions are written as
sums over comparisons rather than as a scatter, so that a mesh that splits rows or positions can compute partial sums
and add them up.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import NamedTuple, Protocol

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from meshtune.arrays.tree import Tree, split
from meshtune.kernels.cross_entropy import log_probs, log_probs_and_entropies
from meshtune.model.block import Sums
from meshtune.model.compute import Compute
from meshtune.model.decoder import forward, head_logits, head_params
from meshtune.model.gather import loss_sharding
from meshtune.model.inputs import inputs_of
from meshtune.model.spec import ModelSpec
from meshtune.model.stacks import layers_result

Batch = dict[str, Array]
"""tokens, targets, positions, segment_ids int32 [B, T]; weights float32 [B, T].

Stages that compare answers have further float32 arrays. A unit is n neighbouring segments of a row, two for pairs: unit
u is segments nu + 1 to nu + n, and a row has at most U units. `units` [B, U] is 1 where a unit exists; `values` [B, U]
is the margin of a pair or the label of an answer. Where needed, `reference` [B, nU] is the reference model's
log-probability of every segment, and `nll` [B, T] the weight of every target in a term of plain cross-entropy; the
weights of one update add up to its number of units.

Online stages (objectives/policy.py) have one completion a unit, and float32 [B, T] for its tokens: `weights` are the
loss's, 0 on all that is not trained on; `advantages`; `old`, `sampled` and `reference_tokens` are the log-probabilities
before the first update, of the sampler, and of the reference model; `policy_weights` multiply the policy's term of the
loss, `entropy_weights` are those of the entropy bonus, and `completion` is 1 on all tokens that the model drew.
"""

CRITIC = "critic"  # the node of a second model in a tree of parameters


class WeightedMetric(NamedTuple):
    """A metric with its own weight, such as a mean over only the chosen answers."""

    total: Float[Array, ""]
    weight: Float[Array, ""]


class Largest(NamedTuple):
    """A metric that is the largest value over a batch, at least 0."""

    value: Float[Array, ""]


class Smallest(NamedTuple):
    """A metric that is the smallest value over a batch, at most 1: it is held as 1 minus that."""

    complement: Float[Array, ""]


Metric = Float[Array, ""] | WeightedMetric | Largest | Smallest
NO_SUMS: Sums = {}


class LossSums(NamedTuple):
    """Sums over a batch, as float32 scalars.

    The loss to report and to differentiate is `loss / weight`, divided once after all micro-batches, devices and
    processes are summed. Metrics are divided by `weight` too, except a WeightedMetric, which is divided by its own, and
    Largest and Smallest.
    `layers` are the sums of the model's layers; `with_layers` adds their share of the loss.
    """

    loss: Float[Array, ""]
    weight: Float[Array, ""]
    metrics: Mapping[str, Metric]
    layers: Sums = NO_SUMS


class Objective(Protocol):
    """Computes the LossSums of one micro-batch. `rng` is None where nothing is random, as in evaluation."""

    def __call__(
        self, params: Tree, spec: ModelSpec, compute: Compute, batch: Batch, rng: Array | None
    ) -> LossSums: ...


@functools.cache
def logits_of(spec: ModelSpec, temperature: float = 1.0) -> Callable[[Tree, Array], Array]:
    """`head_logits` of a model divided by `temperature`, always the same function for the same spec and temperature."""
    function = functools.partial(head_logits, spec=dataclasses.replace(spec, stacks=()))
    return function if temperature == 1.0 else lambda head, hidden: function(head, hidden) / temperature


def with_layers(spec: ModelSpec, loss_sums: LossSums) -> LossSums:
    """The sums with what its layers' sums add to the mean loss, the metric `aux_loss`, and the layers' own metrics."""
    if not loss_sums.layers:
        return loss_sums
    result = layers_result(spec, loss_sums.layers)
    metrics = {**loss_sums.metrics, **{name: WeightedMetric(*metric) for name, metric in result.metrics.items()}}
    if result.loss is None:
        return LossSums(loss_sums.loss, loss_sums.weight, metrics)
    loss = result.loss * loss_sums.weight
    return LossSums(loss_sums.loss + loss, loss_sums.weight, {**metrics, "aux_loss": jax.lax.stop_gradient(loss)})


def add_sums(total: LossSums, new: LossSums) -> LossSums:
    """The sums of two parts of a batch."""

    def add(a: Metric, b: Metric) -> Metric:
        return jax.tree.map(jnp.maximum if isinstance(a, Largest | Smallest) else jnp.add, a, b)

    return jax.tree.map(add, total, new, is_leaf=lambda node: isinstance(node, Largest | Smallest))


def metric_means(loss_sums: LossSums) -> dict[str, Float[Array, ""]]:
    """Every metric of summed losses as a mean; 0 where its weight is 0."""

    def mean(metric: Metric) -> Array:
        match metric:
            case Largest(value):
                return value
            case Smallest(complement):
                return 1 - complement
            case WeightedMetric(total, weight):
                return total / jnp.where(weight > 0, weight, 1.0)
        return metric / jnp.where(loss_sums.weight > 0, loss_sums.weight, 1.0)

    return {name: mean(metric) for name, metric in loss_sums.metrics.items()}


def max_segments(batch: Batch, unit_segments: int = 2) -> int:
    """S, the largest number of segments that a row of this batch can have, with `unit_segments` in every unit."""
    return unit_segments * batch["units"].shape[-1] if "units" in batch else batch["segment_ids"].shape[-1]


def segment_sum(values: Float[Array, "B T"], segment_ids: Int[Array, "B T"], count: int) -> Float[Array, "B S"]:
    """The sum of `values` over each of the segments 1 .. count."""
    return jnp.sum(jnp.where(_membership(segment_ids, count), values[..., None], 0.0), axis=1)


def segment_min(values: Float[Array, "B T"], segment_ids: Int[Array, "B T"], count: int) -> Float[Array, "B S"]:
    """The minimum of `values` over each of the segments 1 .. count; infinity for a segment without tokens."""
    return jnp.min(jnp.where(_membership(segment_ids, count), values[..., None], jnp.inf), axis=1)


def to_tokens(values: Float[Array, "B S"], segment_ids: Int[Array, "B T"]) -> Float[Array, "B T"]:
    """The value of every token's segment; 0 for padding."""
    return jnp.sum(jnp.where(_membership(segment_ids, values.shape[-1]), values[:, None, :], 0.0), axis=-1)


def _membership(segment_ids: Int[Array, "B T"], count: int) -> Bool[Array, "B T S"]:
    return segment_ids[..., None] == jnp.arange(1, count + 1, dtype=segment_ids.dtype)


class TokenLogProbs(NamedTuple):
    """float32 log-probabilities [B, T] of the targets in a mask, 0 elsewhere.

    `entropies` [B, T] are those of the predicted distributions in nats, where they were asked for; `layers` are the
    layers' sums.
    """

    log_probs: Float[Array, "B T"]
    entropies: Float[Array, "B T"] | None
    layers: Sums


def token_log_probs(
    params: Tree,
    spec: ModelSpec,
    compute: Compute,
    batch: Batch,
    mask: Bool[Array, "B T"],
    rng: Array | None,
    temperature: float = 1.0,
    *,
    entropies: bool = False,
) -> TokenLogProbs:
    """Computes the log-probability of every target in `mask`, from logits that are divided by `temperature`."""
    inputs = inputs_of(batch)
    hidden, _, sums = forward(params, spec, compute, inputs, rng=rng)
    head = head_params(params, spec, hidden)
    sharding = None if compute.layout is None else loss_sharding(head, spec, compute.layout, mask.shape)
    arguments = logits_of(spec, temperature), head, hidden, batch["targets"], mask
    if entropies:
        return TokenLogProbs(
            *log_probs_and_entropies(*arguments, chunk=compute.loss_chunk, sharding=sharding), layers=sums
        )
    return TokenLogProbs(log_probs(*arguments, chunk=compute.loss_chunk, sharding=sharding), None, sums)


class AnswerLogProbs(NamedTuple):
    """Log-probabilities of the two segments of every unit.

    `first` and `second` [B, U] are the log-probabilities of the answers, `lengths` a pair of [B, U] with the answers'
    lengths in tokens, `unit_mask` [B, U] is 1 where a unit exists. `nll` is the batch's weighted cross-entropy (see
    data.loader), summed. `layers` are the layers' sums.
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
    values, _, layers = token_log_probs(params, spec, compute, batch, mask, rng)
    count, unit_mask = max_segments(batch), batch["units"]
    lengths = segment_sum(trained.astype(jnp.float32), segments, count)
    factors = trained.astype(jnp.float32)
    if tail is not None:
        factors = factors * _tail_factors(batch, lengths, tail)
    sums = segment_sum(values * factors, segments, count)
    first, second = (jnp.where(unit_mask > 0, side, -1.0) for side in by_side(sums))
    first_length, second_length = (jnp.maximum(side, 1.0) for side in by_side(lengths))
    nll = -jnp.sum(values * batch["nll"]) if "nll" in batch else jnp.float32(0.0)
    return AnswerLogProbs(first, second, (first_length, second_length), unit_mask, nll, layers)


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


def without_critic(params: Tree) -> Tree:
    """The parameters of the model that generates, without those of its critic (objectives.critic)."""
    return {name: node for name, node in params.items() if name != CRITIC}


def by_side(values: Float[Array, "B S"], unit_segments: int = 2) -> tuple[Float[Array, "B U"], ...]:
    """Splits values per segment into those of the first segment of every unit, those of the second, and so on."""
    sides = values.reshape(values.shape[0], -1, unit_segments)
    return tuple(sides[..., side] for side in range(unit_segments))


def _tail_factors(batch: Batch, lengths: Float[Array, "B S"], tail: float) -> Float[Array, "B T"]:
    """1 up to the length of the unit's shorter answer, `tail` beyond it."""
    segments, positions = batch["segment_ids"], batch["positions"].astype(jnp.float32)
    starts = segment_min(jnp.where(batch["weights"] > 0, positions, jnp.inf), segments, lengths.shape[-1])
    shorter = jnp.repeat(jnp.minimum(*by_side(lengths)), 2, axis=-1)
    ends = jnp.where(jnp.isfinite(starts), starts + shorter, 0.0)
    return jnp.where(positions < to_tokens(ends, segments), 1.0, tail)
