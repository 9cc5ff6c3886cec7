"""Towers that read pictures, and the projector that makes embeddings of what they see. Pure functions of parameters.

A tower is a stack of the decoder's own layers over patches: all have position 0 and attention is not causal, so that
patches see all others of their segment. Everything that depends on places is computed from the grid of the patches.
"""

from __future__ import annotations

import dataclasses
from typing import Literal, NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float, Int

from meshtune.arrays.spec import ArraySpec
from meshtune.arrays.tree import Tree
from meshtune.errors import UserError
from meshtune.model.block import Hidden
from meshtune.model.compute import Compute
from meshtune.model.gather import gather_params, to_device, with_shared
from meshtune.model.inputs import SequenceInfo, Visual
from meshtune.model.linear import fold, linear, linear_params
from meshtune.model.mlp import ACTIVATIONS, ActivationName
from meshtune.model.norm import NormSpec
from meshtune.model.rope import RopeSpec, angles
from meshtune.model.spec import PROJECTOR, VISION, ModelSpec, Stack
from meshtune.model.stacks import through_layers

TOWER = 0x766973  # folded into the key of dropout, so that a tower's layers differ from the decoder's


@dataclasses.dataclass(frozen=True)
class PatchPositions:
    """A table of positions [rows x columns, D], whose vectors are added to patches.

    `learned`: the entry of the patch's row and column. `summed`: of columns + rows entries that of the column and that
    of the row, added. `bucketed`: the entry that the patch's share of the height and
    of the width falls on, whatever the size of the tile (https://arxiv.org/abs/2307.06304). `interpolated`: the mean of
    the four entries around the place where the patch is if the table is stretched over the picture, corners on corners.
    `cubic`: of the sixteen entries around it, if its edges are stretched over those of the picture. `linear`: likewise
    of four entries, or of all that a patch covers where the table has more entries than the picture has patches.
    """

    kind: Literal["learned", "summed", "bucketed", "interpolated", "cubic", "linear"]
    rows: int
    columns: int

    @property
    def entries(self) -> int:
        """The rows of the table."""
        return self.rows + self.columns if self.kind == "summed" else self.rows * self.columns

    def __call__(self, table: Float[Array, "n D"], grid: Int[Array, "B P 4"]) -> Float[Array, "B P D"]:
        """The vector of every patch, in the table's dtype; of several entries computed in float32."""
        row, column = grid[..., 0], grid[..., 1]
        if self.kind in ("interpolated", "cubic"):
            return self._interpolate(table, grid)
        if self.kind == "linear":
            down, right = _cover(row, grid[..., 2], self.rows), _cover(column, grid[..., 3], self.columns)
            shares = (down[..., :, None] * right[..., None, :]).reshape(*row.shape, -1)
            return jnp.einsum("bpn,nd->bpd", shares, table.astype(jnp.float32)).astype(table.dtype)
        if self.kind == "summed":
            return jnp.take(table, column, axis=0) + jnp.take(table, self.columns + row, axis=0)
        if self.kind == "bucketed":
            row, column = _bucket(row, grid[..., 2], self.rows), _bucket(column, grid[..., 3], self.columns)
        return jnp.take(table, row * self.columns + column, axis=0)

    def _interpolate(self, table: Float[Array, "n D"], grid: Int[Array, "B P 4"]) -> Float[Array, "B P D"]:
        stretch = _stretch if self.kind == "interpolated" else _stretch_cubic
        down, right = (stretch(grid[..., n], grid[..., n + 2], (self.rows, self.columns)[n]) for n in (0, 1))
        taps = [(i * self.columns + j, a * b) for i, a in down for j, b in right]
        vectors = [jnp.take(table, at, axis=0).astype(jnp.float32) * share[..., None] for at, share in taps]
        return sum(vectors[1:], vectors[0]).astype(table.dtype)


