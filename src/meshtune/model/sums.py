"""The sums that layers return: added over layers, and what they come to in a model's loss and metrics."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from meshtune.model.block import Measured, Sums
from meshtune.model.spec import ModelSpec


def no_sums(spec: ModelSpec) -> dict[str, Array]:
    """Zeros for all sums of a model's layers."""
    shapes = {name: shape for block in spec.blocks for name, shape in block.sums().items()}
    return {name: jnp.zeros(shape, jnp.float32) for name, shape in shapes.items()}


def add_sums(total: Sums, sums: Sums) -> dict[str, Array]:
    """`total` with the sums of one more layer."""
    return {name: value + sums[name] if name in sums else value for name, value in total.items()}


class LayersResult(NamedTuple):
    """What the layers add to the mean loss (None: nothing), and their metrics, each a total and its weight."""

    loss: Float[Array, ""] | None
    metrics: Mapping[str, tuple[Array, Array]]


def layers_result(spec: ModelSpec, sums: Sums) -> LayersResult:
    """The loss and the metrics of the layers, from the sums of a whole batch."""
    measured = [block for block in spec.blocks if isinstance(block, Measured)]
    metrics = {name: metric for block in measured for name, metric in block.metrics(sums).items()}
    return LayersResult(layers_loss(spec, sums), jax.lax.stop_gradient(metrics))


def layers_loss(spec: ModelSpec, sums: Sums) -> Array | None:
    """What the layers add to the mean loss, from the sums of a whole batch; None where they add nothing."""
    losses = [loss for block in spec.blocks if (loss := block.loss(sums)) is not None]
    return sum(losses[1:], losses[0]) if losses else None
