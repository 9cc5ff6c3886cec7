"""A function of tokens computed for one chunk of each row at a time, forward and backward.

Intermediate arrays exist for one chunk only. The backward pass computes a chunk again from the same input and turns it
into gradients at once, which overwrite the cotangent they were computed from; gradients of what all chunks share are
summed in float32. Rows are never copied: a chunk is sliced out of them and written back. Where a recurrence passes a
state from chunk to chunk, the states before the chunks are kept, and the backward pass takes them from the last one.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any, cast

import jax
import jax.numpy as jnp
from jax import lax
from jax.custom_derivatives import SymbolicZero
from jaxtyping import Array, Float, PyTree

from meshtune.arrays.tree import Tree

# (what is shared, a chunk of x, of what is beside it, of the tokens' data, its number: None where the row is whole)
# -> (results, sums)
Chunk = Callable[[PyTree, Array, Tree, PyTree, Array | None], tuple[PyTree, PyTree]]
# The same with the state before the chunk as its second argument -> (results, sums, the state after it)
CarryingChunk = Callable[[PyTree, PyTree, Array, Tree, PyTree, Array], tuple[PyTree, PyTree, PyTree]]


def over_chunks(
    function: Chunk,
    shared: PyTree,
    x: Float[Array, "B T D"],
    beside: Tree,
    tokens: PyTree,
    *,
    chunk: int | None,
    ranks: int = 1,
) -> tuple[PyTree, PyTree]:
    """function(shared, x, beside, tokens, None), computed by chunks of `chunk` tokens of a row.

    x is [B, T, D]; the leaves of `beside` are [B, T, ..] and differentiated, those of `tokens` are [B, T, ..] and not.
    The function gives (results, sums): each result is [B, T, ..], a row's tokens in the same order; sums are added over
    the chunks. It may not mix the tokens of x; anything they are to see of each other is in `shared`. It must be pure
    and close over no array. Where the chunk does not divide a row, rows are filled up with zeros (segment 0), whose
    results are cut off, and which sums must leave out. `ranks` is the number of devices that hold the parts of a row:
    a chunk then takes its share from each. None, or a chunk as long as the row: the function itself.
    """
    if chunk is None or chunk * ranks >= x.shape[1]:
        return function(shared, x, beside, tokens, None)

    return _over_chunks(_Stateless(function), chunk, ranks, x, beside, tokens, shared, ())


def over_chunks_with_state(
    function: CarryingChunk,
    shared: PyTree,
    state: PyTree,
    x: Float[Array, "B T D"],
    beside: Tree,
    tokens: PyTree,
    *,
    chunk: int,
) -> tuple[PyTree, PyTree]:
    """`over_chunks` of a function that also takes the state before its chunk and gives the one after it.

    `state` is the one before the rows, floating-point arrays of any shapes, which get their gradient too.
    """
    return _over_chunks(function, chunk, 1, x, beside, tokens, shared, state)


@dataclasses.dataclass(frozen=True)
class _Stateless:
    """A function of chunks as one that carries no state."""

    function: Chunk

    def __call__(self, shared: PyTree, state: PyTree, *of_chunk: Any) -> tuple[PyTree, PyTree, PyTree]:
        return *self.function(shared, *of_chunk), state


def _over_chunks(
    function: CarryingChunk, chunk: int, ranks: int, x: Array, beside: Tree, tokens: PyTree, *before: PyTree
) -> tuple[PyTree, PyTree]:
    """`before` holds the shared arrays and the state before the rows."""
    length = x.shape[1] // ranks
    count = math.ceil(length * ranks / chunk)
    size = math.ceil(length / count)
    if missing := count * size - length:
        x, beside, tokens = jax.tree.map(lambda leaf: _pad_parts(leaf, missing, ranks), (x, beside, tokens))
    results, sums = cast(tuple[PyTree, PyTree], _apply_chunks(function, count, ranks, *before, x, beside, tokens))
    return (jax.tree.map(lambda leaf: _cut_back(leaf, missing, ranks), results) if missing else results), sums


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1, 2))
def _apply_chunks(function: CarryingChunk, count: int, ranks: int, *arguments: PyTree) -> PyTree:
    return _in_order(function, count, ranks, *arguments)[:2]


def _in_order(
    function: CarryingChunk,
    count: int,
    ranks: int,
    shared: PyTree,
    state: PyTree,
    x: Array,
    beside: Tree,
    tokens: PyTree,
) -> tuple[PyTree, PyTree, PyTree]:
    """(results, sums, the state before every chunk, stacked)."""

    def compute(state: PyTree, number: PyTree, source: Array) -> tuple[PyTree, PyTree, PyTree]:
        x_chunk, beside_chunk, tokens_chunk = _chunk_of((source, beside, tokens), number, count, ranks)
        return function(shared, state, x_chunk, beside_chunk, tokens_chunk, number)

    def step(number: Array, running: PyTree) -> PyTree:
        results, totals, state, states = running
        states = jax.tree.map(
            lambda all_, value: lax.dynamic_update_index_in_dim(all_, value, number, 0), states, state
        )
        # Where results take the place of x, a chunk of x is read before it is overwritten.
        new, sums, state = compute(state, number, results if in_place else x)
        return _write_chunk(results, new, number, count, ranks), jax.tree.map(jnp.add, totals, sums), state, states

    shapes, sum_shapes, _ = jax.eval_shape(lambda: compute(state, jnp.int32(0), x))
    in_place = _alike(shapes, _chunk_of(x, 0, count, ranks))
    leading = (x.shape[0], x.shape[1])
    empty = x if in_place else jax.tree.map(lambda s: jnp.zeros((*leading, *s.shape[2:]), s.dtype), shapes)
    totals = jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype), sum_shapes)
    states = jax.tree.map(lambda leaf: jnp.zeros((count, *leaf.shape), leaf.dtype), state)
    results, totals, _, states = lax.fori_loop(0, count, step, (empty, totals, state, states))
    return results, totals, states


@jax.tree_util.register_static
class _Perturbed(tuple[bool, ...]):
    """Tells which leaves of the shared arrays are differentiated."""


def _chunked_forward(function: CarryingChunk, count: int, ranks: int, *arguments: PyTree) -> tuple[PyTree, PyTree]:
    perturbed = _Perturbed(leaf.perturbed for leaf in jax.tree.leaves(arguments[0]))
    shared, state, x, beside, tokens = jax.tree.map(lambda leaf: leaf.value, arguments)
    results, sums, states = _in_order(function, count, ranks, shared, state, x, beside, tokens)
    return (results, sums), (perturbed, shared, states, x, beside, tokens)


def _chunked_backward(function: CarryingChunk, count: int, ranks: int, saved: PyTree, cotangents: PyTree) -> PyTree:
    perturbed, shared, states, x, beside, tokens = saved
    leaves, structure = jax.tree.flatten(shared)
    trained = [leaf for leaf, yes in zip(leaves, perturbed, strict=True) if yes]
    d_results, d_totals = jax.tree.map(
        _instantiate_zero, cotangents, is_leaf=lambda leaf: isinstance(leaf, SymbolicZero)
    )
    in_place = _alike(d_results, x)

    def step(nth: Array, running: PyTree) -> PyTree:
        d_x, d_beside, totals, d_state = running
        number = count - 1 - nth if jax.tree.leaves(states) else nth
        x_chunk, beside_chunk, tokens_chunk = _chunk_of((x, beside, tokens), number, count, ranks)
        state = jax.tree.map(lambda leaf: lax.dynamic_index_in_dim(leaf, number, keepdims=False), states)

        def of(trained: list[Array], state: PyTree, x_chunk: Array, beside_chunk: Tree) -> PyTree:
            values = iter(trained)
            chosen = [next(values) if yes else leaf for leaf, yes in zip(leaves, perturbed, strict=True)]
            return function(jax.tree.unflatten(structure, chosen), state, x_chunk, beside_chunk, tokens_chunk, number)

        _, pull = jax.vjp(of, trained, state, x_chunk, beside_chunk)
        d_chunk = _chunk_of(d_x if in_place else d_results, number, count, ranks)
        d_shared, d_state, d_x_chunk, d_beside_chunk = pull((d_chunk, d_totals, d_state))
        totals = [total + part.astype(total.dtype) for total, part in zip(totals, d_shared, strict=True)]
        d_beside = _write_chunk(d_beside, d_beside_chunk, number, count, ranks)
        return _write_chunk(d_x, d_x_chunk, number, count, ranks), d_beside, totals, d_state

    zeros = [jnp.zeros(leaf.shape, jnp.promote_types(leaf.dtype, jnp.float32)) for leaf in trained]
    d_state = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape[1:], leaf.dtype), states)
    begin = (d_results if in_place else jnp.zeros_like(x), jax.tree.map(jnp.zeros_like, beside), zeros, d_state)
    d_x, d_beside, totals, d_state = lax.fori_loop(0, count, step, begin)
    remaining = iter(totals)
    d_leaves = [
        next(remaining).astype(leaf.dtype) if yes else None for leaf, yes in zip(leaves, perturbed, strict=True)
    ]
    return jax.tree.unflatten(structure, d_leaves), d_state, d_x, d_beside, jax.tree.map(lambda _: None, tokens)


_apply_chunks.defvjp(_chunked_forward, _chunked_backward, symbolic_zeros=True)


def _chunk_of(tree: PyTree, number: PyTree, count: int, ranks: int) -> PyTree:
    def cut(leaf: Array) -> Array:
        size = leaf.shape[1] // ranks // count
        parts = _in_parts(leaf, ranks)
        chunk = lax.dynamic_slice_in_dim(parts, number * size, size, axis=parts.ndim - leaf.ndim + 1)
        return chunk.reshape(leaf.shape[0], ranks * size, *leaf.shape[2:])

    return jax.tree.map(cut, tree)


def _write_chunk(tree: PyTree, chunk: PyTree, number: Array, count: int, ranks: int) -> PyTree:
    def write(leaf: Array, new: Array) -> Array:
        size = leaf.shape[1] // ranks // count
        parts, new = _in_parts(leaf, ranks), _in_parts(new.astype(leaf.dtype), ranks)
        axis = parts.ndim - leaf.ndim + 1
        return lax.dynamic_update_slice_in_dim(parts, new, number * size, axis=axis).reshape(leaf.shape)

    return jax.tree.map(write, tree, chunk)


def _in_parts(leaf: Array, ranks: int) -> Array:
    """[B, T, ..] as [B, ranks, T / ranks, ..]: a row's tokens by the device that holds them."""
    return leaf if ranks == 1 else leaf.reshape(leaf.shape[0], ranks, leaf.shape[1] // ranks, *leaf.shape[2:])


def _pad_parts(leaf: Array, missing: int, ranks: int) -> Array:
    parts = leaf.reshape(leaf.shape[0], ranks, leaf.shape[1] // ranks, *leaf.shape[2:])
    parts = jnp.pad(parts, [(0, 0), (0, 0), (0, missing)] + [(0, 0)] * (parts.ndim - 3))
    return parts.reshape(leaf.shape[0], -1, *leaf.shape[2:])


def _cut_back(leaf: Array, missing: int, ranks: int) -> Array:
    parts = leaf.reshape(leaf.shape[0], ranks, leaf.shape[1] // ranks, *leaf.shape[2:])
    return parts[:, :, : parts.shape[2] - missing].reshape(leaf.shape[0], -1, *leaf.shape[2:])


def _alike(tree: PyTree, x: PyTree) -> bool:
    return hasattr(tree, "shape") and (tree.shape, tree.dtype) == (x.shape, x.dtype)


def _instantiate_zero(cotangent: PyTree) -> Array:
    if not isinstance(cotangent, SymbolicZero):
        return cotangent
    aval: Any = cotangent.aval
    return jnp.zeros_like(aval)
