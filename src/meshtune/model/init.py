"""Random parameters, for tests, benchmarks and training from scratch."""

from __future__ import annotations

import zlib

import jax
import jax.numpy as jnp

from meshtune.arrays.spec import ArraySpec
from meshtune.arrays.tree import Tree, flatten, unflatten
from meshtune.model.spec import ModelSpec, abstract_params


def init_params(spec: ModelSpec, key: jax.Array) -> Tree:
    """Normal weights with spec.init_std, norms one, biases zero. A leaf depends on the key and its own path only."""

    def make(path: str, leaf: ArraySpec) -> jax.Array:
        match leaf.init:
            case "ones":
                return jnp.ones(leaf.shape, leaf.dtype)
            case "zeros":
                return jnp.zeros(leaf.shape, leaf.dtype)
            case "normal":
                leaf_key = jax.random.fold_in(key, zlib.crc32(path.encode()))
                return (jax.random.normal(leaf_key, leaf.shape) * spec.init_std).astype(leaf.dtype)

    return unflatten({path: make(path, leaf) for path, leaf in flatten(abstract_params(spec)).items()})
