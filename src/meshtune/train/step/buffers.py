"""The buffers of a state, such as correction biases of routers, around an update of what is trained."""

from __future__ import annotations

import dataclasses
from typing import Protocol

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int

from meshtune.arrays.tree import Tree, merge
from meshtune.model.block import Sums
from meshtune.model.buffers import adjust_buffers
from meshtune.model.spec import ModelSpec
from meshtune.objectives.score import Batch
from meshtune.train.step.state import Metrics, TrainState


class Step(Protocol):
    """One update, not yet compiled."""

    def __call__(
        self, state: TrainState, frozen: Tree, batch: Batch, seed: Int[Array, ""]
    ) -> tuple[TrainState, Metrics]: ...


class SummedStep(Protocol):
    """An update that also returns the sums of the layers over all its micro-batches."""

    def __call__(
        self, state: TrainState, frozen: Tree, batch: Batch, seed: Int[Array, ""], /
    ) -> tuple[TrainState, Metrics, Sums]: ...


def with_buffers(spec: ModelSpec, step: SummedStep) -> Step:
    """The step of a state with buffers: frozen in its forward and backward passes, and adjusted after its update."""

    def adjusted(state: TrainState, frozen: Tree, batch: Batch, seed: Int[Array, ""]) -> tuple[TrainState, Metrics]:
        buffers = state.buffers
        state = dataclasses.replace(state, buffers={})
        after, metrics, sums = step(state, merge(frozen, buffers), batch, seed)
        if buffers:
            new = adjust_buffers(spec, buffers, sums)
            buffers = jax.tree.map(lambda new, old: jnp.where(metrics["finite"], new, old), new, buffers)
        return dataclasses.replace(after, buffers=buffers), metrics

    return adjusted
