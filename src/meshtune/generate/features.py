"""The features of pictures on the devices: computed once a request, and read where tokens stand for them."""

from __future__ import annotations

import dataclasses
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from meshtune.adapters.adapter_set import select
from meshtune.arrays.tree import Tree
from meshtune.generate.programs import length_bucket
from meshtune.lazy import LazyFunction
from meshtune.model.compute import Compute
from meshtune.model.inputs import Inputs, Visual
from meshtune.model.model_cache import rows_bucket
from meshtune.model.spec import ModelSpec

encode_pictures = LazyFunction("meshtune.model.vision:encode_pictures")


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Pictures:
    """What some tokens of n rows are besides text, as model.inputs has it: `features` are of each row's pictures, of
    which `visual` names one a token. None: there is nothing of the kind."""

    features: tuple[Tree, ...] = ()
    visual: Int[Array, "n T"] | None = None
    rope_positions: Int[Array, "n T 3"] | None = None
    reach: Int[Array, "n T"] | None = None

    def add_to(self, inputs: Inputs) -> Inputs:
        """The inputs with these pictures."""
        visual = None
        if self.visual is not None:
            features = jax.tree.map(lambda *rows: jnp.concatenate(rows), *self.features)
            none = jnp.zeros((self.visual.shape[0], 0), jnp.int32)
            visual = Visual(none[..., None], none, none[..., None], self.visual, features)
        return dataclasses.replace(inputs, visual=visual, rope_positions=self.rope_positions, reach=self.reach)


def pad_patches(
    spec: ModelSpec, patches: Float[np.ndarray, "P K"], segments: Int[np.ndarray, "P"], grid: Int[np.ndarray, "P 4"]
) -> tuple[Float[np.ndarray, "1 Q K"], Int[np.ndarray, "1 Q"], Int[np.ndarray, "1 Q 4"]]:
    """The arrays as a row of a bucketed number of patches: of tiles, where a tower reads those."""
    assert spec.vision is not None, "a model without a tower reads no pictures"
    count, tile = len(patches), spec.vision.tile
    bucket = length_bucket(count) if tile is None else rows_bucket(-(-count // tile)) * tile
    arrays = (patches, segments, grid)
    padded = [np.pad(array, ((0, bucket - count), *((0, 0),) * (array.ndim - 1)))[None] for array in arrays]
    return padded[0], padded[1], padded[2]


@partial(jax.jit, static_argnames=("spec", "compute"))
def encode(
    params: Tree,
    patches: Float[Array, "n P K"],
    segments: Int[Array, "n P"],
    grid: Int[Array, "n P 4"],
    *,
    spec: ModelSpec,
    compute: Compute,
    adapters: Float[Array, "n N"] | None = None,
) -> Tree:
    """The features of pictures, as `Visual` takes them; `adapters` are as in `read`."""
    visual = Visual(patches, segments, grid, jnp.zeros((patches.shape[0], 0), jnp.int32))
    return encode_pictures(select(params, adapters), spec, compute, visual)
