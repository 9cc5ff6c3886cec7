"""The gradient of a whole batch: micro-batches are computed in turn, and divided once by their whole weight."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax import lax
from jaxtyping import Array, Bool, Float

from meshtune.arrays.tree import Tree
from meshtune.model.block import Sums
from meshtune.model.compute import Compute
from meshtune.model.spec import ModelSpec
from meshtune.objectives.score import Batch, Objective, Score, metric_means, with_layers
from meshtune.train.step.layer_gradient import layer_gradient
from meshtune.train.step.state import Metrics


class Gradient(NamedTuple):
    """The gradient of the mean loss over a batch, float32, its norm, whether all of it is finite, metrics, and the sums
    of the layers."""

    tree: Tree
    norm: Float[Array, ""]
    finite: Bool[Array, ""]
    metrics: Metrics
    sums: Sums


def mean_gradient(
    objective: Objective,
    spec: ModelSpec,
    compute: Compute,
    trained: Tree,
    params: Callable[[Tree], Tree],
    batch: Batch,
    rng: Array | None,
    placed: Callable[[Tree], Tree],
) -> Gradient:
    """The gradient with respect to `trained`, of which `params` makes all parameters.

    Every array of the batch is [A, B, T], of A micro-batches. `placed` lays a gradient out over the mesh. What the
    layers add to the loss is a function of their sums over all micro-batches, which is not linear: where there is more
    than one, a forward pass over all of them comes first, for its derivative by these sums.
    """

    def score_of(trained: Tree, index: Array, micro: Batch) -> Score:
        key = None if rng is None else jax.random.fold_in(rng, index)
        return objective(params(trained), spec, compute, micro, key)

    by_sums = layer_gradient(lambda *micro: score_of(trained, *micro), spec, batch)

    def loss(trained: Tree, index: Array, micro: Batch) -> tuple[Array, Score]:
        score = score_of(trained, index, micro)
        if by_sums is None:
            return with_layers(spec, score).loss, score
        terms = [jnp.sum(by_sums[name] * value) for name, value in score.layers.items()]
        return score.loss + sum(terms), score

    def micro_batch(index: Array, micro: Batch) -> tuple[Score, Tree, Array]:
        (_, score), gradient = jax.value_and_grad(loss, has_aux=True)(trained, index, micro)
        gradient = placed(jax.tree.map(lambda g: g.astype(jnp.float32), gradient))
        return score, gradient, jnp.isfinite(score.loss) & jnp.isfinite(optax.global_norm(gradient))

    total, gradient, finite_micro = _accumulate(micro_batch, batch)
    sums, total = total.layers, with_layers(spec, total)
    weight = jnp.where(total.weight > 0, total.weight, 1.0)
    gradient = jax.tree.map(lambda g: g / weight, gradient)
    norm = optax.global_norm(gradient)
    finite = jnp.all(finite_micro) & jnp.isfinite(norm)
    metrics = metric_means(total) | {
        "loss": total.loss / weight,
        "weight": total.weight,
        "grad_norm": norm,
        "finite": finite,
        "finite_micro": finite_micro,
    }
    return Gradient(gradient, norm, finite, metrics, sums)


def _accumulate(
    micro_batch: Callable[[Array, Batch], tuple[Score, Tree, Array]], batch: Batch
) -> tuple[Score, Tree, Float[Array, "A"]]:
    """(summed scores, summed gradients, finite flag of each micro-batch)."""
    count = batch["tokens"].shape[0]
    if count == 1:
        score, gradient, finite = micro_batch(jnp.int32(0), jax.tree.map(lambda x: x[0], batch))
        return score, gradient, finite[None]

    def add(carry: tuple[Score, Tree], x: tuple[Array, Batch]) -> tuple[tuple[Score, Tree], Array]:
        score, gradient, finite = micro_batch(*x)
        return jax.tree.map(jnp.add, carry, (score, gradient)), finite

    indices = jnp.arange(count)
    shapes = jax.eval_shape(micro_batch, indices[0], jax.tree.map(lambda x: x[0], batch))[:2]
    zeros = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes)
    (score, gradient), finite = lax.scan(add, zeros, (indices, batch))
    return score, gradient, finite
