"""The families of models that see: the placeholder, tokens and tiles of a picture of each.

Adding a family is a class with the rules of its processor in transformers, and an entry of FAMILIES.
"""

from __future__ import annotations

import dataclasses
import json
import math
import pathlib
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from meshtune.data.pictures.lfm2 import read_lfm2
from meshtune.data.pictures.model_files import Layout, ModelFiles, refuse_crops
from meshtune.data.pictures.reader import NEWLINE, PUBLISHED, PictureReader
from meshtune.errors import UserError
from meshtune.json_text import read_json

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

    from meshtune.config.sections import VisionSection

_MODELS = "transformers.models"
GOT_OCR2 = f"{_MODELS}.got_ocr2.image_processing_pil_got_ocr2"
IDEFICS3 = f"{_MODELS}.idefics3.image_processing_pil_idefics3"
SMOLVLM = f"{_MODELS}.smolvlm.image_processing_pil_smolvlm"
QWEN2_VL = f"{_MODELS}.qwen2_vl.image_processing_pil_qwen2_vl"
GEMMA3 = f"{_MODELS}.gemma3.image_processing_pil_gemma3"
LLAVA = f"{_MODELS}.llava.image_processing_pil_llava"
LLAVA_NEXT = f"{_MODELS}.llava_next.image_processing_pil_llava_next"
CLIP = f"{_MODELS}.clip.image_processing_pil_clip"
LFM2 = "meshtune.data.pictures.lfm2:Lfm2Pixels"  # transformers' own needs torchvision
GLM4V = f"{_MODELS}.glm4v.image_processing_pil_glm4v"
GLM46V = f"{_MODELS}.glm46v.image_processing_pil_glm46v"
GEMMA4 = f"{_MODELS}.gemma4.image_processing_pil_gemma4"
SIGLIP = f"{_MODELS}.siglip.image_processing_pil_siglip"
PIXTRAL = f"{_MODELS}.pixtral.image_processing_pil_pixtral"


def picture_reader(directory: pathlib.Path, vision: VisionSection, tokenizer: PreTrainedTokenizerFast) -> PictureReader:
    """The reader of pictures for the model in `directory`.

    Raises UserError for a model that does not see, for files that are missing or say what is not supported, and for
    limits of pixels that leave no patch.
    """
    config = read_json(directory / "config.json")
    model_type = config.get("model_type")
    if model_type not in FAMILIES:
        known = ", ".join(FAMILIES)
        raise UserError(
            f"{model_type} models read text only, and the recipe has a section vision",
            where=str(directory),
            fix=f"leave vision out, or take a model that sees: {known}",
        )
    make, processors = FAMILIES[model_type]
    processor = _optional(directory / "processor_config.json")
    settings = _optional(directory / "preprocessor_config.json") or processor.get("image_processor", {})
    if not settings:
        raise UserError(
            "the model has no preprocessor_config.json, which says how pictures are scaled",
            where=str(directory),
            fix="copy preprocessor_config.json of the model into its folder",
        )
    name = str(settings.get("image_processor_type") or settings.get("feature_extractor_type") or next(iter(processors)))
    name = name.removesuffix("Pil").removesuffix("Fast").replace("FeatureExtractor", "ImageProcessor")
    if name not in processors:
        raise UserError(
            f"the image processor {name} of preprocessor_config.json is not one of {model_type}",
            where=str(directory),
            fix=f"known: {', '.join(processors)}",
        )
    options = {key: value for key, value in settings.items() if key not in _NOT_OPTIONS}
    files = ModelFiles(directory, config, config.get("vision_config") or {}, options, processor, tokenizer)
    try:
        reader = make(files, vision)
        reader = dataclasses.replace(
            reader,
            processor=processors[name] if ":" in processors[name] else f"{processors[name]}:{name}Pil",
            settings=json.dumps(files.settings, sort_keys=True),
            channels=int(next((files.vision[key] for key in _CHANNELS if files.vision.get(key)), 3)),
        )
        reader.check_pixels()
    except UserError:
        raise
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as problem:
        raise UserError(
            f"no picture can be read with these settings ({type(problem).__name__}: {problem})",
            where=str(directory / "preprocessor_config.json"),
            fix=PUBLISHED,
        ) from problem
    reader = dataclasses.replace(reader, areas=(vision.max_pixels, vision.min_pixels))
    minimum = (reader.family.patch * reader.merge) ** 2
    if vision.max_pixels is not None and vision.max_pixels < minimum:
        side = reader.family.patch * reader.merge
        problem = f"{vision.max_pixels} pixels are less than one feature of this model, {side} x {side}"
        raise UserError(problem, where="vision.max_pixels", fix=f"give {minimum} or more")
    return reader


