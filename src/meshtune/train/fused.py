"""A step that uses every layer's gradient up as soon as the backward pass has made it (https://arxiv.org/abs/2306.09782).

No gradient of the whole model ever exists: only those of one layer, and of what is in no layer (embedding, final norm,
output head). So nothing may need them all at once, such as their norm before the update, or the sum over several
micro-batches. Parameters and optimizer state are updated in their place, through references that the backward pass of
the layers writes to.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from meshtune.errors import UserError
from meshtune.mesh.layout import Layout
from meshtune.model.compute import Compute
from meshtune.model.spec import ModelSpec, Stack
from meshtune.model.tree import Tree, merge
from meshtune.model.walk import Hidden, Layer, backward, forward, here, row_of, with_row
from meshtune.objectives.score import Batch, Objective, Score, means
from meshtune.optim.optimizer import COUNT, KEPT, LAYERS, Optimizer, single
from meshtune.optim.paths import named_leaves
from meshtune.train.focused import laid_out

Metrics = dict[str, Array]


@dataclasses.dataclass
class ConsumedLayers:
    """Stands at params["layers"]: layers that are updated while the backward pass goes through them.

    `refs` are references to what is trained (stacked, by key), to the optimizer's state of it (by path) and to
    `seen`: the sum of squares of all gradients so far, and whether all were finite. `spark` is a zero that is
    differentiated: references are not, and a stack on which nothing else that is depends would have no backward pass.
    """

    refs: dict[str, Any]
    frozen: Tree
    optimizer: Optimizer
    count: Int[Array, ""]
    spark: Float[Array, ""]
    arrays: Tree | None
    layout: Layout | None
    passes: int = 0

    def through(
        self, layer: Callable[[int], Layer], spec: ModelSpec, compute: Compute, x: Hidden, shared: Any
    ) -> Hidden:
        """x after all layers."""
        self.passes += 1
        if self.passes > 1:
            raise UserError(
                "a fused update uses gradients up in one backward pass, and this stage goes through the model twice",
                where="optimizer.fused, stage",
                fix="set optimizer.fused=false; optimizer.name=adamw8bit or galore also takes less memory",
            )
        for number, stack in enumerate(spec.stacks):
            keys = [f"{number}.{place}" for place in range(len(stack.pattern))]
            frozen = {key: self.frozen.get(key, {}) for key in keys}
            if any(key in self.refs["trained"] for key in keys):
                mine = {
                    "trained": {key: self.refs["trained"].get(key, {}) for key in keys},
                    "state": {path: refs for path, refs in self.refs["state"].items() if path.split("/")[1] in keys},
                    "seen": self.refs["seen"],
                }
                x = self._stack(keys, layer(number), stack, compute)(mine, frozen, x, self.spark, shared, self.count)
            else:
                x = _frozen_stack(layer(number), stack, [frozen[key] for key in keys], x, shared)
        return x

    def _stack(self, keys: list[str], layer: Layer, stack: Stack, compute: Compute) -> Callable[..., Hidden]:
        def ahead(refs, frozen, x, spark, shared, count):
            trained = _read(refs["trained"])
            nodes = [merge(trained[key], frozen[key]) for key in keys]
            x, entering = forward(layer, stack, nodes, x, shared, compute)
            return x, (refs, frozen, entering, shared, count)

        def back(kept, cotangent):
            refs, frozen, entering, shared, count = kept

            def node(carry: Any, place: int, row: Array) -> tuple[Tree, Tree]:
                return here(row_of(carry["trained"][keys[place]], row)), row_of(frozen[keys[place]], row)

            def visit(carry: Any, place: int, row: Array, gradient: Tree) -> Any:
                return self._used_up(carry, keys[place], row, gradient, count)

            cotangent, carry = backward(
                layer, stack, node, entering, cotangent, shared, visit, _read(refs), merged=merge
            )
            jax.tree.map(lambda ref, new: ref.__setitem__(..., new), refs, carry)
            return None, None, cotangent, jnp.float32(0), None, None

        @jax.custom_vjp
        def through(refs, frozen, x, spark, shared, count):
            return ahead(refs, frozen, x, spark, shared, count)[0]

        through.defvjp(ahead, back)
        return through

    def _used_up(self, carry: Any, key: str, row: Array, gradient: Tree, count: Array) -> Any:
        """Parameters and state with one layer updated, if its gradient and all before were finite."""
        if self.layout is not None:
            assert self.arrays is not None
            gradient = laid_out(gradient, self.arrays.get(key, {}), self.layout)
        square = carry["seen"]["square"] + sum_of_squares(gradient)
        finite = carry["seen"]["finite"] & jnp.isfinite(square)
        names = [f"{LAYERS}{key}/{path}" for path, _ in named_leaves(gradient)]
        parameters, structure = jax.tree.flatten(here(row_of(carry["trained"][key], row)))
        states = [here(row_of(carry["state"][name], row)) for name in names]

        def updated() -> tuple[list[Array], list[Any]]:
            one, slopes = self.optimizer.one, jax.tree.leaves(gradient)
            assert one is not None
            every = zip(names, slopes, states, parameters, strict=True)
            made = [one(name, slope, state, parameter, count, row) for name, slope, state, parameter in every]
            return [new for new, _ in made], [new for _, new in made]

        # A branch and not a choice between numbers: its results are there before any is written to a stack. Left to
        # itself the compiler may read one stack while it writes another, and must then copy whole stacks.
        parameters, states = lax.cond(finite, updated, lambda: (parameters, states))
        trained = carry["trained"] | {
            key: with_row(carry["trained"][key], jax.tree.unflatten(structure, parameters), row)
        }
        written = {name: with_row(carry["state"][name], new, row) for name, new in zip(names, states, strict=True)}
        return {
            "trained": trained,
            "state": carry["state"] | written,
            "seen": {"square": square, "finite": finite},
        }


def fused_step(
    objective: Objective, spec: ModelSpec, compute: Compute, optimizer: Optimizer, abstract: Tree | None
) -> Callable[..., tuple[Tree, Any, Metrics]]:
    """A function (trainable, optimizer state, frozen, batch [1, B, T], rng) -> (trainable, state, metrics).

    Metrics are those of train.step.make_train_step. Where a gradient is not finite, nothing below it in the backward
    pass is updated; what is above already was. `finite` is then False, and the state of no further use.
    """
    layout, one = compute.layout, optimizer.one
    assert one is not None, "an update that needs all gradients cannot be made while they come"
    arrays = None
    if abstract is not None:
        arrays = {
            key: jax.tree.map(lambda leaf: single(LAYERS, leaf), node) for key, node in abstract["layers"].items()
        }

    def step(trainable: Tree, state: Any, frozen: Tree, batch: Batch, rng: Array | None) -> tuple[Tree, Any, Metrics]:
        assert batch["tokens"].shape[0] == 1, "a gradient that is used up cannot be added to the next micro-batch's"
        micro, count = jax.tree.map(lambda x: x[0], batch), state[COUNT]
        outer = {name: node for name, node in trainable.items() if name != "layers"}
        inside = {path: kept for path, kept in state[KEPT].items() if path.startswith(LAYERS)}
        seen = {"square": jnp.float32(0), "finite": jnp.bool_(True)}
        refs = jax.tree.map(jax.new_ref, {"trained": trainable["layers"], "state": inside, "seen": seen})
        around = {name: node for name, node in frozen.items() if name != "layers"}

        def score(outer: Tree, spark: Array) -> tuple[Array, Score]:
            layers = ConsumedLayers(refs, frozen.get("layers", {}), optimizer, count, spark, arrays, layout)
            scored = objective(merge(outer, around) | {"layers": layers}, spec, compute, micro, rng)
            return scored.loss, scored

        loss, pull, scored = jax.vjp(score, outer, jnp.float32(0), has_aux=True)
        weight = jnp.where(scored.weight > 0, scored.weight, 1.0)
        gradient, _ = pull(1 / weight)
        made = _read(refs)
        if layout is not None:
            assert abstract is not None
            gradient = laid_out(gradient, {name: abstract[name] for name in outer}, layout)
        square = made["seen"]["square"] + sum_of_squares(gradient)
        finite = made["seen"]["finite"] & jnp.isfinite(square) & jnp.isfinite(loss)
        kept, new = dict(made["state"]), []
        for (path, slope), parameter in zip(named_leaves(gradient), jax.tree.leaves(outer), strict=True):
            after = one(path, slope, state[KEPT][path], parameter, count, jnp.int32(0))
            parameter, kept[path] = jax.tree.map(
                lambda after, was: jnp.where(finite, after, was), after, (parameter, state[KEPT][path])
            )
            new.append(parameter)
        trainable = jax.tree.unflatten(jax.tree.structure(outer), new) | {"layers": made["trained"]}
        metrics = means(scored) | {
            "loss": loss / weight,
            "weight": scored.weight,
            "grad_norm": jnp.sqrt(square),
            "finite": finite,
            "finite_micro": finite[None],
        }
        return trainable, {COUNT: jnp.where(finite, count + 1, count), KEPT: kept}, metrics

    return step


def sum_of_squares(tree: Tree) -> Array:
    """Of all numbers, in float32."""
    return sum((jnp.sum(jnp.square(leaf.astype(jnp.float32))) for leaf in jax.tree.leaves(tree)), jnp.float32(0))


def _frozen_stack(layer: Layer, stack: Stack, nodes: list[Tree], x: Hidden, shared: Any) -> Hidden:
    """Layers of which nothing is trained, kept as little of as of the others."""

    def group(x: Hidden, row: Array) -> tuple[Hidden, None]:
        for place, node in enumerate(nodes):
            x = layer(x, row_of(node, row), place, row, shared)
        return x, None

    return lax.scan(jax.checkpoint(group, prevent_cse=False), x, jnp.arange(stack.repeats))[0]


def _read(refs: Any) -> Any:
    return jax.tree.map(lambda ref: ref[...], refs)
