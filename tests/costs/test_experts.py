"""A mixture of experts in the analytic models: active operations, all weights, and messages over ep."""

from __future__ import annotations

import dataclasses
from typing import ClassVar

import pytest
from llamas import llama

from meshtune.adapters.config import FullConfig
from meshtune.adapters.method import PreparedModel
from meshtune.arrays.spec import ArraySpec
from meshtune.costs.estimate import estimated_collectives
from meshtune.costs.hardware import find_target
from meshtune.costs.roofline import work_of
from meshtune.costs.workload import workload_on
from meshtune.model.block import Activation, BlockChoice, Cost, Divisor
from meshtune.model.layer import LayerSpec
from meshtune.model.spec import abstract_params
from meshtune.setup.choices import optimizer_of
from meshtune.setup.search import apply_overrides, predict_candidate, workload_of


@dataclasses.dataclass(frozen=True)
class Experts:
    """The abstract half of a mixture of experts: `active` of `experts` gated networks of F for each token."""

    width: int
    experts: int
    active: int
    name: ClassVar[str] = "moe"

    def params(self, embed):
        def expert(out, into):
            sizes, axes = zip(out, into, strict=True)
            return ArraySpec((self.experts, *sizes), "float32", ("experts", *axes), role="experts")

        wide, narrow = (self.width, "ffn"), (embed, "embed")
        return {
            "gate": {"weight": expert(wide, narrow)},
            "up": {"weight": expert(wide, narrow)},
            "down": {"weight": expert(narrow, wide)},
            "router": {"weight": ArraySpec((self.experts, embed), "float32", ("whole", "embed"), role="router")},
        }

    def cost(self, embed):
        wide = Activation("ffn", self.active * self.width, self.width, kept=True, products=1, elementwise=1)
        weights = embed * (3 * self.active * self.width + self.experts)
        wide = wide._replace(routed=True)
        activations = (wide, wide, wide._replace(kept=False))
        return Cost(weights, activations, dispatched=self.active * embed, chosen=self.active)

    def choices(self, compute):
        return (BlockChoice("expert exchange", compute.expert_exchange, "of a stand-in"),)

    def sums(self):
        return {}

    def row_params(self):
        return None

    def divisors(self):
        return (Divisor("ep", "experts", self.experts),)


def scored(tmp_path, mesh, *overrides):
    """Mixtral 8x7B by its numbers, tuned in full on eight H100."""
    target = find_target("8xH100", env={})
    recipe = llama(tmp_path, "8B", "method=full", "data.max_length=2048", "compute.precision=mixed", *overrides)
    recipe = apply_overrides(recipe, {"mesh": mesh})
    base = workload_of(recipe, "gpu")
    layer: LayerSpec = base.spec.stacks[0].pattern[0]
    experts = dataclasses.replace(layer, ffn=Experts(14336, 8, 2))  # pyright: ignore[reportArgumentType]
    stack = dataclasses.replace(base.spec.stacks[0], pattern=(experts,))
    spec = dataclasses.replace(base.spec, vocab=32000, stacks=(stack,), dtype="float32")
    arrays = PreparedModel(spec, frozen={}, trainable=abstract_params(spec))
    workload = workload_on(arrays, recipe, FullConfig(), base.precision, optimizer_of(recipe, base.precision))
    return predict_candidate(recipe, target, workload)


def test_operations_are_those_of_active_experts(tmp_path):
    plan = scored(tmp_path, {"fsdp": 8})
    work = work_of(plan.candidate)
    # Mixtral's authors count 12.9e9 active parameters; the embedding's 32000 x 4096 multiply nothing.
    active = 12.9e9 - 32000 * 4096
    attention = 6 * 32 * 2048 * 4096
    assert work.flops == pytest.approx(2048 * (6 * active + attention), rel=0.01)


def test_memory_is_that_of_all_experts(tmp_path):
    plan = scored(tmp_path, {"fsdp": 8})
    # 46.7e9 parameters in float32, over eight devices.
    assert plan.estimate.breakdown["weights"] == pytest.approx(46.7e9 * 4 / 8, rel=0.01)
    assert work_of(plan.candidate).product_bytes > 2 * 46.7e9  # every pass reads all experts in bfloat16


def test_experts_over_ep_are_not_gathered_but_tokens_are_exchanged(tmp_path):
    gathered, split = (scored(tmp_path, mesh, "compute.remat=full") for mesh in ({"fsdp": 8}, {"ep": 8}))
    assert split.estimate.breakdown["weights"] == pytest.approx(gathered.estimate.breakdown["weights"], rel=0.01)
    # A layer's experts are 1.4e9 elements; with ep a device holds an eighth of them while it computes, and has room
    # for half as many rows again.
    ffn = split.candidate.workload.layers[0].ffn
    assert ffn is not None
    assert ffn.local_weights(tp=1, ep=8) == pytest.approx(3 * 4096 * 14336, rel=0.01)
    assert split.estimate.device_bytes < gathered.estimate.device_bytes - 1e9
    assert not [c for c in estimated_collectives(gathered.candidate) if c.kind == "all-to-all"]
    (exchange,) = [c for c in estimated_collectives(split.candidate) if c.kind == "all-to-all"]
    assert exchange.bytes == 1.5 * 2048 * 2 * 4096 * 2  # slots for each token to two experts, in bfloat16
    assert exchange.group_size == 8


def test_tokens_of_all_devices_are_gathered_where_each_goes_to_most_of_them(tmp_path):
    """The arrays of experts then have room for what any of the devices could be sent."""
    exchanged = scored(tmp_path, {"ep": 8})
    gathered = scored(tmp_path, {"ep": 8}, "compute.expert_exchange=gather")
    collectives = estimated_collectives(gathered.candidate)
    assert not [c for c in collectives if c.kind == "all-to-all"]
    tokens = [c for c in collectives if c.kind == "all-gather" and c.bytes == 8 * 2048 * 4096 * 2]
    assert sum(c.count for c in tokens) >= 32 * 2  # in every layer, forward and backward
    assert gathered.estimate.device_bytes > exchanged.estimate.device_bytes