_CHANNELS = ("num_channels", "in_channels", "in_chans")
_NOT_OPTIONS = ("image_processor_type", "feature_extractor_type", "processor_class", "auto_map")


def _optional(file: pathlib.Path) -> dict[str, Any]:
    return read_json(file) if file.is_file() else {}


def _side(size: Mapping[str, Any], where: str) -> int:
    """The side of a square size. Raises UserError for another."""
    sides = {size[key] for key in ("height", "width", "shortest_edge", "longest_edge") if size.get(key)}
    if len(sides) != 1:
        raise UserError(f"expected a square size of pictures, found {dict(size)}", where=where, fix="correct it")
    return int(sides.pop())


def _square(side: int) -> tuple[int, int]:
    return side, side


@dataclasses.dataclass(frozen=True)
class InternVL:
    """Tiles in the grid that is nearest to the aspect, and a thumbnail after several (InternVLProcessor)."""

    patch: int
    merge: int
    side: int
    min_tiles: int
    max_tiles: int
    start: int
    context: int
    end: int

    @property
    def tile_patches(self) -> int:
        """The patches of a tile."""
        return (self.side // self.patch) ** 2

    def layout(self, width: int, height: int) -> Layout:
        """The layout of a picture of this size."""
        tiles = 1
        if self.max_tiles > 1:
            from transformers.models.got_ocr2.image_processing_pil_got_ocr2 import get_optimal_tiled_canvas

            columns, rows = get_optimal_tiled_canvas(
                (height, width), (self.side, self.side), self.min_tiles, self.max_tiles
            )
            tiles = columns * rows + (columns * rows > 1)
        count = tiles * self.tile_patches // self.merge**2
        ids = [self.start, *[self.context] * count, self.end]
        return ids, [0, *range(1, count + 1), 0], [_square(self.side // self.patch)] * tiles

    def pixels(self, output: Mapping[str, Any]) -> list[np.ndarray]:
        """The tiles of a picture."""
        return list(output["pixel_values"])


def _internvl(files: ModelFiles, vision: VisionSection) -> PictureReader:
    where = str(files.directory / "preprocessor_config.json")
    # InternVLProcessor cuts into tiles whatever the file says, and max_patches says how many.
    files.settings["crop_to_patches"] = True
    max_tiles = files.settings["max_patches"] = vision.crops or int(files.settings.get("max_patches", 12))
    min_tiles = files.settings["min_patches"] = min(int(files.settings.get("min_patches", 1)), max_tiles)
    merge = round(1 / float(files.config.get("downsample_ratio", 0.5)))
    context = files.token("context_image_token", "<IMG_CONTEXT>")
    start, end = files.token("start_image_token", "<img>"), files.token("end_image_token", "</img>")
    side = _side(files.settings.get("size", {"height": 384, "width": 384}), where)
    family = InternVL(files.patch, merge, side, min_tiles, max_tiles, files.id(start), files.id(context), files.id(end))
    return PictureReader(family, context, files.id(context), (context, start, end))


@dataclasses.dataclass(frozen=True)
class Idefics3:
    """Tiles of a picture whose longer edge is scaled to a size, and the whole picture last (SmolVLMProcessor).

    `longest` is that size, 0: the whole picture only. `texts` are the ids of the texts between runs of image tokens.
    """

    patch: int
    merge: int
    side: int
    longest: int
    image: int
    texts: tuple[tuple[str, tuple[int, ...]], ...]

    @property
    def tile_patches(self) -> int:
        """The patches of a tile, whose margin below a patch is left out."""
        return (self.side // self.patch) ** 2

    def grid(self, width: int, height: int) -> tuple[int, int]:
        """The rows and columns of tiles; 0 and 0 for a picture that is not cut."""
        if not self.longest:
            return 0, 0
        from transformers.models.idefics3 import image_processing_pil_idefics3 as idefics3

        pixels = np.broadcast_to(np.uint8(0), (3, height, width))
        height, width = idefics3.get_resize_output_image_size(pixels, self.longest)
        aspect = width / height
        if width >= height:
            width = math.ceil(width / self.side) * self.side
            height = math.ceil(int(width / aspect) / self.side) * self.side
        else:
            height = math.ceil(height / self.side) * self.side
            width = math.ceil(int(height * aspect) / self.side) * self.side
        rows, columns = height // self.side, width // self.side
        return (0, 0) if rows == columns == 1 else (rows, columns)

    def layout(self, width: int, height: int) -> Layout:
        """The layout of a picture of this size."""
        rows, columns = self.grid(width, height)
        texts, count = dict(self.texts), self.tile_patches // self.merge**2
        ids, visual = list[int](), list[int]()

        def write(text: str, tile: int | None = None) -> None:
            ids.extend(texts[text])
            visual.extend([0] * len(texts[text]))
            if tile is not None:
                ids.extend([self.image] * count)
                visual.extend(range(tile * count + 1, (tile + 1) * count + 1))

        for row in range(rows):
            for column in range(columns):
                write("fake")
                write(f"<row_{row + 1}_col_{column + 1}>", row * columns + column)
            write("\n" if row + 1 < rows else "\n\n")
        write("fake")
        write("global", rows * columns)
        write("fake")
        return ids, visual, [_square(self.side // self.patch)] * (rows * columns + 1)

    def pixels(self, output: Mapping[str, Any]) -> list[np.ndarray]:
        """The tiles of a picture."""
        return list(output["pixel_values"][0])


def _idefics3(files: ModelFiles, vision: VisionSection) -> PictureReader:
    where = str(files.directory / "preprocessor_config.json")
    side = _side(files.settings.get("max_image_size", {"longest_edge": 364}), where)
    longest = int(files.settings.get("size", {"longest_edge": 4 * 364}).get("longest_edge", 0))
    if vision.crops is not None:
        longest = files.settings.setdefault("size", {})["longest_edge"] = min(longest, math.isqrt(vision.crops) * side)
        files.settings["do_image_splitting"] = vision.crops > 1
    if not files.settings.get("do_image_splitting", True):
        longest = 0
    fake = files.token("fake_image_token", "<fake_token_around_image>")
    image, global_token = files.token("image_token", "<image>"), files.token("global_image_token", "<global-img>")
    texts = {
        "fake": (files.id(fake),),
        "global": files.ids(global_token),
        "\n": files.ids("\n"),
        "\n\n": files.ids("\n\n"),
    }
    side_tiles = math.ceil(min(longest, 4096) / side)
    names = [f"<row_{row}_col_{column}>" for row in range(1, side_tiles + 1) for column in range(1, side_tiles + 1)]
    texts |= {name: files.ids(name) for name in names}
    merge = int(files.config.get("scale_factor", 2))
    family = Idefics3(files.patch, merge, side, longest, files.id(image), tuple(texts.items()))
    return PictureReader(family, image, files.id(image), (image, fake, global_token))


@dataclasses.dataclass(frozen=True)
class Qwen:
    """Whole pictures, scaled to a multiple of the blocks of patches (Qwen2VLProcessor, Glm4vProcessor).

    `min_area` and `max_area` bound the pixels, in `glm` those of the two frames that a picture is repeated for.
    """

    patch: int
    merge: int
    min_area: int
    max_area: int
    pad: int
    glm: bool = False
    tile_patches: int = 0

    def layout(self, width: int, height: int) -> Layout:
        """The layout of a picture of this size."""
        from transformers.models.glm4v.image_processing_pil_glm4v import smart_resize as resize_frames
        from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import smart_resize

        side = self.patch * self.merge
        if self.glm:
            height, width = resize_frames(2, height, width, 2, side, self.min_area, self.max_area)
        else:
            height, width = smart_resize(height, width, side, self.min_area, self.max_area)
        count = (height // side) * (width // side)
        return [self.pad] * count, range(1, count + 1), [(height // self.patch, width // self.patch)]

    def pixels(self, output: Mapping[str, Any]) -> list[np.ndarray]:
        """The picture, whose patches the processor gives, each twice as frames of a video."""
        _, rows, columns = np.asarray(output["image_grid_thw"])[0].tolist()
        values = np.asarray(output["pixel_values"])
        blocks = (rows // self.merge, columns // self.merge, self.merge, self.merge)
        frames = values.reshape(*blocks, -1, 2, self.patch, self.patch)[..., 0, :, :]
        return [frames.transpose(4, 0, 2, 5, 1, 3, 6).reshape(-1, rows * self.patch, columns * self.patch)]


def _qwen(files: ModelFiles, vision: VisionSection) -> PictureReader:
    size = {"shortest_edge": 56 * 56, "longest_edge": 28 * 28 * 1280}
    tokens = ("<|image_pad|>", "<|video_pad|>", "<|vision_start|>", "<|vision_end|>")
    return _of_any_size(files, vision, size, tokens, glm=False)


def _glm(files: ModelFiles, vision: VisionSection) -> PictureReader:
    size = {"shortest_edge": 112 * 112, "longest_edge": 28 * 28 * 15000}
    tokens = ("<|image|>", "<|video|>", "<|begin_of_image|>", "<|end_of_image|>")
    return _of_any_size(files, vision, size, tokens, glm=True)


def _of_any_size(
    files: ModelFiles, vision: VisionSection, size: dict[str, int], tokens: tuple[str, str, str, str], *, glm: bool
) -> PictureReader:
    """The reader of a processor with this default size and these tokens of pictures, of videos, before and after."""
    refuse_crops(vision, "this model")
    settings = files.settings
    size = dict(settings.get("size") or size)
    min_area = int(settings.get("min_pixels") or size["shortest_edge"])
    max_area = int(settings.get("max_pixels") or size["longest_edge"])
    patch, merge = int(settings.get("patch_size", 14)), int(settings.get("merge_size", 2))
    if int(settings.get("temporal_patch_size", 2)) != 2:
        raise UserError("temporal_patch_size is not 2", where=str(files.directory / "preprocessor_config.json"))
    pad, begin, end = files.token("image_token", tokens[0]), *tokens[2:]
    family = Qwen(patch, merge, min_area, max_area, files.id(pad), glm)
    frame = (files.id(begin), files.id(end))
    return PictureReader(family, pad, files.id(pad), (pad, *tokens[1:]), frame=frame, mrope=True)


@dataclasses.dataclass(frozen=True)
class Pixtral:
    """Whole pictures, at most `largest` (height and width), whose rows of features end with a token, the last one with
    another (PixtralProcessor)."""

    patch: int
    merge: int
    largest: tuple[int, int]
    image: int
    row_end: int
    end: int
    tile_patches: int = 0

    def layout(self, width: int, height: int) -> Layout:
        """The layout of a picture of this size."""
        from transformers.models.pixtral.image_processing_pil_pixtral import get_resize_output_image_size

        pixels, side = np.broadcast_to(np.uint8(0), (3, height, width)), self.patch * self.merge
        height, width = get_resize_output_image_size(pixels, self.largest, side, "channels_first")
        rows, columns = height // side, width // side
        ids = [*[*[self.image] * columns, self.row_end] * rows][:-1]
        visual = np.pad(1 + np.arange(rows * columns).reshape(rows, columns), ((0, 0), (0, 1)))
        return [*ids, self.end], visual.ravel().tolist(), [(rows * self.merge, columns * self.merge)]

    def pixels(self, output: Mapping[str, Any]) -> list[np.ndarray]:
        """The picture."""
        return list(output["pixel_values"])


def _pixtral(files: ModelFiles, vision: VisionSection) -> PictureReader:
    refuse_crops(vision, "this model")
    merge, size = int(files.config.get("spatial_merge_size", 2)), files.settings.get("size") or {"longest_edge": 1024}
    longest = size.get("longest_edge")
    largest = (longest, longest) if longest else (int(size["height"]), int(size["width"]))
    # PixtralProcessor gives the side of a feature as that of a patch, whatever the file of the image processor says.
    files.settings["patch_size"] = {"height": files.patch * merge, "width": files.patch * merge}
    image, row_end, end = tokens = tuple(
        str(files.processor.get(f"image{name}_token", default))
        for name, default in (("", "[IMG]"), ("_break", "[IMG_BREAK]"), ("_end", "[IMG_END]"))
    )
    family = Pixtral(files.patch, merge, largest, files.id(image), files.id(row_end), files.id(end))
    return PictureReader(family, image, files.id(image), tokens)


@dataclasses.dataclass(frozen=True)
class OneTile:
    """Whole pictures scaled to one size, whose tokens stand between `before` and `after` (Gemma3Processor,
    LlavaProcessor, PaliGemmaProcessor)."""

    patch: int
    merge: int
    side: int
    image: int
    before: tuple[int, ...] = ()
    after: tuple[int, ...] = ()

    @property
    def tile_patches(self) -> int:
        """The patches of a picture."""
        return (self.side // self.patch) ** 2

    def layout(self, width: int, height: int) -> Layout:
        """The layout of a picture of any size."""
        count = self.tile_patches // self.merge**2
        visual = [*[0] * len(self.before), *range(1, count + 1), *[0] * len(self.after)]
        return [*self.before, *[self.image] * count, *self.after], visual, [_square(self.side // self.patch)]

    def pixels(self, output: Mapping[str, Any]) -> list[np.ndarray]:
        """The picture."""
        return list(output["pixel_values"])


def _gemma3(files: ModelFiles, vision: VisionSection) -> PictureReader:
    refuse_crops(vision, "Gemma 3")
    where = str(files.directory / "preprocessor_config.json")
    if files.settings.get("do_pan_and_scan"):
        raise UserError("do_pan_and_scan is not supported", where=where, fix="set it to false")
    side = _side(files.settings.get("size", {"height": 224, "width": 224}), where)
    begin, image = files.token("boi_token", "<start_of_image>"), files.token("image_token", "<image_soft_token>")
    end, count = files.token("eoi_token", "<end_of_image>"), int(files.config.get("mm_tokens_per_image", 256))
    merge = side // files.patch // math.isqrt(count)
    family = OneTile(files.patch, merge, side, files.id(image), (files.id(begin),), (files.id(end),))
    return PictureReader(family, begin, files.id(begin), (begin, image, end), surroundings=("\n\n", "\n\n"), reach=True)


def _paligemma(files: ModelFiles, vision: VisionSection) -> PictureReader:
    refuse_crops(vision, "PaliGemma")
    side = _side(files.settings.get("size", {"height": 224, "width": 224}), str(files.directory))
    image = files.token("image_token", "<image>")
    family = OneTile(files.patch, 1, side, files.id(image))
    return PictureReader(family, image, files.id(image), (image,), prefix=True)


@dataclasses.dataclass(frozen=True)
class Gemma4:
    """Whole pictures, scaled up or down to at most `tokens` features of `pool` x `pool` squares of `side` pixels
    (Gemma4Processor). Those squares are patches, or with `unified` a feature is one patch (Gemma4UnifiedProcessor)."""

    side: int
    pool: int
    tokens: int
    ids: tuple[int, int, int]
    unified: bool = False
    tile_patches: int = 0

    @property
    def patch(self) -> int:
        """The side of a patch in pixels."""
        return self.side * self.pool if self.unified else self.side

    @property
    def merge(self) -> int:
        """The side of a block of patches that make a feature."""
        return 1 if self.unified else self.pool

    def layout(self, width: int, height: int) -> Layout:
        """The layout of a picture of this size."""
        from transformers.models.gemma4.image_processing_pil_gemma4 import get_aspect_ratio_preserving_size

        limit = self.tokens * self.pool**2
        height, width = get_aspect_ratio_preserving_size(height, width, self.side, limit, self.pool)
        rows, columns = height // self.patch, width // self.patch
        (begin, image, end), count = self.ids, rows * columns // self.merge**2
        return [begin, *[image] * count, end], [0, *range(1, count + 1), 0], [(rows, columns)]

    def pixels(self, output: Mapping[str, Any]) -> list[np.ndarray]:
        """The picture, whose squares the processor gives row by row, with their places and some for padding."""
        places = np.asarray(output["image_position_ids"])[0]
        columns, rows = places.max(axis=0) + 1
        squares = np.asarray(output["pixel_values"])[0][: rows * columns]
        split = squares.reshape(rows, columns, self.side, self.side, -1)
        return [split.transpose(4, 0, 2, 1, 3).reshape(-1, rows * self.side, columns * self.side)]


def _gemma4(files: ModelFiles, vision: VisionSection) -> PictureReader:
    from transformers.models.gemma4.image_processing_pil_gemma4 import _SUPPORTED_SOFT_TOKENS as COUNTS

    refuse_crops(vision, "Gemma 4")
    merge = int(files.vision.get("pooling_kernel_size", 3))
    tokens, area = int(files.settings.get("max_soft_tokens", 280)), (files.patch * merge) ** 2
    if vision.max_pixels is not None:  # a smaller picture would be scaled up
        tokens = min(tokens, max((count for count in COUNTS if count * area <= vision.max_pixels), default=COUNTS[0]))
    files.settings.update(patch_size=files.patch, pooling_kernel_size=merge, max_soft_tokens=tokens)
    names = [
        files.token(f"{name}_token", default)
        for name, default in (("boi", "<|image>"), ("image", "<|image|>"), ("eoi", "<image|>"))
    ]
    begin, image, end = (files.id(name) for name in names)
    unified = files.config["model_type"] == "gemma4_unified"
    family = Gemma4(files.patch, merge, tokens, (begin, image, end), unified)
    default = "vision" if unified else None
    reach = bool((files.config.get("text_config") or {}).get("use_bidirectional_attention", default))
    return PictureReader(family, names[1], image, tuple(names), reach=reach)


def _check_strategy(files: ModelFiles) -> None:
    strategy = files.config.get("vision_feature_select_strategy", "default")
    if strategy != "default":
        where = str(files.directory / "config.json")
        raise UserError(f"vision_feature_select_strategy {strategy} is not supported, only default", where=where)


def _llava(files: ModelFiles, vision: VisionSection) -> PictureReader:
    refuse_crops(vision, "LLaVA 1.5")
    _check_strategy(files)
    where = str(files.directory / "preprocessor_config.json")
    is_cut = files.settings.get("do_center_crop", True)
    size = files.settings.get("crop_size" if is_cut else "size") or {"height": 224, "width": 224}
    side = _side(size if isinstance(size, dict) else {"height": size}, where)
    image = files.token("image_token", "<image>")
    return PictureReader(OneTile(files.patch, 1, side, files.id(image)), image, files.id(image), (image,))


@dataclasses.dataclass(frozen=True)
class LlavaNext:
    """The whole picture, then its tiles as one grid of features without those of padding, whose rows end with the
    model's newline (LlavaNextProcessor)."""

    patch: int
    side: int
    image: int
    resolutions: tuple[tuple[int, int], ...]
    merge: int = 1

    @property
    def tile_patches(self) -> int:
        """The patches of a tile."""
        return (self.side // self.patch) ** 2

    def layout(self, width: int, height: int) -> Layout:
        """The layout of a picture of this size."""
        from transformers.image_processing_utils import select_best_resolution

        n, base = self.side // self.patch, self.tile_patches
        best = select_best_resolution((height, width), [list(size) for size in self.resolutions])
        rows, columns = best[0] // self.side, best[1] // self.side
        tile = 1 + np.arange(rows * columns).reshape(rows, 1, columns, 1)
        features = (tile * base + np.arange(base).reshape(1, n, 1, n) + 1).reshape(rows * n, columns * n)
        if width / height > features.shape[1] / features.shape[0]:  # unpad_image of transformers' LLaVA-NeXT
            padding = (features.shape[0] - int(round(height * (features.shape[1] / width), 7))) // 2
            features = features[padding : features.shape[0] - padding]
        else:
            padding = (features.shape[1] - int(round(width * (features.shape[0] / height), 7))) // 2
            features = features[:, padding : features.shape[1] - padding]
        newlines = np.full((len(features), 1), NEWLINE)
        visual = np.concatenate([np.arange(1, base + 1), np.concatenate([features, newlines], 1).ravel()])
        return [self.image] * len(visual), visual.tolist(), [(n, n)] * (1 + rows * columns)

    def pixels(self, output: Mapping[str, Any]) -> list[np.ndarray]:
        """The whole picture and its tiles."""
        return list(output["pixel_values"][0])


def _llava_next(files: ModelFiles, vision: VisionSection) -> PictureReader:
    _check_strategy(files)
    where = str(files.directory / "preprocessor_config.json")
    side = _side(files.settings.get("crop_size") or files.settings.get("size") or {"shortest_edge": 224}, where)
    default = [[336, 672], [672, 336], [672, 672], [1008, 336], [336, 1008]]
    resolutions = [(int(height), int(width)) for height, width in files.settings.get("image_grid_pinpoints") or default]
    if vision.crops is not None:
        few = [size for size in resolutions if size[0] * size[1] <= vision.crops * side**2]
        resolutions = few or [(side, side)]
        files.settings["image_grid_pinpoints"] = [list(size) for size in resolutions]
    image = files.token("image_token", "<image>")
    family = LlavaNext(files.patch, side, files.id(image), tuple(resolutions))
    return PictureReader(family, image, files.id(image), (image,))


_QWEN = (_qwen, {"Qwen2VLImageProcessor": QWEN2_VL})
_GLM = (_glm, {"Glm4vImageProcessor": GLM4V, "Glm46VImageProcessor": GLM46V})
FAMILIES: dict[str, tuple[Callable[[ModelFiles, VisionSection], PictureReader], dict[str, str]]] = {
    "internvl": (_internvl, {"GotOcr2ImageProcessor": GOT_OCR2}),
    "idefics3": (_idefics3, {"Idefics3ImageProcessor": IDEFICS3}),
    "smolvlm": (_idefics3, {"SmolVLMImageProcessor": SMOLVLM, "Idefics3ImageProcessor": IDEFICS3}),
    **dict.fromkeys(("qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe", "qwen3_5", "qwen3_5_moe"), _QWEN),
    **dict.fromkeys(("glm4v", "glm46v", "glm4v_moe"), _GLM),
    "mistral3": (_pixtral, {"PixtralImageProcessor": PIXTRAL}),
    "gemma3": (_gemma3, {"Gemma3ImageProcessor": GEMMA3}),
    "paligemma": (_paligemma, {"SiglipImageProcessor": SIGLIP}),
    "lfm2_vl": (read_lfm2, {"Lfm2VlImageProcessor": LFM2}),
    "gemma4": (_gemma4, {"Gemma4ImageProcessor": GEMMA4}),
    "gemma4_unified": (_gemma4, {"Gemma4UnifiedImageProcessor": f"{GEMMA4}:Gemma4ImageProcessorPil"}),
    "llava": (_llava, {"CLIPImageProcessor": CLIP, "LlavaImageProcessor": LLAVA}),
    "llava_next": (_llava_next, {"LlavaNextImageProcessor": LLAVA_NEXT}),
}
