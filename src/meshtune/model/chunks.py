"""A function of tokens computed a chunk of each row at a time, forward and backward.

What the function needs inside exists for one chunk only. The backward pass makes a chunk again from the same input
and turns it into gradients at once, in the place of the cotangent it has used up; gradients of what all chunks share
are summed in float32. Rows are never copied: a chunk is cut out of them and written back.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.custom_derivatives import SymbolicZero
from jaxtyping import Array, Float

from meshtune.arrays.tree import Tree

# (what is shared, a chunk of x, a chunk of the tokens' data, its number: None where the row is whole) -> results
Chunk = Callable[[Any, Array, Tree, Array | None], Any]


def over_chunks(
    function: Chunk, shared: Any, x: Float[Array, "B T D"], tokens: Tree, *, chunk: int | None, ways: int = 1
) -> Any:
    """function(shared, x, tokens, None), computed by chunks of `chunk` tokens of a row.

    x is [B, T, D], the leaves of `tokens` [B, T, ..] (data, not differentiated), each result [B, T, ..], a row's tokens
    in the same order. The function may not mix the tokens of x; whatever they are to see of each other is in `shared`.
    It must be pure and close over no array. Where the chunk does not divide a row, rows are filled up with zeros, whose
    results are cut off. `ways` is the number of devices that hold a row's parts in turn: a chunk then takes its share
    from each. None, or a chunk as long as the row: the function itself.
    """
    length = x.shape[1] // ways
    if chunk is None or chunk * ways >= x.shape[1]:
        return function(shared, x, tokens, None)
    count = math.ceil(length * ways / chunk)
    size = math.ceil(length / count)
    if missing := count * size - length:
        x, tokens = jax.tree.map(lambda leaf: _padded(leaf, missing, ways), (x, tokens))
    results = _chunked(function, count, ways, shared, x, tokens)
    return jax.tree.map(lambda leaf: _cut_back(leaf, missing, ways), results) if missing else results


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1, 2))
def _chunked(function: Chunk, count: int, ways: int, shared: Any, x: Array, tokens: Tree) -> Any:
    def made(number: Any, source: Array) -> Any:
        here, tokens_here = _chunk_of((source, tokens), number, count, ways)
        return function(shared, here, tokens_here, number)

    def one(number: Array, results: Any) -> Any:
        # Where results take the place of x, a chunk of x is read before it is overwritten.
        return _written(results, made(number, results if in_place else x), number, count, ways)

    shapes = jax.eval_shape(lambda: made(jnp.int32(0), x))
    in_place = _same(shapes, _chunk_of(x, 0, count, ways))
    whole = (x.shape[0], x.shape[1])
    empty = x if in_place else jax.tree.map(lambda s: jnp.zeros((*whole, *s.shape[2:]), s.dtype), shapes)
    return lax.fori_loop(0, count, one, empty)


@jax.tree_util.register_static
class _Learned(tuple[bool, ...]):
    """Which leaves of what is shared are differentiated."""


def _chunked_forward(function: Chunk, count: int, ways: int, shared: Any, x: Any, tokens: Any) -> Any:
    learned = _Learned(leaf.perturbed for leaf in jax.tree.leaves(shared))
    shared, value, tokens = jax.tree.map(lambda leaf: leaf.value, (shared, x, tokens))
    return _chunked(function, count, ways, shared, value, tokens), (learned, shared, value, tokens)


def _chunked_backward(function: Chunk, count: int, ways: int, saved: Any, cotangents: Any) -> Any:
    learned, shared, x, tokens = saved
    leaves, structure = jax.tree.flatten(shared)
    mine = [leaf for leaf, yes in zip(leaves, learned, strict=True) if yes]
    cotangents = jax.tree.map(_instantiated, cotangents, is_leaf=lambda leaf: isinstance(leaf, SymbolicZero))
    in_place = _same(cotangents, x)

    def one(number: Array, running: tuple[Array, list[Array]]) -> tuple[Array, list[Array]]:
        d_x, sums = running
        here, tokens_here = _chunk_of((x, tokens), number, count, ways)

        def of(given: list[Array], here: Array) -> Any:
            others = iter(given)
            chosen = [next(others) if yes else leaf for leaf, yes in zip(leaves, learned, strict=True)]
            return function(jax.tree.unflatten(structure, chosen), here, tokens_here, number)

        _, pull = jax.vjp(of, mine, here)
        d_shared, d_here = pull(_chunk_of(d_x if in_place else cotangents, number, count, ways))
        sums = [total + part.astype(total.dtype) for total, part in zip(sums, d_shared, strict=True)]
        return _written(d_x, d_here, number, count, ways), sums

    zeros = [jnp.zeros(leaf.shape, jnp.promote_types(leaf.dtype, jnp.float32)) for leaf in mine]
    d_x, sums = lax.fori_loop(0, count, one, (cotangents if in_place else jnp.zeros_like(x), zeros))
    totals = iter(sums)
    d_leaves = [next(totals).astype(leaf.dtype) if yes else None for leaf, yes in zip(leaves, learned, strict=True)]
    return jax.tree.unflatten(structure, d_leaves), d_x, jax.tree.map(lambda _: None, tokens)


_chunked.defvjp(_chunked_forward, _chunked_backward, symbolic_zeros=True)


def _chunk_of(tree: Any, number: Any, count: int, ways: int) -> Any:
    def cut(leaf: Array) -> Array:
        size = leaf.shape[1] // ways // count
        parts = _in_parts(leaf, ways)
        here = lax.dynamic_slice_in_dim(parts, number * size, size, axis=parts.ndim - leaf.ndim + 1)
        return here.reshape(leaf.shape[0], ways * size, *leaf.shape[2:])

    return jax.tree.map(cut, tree)


def _written(tree: Any, chunk: Any, number: Array, count: int, ways: int) -> Any:
    def write(leaf: Array, here: Array) -> Array:
        size = leaf.shape[1] // ways // count
        parts, here = _in_parts(leaf, ways), _in_parts(here.astype(leaf.dtype), ways)
        axis = parts.ndim - leaf.ndim + 1
        return lax.dynamic_update_slice_in_dim(parts, here, number * size, axis=axis).reshape(leaf.shape)

    return jax.tree.map(write, tree, chunk)


def _in_parts(leaf: Array, ways: int) -> Array:
    """[B, T, ..] as [B, ways, T / ways, ..]: a row's tokens by the device that holds them."""
    return leaf if ways == 1 else leaf.reshape(leaf.shape[0], ways, leaf.shape[1] // ways, *leaf.shape[2:])


def _padded(leaf: Array, missing: int, ways: int) -> Array:
    parts = leaf.reshape(leaf.shape[0], ways, leaf.shape[1] // ways, *leaf.shape[2:])
    parts = jnp.pad(parts, [(0, 0), (0, 0), (0, missing)] + [(0, 0)] * (parts.ndim - 3))
    return parts.reshape(leaf.shape[0], -1, *leaf.shape[2:])


def _cut_back(leaf: Array, missing: int, ways: int) -> Array:
    parts = leaf.reshape(leaf.shape[0], ways, leaf.shape[1] // ways, *leaf.shape[2:])
    return parts[:, :, : parts.shape[2] - missing].reshape(leaf.shape[0], -1, *leaf.shape[2:])


def _same(tree: Any, x: Any) -> bool:
    return hasattr(tree, "shape") and (tree.shape, tree.dtype) == (x.shape, x.dtype)


def _instantiated(cotangent: Any) -> Array:
    if not isinstance(cotangent, SymbolicZero):
        return cotangent
    aval: Any = cotangent.aval
    return jnp.zeros_like(aval)
