"""Features of pictures for the compiled programs of generation: computed once, and read in pieces of a prompt."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Sequence
from functools import partial
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike
from jaxtyping import Array, Float, Int

from meshtune.adapters.adapter_set import select
from meshtune.arrays.tree import Tree
from meshtune.generate.pictures import PatchArrays, PromptPictures
from meshtune.generate.programs import length_bucket
from meshtune.generate.request import Generation
from meshtune.model.attention import AttentionSpec
from meshtune.model.compute import Compute
from meshtune.model.inputs import Inputs, Visual
from meshtune.model.model_cache import rows_bucket
from meshtune.model.spec import ModelSpec
from meshtune.model.vision import PictureFeatures, encode_pictures


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Pictures:
    """The pictures of n rows of tokens, with the names of model.inputs. `features` are those of each row, of which
    `visual` names one a token. An array that is None has no place in the inputs."""

    features: tuple[PictureFeatures, ...] = ()
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


def encode(
    params: Tree, arrays: PatchArrays, adapters: ArrayLike | None, *, spec: ModelSpec, compute: Compute
) -> PictureFeatures:
    """The features of pictures, as `Visual` takes them, in a row of a bucketed number of patches. `adapters` are as in
    `programs.read`."""
    assert spec.vision is not None, "a model without a tower reads no pictures"
    count, tile = len(arrays.patches), spec.vision.tile
    bucket = length_bucket(count) if tile is None else rows_bucket(-(-count // tile)) * tile
    padded = (np.pad(array, ((0, bucket - count), *((0, 0),) * (array.ndim - 1)))[None] for array in arrays)
    return _encode(params, *padded, adapters, spec=spec, compute=compute)


@partial(jax.jit, static_argnames=("spec", "compute"))
def _encode(
    params: Tree,
    patches: Float[Array, "n P K"],
    segments: Int[Array, "n P"],
    grid: Int[Array, "n P 4"],
    adapters: Float[Array, "n N"] | None,
    *,
    spec: ModelSpec,
    compute: Compute,
) -> PictureFeatures:
    visual = Visual(patches, segments, grid, jnp.zeros((patches.shape[0], 0), jnp.int32))
    return encode_pictures(select(params, adapters), spec, compute, visual)


class PicturePiece(Protocol):
    """Tokens `length` to `end` of a prompt with `pictures`, of which those from number `first` on have `features`."""

    @property
    def pictures(self) -> PromptPictures | None: ...

    @property
    def length(self) -> int: ...

    @property
    def end(self) -> int: ...

    @property
    def first(self) -> int: ...

    @property
    def features(self) -> int: ...


def piece_arrays(pieces: Sequence[PicturePiece], rows: int, length: int) -> dict[str, np.ndarray]:
    """The arrays of `Pictures` for pieces that are read together, in `rows` rows of `length` tokens."""
    arrays: dict[str, np.ndarray] = {}

    def put(name: str, n: int, values: np.ndarray | None) -> None:
        if values is not None:
            array = arrays.setdefault(name, np.zeros((rows, length, *values.shape[1:]), np.int32))
            array[n, : len(values)] = values

    for n, piece in enumerate(pieces):
        if piece.pictures is not None:
            put("rope_positions", n, piece.pictures.rope_from(piece.length, piece.end))
            if piece.features or piece.pictures.prefix:
                put("reach", n, piece.pictures.reach_from(piece.length, piece.end))
            if piece.features:
                put("visual", n, piece.pictures.index(piece.first, piece.length, piece.end))
    return arrays


def feed_columns(generations: Sequence[Generation | None], spec: ModelSpec) -> dict[str, list[int]]:
    """The columns of a decode step's `Feed` that rows with pictures need: M-RoPE's offsets, and the lengths of prompts
    whose tokens see each other where the last of them is decoded and the first is beyond a window."""
    offsets, prefixes, window = [0] * len(generations), [0] * len(generations), _prefix_window(spec)
    for n, generation in enumerate(generations):
        if generation is not None and (pictures := generation.request.pictures) is not None:
            offsets[n] = pictures.offset
            prompt = len(generation.request.prompt)
            prefixes[n] = prompt if pictures.prefix and not generation.tokens and prompt > window else 0
    columns = {"rope_offset": offsets, "prefix": prefixes}
    return {name: column for name, column in columns.items() if any(column)}


@functools.lru_cache(maxsize=8)
def _prefix_window(spec: ModelSpec) -> float:
    """The smallest window of layers where all tokens of a prompt see each other; infinite without one."""
    mixers = [kind.mixer for kind in spec.layer_kinds]
    windows = [m.window for m in mixers if isinstance(m, AttentionSpec) and m.prefix and m.window is not None]
    return min(windows, default=math.inf)


@dataclasses.dataclass(frozen=True)
class WholeText:
    """All `end` tokens of a text with pictures, as one piece."""

    pictures: PromptPictures
    end: int
    length: int = 0
    first: int = 0
    features: int = 1


def text_pictures(
    params: Tree, pictures: PromptPictures, count: int, length: int, *, spec: ModelSpec, compute: Compute
) -> Pictures:
    """The pictures of a text of `count` tokens in a row of `length`, with their features."""
    arrays: Any = piece_arrays([WholeText(pictures, count, features=pictures.patches)], 1, length)
    if not pictures.patches:
        return Pictures(**arrays)
    return Pictures((encode(params, pictures.read(0), None, spec=spec, compute=compute),), **arrays)
