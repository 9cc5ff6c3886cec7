"""Where each Hugging Face tensor lives in the parameter tree, and the blocks it is moved in.

Checking, loading, writing and verifying all walk this one list.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from meshtune.families import hf_names
from meshtune.model.spec import ArraySpec, ModelSpec, abstract_params
from meshtune.model.tree import flatten

# Host memory that moving one tensor may take; larger tensors are moved in several blocks of rows.
BLOCK_BYTES = 16 << 20


@dataclasses.dataclass(frozen=True)
class Slot:
    """One Hugging Face tensor: its name, and its place `params[path]` or, in a stacked array, `params[path][row]`."""

    name: str
    path: str
    row: int | None
    array: ArraySpec

    @property
    def shape(self) -> tuple[int, ...]:
        """The tensor's shape, without the axis of stacked layers."""
        return self.array.shape if self.row is None else self.array.shape[1:]

    @property
    def axes(self) -> tuple[str, ...]:
        """The logical name of each of its dimensions."""
        return self.array.axes if self.row is None else self.array.axes[1:]


def slots(spec: ModelSpec) -> list[Slot]:
    """Every tensor of a model, in the order embedding, layer by layer, norm, head."""
    names = hf_names(spec)
    numbers = {key: numbers for key, _, _, numbers in spec.positions()}
    ordered: list[tuple[float, Slot]] = []
    outside = -1.0  # leaves outside the layers keep their place in the tree: before all layers, or after
    for path, array in flatten(abstract_params(spec)).items():
        if array.axes[0] != "layers":
            (name,) = names[path]
            ordered.append((outside, Slot(name, path, None, array)))
            continue
        outside = float(spec.layers)
        in_layers = enumerate(zip(numbers[path.split("/")[1]], names[path], strict=True))
        ordered += [(float(number), Slot(name, path, row, array)) for row, (number, name) in in_layers]
    return [slot for _, slot in sorted(ordered, key=lambda entry: entry[0])]


def blocks(shape: tuple[int, ...], itemsize: int, limit: int = BLOCK_BYTES) -> Iterator[tuple[int, int]]:
    """Ranges [start, stop) of a tensor's first axis, each at most `limit` bytes (or one row)."""
    row_bytes = max(1, int(np.prod(shape[1:], dtype=np.int64)) * itemsize)
    rows = max(1, limit // row_bytes)
    for start in range(0, shape[0], rows):
        yield start, min(shape[0], start + rows)


@functools.partial(jax.jit, donate_argnums=0)
def place(leaf: jax.Array, block: jax.Array, at: jax.Array) -> jax.Array:
    """`leaf` with `block`, cast to its dtype, written at index `at` (int32, one a dimension of leaf), in place."""
    block = block.astype(leaf.dtype).reshape((1,) * (leaf.ndim - block.ndim) + block.shape)
    return lax.dynamic_update_slice(leaf, block, tuple(at[i] for i in range(leaf.ndim)))


@functools.partial(jax.jit, static_argnames=("shape", "dtype"))
def _cut(leaf: jax.Array, at: jax.Array, *, shape: tuple[int, ...], dtype: str) -> jax.Array:
    block = lax.dynamic_slice(leaf, tuple(at[i] for i in range(leaf.ndim)), shape)
    # The barrier keeps float32 -> bfloat16 -> float32 from being simplified away by a caller that fuses this.
    return lax.optimization_barrier(block.astype(dtype))


def index(slot: Slot, start: int) -> np.ndarray:
    """Index into the leaf of row `start` of the slot's tensor, int32."""
    first = (start,) + (0,) * (len(slot.shape) - 1)
    return np.asarray(first if slot.row is None else (slot.row, *first), np.int32)


def cut(leaf: Any, slot: Slot, start: int, stop: int, dtype: str) -> np.ndarray:
    """Rows start..stop of a slot's tensor, cast to `dtype` where the leaf lives, as a host array."""
    shape = (stop - start, *slot.shape[1:])
    block = _cut(leaf, index(slot, start), shape=shape if slot.row is None else (1, *shape), dtype=dtype)
    return np.asarray(block).reshape(shape)


def allocate(arrays: dict[str, ArraySpec]) -> dict[str, jax.Array]:
    """The memory of some leaves, all zero, on the default device."""
    # One program for all: a compilation for every shape would take longer than reading a small model.
    return jax.jit(lambda: {path: jnp.zeros(array.shape, array.dtype) for path, array in arrays.items()})()
