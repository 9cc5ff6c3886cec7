"""Where each Hugging Face tensor lives in the parameter tree, and the blocks it is moved in.

Checking, loading, writing and verifying all walk this one list.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterator

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import SingleDeviceSharding

from meshtune.arrays.spec import ArraySpec
from meshtune.arrays.tree import flatten
from meshtune.families import hf_names
from meshtune.model.spec import ModelSpec, abstract_params
from meshtune.weights.row_order import RowOrder, row_order
from meshtune.weights.safetensors_files import BLOCK_BYTES


@dataclasses.dataclass(frozen=True)
class Slot:
    """One Hugging Face tensor: its name, and its place `params[path]` or, in a stacked array, `params[path][row]`.

    `order` says where the file has the tensor's rows, where that is not as the parameter has them.
    """

    name: str
    path: str
    row: int | None
    array: ArraySpec
    order: RowOrder | None = None

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
            ordered.append((outside, Slot(name, path, None, array, row_order(spec, array.axes))))
            continue
        outside, order = float(spec.layers), row_order(spec, array.axes[1:])
        in_layers = enumerate(zip(numbers[path.split("/")[1]], names[path], strict=True))
        ordered += [(float(number), Slot(name, path, row, array, order)) for row, (number, name) in in_layers]
    return [slot for _, slot in sorted(ordered, key=lambda entry: entry[0])]


def blocks(shape: tuple[int, ...], itemsize: int, limit: int = BLOCK_BYTES) -> Iterator[tuple[int, int]]:
    """Ranges [start, stop) of a tensor's first axis, each at most `limit` bytes (or one row), and as equal as can be:
    every other size is another program to compile.
    """
    row_bytes = max(1, int(np.prod(shape[1:], dtype=np.int64)) * itemsize)
    most = max(1, limit // row_bytes)
    rows = -(-shape[0] // -(-shape[0] // most)) if shape[0] else most
    for start in range(0, shape[0], rows):
        yield start, min(shape[0], start + rows)


@functools.partial(jax.jit, donate_argnums=0)
def place(leaf: jax.Array, block: jax.Array, at: jax.Array) -> jax.Array:
    """`leaf` with `block`, cast to its dtype, written at index `at` (int32, one a dimension of leaf), in place."""
    block = block.astype(leaf.dtype).reshape((1,) * (leaf.ndim - block.ndim) + block.shape)
    start = tuple(at[i] for i in range(leaf.ndim))
    if leaf.dtype not in (jnp.bfloat16, jnp.float8_e4m3fn):
        return lax.dynamic_update_slice(leaf, block, start)
    # As integers: XLA's CPU backend has no narrow floats of its own, and would convert the whole leaf there and back.
    bits = jnp.uint16 if leaf.dtype == jnp.bfloat16 else jnp.uint8
    leaf_bits, block_bits = (lax.bitcast_convert_type(x, bits) for x in (leaf, block))
    return lax.bitcast_convert_type(lax.dynamic_update_slice(leaf_bits, block_bits, start), leaf.dtype)


def allocate(arrays: dict[str, tuple[tuple[int, ...], str]], device: jax.Device | None = None) -> dict[str, jax.Array]:
    """The memory of some leaves (path -> shape and dtype), all zero, on one device (None: the default device)."""
    where = None if device is None else SingleDeviceSharding(device)

    def zeros() -> dict[str, jax.Array]:
        return {path: jnp.zeros(shape, dtype) for path, (shape, dtype) in arrays.items()}

    # One program for all: a compilation for every shape would take longer than reading a small model.
    return jax.jit(zeros, out_shardings=where)()