def _stretch(
    place: Int[Array, "B P"], count: Int[Array, "B P"], side: int
) -> list[tuple[Int[Array, "B P"], Float[Array, "B P"]]]:
    """Two neighbouring entries of a table's side, with their shares, at a place among `count` over which it is
    stretched."""
    at = place.astype(jnp.float32) * (side - 1) / jnp.maximum(count - 1, 1)
    floor = jnp.floor(at)
    first = floor.astype(jnp.int32)
    return [(jnp.clip(first + n, 0, side - 1), 1 - jnp.abs(at - floor - n)) for n in (0, 1)]


def _stretch_cubic(
    place: Int[Array, "B P"], count: Int[Array, "B P"], side: int
) -> list[tuple[Int[Array, "B P"], Float[Array, "B P"]]]:
    """Four neighbouring entries of a table's side, with their shares by cubic convolution with a = -3/4, as torch's
    grid_sample has it; beyond the side its last entry counts."""
    at = (place.astype(jnp.float32) + 0.5) / jnp.maximum(count, 1) * side - 0.5
    floor = jnp.floor(at)
    entries = []
    for n in (-1, 0, 1, 2):
        distance, a = jnp.abs(at - floor - n), -0.75
        near = ((a + 2) * distance - (a + 3)) * distance * distance + 1
        far = ((a * distance - 5 * a) * distance + 8 * a) * distance - 4 * a
        entries.append((jnp.clip(floor.astype(jnp.int32) + n, 0, side - 1), near if n in (0, 1) else far))
    return entries


def _cover(place: Int[Array, "B P"], count: Int[Array, "B P"], side: int) -> Float[Array, "B P side"]:
    """The shares of the entries of a table's side by a triangle as wide as a patch, or two entries, whichever is more:
    torch's antialiased bilinear interpolation."""
    scale = side / jnp.maximum(count, 1).astype(jnp.float32)
    centre = scale * (place.astype(jnp.float32) + 0.5)
    distance = jnp.abs(jnp.arange(side) + 0.5 - centre[..., None]) / jnp.maximum(scale, 1.0)[..., None]
    shares = jnp.maximum(1 - distance, 0)
    return shares / jnp.maximum(jnp.sum(shares, axis=-1, keepdims=True), 1e-6)


def _bucket(place: Int[Array, "B P"], count: Int[Array, "B P"], buckets: int) -> Int[Array, "B P"]:
    """The bucket of a place among `count`, by shares and boundaries in float32: on a boundary their rounding decides,
    as it did where the model was trained."""
    share = place.astype(jnp.float32) * (1.0 / jnp.maximum(count, 1).astype(jnp.float32))
    boundaries = (1 / buckets + np.arange(buckets - 1) * (1 / buckets)).astype(np.float32)
    boundaries = boundaries[1 / buckets + np.arange(buckets - 1) * (1 / buckets) < 1.0]
    return jnp.searchsorted(jnp.asarray(boundaries), jnp.minimum(share, 1.0 - 1e-6), side="right").astype(jnp.int32)


