"""Measures the inputs of linear layers, by an adapter that leaves their outputs unchanged."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from meshtune.adapters.kind import Weight
from meshtune.adapters.method import SHARED
from meshtune.arrays.spec import ArraySpec
from meshtune.arrays.tree import Tree, merge, unflatten
from meshtune.model.compute import Compute, compiler_options
from meshtune.model.decoder import forward
from meshtune.model.inputs import inputs_of
from meshtune.model.linear import matmul
from meshtune.model.spec import ModelSpec


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class CountedTokens:
    """1.0 for tokens and 0.0 for padding, [B, T]; shared by all `Measure`s of a program."""

    tokens: Any

    def cut(self, shape: tuple[int, ...]) -> CountedTokens:
        """The same mask for a weight of any shape."""
        return self

    def in_use(self, gathered: Callable[..., Array], axes: tuple[str, ...]) -> CountedTokens:
        """The mask is sharded like the tokens."""
        return self


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Measure:
    """y = x W^T. The gradient of `squares` [in] is no gradient: whatever the loss, it is the sum of x^2 over tokens."""

    squares: Any

    def apply(
        self,
        x: Float[Array, "B T i"],
        weight: Weight,
        key: Array | None = None,
        out: DTypeLike | None = None,
        fixed: CountedTokens | None = None,
    ) -> Float[Array, "B T o"]:
        """The linear layer, unchanged and without its bias."""
        assert fixed is not None, "the mask of counted tokens is not in the tree"
        counted = jnp.square(x.astype(jnp.float32)) * fixed.tokens[..., None]
        return _note_squares(matmul(x, weight, out), self.squares, jnp.sum(counted, axis=(0, 1)))

    def in_use(self, gathered: Callable[..., Array], axes: tuple[str, ...]) -> Measure:
        """Gathered for computing: see adapters.kind.Adapter."""
        return Measure(gathered(self.squares, axes[1]))


@jax.custom_vjp
def _note_squares(y: Array, squares: Float[Array, "i"], counted: Float[Array, "i"]) -> Array:
    return y


def _noted_forward(y: Array, squares: Array, counted: Array) -> tuple[Array, Array]:
    return y, counted


def _noted_backward(counted: Array, cotangent: Array) -> tuple[Array, Array, Array]:
    # The cotangent stops here, so that the matrix products of a backward pass are not computed.
    return jnp.zeros_like(cotangent), counted, jnp.zeros_like(counted)


_note_squares.defvjp(_noted_forward, _noted_backward)


def input_sizes(
    nodes: Mapping[str, ArraySpec],
    params: Tree,
    spec: ModelSpec,
    compute: Compute,
    batches: Iterable[Tree],
) -> dict[str, Float[Array, "L i"]]:
    """The root mean square of every input of the linear layers `nodes` ("layers/../q" and the form of its weight
    [L, out, in]), over all tokens of `batches` but padding; float32, split over devices as the weight's inputs are.

    A batch has `tokens`, `positions` and `segment_ids` [B, T]. Whole rows must fit: nothing is computed by chunks.
    """
    compute = dataclasses.replace(compute, remat="full", mlp_chunk=None, attention_chunk=None, offload=())
    layout = compute.layout
    forms = {
        node: ArraySpec((w.shape[0], w.shape[-1]), "float32", (w.axes[0], w.axes[-1])) for node, w in nodes.items()
    }
    where = None if layout is None else {node: layout.of(form) for node, form in forms.items()}
    total = jax.jit(lambda: {node: jnp.zeros(form.shape) for node, form in forms.items()}, out_shardings=where)()

    def sum_squares(squares: dict[str, Array], params: Tree, batch: Tree) -> tuple[dict[str, Array], Array]:
        counted = (batch["segment_ids"] > 0).astype(jnp.float32)
        inputs = inputs_of(batch)

        def through(measured: dict[str, Array]) -> Array:
            beside = unflatten({f"{node}/adapter": Measure(array) for node, array in measured.items()})
            beside = merge(beside, {SHARED: CountedTokens(counted)})
            return forward(merge(params, beside), spec, compute, inputs).hidden.sum()

        sums = jax.grad(through)(jax.tree.map(jnp.zeros_like, squares))
        return jax.tree.map(jnp.add, squares, sums), jnp.sum(counted)

    options = None if compute.dtype == "float32" else compiler_options(compute.platform)
    outs = None if layout is None else (where, layout.replicated)
    step = jax.jit(sum_squares, donate_argnums=0, out_shardings=outs, compiler_options=options)
    tokens = 0.0
    for batch in batches:
        total, counted = step(total, params, {name: batch[name] for name in ("tokens", "positions", "segment_ids")})
        tokens += float(jax.device_get(counted.addressable_data(0)))
    return {node: jnp.sqrt(squares / tokens) for node, squares in total.items()}
