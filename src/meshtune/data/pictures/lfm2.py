"""LFM2-VL's pictures: in one piece, or in tiles with a thumbnail. Only torchvision scales them in transformers, so the
rules are written out here, with Pillow's bilinear filter, whose bytes differ from torch's by one level at most."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from meshtune.data.pictures.model_files import Layout, ModelFiles
from meshtune.data.pictures.reader import PictureReader
from meshtune.errors import UserError

if TYPE_CHECKING:
    from PIL.Image import Image

    from meshtune.config.sections import VisionSection

Size = tuple[int, int]


@dataclasses.dataclass(frozen=True)
class Lfm2Sizes:
    """The options of Lfm2VlImageProcessor that say how pictures are scaled and cut, with its defaults."""

    downsample_factor: int = 2
    do_image_splitting: bool = True
    min_tiles: int = 2
    max_tiles: int = 10
    use_thumbnail: bool = True
    min_image_tokens: int = 64
    max_image_tokens: int = 256
    encoder_patch_size: int = 16
    tile_size: int = 512
    max_pixels_tolerance: float = 2.0

    @property
    def side(self) -> int:
        """The side of a feature in pixels."""
        return self.encoder_patch_size * self.downsample_factor

    def scale(self, width: int, height: int) -> Size:
        """The width and height that a whole picture, or a thumbnail, is scaled to."""
        lower, upper = (count * self.side**2 for count in (self.min_image_tokens, self.max_image_tokens))
        across, down = (max(self.side, round(size / self.side) * self.side) for size in (width, height))
        if down * across > upper:
            ratio = math.sqrt(height * width / upper)
            return self._multiple(width / ratio), self._multiple(height / ratio)
        if down * across < lower:
            ratio = math.sqrt(lower / (height * width))
            return math.ceil(width * ratio / self.side) * self.side, math.ceil(height * ratio / self.side) * self.side
        return across, down

    def _multiple(self, size: float) -> int:
        return max(self.side, math.floor(size / self.side) * self.side)

    def tiles(self, width: int, height: int) -> Size:
        """(columns, rows) of tiles, (1, 1) for a picture that is not cut."""
        if not self.do_image_splitting or self.min_tiles == self.max_tiles == 1:
            return 1, 1
        down, across = (max(self.encoder_patch_size, round(n / self.side) * self.side) for n in (height, width))
        if down * across <= self.max_image_tokens * self.side**2 * self.max_pixels_tolerance:
            return 1, 1
        best, distance = (1, 1), math.inf
        for columns, rows in self._grids():
            far = abs(width / height - columns / rows)
            if far < distance or (far == distance and width * height > 0.5 * self.tile_size**2 * columns * rows):
                best, distance = (columns, rows), far
        return best

    def _grids(self) -> Sequence[Size]:
        sides = range(1, self.max_tiles + 1)
        grids = {(w, h) for w in sides for h in sides if self.min_tiles <= w * h <= self.max_tiles}
        return sorted(grids, key=lambda grid: (grid[0] * grid[1], grid))


class Lfm2Pixels:
    """The tiles of pictures, as Lfm2VlImageProcessor gives them before it cuts them into patches."""

    def __init__(self, **options: Any):
        names = {field.name for field in dataclasses.fields(Lfm2Sizes)}
        self.sizes = Lfm2Sizes(**{name: value for name, value in options.items() if name in names})
        self.mean, self.deviation = (
            np.asarray(options.get(name, (0.5,) * 3), np.float32)[:, None, None] for name in ("image_mean", "image_std")
        )
        self.factor = float(options.get("rescale_factor", 1 / 255))

    def __call__(self, images: Sequence[Image], return_tensors: str | None = None) -> Mapping[str, Any]:
        """`pixel_values`: float32 [channels, height, width] of each tile of all pictures."""
        return {"pixel_values": [self._normalise(tile) for image in images for tile in self._tiles(image)]}

    def _tiles(self, image: Image) -> Iterator[Image]:
        columns, rows = self.sizes.tiles(*image.size)
        side = self.sizes.tile_size
        if columns * rows > 1:
            large = image.resize((columns * side, rows * side), 2)
            for row in range(rows):
                for column in range(columns):
                    yield large.crop((column * side, row * side, (column + 1) * side, (row + 1) * side))
        if columns * rows == 1 or self.sizes.use_thumbnail:
            yield image.resize(self.sizes.scale(*image.size), 2)

    def _normalise(self, tile: Image) -> np.ndarray:
        pixels = np.asarray(tile.convert("RGB"), np.float32).transpose(2, 0, 1)
        return (pixels - self.mean / self.factor) / (self.deviation / self.factor)


@dataclasses.dataclass(frozen=True)
class Lfm2:
    """Whole pictures of any size, or tiles and a thumbnail (Lfm2VlProcessor). `texts` are the ids of the words around
    them, none where the processor writes none."""

    sizes: Lfm2Sizes
    image: int
    texts: tuple[tuple[str, tuple[int, ...]], ...]
    tile_patches: int = 0

    @property
    def patch(self) -> int:
        """The side of a patch in pixels."""
        return self.sizes.encoder_patch_size

    @property
    def merge(self) -> int:
        """The side of a block of patches that make a feature."""
        return self.sizes.downsample_factor

    def layout(self, width: int, height: int) -> Layout:
        """The layout of a picture of this size."""
        columns, rows = self.sizes.tiles(width, height)
        texts, side, scaled = dict(self.texts), self.sizes.tile_size, self.sizes.scale(width, height)
        names = [f"<|img_row_{row + 1}_col_{column + 1}|>" for row in range(rows) for column in range(columns)]
        parts = [(name, (side, side)) for name in names] if len(names) > 1 else [("", scaled)]
        if len(names) > 1 and self.sizes.use_thumbnail:
            parts.append(("<|img_thumbnail|>", scaled))
        ids, visual, grids = list(texts.get("start", ())), [0] * len(texts.get("start", ())), list[tuple[int, int]]()
        for name, (across, down) in parts:
            before = texts.get(name, ())
            count, first = across * down // self.sizes.side**2, max(visual, default=0) + 1
            ids += [*before, *[self.image] * count]
            visual += [*[0] * len(before), *range(first, first + count)]
            grids.append((down // self.patch, across // self.patch))
        end = texts.get("end", ())
        return [*ids, *end], [*visual, *[0] * len(end)], grids

    def pixels(self, output: Mapping[str, Any]) -> list[np.ndarray]:
        """The tiles of a picture."""
        return list(output["pixel_values"])


def read_lfm2(files: ModelFiles, vision: VisionSection) -> PictureReader:
    """The reader of pictures of LFM2-VL."""
    settings = files.settings
    # The model's own sizes, whatever the file of the image processor says.
    settings.update(encoder_patch_size=files.patch, downsample_factor=int(files.config.get("downsample_factor", 2)))
    if vision.crops is not None:
        settings["do_image_splitting"] = vision.crops > 1
        settings["max_tiles"] = max(vision.crops, int(settings.get("min_tiles", 2)))
    sizes = Lfm2Pixels(**settings).sizes
    if sizes.tile_size % sizes.side:
        where = str(files.directory / "preprocessor_config.json")
        raise UserError(f"tile_size {sizes.tile_size} is no multiple of {sizes.side} pixels, a feature", where=where)
    image = files.token("image_token", "<image>")
    start, end = files.token("image_start_token", "<|image_start|>"), files.token("image_end_token", "<|image_end|>")
    texts: dict[str, tuple[int, ...]] = {}
    if files.processor.get("use_image_special_tokens", True):
        sides = range(1, sizes.max_tiles + 1)
        names = [f"<|img_row_{row}_col_{column}|>" for row in sides for column in sides if row * column <= max(sides)]
        texts = {name: files.ids(name) for name in (*names, "<|img_thumbnail|>")}
        texts |= {"start": (files.id(start),), "end": (files.id(end),)}
    family = Lfm2(sizes, files.id(image), tuple(texts.items()))
    return PictureReader(family, image, files.id(image), (image, start, end, "<|img_thumbnail|>"))