@dataclasses.dataclass(frozen=True)
class ProjectorSpec:
    """From the features of a tower to embeddings of the decoder.

    merge x merge neighbouring patches become one feature: `concat` puts them one after another, row by row, `unfold`
    does that for each of their numbers, as a convolution does, and `mean` takes their mean. `norm` is applied to that,
    or with `norm_first` to each patch before. Means are multiplied by `scale`; with `standardize` a vector is taken
    from them, and they are multiplied by another one, none of which is trained. With `narrow` a linear layer makes a
    feature as wide as a patch again. Then comes a linear layer, or with `hidden` two with an activation between them.
    """

    merge: int = 1
    pool: Literal["concat", "unfold", "mean"] = "concat"
    norm: NormSpec | None = None
    norm_first: bool = False
    narrow: bool = False
    scale: float | None = None
    standardize: bool = False
    hidden: int | None = None
    activation: ActivationName = "gelu"
    bias: bool = True

    def params(self, width: int, out: int) -> Tree:
        """{norm, shift and stretch [n], narrow [width, n], in [hidden, n], out [out, hidden or n]} for features
        `width` wide."""
        merged = width * (self.merge**2 if self.pool != "mean" else 1)
        tree: Tree = {}
        if self.norm is not None:
            tree["norm"] = self.norm.params(width if self.norm_first else merged, "whole")
        if self.standardize:
            buffer = ArraySpec((merged,), "float32", ("whole",), "ones", role="buffer")
            tree |= {"shift": {"weight": buffer}, "stretch": {"weight": buffer}}
        if self.narrow:
            tree["narrow"] = linear_params((width, "whole"), (merged, "whole"), bias=False)
            merged = width
        if self.hidden is not None:
            tree["in"] = linear_params((self.hidden, "whole"), (merged, "whole"), self.bias)
        tree["out"] = linear_params((out, "embed"), (self.hidden or merged, "whole"), self.bias)
        return tree

    def __call__(self, x: Float[Array, "B P D"], node: Tree) -> Float[Array, "B F E"]:
        """Features of patches that come block by block: the merge x merge patches of a feature one after another."""
        if self.norm is not None and self.norm_first:
            x = self.norm(x, node.get("norm", {}))
        blocks = x.reshape(x.shape[0], -1, self.merge**2, x.shape[-1])
        if self.pool == "mean":
            x = self._mean(blocks, node).astype(x.dtype)
        else:
            blocks = blocks if self.pool == "concat" else blocks.swapaxes(2, 3)
            x = blocks.reshape(*blocks.shape[:2], -1)
        if self.norm is not None and not self.norm_first:
            x = self.norm(x, node.get("norm", {}))
        if self.narrow:
            x = linear(x, node["narrow"])
        if self.hidden is not None:
            x = ACTIVATIONS[self.activation](linear(x, node["in"]))
        return linear(x, node["out"])

    def _mean(self, blocks: Float[Array, "B F n D"], node: Tree) -> Float[Array, "B F D"]:
        """Of the patches of each block, in float32: the multiples may be beyond float16."""
        mean = jnp.mean(blocks.astype(jnp.float32), axis=2)
        mean = mean if self.scale is None else mean * self.scale
        if not self.standardize:
            return mean
        buffers = (lax.stop_gradient(node[name]["weight"]) for name in ("shift", "stretch"))
        shift, stretch = (buffer.astype(jnp.float32) for buffer in buffers)
        return (mean - shift) * stretch


@dataclasses.dataclass(frozen=True)
class GatedProjectorSpec:
    """A convolution over merge x merge neighbouring patches, a linear layer with a norm and GELU, and a gated network
    of `width` numbers (GLM-4.1V, https://arxiv.org/abs/2507.01006)."""

    merge: int
    width: int
    norm: NormSpec
    activation: ActivationName = "silu"

    def params(self, width: int, out: int) -> Tree:
        """{convolution [out, width x merge^2], in [out, out], norm, gate and up [F, out], out [out, F]} for features
        `width` wide."""
        wide, merged = (out, "whole"), (width * self.merge**2, "whole")
        return {
            "convolution": linear_params(wide, merged, bias=True),
            "in": linear_params(wide, wide, bias=False),
            "norm": self.norm.params(out, "whole"),
            "gate": linear_params((self.width, "whole"), wide, bias=False),
            "up": linear_params((self.width, "whole"), wide, bias=False),
            "out": linear_params((out, "embed"), (self.width, "whole"), bias=False),
        }

    def __call__(self, x: Float[Array, "B P D"], node: Tree) -> Float[Array, "B F E"]:
        """Features of patches that come block by block."""
        blocks = x.reshape(x.shape[0], -1, self.merge**2, x.shape[-1]).swapaxes(2, 3)
        x = linear(blocks.reshape(*blocks.shape[:2], -1), node["convolution"])
        x = ACTIVATIONS["gelu"](self.norm(linear(x, node["in"]), node["norm"]))
        return linear(ACTIVATIONS[self.activation](linear(x, node["gate"])) * linear(x, node["up"]), node["out"])


