"""Caches of a layer while text is generated: keys and values, states, and their codes of 8 bits.

A row's token at position p is kept in slot p modulo the number of slots: a cache of a sliding window needs one window
of slots, rows of one batch have different lengths, and padding takes no slot. Keys and values may be held as codes
(coded_cache): they are encoded when written, and decoded where they are recalled. They lie head by head,
[B, K, S, h], so that attention over a cache is products over batches of heads, and copies nothing.

A head's numbers are divided by their scale, the largest of them by magnitude over 127, and rounded: none moves by more
than half the scale. Codes are made with the stored scale, so that its rounding adds nothing to that: bfloat16
has the range of float32, and the step is at most 0.4% wider than with a float32 scale.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, BFloat16, Float, Int, Int8

from meshtune.arrays.spec import ArraySpec
from meshtune.arrays.tree import Tree
from meshtune.mesh.layout import Layout, constrain

CODES = "int8"
SCALES = "bfloat16"
LARGEST = 127  # symmetric: the code -128 does not occur
SLOTS = "slots"  # the logical axis that grows with the rows
BY_HEAD = (
    "kv_heads",
    SLOTS,
    "head_dim",
)  # the last logical axes of keys and of values, and of no other array of a cache
SCALE = "_scale"  # how the names of scales end


def scale_name(name: str) -> str:
    """The key of an array's scales in a layer's cache, where the array is coded."""
    return name + SCALE


def code_specs(arrays: Tree) -> Tree:
    """The ArraySpecs of a layer's cache with keys and values as codes and scales; other arrays unchanged."""
    tree: Tree = {}
    for name, spec in arrays.items():
        if isinstance(spec, dict):
            tree[name] = code_specs(spec)
        elif is_key_or_value(spec):
            tree[name] = dataclasses.replace(spec, dtype=CODES)
            tree[scale_name(name)] = ArraySpec(spec.shape[:-1], SCALES, spec.axes[:-1], "zeros")
        else:
            tree[name] = spec
    return tree


def is_key_or_value(spec: ArraySpec) -> bool:
    """Whether an array of a cache holds keys or values, head by head."""
    return spec.axes[-3:] == BY_HEAD


def encode(values: Float[Array, "*n h"]) -> tuple[Int8[Array, "*n h"], BFloat16[Array, "*n"]]:
    """(codes, scales). Where a number is not finite, neither is what the codes decode to."""
    values = values.astype(jnp.float32)
    # Not a cast to bfloat16 and back, which XLA may leave out: codes must be made with the scale that is stored.
    scale = lax.reduce_precision(jnp.max(jnp.abs(values), axis=-1) / LARGEST, exponent_bits=8, mantissa_bits=7)
    divisor = jnp.where(scale > 0, scale, 1)[..., None]
    codes = jnp.clip(jnp.round(values / divisor), -LARGEST, LARGEST)
    return codes.astype(CODES), scale.astype(SCALES)


def decode(codes: Int8[Array, "*n h"], scales: BFloat16[Array, "*n"], dtype: str | jnp.dtype) -> Float[Array, "*n h"]:
    """The numbers of codes: exact in float32, rounded once to a narrower dtype."""
    return (codes.astype(jnp.float32) * scales.astype(jnp.float32)[..., None]).astype(dtype)


__all__ = ["SLOTS", "Cache", "LayerCache", "empty", "grown"]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Cache:
    """The caches of a model. `lengths` are the tokens that each row has so far.

    `layers` holds the arrays of every key of params["layers"], stacked; or, where the layers are unrolled, a tuple of
    each layer's, stacks of one: what reads a layer of a larger stack may have to copy it.
    """

    layers: dict[str, Tree]
    lengths: Int[Array, "B"]


def empty(specs: dict[str, Tree], batch: int, layout: Layout | None) -> Cache:
    """A cache of zeros from its ArraySpecs."""
    layers = jax.tree.map(lambda spec: constrain(jnp.zeros(spec.shape, spec.dtype), layout, *spec.axes), specs)
    return Cache(layers, jnp.zeros(batch, jnp.int32))


def grown(cache: Cache, specs: dict[str, Tree]) -> Cache:
    """The same cache in larger arrays, `specs`: their new slots are empty.

    No row may be longer than a cache whose slots become more.
    """

    def grow(array: Array, spec: ArraySpec) -> Array:
        return jnp.pad(array, [(0, new - old) for old, new in zip(array.shape, spec.shape, strict=True)])

    return Cache(jax.tree.map(grow, cache.layers, specs), cache.lengths)


@dataclasses.dataclass(frozen=True)
class RowState:
    """State that a layer's mixer carries from one chunk of packed rows to the next: the `arrays` of its cache, [B, ..],
    and the segments of the last tokens before the chunk [B, n], the newest last; -1: there is none.
    """

    arrays: Tree
    segments: Int[Array, "B n"]

    def read(self, name: str) -> Array:
        """An array after the tokens before the chunk."""
        return self.arrays[name]

    def replace(self, name: str, value: Array) -> RowState:
        """With `value` in place of an array, in its dtype."""
        return dataclasses.replace(self, arrays=self.arrays | {name: value.astype(self.arrays[name].dtype)})


