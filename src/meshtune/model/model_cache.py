"""The caches of all layers of a model."""

from __future__ import annotations

import typing

import jax
import jax.numpy as jnp

from meshtune.arrays.spec import ArraySpec
from meshtune.arrays.tree import Tree, flatten, map_leaves
from meshtune.errors import UserError
from meshtune.mesh.layout import Layout
from meshtune.model.block import Mixer
from meshtune.model.cache import Cache, code_specs, empty, is_key_or_value
from meshtune.model.compute import CacheName
from meshtune.model.spec import ModelSpec

ROOM = 512  # slots made at first for tokens to come; a longer text lets the cache grow
READ_ROWS = 16  # rows that read prompts at once, at most: their caches exist twice more meanwhile
FEWEST_SLOTS = 128  # then powers of two: empty slots cost little, another length costs a compilation


def rows_bucket(n: int) -> int:
    """The next of 1, 2, 4, 6, 8, 12, 16, ...: rows that are filled up cost less than another compilation."""
    power = 1 << (n - 1).bit_length()
    return power * 3 // 4 if 4 < n <= power * 3 // 4 else power


def slots_bucket(length: int) -> int:
    """The slots of caches for `length` tokens."""
    return max(FEWEST_SLOTS, 1 << (length - 1).bit_length())


def cache_specs(
    spec: ModelSpec, batch: int, slots: int, dtype: str, cache: CacheName | None = None, *, by_layer: bool = False
) -> dict[str, typing.Any]:
    """The ArraySpecs of the caches of all layers, by key of params["layers"], for rows of up to `slots` tokens.

    With `cache` "int8" keys and values are codes and scales (coded_cache), whatever the `dtype` of other arrays. With
    `by_layer` a key has a tuple of each layer's arrays, stacks of one.
    """
    tree: dict[str, typing.Any] = {}
    for key, repeats, kind, _ in spec.positions():
        layers, arrays = 1 if by_layer else repeats, _layer_specs(kind.mixer, batch, slots, dtype, cache)
        node = map_leaves(lambda leaf, layers=layers: leaf.stacked(layers), arrays)
        tree[key] = (node,) * repeats if by_layer else node
    return tree


def init_cache(
    spec: ModelSpec,
    batch: int,
    slots: int,
    dtype: str,
    layout: Layout | None = None,
    cache: CacheName | None = None,
    *,
    by_layer: bool = False,
) -> Cache:
    """An empty cache for rows of up to `slots` tokens."""
    return empty(cache_specs(spec, batch, slots, dtype, cache, by_layer=by_layer), batch, layout)


def stack_layers(layers: dict[str, typing.Any]) -> dict[str, typing.Any]:
    """The caches with the arrays of all layers stacked; they may be by layer."""
    return {
        key: jax.tree.map(lambda *arrays: jnp.concatenate(arrays), *node) if isinstance(node, tuple) else node
        for key, node in layers.items()
    }


def split_layers(layers: dict[str, typing.Any], like: dict[str, typing.Any]) -> dict[str, typing.Any]:
    """The stacked caches in the form of `like`, which may be by layer."""

    def split(node: typing.Any, form: typing.Any) -> typing.Any:
        if not isinstance(form, tuple):
            return node
        return tuple(jax.tree.map(lambda array, n=n: array[n : n + 1], node) for n in range(len(form)))

    return {key: split(node, like[key]) for key, node in layers.items()}


def check_cache(spec: ModelSpec, cache: str | None) -> CacheName | None:
    """`cache`, if the model can have it. Raises UserError for another name, and for a model whose layers remember
    something else than keys and values: latents, recurrent states."""
    names = typing.get_args(CacheName)
    if cache is None:
        return None
    if cache not in names:
        fix = f"give {' or '.join(names)}, or leave it out: keys and values are then in the dtype of the computation"
        raise UserError(f"a cache in '{cache}' is not supported", where="cache", fix=fix)
    count, uncoded = _coded_layers(spec)
    if not count:
        raise UserError(
            f"cache {cache} is for keys and values, and this model ({spec.family}) has none in its cache, "
            f"which holds: {', '.join(uncoded)}",
            where="cache",
            fix="leave it out",
        )
    return typing.cast(CacheName, cache)


def describe_cache(spec: ModelSpec, cache: CacheName | None, dtype: str) -> str:
    """Describes the storage of a model's cache, for those who asked for `cache`."""
    count, uncoded = _coded_layers(spec)
    if cache is None or not count:
        return dtype
    if not uncoded:
        return f"keys and values in {cache}"
    return f"keys and values of {count} of {spec.layers} layers in {cache}; {', '.join(uncoded)} as without it"


def _layer_specs(mixer: Mixer | None, batch: int, slots: int, dtype: str, cache: CacheName | None) -> Tree:
    arrays = {} if mixer is None else mixer.cache(batch, slots, dtype)
    return arrays if cache is None else code_specs(arrays)


def _coded_layers(spec: ModelSpec) -> tuple[int, tuple[str, ...]]:
    """(the number of layers that hold keys and values of their own, the names of all other arrays of caches)."""
    count, uncoded = 0, dict[str, None]()
    for _, repeats, kind, _ in spec.positions():
        arrays: dict[str, ArraySpec] = flatten(_layer_specs(kind.mixer, 1, 1, "bfloat16", None))
        count += repeats * any(map(is_key_or_value, arrays.values()))
        uncoded |= {path.split("/")[-1]: None for path, array in arrays.items() if not is_key_or_value(array)}
    return count, tuple(uncoded)


def bucket(n: int, least: int) -> int:
    """The next multiple of `least`, or of a larger power of two as long as that is at most a quarter more."""
    step = max(least, 1 << max(0, (n - 1).bit_length() - 3))
    return -(-n // step) * step


def floor_bucket(n: int) -> int:
    """The largest of 1, 2, ..., 8, 10, 12, 14, 16, 20, ... that is not above `n`."""
    step = 1 << max(0, n.bit_length() - 3)
    return n // step * step