@dataclasses.dataclass(frozen=True)
class VisionSpec:
    """A tower and its projector, as pure data.

    Patches of `side` x `side` pixels with `channels` numbers each, repeated for `frames` frames, are projected to
    `width`. `stacks` are its layers. A tower of tiles has `tile` patches in each, which see each other; patches of
    others see those of their segment. With `class_token` a trained vector stands before the patches of each tile, with
    a position of its own. `pixel_norm` comes before the projection, `patch_norm` before positions, `first_norm` before
    the layers, `norm` after them. `newline`: there is a trained embedding for the end of a row of features. `taps` make
    features of what leaves the tapped layers, which are added to what leaves the first layers of the decoder
    (DeepStack, https://arxiv.org/abs/2406.04334). In windowed layers patches see those of their window, `window` x
    `window` patches of a picture. `mutual`: the tokens of a picture see each other both ways in all layers of the
    decoder, or in those with a sliding window, by Inputs.reach; `prefix`: so do all tokens up to the answer. `centred`:
    pixels from 0 to 1 are brought to -1 to 1. `partial`: its files have more layers, which are not computed.
    """

    kind: str
    width: int
    stacks: tuple[Stack, ...]
    side: int
    projector: ProjectorSpec | GatedProjectorSpec
    channels: int = 3
    frames: int = 1
    patch_bias: bool = True
    tile: int | None = None
    class_token: bool = False
    positions: PatchPositions | None = None
    rope: RopeSpec | None = None
    pixel_norm: NormSpec | None = None
    patch_norm: NormSpec | None = None
    first_norm: NormSpec | None = None
    norm: NormSpec | None = None
    newline: bool = False
    taps: tuple[ProjectorSpec, ...] = ()
    window: int | None = None
    mutual: Literal["all", "windows", "prefix"] | None = None
    centred: bool = False
    partial: bool = False

    @property
    def layers(self) -> int:
        """The number of layers of the tower."""
        return sum(stack.layers for stack in self.stacks)

    @property
    def merge(self) -> int:
        """merge x merge neighbouring patches are one feature."""
        return self.projector.merge

    @property
    def pixels(self) -> int:
        """The numbers of a patch of one frame."""
        return self.channels * self.side**2

    def params(self, embed: int) -> tuple[Tree, Tree]:
        """The ArraySpecs of (the tower outside of its layers, the projector): {patches [D, frames x pixels], class [D],
        positions [n, D], pixel_norm, patch_norm, first_norm, norm, taps}, and those of ProjectorSpec with newline
        [embed]."""
        width, vector = (self.width, "embed"), ArraySpec((self.width,), "float32", ("embed",), role="vector")
        tree: Tree = {"patches": linear_params(width, (self.frames * self.pixels, "whole"), self.patch_bias)}
        if self.class_token:
            tree["class"] = {"weight": vector}
        if self.positions is not None:
            entries = self.positions.entries + int(self.class_token)
            table = ArraySpec((entries, self.width), "float32", ("whole", "embed"), role="table")
            tree["positions"] = {"weight": table}
        if self.pixel_norm is not None:
            tree["pixel_norm"] = self.pixel_norm.params(self.frames * self.pixels, "whole")
        for name in ("patch_norm", "first_norm", "norm"):
            if (norm := getattr(self, name)) is not None:
                tree[name] = norm.params(self.width, "embed")
        if self.taps:
            tree["taps"] = {str(number): tap.params(self.width, embed) for number, tap in enumerate(self.taps)}
        projector = self.projector.params(self.width, embed)
        if self.newline:
            projector["newline"] = {"weight": dataclasses.replace(vector, shape=(embed,))}
        return tree, projector


