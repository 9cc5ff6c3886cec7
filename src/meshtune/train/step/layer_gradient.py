"""The derivative of what layers add to the loss of an update by their sums, where micro-batches are accumulated."""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array

from meshtune.model.block import Sums
from meshtune.model.spec import ModelSpec
from meshtune.model.stacks import layers_loss, no_sums
from meshtune.objectives.score import Batch, Score


def layer_gradient(score_of: Callable[[Array, Batch], Score], spec: ModelSpec, batch: Batch) -> Sums | None:
    """The derivative of the layers' part of the summed loss by their sums over all micro-batches; None where there is
    one micro-batch, or no such part."""
    count = batch["tokens"].shape[0]
    adds = jax.eval_shape(lambda: layers_loss(spec, no_sums(spec.stacks))) is not None
    if count == 1 or not adds:
        return None

    def add(total: tuple[Sums, Array], x: tuple[Array, Batch]) -> tuple[tuple[Sums, Array], None]:
        score = score_of(*x)
        return jax.tree.map(jnp.add, total, (dict(score.layers), score.weight)), None

    (sums, weight), _ = lax.scan(add, (no_sums(spec.stacks), jnp.zeros(())), (jnp.arange(count), batch))

    def loss(sums: Sums) -> Array:
        added = layers_loss(spec, sums)
        assert added is not None
        return added * weight

    return jax.lax.stop_gradient(jax.grad(loss)(sums))
