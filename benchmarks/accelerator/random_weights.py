"""Random arrays made on the device, in the place of weights, adapters and batches that are only described."""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from meshtune.mesh.placement import concrete_sharding
from meshtune.quantize.weight import QuantisedWeight

STD, SCALE = 0.02, 0.05  # of weights; the largest number of a quantised block
LARGEST_DRAW = 1 << 25  # numbers
DOCUMENT = 512  # tokens of a document in a packed row


def random_like(tree: Any, seed: int = 0) -> Any:
    """A tree of ShapeDtypeStructs filled where each lies: normal numbers, ones for norms, random codes.

    Large arrays come first, so that the scratch memory of making one is never more than what is made after it.
    """
    leaves, structure = jax.tree_util.tree_flatten_with_path(
        tree, is_leaf=lambda node: isinstance(node, QuantisedWeight)
    )
    arrays: list[Any] = [None] * len(leaves)
    for place in sorted(range(len(leaves)), key=lambda place: -_size(leaves[place][1])):
        path, leaf = leaves[place]
        key = jax.random.key(seed + place, impl="rbg")  # made by the device's own generator
        fill = _codes if isinstance(leaf, QuantisedWeight) else _numbers
        arrays[place] = jax.block_until_ready(fill(key, jax.tree_util.keystr(path), leaf))
    return jax.tree.unflatten(structure, arrays)


def zeros_like(tree: Any) -> Any:
    """Zeros where each array lies, as Adam's state begins."""
    return jax.tree.map(lambda leaf: _placed(jax.jit(lambda: jnp.zeros(leaf.shape, leaf.dtype))(), leaf), tree)


def random_batch(batch: dict[str, Any], vocab: int, seed: int = 0) -> dict[str, jax.Array]:
    """Packed rows of random tokens, all of which are learned."""
    shape = batch["tokens"].shape
    tokens = np.random.default_rng(seed).integers(3, vocab, (*shape[:-1], shape[-1] + 1)).astype(np.int32)
    place = np.broadcast_to(np.arange(shape[-1], dtype=np.int32), shape)
    arrays = {
        "tokens": tokens[..., :-1],
        "targets": tokens[..., 1:],
        "positions": place % DOCUMENT,
        "segment_ids": place // DOCUMENT + 1,
        "weights": np.ones(shape, np.float32),
    }
    assert arrays.keys() == batch.keys(), batch.keys()
    return {name: _placed(jnp.asarray(array, batch[name].dtype), batch[name]) for name, array in arrays.items()}


def _size(leaf: Any) -> int:
    return sum(math.prod(array.shape) * jnp.dtype(array.dtype).itemsize for array in jax.tree.leaves(leaf))


def _numbers(key: jax.Array, path: str, leaf: Any) -> jax.Array:
    # A generator's scratch memory is several times what it makes, and would be the peak: large arrays repeat blocks.
    parts = 1
    while math.prod(leaf.shape) // parts > LARGEST_DRAW and leaf.shape[0] % (2 * parts) == 0:
        parts *= 2

    def make(key: jax.Array) -> jax.Array:
        if "norm" in path:
            return jnp.ones(leaf.shape, leaf.dtype)
        block = (leaf.shape[0] // parts, *leaf.shape[1:])
        numbers = jax.random.normal(key, block, leaf.dtype) * jnp.asarray(STD, leaf.dtype)
        return jnp.broadcast_to(numbers, (parts, *block)).reshape(leaf.shape)

    return _placed(jax.jit(make)(key), leaf)


def _codes(key: jax.Array, path: str, weight: QuantisedWeight) -> QuantisedWeight:
    """Random codes whose blocks all have the same scale."""

    def codes(key: jax.Array) -> jax.Array:
        shape, dtype = weight.codes.shape, jnp.dtype(weight.codes.dtype)
        if jnp.issubdtype(dtype, jnp.floating):
            return jax.random.uniform(key, shape, jnp.bfloat16, -1, 1).astype(dtype)  # random bits could be NaN
        return jax.lax.bitcast_convert_type(jax.random.bits(key, shape, jnp.uint8), dtype)

    def constant(leaf: Any, number: float) -> jax.Array | None:
        return None if leaf is None else _placed(jax.jit(lambda: jnp.full(leaf.shape, number, leaf.dtype))(), leaf)

    nested = weight.nested is not None
    return QuantisedWeight(
        codes=_placed(jax.jit(codes)(key), weight.codes),
        scales=constant(weight.scales, 0 if nested else SCALE),
        nested=constant(weight.nested, 0.0),
        offset=constant(weight.offset, SCALE),
        format=weight.format,
        block_size=weight.block_size,
        dtype=weight.dtype,
    )


def _placed(array: jax.Array, leaf: Any) -> jax.Array:
    where = concrete_sharding(getattr(leaf, "sharding", None))
    return array if where is None else jax.device_put(array, where)