def place_pictures(
    params: Tree, spec: ModelSpec, compute: Compute, visual: Visual, x: Hidden, rng: Array | None = None
) -> tuple[Hidden, Tree]:
    """(embeddings x with features of pictures where visual.index says so, side inputs of the first layers).

    Raises UserError for a model that was loaded without its tower.
    """
    if spec.vision is None:
        raise UserError(
            f"there are pictures in the data, and this {spec.family} model was loaded without a vision tower",
            where="vision",
            fix="set vision={} in the recipe, with a model that sees (`meshtune families` lists them)",
        )
    encoded = encode_pictures(params, spec, compute, visual, rng) if visual.features is None else visual.features
    is_feature, at = visual.index[..., None] > 0, jnp.maximum(visual.index - 1, 0)[..., None]
    features, *tapped = (jnp.take_along_axis(array, at, axis=1) for array in (encoded.features, *encoded.tapped))
    x = jnp.where(is_feature, features, x)
    if spec.vision.newline:
        newline = to_device(params[PROJECTOR]["newline"])["weight"].astype(x.dtype)
        x = jnp.where(visual.index[..., None] < 0, newline, x)
    return x, {deepstack(number): jnp.where(is_feature, array, 0) for number, array in enumerate(tapped)}


def deepstack(number: int) -> str:
    """The name of the side input that is added to what leaves layer `number` of the decoder."""
    return f"deepstack_{number}"


class PictureFeatures(NamedTuple):
    """The features of rows of patches as embeddings of the decoder, in compute.dtype, and those of each tap."""

    features: Float[Array, "B F D"]
    tapped: tuple[Float[Array, "B F D"], ...] = ()


def encode_pictures(
    params: Tree, spec: ModelSpec, compute: Compute, visual: Visual, rng: Array | None = None
) -> PictureFeatures:
    """The inputs of the tower for rows of patches; F = P / merge^2, in the order of the patches.

    Reads params["vision"] and params["projector"], and visual's arrays but for `index`. Features of padding are numbers
    without a meaning.
    """
    vision = spec.vision
    assert vision is not None, "a model without a tower has no features"
    compute = dataclasses.replace(
        compute, attention_chunk=None, mlp_chunk=None, shared_prompts=False, packed=vision.tile is None
    )
    (outside, arrays), shared = vision.params(spec.embed), params.get("shared")
    tower = {name: node for name, node in params[VISION].items() if name != "layers"}
    tower, projector = (with_shared(to_device(node), shared) for node in (tower, params[PROJECTOR]))
    tower, projector = gather_params(tower, outside, compute), gather_params(projector, arrays, compute)
    rows = visual.patches.shape[0]
    patches, segments, grid, back = visual.patches, visual.segments, visual.grid, None
    if vision.tile is not None:
        patches, grid = (array.reshape(-1, vision.tile, array.shape[-1]) for array in (patches, grid))
        segments = jnp.ones(patches.shape[:2], jnp.int32)
    elif vision.window is not None:
        patches, segments, grid, back = _by_windows(patches, segments, grid, vision.window)
    x = _embed_patches(tower, vision, patches.astype(compute.dtype), grid)
    if vision.class_token:
        segments = jnp.ones(x.shape[:2], jnp.int32)
    if vision.first_norm is not None:
        x = vision.first_norm(x, tower["first_norm"])
    order = jnp.zeros_like(segments)
    turns = {} if vision.rope is None else {vision.rope: angles(vision.rope, grid[..., :2], order, segments)}
    windows = None if vision.window is None else _windows(segments, grid, vision.window)
    info, tapped = SequenceInfo(order, segments, turns, windows=windows), []

    def features(x: Hidden, projector: ProjectorSpec | GatedProjectorSpec, node: Tree) -> Hidden:
        x = x[:, 1:] if vision.class_token else x
        x = x if back is None else jnp.take_along_axis(x, back[..., None], axis=1)
        return projector(x.reshape(rows, -1, vision.width), node)

    rng, first = fold(rng, TOWER), 0
    for last in _last_of_runs(vision.stacks):
        run = range(first, last + 1)
        keys = [(f"{n}.{place}", f"{n - first}.{place}") for n in run for place in range(len(vision.stacks[n].pattern))]
        layers = {new: params[VISION]["layers"][key] for key, new in keys}
        stacks, first = vision.stacks[first : last + 1], last + 1
        options = {"shared": shared, "rng": fold(rng, last)}
        x, _, _ = through_layers(layers, stacks, vision.width, compute, x, info, {}, **options)
        if vision.stacks[last].pattern[-1].tapped:
            number = len(tapped)
            tapped.append(features(x, vision.taps[number], tower["taps"][str(number)]))
    if vision.norm is not None:
        x = vision.norm(x, tower["norm"])
    return PictureFeatures(features(x, vision.projector, projector), tuple(tapped))


