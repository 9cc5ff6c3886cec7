"""A step that consumes every layer's gradient as soon as the backward pass has computed it (LOMO,
https://arxiv.org/abs/2306.09782).

No gradient of the whole model ever exists: only those of one layer, or of parameters in no layer (output head and final
norm, before the layers; the embedding and what feeds side inputs, after them). So nothing may need them all at once,
such as their norm before the update, or the sum over several micro-batches. Parameters and optimizer state are updated
in place. Where they are kept in the host's memory, one layer of them is fetched for the forward pass and for its
backward, updated on the device, and written back.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int

from meshtune.arrays.tree import Tree, merge, named_leaves
from meshtune.errors import UserError
from meshtune.model.block import Hidden, Sums, without_memories
from meshtune.model.compute import Compute
from meshtune.model.gather import to_device
from meshtune.model.inputs import SequenceInfo
from meshtune.model.reverse import Layer, layer_functions
from meshtune.model.spec import ModelSpec
from meshtune.model.stacks import no_sums
from meshtune.objectives.answers import Batch, LossSums, Objective, metric_means, with_layers
from meshtune.optim.optimizer import COUNT, PARAM_STATE, Optimizer
from meshtune.train.step.block_coordinate import placed_as
from meshtune.train.step.host_state import updated_at_once
from meshtune.train.step.layer_updates import LayerUpdates, Norm
from meshtune.train.step.state import Metrics, TrainState


@dataclasses.dataclass
class LayerBoundary:
    """Replaces params["layers"] (model.reverse.LayerRunner) and cuts the model there: it captures the input of the
    layers, and returns `leaving` as what leaves them (None: what enters, where nothing after the layers matters)."""

    leaving: tuple[Hidden, Sums] | None = None
    captured: tuple[Hidden, SequenceInfo, Tree] | None = None

    def apply(
        self,
        layers: Callable[[int], Layer],
        spec: ModelSpec,
        compute: Compute,
        x: Hidden,
        rows: SequenceInfo,
        side: Tree,
    ) -> tuple[Hidden, Sums]:
        """`leaving`; the arguments are captured."""
        if self.captured is not None:
            raise UserError(
                "an update in the backward pass consumes gradients in one pass, and this stage goes through the model "
                "twice",
                where="optimizer.in_backward, stage",
                fix="set optimizer.in_backward=false; optimizer.name=adamw8bit or galore also takes less memory",
            )
        self.captured = (x, rows, side)
        return (x, no_sums(spec.stacks)) if self.leaving is None else self.leaving


def layerwise_step(
    objective: Objective,
    spec: ModelSpec,
    compute: Compute,
    optimizer: Optimizer,
    abstract: Tree | None,
    dropout: bool,
) -> Callable[[TrainState, Tree, Batch, Int[Array, ""]], tuple[TrainState, Metrics, Sums]]:
    """The step of make_train_step for an optimizer that updates in the backward pass, for one micro-batch; it also
    returns the sums of the layers.

    Where a gradient is not finite, nothing below it in the backward pass is updated; layers above already were.
    `finite` is then False, and the state of no further use.
    """
    assert optimizer.update_param is not None, "an update that needs all gradients cannot be made while they come"

    def step(state: TrainState, frozen: Tree, batch: Batch, seed: Int[Array, ""]) -> tuple[TrainState, Metrics, Sums]:
        assert batch["tokens"].shape[0] == 1, "a gradient that is consumed cannot be added to the next micro-batch's"
        rng = jax.random.fold_in(jax.random.fold_in(jax.random.key(seed), state.step), 0) if dropout else None
        micro, count = jax.tree.map(lambda x: x[0], batch), state.opt_state[COUNT]
        cut = _CutModel(objective, spec, compute, state.trainable, frozen, micro, rng)
        (x, side), enter, rows = jax.vjp(cut.before, to_device(cut.trained_before), has_aux=True)
        updates = LayerUpdates(layer_functions(spec, compute), spec, compute, optimizer, abstract, count, rows)
        stacks = state.trainable["layers"], frozen.get("layers", {})
        x, sums, layer_inputs, side = updates.forward(*stacks, x, side, through=bool(cut.trained_before))
        loss, leave, loss_sums = jax.vjp(cut.after, to_device(cut.trained_after), x, sums, has_aux=True)
        weight = jnp.where(loss_sums.weight > 0, loss_sums.weight, 1.0)
        gradient, d_x, d_sums = leave(1 / weight)
        # Of a tied embedding: its gradient as a head waits for its gradient as an embedding.
        tied = {name: gradient.pop(name) for name in list(gradient) if name in cut.trained_before}
        outer_updates = _OuterUpdates(optimizer, abstract, compute, cut.outer, state.opt_state[PARAM_STATE], count)
        norm = outer_updates.update(gradient, Norm(jnp.float32(0), jnp.isfinite(loss)))
        cotangents = d_x, jax.tree.map(jnp.zeros_like, side), d_sums
        (d_x, d_side, _), trained, layer_state, norm = updates.backward(
            *stacks, state.opt_state[PARAM_STATE], layer_inputs, side, cotangents, norm
        )
        if cut.trained_before:
            (gradient,) = enter((d_x, without_memories(d_side)))
            gradient |= {name: jax.tree.map(jnp.add, gradient[name], node) for name, node in tied.items()}
            norm = outer_updates.update(gradient, norm)
        metrics = metric_means(loss_sums) | {
            "loss": loss / weight,
            "weight": loss_sums.weight,
            "grad_norm": jnp.sqrt(norm.square),
            "finite": norm.finite,
            "finite_micro": norm.finite[None],
        }
        opt_state = {COUNT: jnp.where(norm.finite, count + 1, count), PARAM_STATE: outer_updates.kept | layer_state}
        updated = jnp.where(norm.finite, state.step + 1, state.step)
        return TrainState(updated, outer_updates.parameters | {"layers": trained}, opt_state), metrics, sums

    return step


class _CutModel:
    """A model cut before and after its layers, as functions of the parameters trained outside them.

    Raises UserError for a trained leaf that is on neither side of the cut: it would get no gradient.
    """

    def __init__(
        self,
        objective: Objective,
        spec: ModelSpec,
        compute: Compute,
        trainable: Tree,
        frozen: Tree,
        micro: Batch,
        rng: Array | None,
    ):
        self.outer = {name: node for name, node in trainable.items() if name != "layers"}
        self.trained_before = {name: node for name, node in self.outer.items() if name in spec.before}
        self.trained_after = {name: node for name, node in self.outer.items() if name in spec.after}
        for name in self.outer.keys() - self.trained_before.keys() - self.trained_after.keys():
            raise UserError(
                f"'{name}' is trained, and an update in the backward pass would give it no gradient",
                where="optimizer.in_backward, method",
                fix="set optimizer.in_backward=false, or do not train it",
            )
        frozen_outer = {name: node for name, node in frozen.items() if name != "layers"}

        def run(trained: Tree, boundary: LayerBoundary) -> LossSums:
            params = merge(to_device(self.outer) | trained, frozen_outer) | {"layers": boundary}
            return with_layers(spec, objective(params, spec, compute, micro, rng))

        self._run = run

    def before(self, trained: Tree) -> tuple[tuple[Hidden, Tree], SequenceInfo]:
        """((what enters the layers, side inputs), rows)."""
        boundary = LayerBoundary()
        self._run(trained, boundary)
        assert boundary.captured is not None
        x, rows, side = boundary.captured
        return (x, side), rows

    def after(self, trained: Tree, x: Hidden, sums: Sums) -> tuple[Array, LossSums]:
        """(the summed loss, all sums) from what leaves the layers."""
        loss_sums = self._run(trained, LayerBoundary((x, sums)))
        return loss_sums.loss, loss_sums


class _OuterUpdates:
    """Updates parameters outside of layers as their gradients come: `parameters` and their state `kept`."""

    def __init__(
        self,
        optimizer: Optimizer,
        abstract: Tree | None,
        compute: Compute,
        outer: Tree,
        state: Mapping[str, object],
        count: Array,
    ):
        self._optimizer, self._abstract, self._layout = optimizer, abstract, compute.layout
        self._outer, self._state, self._count = outer, state, count
        self.parameters, self.kept = dict(outer), {}

    def update(self, gradient: Tree, norm: Norm) -> Norm:
        """Updates the parameters of `gradient`, if it and all before it were finite."""
        if self._layout is not None:
            assert self._abstract is not None
            gradient = placed_as(gradient, {name: self._abstract[name] for name in gradient}, self._layout)
        norm = norm.with_gradient(gradient)
        parameters = {name: self._outer[name] for name in gradient}
        new = []
        for (path, grad), parameter in zip(named_leaves(gradient), jax.tree.leaves(parameters), strict=True):
            after, self.kept[path] = updated_at_once(
                self._optimizer, path, grad, self._state[path], parameter, self._count, norm.finite, self._layout
            )
            new.append(after)
        self.parameters.update(jax.tree.unflatten(jax.tree.structure(parameters), new))
        return norm
