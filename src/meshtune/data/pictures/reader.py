"""Pictures as a model takes them: the tokens that stand for each, and its patches.

Pixels are those of transformers' image processors (*ImageProcessorPil, which need neither torch nor torchvision). The
tokens are those of transformers' processors, which need torch, so the families' rules are written out in families.py.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import importlib
import json
import math
import operator
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from meshtune.data.pictures.files import pillow
from meshtune.errors import UserError

if TYPE_CHECKING:
    from PIL.Image import Image

    from meshtune.model.vision import VisionSpec

PUBLISHED = "give the preprocessor_config.json that was published with the model"
NEWLINE = -1  # in `visual`: the place of the model's own vector after a row of features


@dataclasses.dataclass(frozen=True)
class PictureLayout:
    """The tokens of a picture, and its patches.

    `ids` int32 [n] replace the placeholder in a text. `visual` int32 [n]: 0 for text, k + 1 for feature k of the
    picture, NEWLINE. `tiles` are the rows and columns of patches of each tile (of the picture, where it has none);
    `merge` x `merge` neighbouring patches make a feature.
    """

    ids: np.ndarray
    visual: np.ndarray
    tiles: tuple[tuple[int, int], ...]
    merge: int

    @property
    def patches(self) -> int:
        """The number of patches."""
        return sum(rows * columns for rows, columns in self.tiles)

    @property
    def features(self) -> int:
        """The number of features."""
        return self.patches // self.merge**2

    @property
    def grid(self) -> tuple[int, int, int]:
        """Frames, rows and columns of features, of a picture without tiles."""
        rows, columns = self.tiles[0]
        return 1, rows // self.merge, columns // self.merge


class Family(Protocol):
    """The rules of a family of models for pictures."""

    @property
    def patch(self) -> int:
        """The side of a patch in pixels."""
        ...

    @property
    def merge(self) -> int:
        """The side of a block of patches that make a feature."""
        ...

    @property
    def tile_patches(self) -> int:
        """The patches of a tile where all are alike, else 0."""
        ...

    def layout(self, width: int, height: int) -> tuple[Sequence[int], Sequence[int], Sequence[tuple[int, int]]]:
        """`ids`, `visual` and `tiles` of a picture of this size. Raises ValueError for one it cannot take."""
        ...

    def pixels(self, output: Mapping[str, Any]) -> list[np.ndarray]:
        """The tiles in what the image processor returns for a picture, each [channels, height, width]."""
        ...


@dataclasses.dataclass(frozen=True)
class PictureReader:
    """Reads pictures for a model.

    `placeholder` is the text that stands for a picture in rendered conversations, `placeholder_id` its token;
    `reserved` are all texts that only pictures have. `surroundings` are texts that go before and after the placeholder,
    `frame` the tokens of the chat template around a picture that are cut off with it. `mrope` and `reach` say which
    further arrays the model reads, and with `prefix` all tokens of a prompt see each other. `processor` is the image
    processor's class, `settings` its options as JSON. `areas` are the recipe's max_pixels and min_pixels.
    """

    family: Family
    placeholder: str
    placeholder_id: int
    reserved: tuple[str, ...]
    processor: str = ""
    settings: str = ""
    surroundings: tuple[str, str] = ("", "")
    frame: tuple[int | None, int | None] = (None, None)
    mrope: bool = False
    reach: bool = False
    prefix: bool = False
    channels: int = 3
    areas: tuple[int | None, int | None] = (None, None)

    @property
    def merge(self) -> int:
        """The side of a block of patches that make a feature."""
        return self.family.merge

    @property
    def pixels(self) -> int:
        """K, the values of a patch."""
        return self.channels * self.family.patch**2

    @property
    def tile_patches(self) -> int:
        """The patches of a tile where all are alike, else 0."""
        return self.family.tile_patches

    def key(self) -> str:
        """A hash of everything that tokens and pixels depend on."""
        return hashlib.sha256(repr(self).encode()).hexdigest()

    def write(self, text: str) -> str:
        """A rendered conversation with the texts around its placeholders, as transformers' processor writes it."""
        before, after = self.surroundings
        return text.replace(self.placeholder, f"{before}{self.placeholder}{after}") if before or after else text

    def scale(self, width: int, height: int) -> tuple[int, int]:
        """The size that a picture is scaled to before the model's own resize, as LLaMA-Factory does: max_pixels and
        min_pixels bound its area, and its aspect is kept."""
        for limit, is_beyond in zip(self.areas, (operator.gt, operator.lt), strict=True):
            if limit is not None and is_beyond(width * height, limit):
                factor = math.sqrt(limit / (width * height))
                width, height = max(1, int(width * factor)), max(1, int(height * factor))
        return width, height

    def layout(self, width: int, height: int) -> PictureLayout:
        """The tokens and patches of a picture of this size when shown.

        Raises UserError for one that the model cannot take, such as one 200 times as wide as high.
        """
        return _layout(self, width, height)

    def check_pixels(self) -> None:
        """Reads a small picture. Raises an error where the image processor cannot, or gives other patches than `layout`
        says."""
        size = 64, 48
        patches = self.patches(pillow().Image.new("RGB", size))[0]
        if patches.shape != (expected := (self.layout(*size).patches, self.pixels)):
            raise ValueError(f"patches and values of each are {patches.shape}, and config.json says {expected}")

    def check_tower(self, tower: VisionSpec, where: str) -> None:
        """Raises UserError, naming the model `where`, if its tower takes other patches."""
        given, taken = (
            f"{f'tiles of {tile} ' if tile else ''}patches of {values} values, {merge} x {merge} a feature"
            for tile, values, merge in (
                (self.tile_patches, self.pixels, self.merge),
                (tower.tile, tower.pixels, tower.merge),
            )
        )
        if given != taken:
            problem = f"preprocessor_config.json makes {given}, and the tower of config.json takes {taken}"
            raise UserError(problem, where=where, fix=PUBLISHED)

    def patches(self, image: Image) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """The patches of an RGB picture, float32 [n, K], their tiles int32 [n] counted from 1, and int32 [n, 4]: row
        and column in the tile, and the rows and columns of that.

        Patches are (channels, height, width). Those that make a feature follow each other, row by row in their block.
        """
        size = self.scale(*image.size)
        if size != image.size:
            image = image.resize(size)
        output = _processor(self.processor, self.settings)(images=[image], return_tensors="np")
        tiles = self.family.pixels(output)
        arrays = [_cut(np.asarray(tile, np.float32), self.family.patch, self.merge) for tile in tiles]
        grids = [
            _grid(tile.shape[1] // self.family.patch, tile.shape[2] // self.family.patch, self.merge) for tile in tiles
        ]
        numbers = np.repeat(np.arange(1, len(arrays) + 1, dtype=np.int32), [len(array) for array in arrays])
        return np.concatenate(arrays), numbers, np.concatenate(grids)


@functools.lru_cache(maxsize=1 << 14)
def _layout(reader: PictureReader, width: int, height: int) -> PictureLayout:
    try:
        ids, visual, tiles = reader.family.layout(*reader.scale(width, height))
        if not all(rows * columns for rows, columns in tiles):
            raise ValueError("no patch is left of it")
    except (ValueError, ZeroDivisionError) as problem:
        message = f"the picture has {width:,} x {height:,} pixels, and this model takes none of such a shape"
        raise UserError(message, fix="cut a long and narrow picture into several, or fill it up") from problem
    layout = PictureLayout(np.asarray(ids, np.int32), np.asarray(visual, np.int32), tuple(tiles), reader.merge)
    layout.ids.flags.writeable = layout.visual.flags.writeable = False
    return layout


def _blocks(rows: int, columns: int, merge: int, *values: np.ndarray) -> list[np.ndarray]:
    """Arrays [rows, columns, ...] as [rows * columns, ...], block by block."""
    blocks = []
    for value in values:
        split = value.reshape(rows // merge, merge, columns // merge, merge, *value.shape[2:])
        blocks.append(split.swapaxes(1, 2).reshape(rows * columns, *value.shape[2:]))
    return blocks


def _cut(tile: np.ndarray, patch: int, merge: int) -> np.ndarray:
    """The patches [n, channels * patch * patch] of a tile [channels, height, width], whose margin below a patch is cut
    off."""
    channels, height, width = tile.shape
    rows, columns = height // patch, width // patch
    tile = tile[:, : rows * patch, : columns * patch]
    cut = tile.reshape(channels, rows, patch, columns, patch).transpose(1, 3, 0, 2, 4)
    return _blocks(rows, columns, merge, cut)[0].reshape(rows * columns, -1)


def _grid(rows: int, columns: int, merge: int) -> np.ndarray:
    """(row, column, rows, columns) of each patch, int32 [rows * columns, 4]."""
    row, column = np.mgrid[:rows, :columns].astype(np.int32)
    return np.stack(
        [*_blocks(rows, columns, merge, row, column), *np.full((2, rows * columns), [[rows], [columns]], np.int32)], 1
    )


@functools.lru_cache(maxsize=8)
def _processor(name: str, settings: str) -> Any:
    """The image processor of transformers. Raises UserError where this version of transformers has none."""
    module, _, cls = name.partition(":")
    try:
        return getattr(importlib.import_module(module), cls)(**json.loads(settings))
    except (ImportError, AttributeError) as problem:
        raise UserError(
            f"pictures are prepared by {cls} of transformers, which is missing: {problem}",
            fix="install a newer transformers, and Pillow",
        ) from problem
