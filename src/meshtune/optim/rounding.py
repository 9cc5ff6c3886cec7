"""How an updated parameter is rounded to the dtype that it is stored in."""

from __future__ import annotations

from collections.abc import Callable, Collection

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, BFloat16, Float, Int, Key

from meshtune.arrays.paths import named_leaves
from meshtune.arrays.tree import Tree
from meshtune.optim.param_optimizer import UpdateContext

# (updated value in float32, dtype to store it in, path, layer, updates made before) -> the stored value
Rounding = Callable[[Array, jnp.dtype, str, Int[Array, ""], Int[Array, ""]], Array]

ROUNDS = 0x726E64  # folded into the key, so that its random numbers differ from those of projections


def to_nearest(value: Array, dtype: jnp.dtype, path: str, layer: Array, count: Array) -> Array:
    """The nearest number of the dtype."""
    return value.astype(dtype)


def stochastic(seed: int) -> Rounding:
    """Rounds to bfloat16 up or down, with the probability that makes the expected value the exact one.

    Random bits are a function of seed, path, layer and update, so that they depend neither on the mesh nor on where a
    run was resumed. Other dtypes are rounded to nearest.
    """

    def round_value(value: Array, dtype: jnp.dtype, path: str, layer: Array, count: Array) -> Array:
        if dtype != jnp.bfloat16:
            return value.astype(dtype)
        context = UpdateContext(path, layer, count, jnp.zeros(()), 0.0)
        return round_stochastically(value, jax.random.fold_in(context.key(seed, count), ROUNDS))

    return round_value


def add_updates(
    tree: Tree, updates: Tree, count: Int[Array, ""], stacked: Collection[str], rounding: Rounding = to_nearest
) -> Tree:
    """Adds float32 updates to parameters; `stacked` are the paths of those with a layers axis."""

    def add(path: str, parameter: Array, update: Array) -> Array:
        value = parameter.astype(jnp.float32) + update

        def round_layer(value: Array, layer: Array) -> Array:
            return rounding(value, parameter.dtype, path, layer, count)

        return (
            jax.vmap(round_layer)(value, jnp.arange(len(value)))
            if path in stacked
            else round_layer(value, jnp.int32(0))
        )

    pairs = zip(named_leaves(tree), jax.tree.leaves(updates), strict=True)
    added = [add(path, parameter, update) for (path, parameter), update in pairs]
    return jax.tree.unflatten(jax.tree.structure(tree), added)


def round_stochastically(value: Float[Array, "..."], key: Key[Array, ""]) -> BFloat16[Array, "..."]:
    """A bfloat16 is the upper half of a float32: adding a random lower half carries with the probability of its share.
    Infinities and NaN are returned unchanged."""
    bits = lax.bitcast_convert_type(value, jnp.uint32)
    carried = bits + jax.random.bits(key, value.shape, jnp.uint16).astype(jnp.uint32)
    upper = lax.bitcast_convert_type((carried >> 16).astype(jnp.uint16), jnp.bfloat16)
    return jnp.where(jnp.isfinite(value), upper, value.astype(jnp.bfloat16))
