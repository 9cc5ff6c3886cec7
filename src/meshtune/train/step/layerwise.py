"""A step that uses every layer's gradient up as soon as the backward pass has made it (https://arxiv.org/abs/2306.09782).

No gradient of the whole model ever exists: only those of one layer, or of what is in no layer (output head and final
norm, before the layers' turn; the embedding, after it). So nothing may need them all at once, such as their norm before
the update, or the sum over several micro-batches. Parameters and optimizer state are updated in their place. Where they
wait in the host's memory, a layer of them is brought for the forward pass and for its backward, updated on the device,
and written back.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array

from meshtune.arrays.paths import named_leaves
from meshtune.arrays.tree import Tree, merge
from meshtune.errors import UserError
from meshtune.model.compute import Compute
from meshtune.model.in_use import here, on_host
from meshtune.model.reverse import Hidden, Layer, backward, forward, row_of, with_row
from meshtune.model.spec import ModelSpec, Stack
from meshtune.objectives.score import Batch, Objective, Score, metric_means
from meshtune.optim.optimizer import Optimizer
from meshtune.optim.param_optimizer import COUNT, PARAM_STATE
from meshtune.train.step.block_coordinate import laid_out
from meshtune.train.step.host_state import updated_at_once

Metrics = dict[str, Array]


@dataclasses.dataclass
class Cut:
    """Stands at params["layers"] and cuts the model there: it notes what enters the layers, and lets `leaving` leave
    them (None: what enters, where nothing after the layers matters)."""

    leaving: Hidden | None = None
    entered: tuple[Callable[[int], Layer], Hidden, Any] | None = None

    def through(
        self, layer: Callable[[int], Layer], spec: ModelSpec, compute: Compute, x: Hidden, shared: Any
    ) -> Hidden:
        """`leaving`; `layer`, x and `shared` are noted."""
        if self.entered is not None:
            raise UserError(
                "a fused update uses gradients up in one backward pass, and this stage goes through the model twice",
                where="optimizer.in_backward, stage",
                fix="set optimizer.in_backward=false; optimizer.name=adamw8bit or galore also takes less memory",
            )
        self.entered = (layer, x, shared)
        return x if self.leaving is None else self.leaving


def fused_step(
    objective: Objective, spec: ModelSpec, compute: Compute, optimizer: Optimizer, abstract: Tree | None
) -> Callable[..., tuple[Tree, Any, Metrics]]:
    """A function (trainable, optimizer state, frozen, batch [1, B, T], rng) -> (trainable, state, metrics).

    Metrics are those of train.step.make_train_step. Where a gradient is not finite, nothing below it in the backward
    pass is updated; what is above already was. `finite` is then False, and the state of no further use.
    """
    layout = compute.layout
    assert optimizer.update_param is not None, "an update that needs all gradients cannot be made while they come"

    def step(trainable: Tree, state: Any, frozen: Tree, batch: Batch, rng: Array | None) -> tuple[Tree, Any, Metrics]:
        assert batch["tokens"].shape[0] == 1, "a gradient that is used up cannot be added to the next micro-batch's"
        micro, count = jax.tree.map(lambda x: x[0], batch), state[COUNT]
        outer = {name: node for name, node in trainable.items() if name != "layers"}
        around = {name: node for name, node in frozen.items() if name != "layers"}
        first = {name: node for name, node in outer.items() if name == "embed"}
        last = outer if spec.tied else {name: node for name, node in outer.items() if name != "embed"}
        noted: list[Callable[[int], Layer]] = []

        def run(outer: Tree, cut: Cut) -> Score:
            return objective(merge(outer, around) | {"layers": cut}, spec, compute, micro, rng)

        def before(learned: Tree) -> tuple[Hidden, Any]:
            cut = Cut()
            run(here(outer) | learned, cut)
            assert cut.entered is not None
            layer, x, shared = cut.entered
            noted.append(layer)
            return x, shared

        def after(learned: Tree, x: Hidden) -> tuple[Array, Score]:
            scored = run(here(outer) | learned, Cut(x))
            return scored.loss, scored

        x, enter, shared = jax.vjp(before, here(first), has_aux=True)
        walk = _Walk(noted[0], spec, compute, optimizer, abstract, count, shared)
        x, streams = walk.ahead(trainable["layers"], frozen.get("layers", {}), x, through=bool(first))
        loss, leave, scored = jax.vjp(after, here(last), x, has_aux=True)
        weight = jnp.where(scored.weight > 0, scored.weight, 1.0)
        gradient, cotangent = leave(1 / weight)
        parts = {name: gradient.pop(name) for name in list(gradient) if name in first}  # of a tied embedding
        kept, parameters = dict(state[PARAM_STATE]), dict(outer)
        seen = {"square": jnp.float32(0), "finite": jnp.isfinite(loss)}

        def update(gradient: Tree, seen: Any) -> Any:
            names = list(gradient)
            if layout is not None:
                assert abstract is not None
                gradient = laid_out(gradient, {name: abstract[name] for name in names}, layout)
            seen = noticed(seen, gradient)
            mine = {name: outer[name] for name in names}
            new = []
            for (path, slope), parameter in zip(named_leaves(gradient), jax.tree.leaves(mine), strict=True):
                after, kept[path] = updated_at_once(
                    optimizer, path, slope, state[PARAM_STATE][path], parameter, count, seen["finite"], layout
                )
                new.append(after)
            parameters.update(jax.tree.unflatten(jax.tree.structure(mine), new))
            return seen

        seen = update(gradient, seen)
        carry = {
            "trained": trainable["layers"],
            "state": {path: mine for path, mine in state[PARAM_STATE].items() if path in optimizer.stacked},
            "seen": seen,
        }
        cotangent, carry = walk.back(carry, frozen.get("layers", {}), streams, cotangent)
        seen = carry["seen"]
        if first:
            (found,) = enter(cotangent)
            seen = update(jax.tree.map(jnp.add, found, parts) if parts else found, seen)
        kept |= carry["state"]
        metrics = metric_means(scored) | {
            "loss": loss / weight,
            "weight": scored.weight,
            "grad_norm": jnp.sqrt(seen["square"]),
            "finite": seen["finite"],
            "finite_micro": seen["finite"][None],
        }
        made = {COUNT: jnp.where(seen["finite"], count + 1, count), PARAM_STATE: kept}
        return parameters | {"layers": carry["trained"]}, made, metrics

    return step


@dataclasses.dataclass(frozen=True)
class _Walk:
    """Forward through all layers, and back again with each layer's update."""

    layer: Callable[[int], Layer]
    spec: ModelSpec
    compute: Compute
    optimizer: Optimizer
    abstract: Tree | None
    count: Array
    shared: Any

    def ahead(self, trained: Tree, frozen: Tree, x: Hidden, *, through: bool) -> tuple[Hidden, list[Any]]:
        """(x after all layers, the streams that enter every stack's: None of one that no gradient passes `through`)."""
        streams = []
        for number, stack in enumerate(self.spec.stacks):
            keys = keys_of(number, stack)
            through = through or any(key in trained for key in keys)
            nodes = [merge(trained.get(key, {}), frozen.get(key, {})) for key in keys]
            if through:
                x, entering = forward(self.layer(number), stack, nodes, x, self.shared, self.compute)
                streams.append(entering)
            else:
                x = _frozen_stack(self.layer(number), stack, nodes, x, self.shared)
                streams.append(None)
        return x, streams

    def back(self, carry: Any, frozen: Tree, streams: list[Any], cotangent: Hidden) -> tuple[Hidden, Any]:
        """(the cotangent of what enters the lowest stack that was gone through, carry with all trained updated)."""
        for number in reversed(range(len(self.spec.stacks))):
            if streams[number] is None:
                break
            stack = self.spec.stacks[number]
            keys = keys_of(number, stack)

            def node(carry: Any, place: int, row: Array, keys: list[str] = keys) -> tuple[Tree, Tree]:
                mine = carry["trained"].get(keys[place], {})
                ahead = iter(carry["ahead"].get(keys[place], ()))
                leaves, structure = jax.tree.flatten(mine)
                parts = [next(ahead) if on_host(leaf) else row_of(leaf, row) for leaf in leaves]
                return jax.tree.unflatten(structure, parts), row_of(frozen.get(keys[place], {}), row)

            def visit(carry: Any, place: int, row: Array, trained: Tree, gradient: Tree, keys: list[str] = keys) -> Any:
                return self._used_up(carry, keys[place], row, trained, gradient) if gradient else carry

            last = jnp.int32(stack.repeats - 1)
            ahead = {key: self._brought(carry, key, last) for key in keys if key in carry["trained"]}
            layer = self.layer(number)
            cotangent, carry = backward(
                layer,
                stack,
                node,
                streams[number],
                cotangent,
                self.shared,
                visit,
                carry | {"ahead": ahead, "away": ahead, "last": last},
                merged=merge,
                between=functools.partial(self._moved, keys) if any(ahead.values()) else None,
            )
            for key in ahead:
                carry = self._sent(carry, key)
            carry = {name: part for name, part in carry.items() if name not in ("ahead", "away", "last")}
        return cotangent, carry

    def _used_up(self, carry: Any, key: str, row: Array, trained: Tree, gradient: Tree) -> Any:
        """Parameters and state with one layer updated, if its gradient and all before were finite.

        `trained` is the layer as it is computed with, on the device. Of what waits in the host's memory, that of the
        layer above is sent there and that of the layer below comes from there while this layer is computed: these are
        carry["away"] and carry["ahead"].
        """
        if self.compute.layout is not None:
            assert self.abstract is not None
            arrays = jax.tree.map(lambda leaf: leaf.layer, self.abstract["layers"].get(key, {}))
            gradient = laid_out(gradient, arrays, self.compute.layout)
        seen = noticed(carry["seen"], gradient)
        names, one = self._names(carry, key), self.optimizer.update_param
        assert one is not None
        stacks, structure = jax.tree.flatten(self._stacks(carry, key))
        waiting = [on_host(stack) for stack in stacks]
        ahead = iter(carry["ahead"][key])
        parts = [next(ahead) if waits else row_of(stack, row) for stack, waits in zip(stacks, waiting, strict=True)]

        def updated() -> list[Array]:
            parameters, states = jax.tree.unflatten(structure, parts)
            slopes, leaves = jax.tree.leaves(gradient), jax.tree.leaves(parameters)
            every = zip(names, slopes, states, leaves, strict=True)
            made = [one(name, slope, state, leaf, self.count, row) for name, slope, state, leaf in every]
            return jax.tree.leaves(([new for new, _ in made], [new for _, new in made]))

        # A branch and not a choice between numbers: its results are there before any is written to a stack. Left to
        # itself the compiler may read one stack while it writes another, and must then copy whole stacks.
        parts = lax.cond(seen["finite"], updated, lambda: parts)
        for place, stack in enumerate(stacks):
            if not waiting[place]:
                stacks[place] = with_row(stack, parts[place], row)
        left = [part for part, waits in zip(parts, waiting, strict=True) if waits]
        following = {"away": carry["away"] | {key: left}, "ahead": carry["ahead"] | {key: carry.get("below", [])}}
        carry = {name: part for name, part in carry.items() if name != "below"} | {"seen": seen} | following
        return self._with(carry, key, jax.tree.unflatten(structure, stacks))

    def _moved(
        self, keys: list[str], carry: Any, place: int, row: Array, cotangent: Hidden, leaving: Hidden
    ) -> tuple[Any, Hidden]:
        """(carry, cotangent) with the layer above sent to the host while this one is made again, and the layer below
        fetched from there, as carry["below"], while this one's gradient is made."""
        key = keys[place]
        if key not in carry["trained"]:
            return carry, cotangent
        stacks, structure = jax.tree.flatten(self._stacks(carry, key))
        away, there = iter(carry["away"][key]), [place for place, stack in enumerate(stacks) if on_host(stack)]
        above, below = jnp.minimum(row + 1, carry["last"]), jnp.maximum(row - 1, 0)
        # Written first and read then: the other way round the compiler would copy the stack.
        written = [with_row(stacks[place], next(away), above) for place in there]
        written, cotangent, _ = lax.optimization_barrier((written, cotangent, leaving))
        for place, stack in zip(there, written, strict=True):
            stacks[place] = stack
        carry = self._with(carry, key, jax.tree.unflatten(structure, stacks))
        return carry | {"below": [here(row_of(stack, below)) for stack in written]}, cotangent

    def _names(self, carry: Any, key: str) -> list[str]:
        return [f"layers/{key}/{path}" for path, _ in named_leaves(carry["trained"][key])]

    def _stacks(self, carry: Any, key: str) -> tuple[Tree, list[Any]]:
        """What is trained in all layers of a key, and the state of that."""
        return carry["trained"][key], [carry["state"][name] for name in self._names(carry, key)]

    def _with(self, carry: Any, key: str, stacks: tuple[Tree, list[Any]]) -> Any:
        """carry with the stacks of a key replaced."""
        states = dict(zip(self._names(carry, key), stacks[1], strict=True))
        return carry | {"trained": carry["trained"] | {key: stacks[0]}, "state": carry["state"] | states}

    def _brought(self, carry: Any, key: str, row: Array) -> list[Array]:
        """A row, on the device, of every stack that lies in the host's memory."""
        return [here(row_of(stack, row)) for stack in jax.tree.leaves(self._stacks(carry, key)) if on_host(stack)]

    def _sent(self, carry: Any, key: str) -> Any:
        """carry with what is left of its lowest layer written to the host's memory."""
        away = iter(carry["away"][key])
        stacks, structure = jax.tree.flatten(self._stacks(carry, key))
        stacks = [with_row(stack, next(away), jnp.int32(0)) if on_host(stack) else stack for stack in stacks]
        return self._with(carry, key, jax.tree.unflatten(structure, stacks))


def noticed(seen: Any, gradient: Tree) -> Any:
    """`seen`, the sum of squares of all gradients so far and whether all were finite, with some more."""
    square = seen["square"] + sum_of_squares(gradient)
    return {"square": square, "finite": seen["finite"] & jnp.isfinite(square)}


def sum_of_squares(tree: Tree) -> Array:
    """Of all numbers, in float32."""
    return sum((jnp.sum(jnp.square(leaf.astype(jnp.float32))) for leaf in jax.tree.leaves(tree)), jnp.float32(0))


def keys_of(number: int, stack: Stack) -> list[str]:
    """The keys of a stack's layers in params["layers"], one for each place in its pattern."""
    return [f"{number}.{place}" for place in range(len(stack.pattern))]


def _frozen_stack(layer: Layer, stack: Stack, nodes: list[Tree], x: Hidden, shared: Any) -> Hidden:
    """Layers that no gradient passes: nothing is kept of them."""

    def group(x: Hidden, row: Array) -> tuple[Hidden, None]:
        for place, node in enumerate(nodes):
            x = layer(x, row_of(node, row), place, row, shared)
        return x, None

    return lax.scan(group, x, jnp.arange(stack.repeats))[0]
