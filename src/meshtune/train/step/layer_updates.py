"""Forward through all layers, and back again with each layer's update: the inner part of a layerwise step."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float

from meshtune.arrays.tree import Tree, merge, named_leaves
from meshtune.model.block import Hidden, Sums, with_stored
from meshtune.model.compute import Compute
from meshtune.model.gather import is_offloaded, to_device
from meshtune.model.inputs import SequenceInfo
from meshtune.model.reverse import Layer, backward, forward, row_of, with_row
from meshtune.model.spec import ModelSpec, Stack
from meshtune.model.stacks import add_sums, no_sums
from meshtune.optim.optimizer import Optimizer, State
from meshtune.train.step.block_coordinate import placed_as


class Norm(NamedTuple):
    """The sum of squares of all gradients so far, float32, and whether all of them were finite."""

    square: Float[Array, ""]
    finite: Bool[Array, ""]

    def with_gradient(self, gradient: Tree) -> Norm:
        """With some more gradients."""
        leaves = jax.tree.leaves(gradient)
        square = self.square + sum((jnp.sum(jnp.square(leaf.astype(jnp.float32))) for leaf in leaves), jnp.float32(0))
        return Norm(square, self.finite & jnp.isfinite(square))


class Carry(NamedTuple):
    """The state of the backward pass: all that is trained in the layers, its state by path, and the gradients' norm.

    Of arrays kept in the host's memory, by key of params["layers"]: `prefetched` is this layer's, on the device,
    `fetching` that of the layer below, and `writeback` that of the layer above, not yet written to the host. `top` is
    the highest row of the stack.
    """

    trained: Tree
    state: dict[str, State]
    norm: Norm
    prefetched: dict[str, list[Array]] = {}  # noqa: RUF012  (never changed)
    writeback: dict[str, list[Array]] = {}  # noqa: RUF012
    fetching: tuple[list[Array], ...] = ()
    top: Array | None = None


@dataclasses.dataclass(frozen=True)
class LayerUpdates:
    """The layers of a model with their optimizer. `count` are the updates made before."""

    layers: Callable[[int], Layer]
    spec: ModelSpec
    compute: Compute
    optimizer: Optimizer
    abstract: Tree | None
    count: Array
    rows: SequenceInfo

    def forward(
        self, trained: Tree, frozen: Tree, x: Hidden, side: Tree, *, through: bool
    ) -> tuple[Hidden, Sums, list[list[Array] | None], Tree]:
        """(x after all layers, their sums, the layer inputs of every stack: None of one that needs no gradient, `side`
        with the memories that layers store for later ones).

        `through` says that something below the layers is trained.
        """
        layer_inputs: list[list[Array] | None] = []
        sums: Sums = no_sums(self.spec.stacks)
        for number, stack in enumerate(self.spec.stacks):
            keys = keys_of(number, stack)
            through = through or any(key in trained for key in keys)
            nodes = [merge(trained.get(key, {}), frozen.get(key, {})) for key in keys]
            if through:
                layer, compute = self.layers(number), self.compute
                x, sums, saved, side = forward(layer, stack, nodes, x, self.rows, side, sums, compute)
                layer_inputs.append(saved)
            else:
                x, sums, side = self._frozen_stack(number, stack, nodes, x, side, sums)
                layer_inputs.append(None)
        return x, sums, layer_inputs, side

    def backward(
        self,
        trained: Tree,
        frozen: Tree,
        state: Mapping[str, State],
        layer_inputs: list[list[Array] | None],
        side: Tree,
        cotangents: tuple[Hidden, Tree, Sums],
        norm: Norm,
    ) -> tuple[tuple[Hidden, Tree, Sums], Tree, dict[str, State], Norm]:
        """(cotangents below the layers, all that is trained in them, its state by path, the norm), updated."""
        carry = Carry(trained, {name: state[name] for name, _ in named_leaves({"layers": trained})}, norm)
        for number in reversed(range(len(self.spec.stacks))):
            saved = layer_inputs[number]
            if saved is None:
                break
            cotangents, carry = self._stack_backward(number, frozen, saved, side, cotangents, carry)
        return cotangents, carry.trained, carry.state, carry.norm

    def _stack_backward(
        self,
        number: int,
        frozen: Tree,
        layer_inputs: list[Array],
        side: Tree,
        cotangents: tuple[Hidden, Tree, Sums],
        carry: Carry,
    ) -> tuple[tuple[Hidden, Tree, Sums], Carry]:
        stack = self.spec.stacks[number]
        keys = keys_of(number, stack)

        def node(carry: Carry, place: int, row: Array) -> tuple[Tree, Tree]:
            leaves, structure = jax.tree.flatten(carry.trained.get(keys[place], {}))
            prefetched = iter(carry.prefetched.get(keys[place], ()))
            parts = [next(prefetched) if is_offloaded(leaf) else row_of(leaf, row) for leaf in leaves]
            return jax.tree.unflatten(structure, parts), row_of(frozen.get(keys[place], {}), row)

        def visit(carry: Carry, place: int, row: Array, trained: Tree, gradient: Tree) -> Carry:
            return self._apply_layer_update(carry, keys[place], row, gradient) if gradient else carry

        top = jnp.int32(stack.repeats - 1)
        first = {key: self._fetch_row(carry, key, top) for key in keys if key in carry.trained}
        cotangents, carry = backward(
            self.layers(number),
            stack,
            node,
            layer_inputs,
            cotangents,
            self.rows,
            side,
            visit,
            carry._replace(prefetched=first, writeback=first, top=top),
            merged=merge,
            between=functools.partial(self._prefetch, keys) if any(first.values()) else None,
        )
        for key in first:
            carry = self._write_back(carry, key)
        return cotangents, carry._replace(prefetched={}, writeback={}, top=None)

    def _frozen_stack(
        self, number: int, stack: Stack, nodes: list[Tree], x: Hidden, side: Tree, sums: Sums
    ) -> tuple[Hidden, Sums, Tree]:
        """Layers that no gradient passes: nothing is saved of them but the memories that they store."""
        layer = self.layers(number)

        def group(stream: tuple[Hidden, Sums], row: Array) -> tuple[tuple[Hidden, Sums], Tree]:
            (x, sums), stored = stream, {}
            for place, node in enumerate(nodes):
                x, new, left = layer(x, row_of(node, row), place, row, self.rows, with_stored(side, stored))
                sums, stored = add_sums(sums, new), stored | left
            return (x, sums), stored

        (x, sums), stored = lax.scan(group, (x, sums), jnp.arange(stack.repeats))
        return x, sums, with_stored(side, jax.tree.map(lambda leaf: leaf[0], stored))

    def _apply_layer_update(self, carry: Carry, key: str, row: Array, gradient: Tree) -> Carry:
        """Parameters and state with one layer updated, if its gradient and all before were finite."""
        if self.compute.layout is not None:
            assert self.abstract is not None
            arrays = jax.tree.map(lambda leaf: leaf.layer, self.abstract["layers"].get(key, {}))
            gradient = placed_as(gradient, arrays, self.compute.layout)
        norm = carry.norm.with_gradient(gradient)
        names, update_one = self._names(carry, key), self.optimizer.update_param
        assert update_one is not None
        stacks, structure = jax.tree.flatten(self._stacks(carry, key))
        offloaded = [is_offloaded(stack) for stack in stacks]
        prefetched = iter(carry.prefetched[key])
        parts = [
            next(prefetched) if is_away else row_of(leaf, row) for leaf, is_away in zip(stacks, offloaded, strict=True)
        ]

        def update_row() -> list[Array]:
            parameters, states = jax.tree.unflatten(structure, parts)
            grads, leaves = jax.tree.leaves(gradient), jax.tree.leaves(parameters)
            arguments = zip(names, grads, states, leaves, strict=True)
            new = [update_one(name, grad, state, leaf, self.count, row) for name, grad, state, leaf in arguments]
            return jax.tree.leaves(([leaf for leaf, _ in new], [state for _, state in new]))

        # A branch and not a choice between numbers: its results exist before any is written to a stack. Left to itself
        # the compiler may read one stack while it writes another, and must then copy whole stacks.
        parts = lax.cond(norm.finite, update_row, lambda: parts)
        for place, stack in enumerate(stacks):
            if not offloaded[place]:
                stacks[place] = with_row(stack, parts[place], row)
        writeback = [part for part, is_away in zip(parts, offloaded, strict=True) if is_away]
        following = list(carry.fetching[0]) if carry.fetching else []
        carry = carry._replace(
            norm=norm,
            prefetched=carry.prefetched | {key: following},
            writeback=carry.writeback | {key: writeback},
            fetching=(),
        )
        return self._with_stacks(carry, key, jax.tree.unflatten(structure, stacks))

    def _prefetch(
        self, keys: list[str], carry: Carry, place: int, row: Array, cotangent: Hidden, output: Hidden
    ) -> tuple[Carry, Hidden]:
        """(carry, cotangent) with the layer above written to the host while this one is computed again, and the layer
        below fetched from there, as `fetching`, while this one's gradient is computed."""
        key = keys[place]
        if key not in carry.trained:
            return carry, cotangent
        assert carry.top is not None
        stacks, structure = jax.tree.flatten(self._stacks(carry, key))
        writeback, places = iter(carry.writeback[key]), [i for i, stack in enumerate(stacks) if is_offloaded(stack)]
        above, below = jnp.minimum(row + 1, carry.top), jnp.maximum(row - 1, 0)
        # Written first and read then: the other way round the compiler would copy the stack.
        written = [with_row(stacks[i], next(writeback), above) for i in places]
        written, cotangent, _ = lax.optimization_barrier((written, cotangent, output))
        for i, stack in zip(places, written, strict=True):
            stacks[i] = stack
        carry = self._with_stacks(carry, key, jax.tree.unflatten(structure, stacks))
        return carry._replace(fetching=([to_device(row_of(stack, below)) for stack in written],)), cotangent

    def _names(self, carry: Carry, key: str) -> list[str]:
        return [name for name, _ in named_leaves({"layers": {key: carry.trained[key]}})]

    def _stacks(self, carry: Carry, key: str) -> tuple[Tree, list[State]]:
        """The trained parameters of all layers of a key, and their state."""
        return carry.trained[key], [carry.state[name] for name in self._names(carry, key)]

    def _with_stacks(self, carry: Carry, key: str, stacks: tuple[Tree, list[State]]) -> Carry:
        """carry with the stacks of a key replaced."""
        states = dict(zip(self._names(carry, key), stacks[1], strict=True))
        return carry._replace(trained=carry.trained | {key: stacks[0]}, state=carry.state | states)

    def _fetch_row(self, carry: Carry, key: str, row: Array) -> list[Array]:
        """A row, on the device, of every stack that is kept in the host's memory."""
        return [
            to_device(row_of(stack, row)) for stack in jax.tree.leaves(self._stacks(carry, key)) if is_offloaded(stack)
        ]

    def _write_back(self, carry: Carry, key: str) -> Carry:
        """carry with the rest of its lowest layer written to the host's memory."""
        writeback = iter(carry.writeback[key])
        stacks, structure = jax.tree.flatten(self._stacks(carry, key))
        stacks = [with_row(stack, next(writeback), jnp.int32(0)) if is_offloaded(stack) else stack for stack in stacks]
        return self._with_stacks(carry, key, jax.tree.unflatten(structure, stacks))


def keys_of(number: int, stack: Stack) -> list[str]:
    """The keys of a stack's layers in params["layers"], one for each place in its pattern."""
    return [f"{number}.{place}" for place in range(len(stack.pattern))]