def _last_of_runs(stacks: tuple[Stack, ...]) -> list[int]:
    """The stacks after which something is read: tapped layers, and the last one."""
    last = len(stacks) - 1
    return [n for n, stack in enumerate(stacks) if n == last or stack.pattern[-1].tapped]


def _windows(segments: Int[Array, "B P"], grid: Int[Array, "B P 4"], window: int) -> Int[Array, "B P"]:
    """A number for every window of every picture, in the order of pictures, rows and columns; 0 for padding."""
    row, column = grid[..., 0] // window, grid[..., 1] // window
    return jnp.where(segments > 0, (segments * MOST_WINDOWS + row) * MOST_WINDOWS + column, 0)


MOST_WINDOWS = 1 << 9  # along a side of a picture: 32,768 pixels


def _by_windows(
    patches: Float[Array, "B P K"], segments: Int[Array, "B P"], grid: Int[Array, "B P 4"], window: int
) -> tuple[Float[Array, "B P K"], Int[Array, "B P"], Int[Array, "B P 4"], Int[Array, "B P"]]:
    """(patches, segments and grid with the patches of a window one after another, which kernels of attention want; the
    places of patches in that order)."""
    number = _windows(segments, grid, window)
    order = jnp.argsort(jnp.where(number > 0, number, jnp.iinfo(jnp.int32).max), axis=1, stable=True)
    patches, grid = (jnp.take_along_axis(array, order[..., None], axis=1) for array in (patches, grid))
    return patches, jnp.take_along_axis(segments, order, axis=1), grid, jnp.argsort(order, axis=1)


def _embed_patches(
    node: Tree, spec: VisionSpec, patches: Float[Array, "B P K"], grid: Int[Array, "B P 4"]
) -> Float[Array, "B T D"]:
    """The first activations of the tower: projected patches with their positions, after each tile's class token."""
    if spec.frames > 1:
        area = spec.side**2
        still = patches.reshape(*patches.shape[:2], spec.channels, 1, area)
        patches = jnp.repeat(still, spec.frames, axis=3).reshape(*patches.shape[:2], -1)
    if spec.centred:
        patches = 2 * (patches - 0.5)
    if spec.pixel_norm is not None:
        patches = spec.pixel_norm(patches, node["pixel_norm"])
    x = linear(patches, node["patches"])
    if spec.patch_norm is not None:
        x = spec.patch_norm(x, node["patch_norm"])
    first = None if not spec.class_token else node["class"]["weight"].astype(x.dtype)
    if spec.positions is not None:
        table = node["positions"]["weight"].astype(x.dtype)
        if first is not None:
            first, table = first + table[0], table[1:]
        x = x + spec.positions(table, grid)
    if first is not None:
        x = jnp.concatenate([jnp.broadcast_to(first, (x.shape[0], 1, x.shape[2])), x], axis=1)
    return x