@dataclasses.dataclass(frozen=True)
class LayerCache:
    """One layer's part of a cache: row `index` of the stacked `arrays`.

    `lengths` are the tokens that the rows had before; tokens being read have their positions from there on.
    """

    arrays: Tree
    index: Array | int
    lengths: Int[Array, "B"]

    @classmethod
    def of_layer(cls, arrays: Tree, number: Array, lengths: Int[Array, "B"]) -> LayerCache:
        """That of layer `number` of a stack, whose arrays may be those of this layer only."""
        is_single = all(array.shape[0] == 1 for array in jax.tree.leaves(arrays))
        return cls(arrays, 0 if is_single else number, lengths)

    def read(self, name: str) -> Array:
        """This layer's array, [B, ..]."""
        return lax.dynamic_index_in_dim(self.arrays[name], self.index, keepdims=False)

    def stacked(self, name: str) -> Array | None:
        """The array of all layers; None where it is held as codes."""
        return None if scale_name(name) in self.arrays else self.arrays[name]

    def replace(self, name: str, value: Array) -> LayerCache:
        """With this layer's array replaced by `value`, in its dtype."""
        array = self.arrays[name]
        new = lax.dynamic_update_index_in_dim(array, value.astype(array.dtype), self.index, 0)
        return dataclasses.replace(self, arrays=self.arrays | {name: new})

    def write(self, name: str, positions: Int[Array, "B T"], real: Array, values: Array) -> LayerCache:
        """With `values` [B, T, ..] in the slots of their positions; of tokens that are not `real` nothing is kept.

        Of more tokens than there are slots the last ones are kept.
        """
        array, slots = self.arrays[name], self.slots(name)
        last = jnp.max(jnp.where(real, positions, -1), axis=1, keepdims=True)
        slot = jnp.where(real & (positions > last - slots), positions % slots, slots)  # beyond the end: dropped
        # Each row's tokens go to that row, which the compiler is told: else it gathers rows that a mesh splits.
        by_head = self._by_head(name)
        dimensions = lax.ScatterDimensionNumbers(
            update_window_dims=tuple(range(2, values.ndim)),
            inserted_window_dims=(0, 3 if by_head else 2),
            scatter_dims_to_operand_dims=(0, 3 if by_head else 2),
            operand_batching_dims=(1,),
            scatter_indices_batching_dims=(0,),
        )
        places = jnp.stack([jnp.full_like(slot, self.index), slot], axis=-1)
        mode = lax.GatherScatterMode.FILL_OR_DROP
        new = lax.scatter(array, places, values.astype(array.dtype), dimensions, mode=mode)
        return dataclasses.replace(self, arrays=self.arrays | {name: new})

    def slots(self, name: str) -> int:
        """The number of slots of a row."""
        return self.arrays[name].shape[3 if self._by_head(name) else 2]

    def _by_head(self, name: str) -> bool:
        """Whether an array has its heads before its slots: keys, values and their scales."""
        return name.endswith(SCALE) or self.arrays[name].ndim == 5

    def _by_token(self, name: str) -> Array:
        """This layer's array, [B, S, ..]."""
        return self.read(name).swapaxes(1, 2) if self._by_head(name) else self.read(name)

    def slot_positions(self, name: str, lengths: Int[Array, "B"]) -> Int[Array, "B S"]:
        """The position of the token in every slot once the rows have `lengths` tokens; -1 in an empty slot."""
        slots = self.slots(name)
        newest = lengths[:, None] - 1
        position = newest - (newest - jnp.arange(slots)) % slots
        return jnp.where((newest >= 0) & (position >= 0), position, -1)

    def recall(
        self, new: dict[str, Array], positions: Int[Array, "B T"], real: Array, reach: int | None
    ) -> tuple[dict[str, Array], Int[Array, "B S"], LayerCache]:
        """(arrays [B, S, ..] of all tokens that new ones may see, their positions, the cache that holds the new ones).

        `new` are the arrays of the new tokens, which also see themselves; a token sees at most `reach` tokens (None: no
        limit). Positions are -1 where there is no token. Arrays held as codes are decoded to the dtype of `new`, new
        tokens too: they are seen alike however many are read at once.
        """
        lengths = self.lengths + jnp.sum(real, axis=1)
        stored = self._encode_new(new)
        following = self
        for name, values in stored.items():
            following = following.write(name, positions, real, values)
        first = next(iter(new))
        slots, length = self.slots(first), new[first].shape[1]
        if length == 1 or reach is None or slots < reach:  # nothing is overwritten that a new token sees
            past = {name: following._by_token(name) for name in stored}
            return self._decode_past(past, new), self.slot_positions(first, lengths), following
        before = self.slot_positions(first, self.lengths)
        past = {
            name: jnp.concatenate([self._by_token(name), values.astype(self.arrays[name].dtype)], axis=1)
            for name, values in stored.items()
        }
        past_positions = jnp.concatenate([before, jnp.where(real, positions, -1)], axis=1)
        return self._decode_past(past, new), past_positions, following

    def _encode_new(self, new: dict[str, Array]) -> dict[str, Array]:
        """New tokens' arrays as this cache holds them, by the names of its arrays."""
        stored: dict[str, Array] = {}
        for name, values in new.items():
            if scale_name(name) in self.arrays:
                stored[name], stored[scale_name(name)] = encode(values)
            else:
                stored[name] = values
        return stored

    def _decode_past(self, past: dict[str, Array], new: dict[str, Array]) -> dict[str, Array]:
        """The arrays of `new` for all tokens of `past`."""
        return {
            name: decode(past[name], past[scale_name(name)], values.dtype) if scale_name(name) in past else past[name]
            for name, values in new.items()
        }


MixerState = LayerCache | RowState | None  # what a mixer knows of the tokens before those that it is given
