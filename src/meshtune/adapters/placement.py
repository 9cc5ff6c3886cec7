"""Puts the arrays of a prepared model where its layout says: numbers from host memory, and weights in another dtype."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, PyTree

from meshtune.arrays.spec import ArraySpec
from meshtune.mesh.layout import Layout
from meshtune.mesh.placement import cast_offloaded, is_offloaded


def place_arrays(array: PyTree, form: PyTree, layout: Layout | None) -> PyTree:
    """Numbers that every process has in host memory, as arrays sharded by a layout."""
    if layout is None:
        return jax.tree.map(jnp.asarray, array)

    def place(numbers: np.ndarray, spec: ArraySpec) -> Array:
        return jax.make_array_from_callback(numbers.shape, layout.of(spec), lambda index: numbers[index])

    return jax.tree.map(place, array, form)


def cast(leaf: PyTree, like: PyTree, layout: Layout | None) -> PyTree:
    """A weight or an adapter in the dtypes of its abstract form `like`; waits for the result, so that no two leaves are
    duplicated at once."""

    def cast_array(array: Array, spec: ArraySpec) -> Array:
        if array.dtype == spec.dtype:
            return array
        if is_offloaded(array.sharding):
            return cast_offloaded(array, spec.dtype)
        if layout is None:
            return array.astype(spec.dtype)
        sharded = jax.jit(lambda array: array.astype(spec.dtype), out_shardings=layout.of(spec))
        return sharded(array).block_until_ready()

    return jax.tree.map(cast_array, leaf, like)
