"""The families of models that see: the placeholder, tokens and tiles of a picture of each.

Adding a family is a class with the rules of its processor in transformers, and an entry of FAMILIES.
"""

from __future__ import annotations

import dataclasses
import json
import pathlib
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from meshtune.data.pictures.reader import PictureReader
from meshtune.errors import UserError
from meshtune.json_text import read_json

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

    from meshtune.config.sections import VisionSection

Layout = tuple[Sequence[int], Sequence[int], Sequence[tuple[int, int]]]
_MODELS = "transformers.models"
GOT_OCR2 = f"{_MODELS}.got_ocr2.image_processing_pil_got_ocr2"
IDEFICS3 = f"{_MODELS}.idefics3.image_processing_pil_idefics3"
SMOLVLM = f"{_MODELS}.smolvlm.image_processing_pil_smolvlm"
QWEN2_VL = f"{_MODELS}.qwen2_vl.image_processing_pil_qwen2_vl"
GEMMA3 = f"{_MODELS}.gemma3.image_processing_pil_gemma3"
LLAVA = f"{_MODELS}.llava.image_processing_pil_llava"
LLAVA_NEXT = f"{_MODELS}.llava_next.image_processing_pil_llava_next"
CLIP = f"{_MODELS}.clip.image_processing_pil_clip"


@dataclasses.dataclass(frozen=True)
class ModelFiles:
    """The files of a model that say how it reads pictures: `config` and its vision part, `settings` of the image
    processor, `processor` those of the processor around it."""

    directory: pathlib.Path
    config: Mapping[str, Any]
    vision: Mapping[str, Any]
    settings: dict[str, Any]
    processor: Mapping[str, Any]
    tokenizer: PreTrainedTokenizerFast

    @property
    def patch(self) -> int:
        """The side of a patch."""
        size = self.vision.get("patch_size", 14)
        return int(size[0] if isinstance(size, list) else size)

    def id(self, token: str) -> int:
        """The id of a token. Raises UserError where the tokenizer does not have it."""
        id_ = self.tokenizer.get_vocab().get(token)
        if id_ is None:
            raise UserError(
                f"the tokenizer has no token {token}, which stands for pictures",
                where=str(self.directory),
                fix="use the tokenizer of this model: leave model.tokenizer out",
            )
        return id_

    def token(self, name: str, default: str) -> str:
        """A token that the tokenizer has a name for."""
        return str(getattr(self.tokenizer, name, None) or default)

    def ids(self, text: str) -> tuple[int, ...]:
        """The ids of a text between special tokens."""
        return tuple(self.tokenizer(text, add_special_tokens=False)["input_ids"])


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
    kept = {key: value for key, value in settings.items() if key not in _NOT_OPTIONS}
    files = ModelFiles(directory, config, config.get("vision_config") or {}, kept, processor, tokenizer)
    reader = make(files, vision)
    reader = dataclasses.replace(
        reader,
        processor=f"{processors[name]}:{name}Pil",
        settings=json.dumps(files.settings, sort_keys=True),
        channels=int(files.vision.get("num_channels") or files.vision.get("in_channels") or 3),
        areas=(vision.max_pixels, vision.min_pixels),
    )
    least = (reader.family.patch * reader.merge) ** 2
    if vision.max_pixels is not None and vision.max_pixels < least:
        side = reader.family.patch * reader.merge
        problem = f"{vision.max_pixels} pixels are less than one feature of this model, {side} x {side}"
        raise UserError(problem, where="vision.max_pixels", fix=f"give {least} or more")
    return reader


_NOT_OPTIONS = ("image_processor_type", "feature_extractor_type", "processor_class", "auto_map")


def _optional(file: pathlib.Path) -> dict[str, Any]:
    return read_json(file) if file.is_file() else {}


def _refuse_crops(vision: VisionSection, family: str) -> None:
    if vision.crops is not None:
        raise UserError(
            f"{family} does not cut pictures into tiles",
            where="vision.crops",
            fix="leave it out; max_pixels scales pictures",
        )


def _side(size: Mapping[str, Any], where: str) -> int:
    """The side of a square size. Raises UserError for another."""
    sides = {size[key] for key in ("height", "width", "shortest_edge", "longest_edge") if size.get(key)}
    if len(sides) != 1:
        raise UserError(f"expected a square size of pictures, found {dict(size)}", where=where, fix="correct it")
    return int(sides.pop())


@dataclasses.dataclass(frozen=True)
class InternVL:
    """Tiles in the grid that is nearest to the aspect, and a thumbnail after several (InternVLProcessor)."""

    patch: int
    merge: int
    side: int
    least: int
    most: int
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
        if self.most > 1:
            from transformers.models.got_ocr2.image_processing_pil_got_ocr2 import get_optimal_tiled_canvas

            columns, rows = get_optimal_tiled_canvas((height, width), (self.side, self.side), self.least, self.most)
            tiles = columns * rows + (columns * rows > 1)
        count = tiles * self.tile_patches // self.merge**2
        ids = [self.start, *[self.context] * count, self.end]
        return ids, [0, *range(1, count + 1), 0], [(self.side // self.patch,) * 2] * tiles

    def pixels(self, output: Mapping[str, Any]) -> list[np.ndarray]:
        """The tiles of a picture."""
        return list(output["pixel_values"])


def _internvl(files: ModelFiles, vision: VisionSection) -> PictureReader:
    where = str(files.directory / "preprocessor_config.json")
    # InternVLProcessor cuts into tiles whatever the file says, and max_patches says how many.
    files.settings["crop_to_patches"] = True
    most = files.settings["max_patches"] = vision.crops or int(files.settings.get("max_patches", 12))
    least = files.settings["min_patches"] = min(int(files.settings.get("min_patches", 1)), most)
    merge = round(1 / float(files.config.get("downsample_ratio", 0.5)))
    context = files.token("context_image_token", "<IMG_CONTEXT>")
    start, end = files.token("start_image_token", "<img>"), files.token("end_image_token", "</img>")
    side = _side(files.settings.get("size", {"height": 384, "width": 384}), where)
    family = InternVL(files.patch, merge, side, least, most, files.id(start), files.id(context), files.id(end))
    return PictureReader(family, context, files.id(context), (context, start, end))


FAMILIES: dict[str, tuple[Callable[[ModelFiles, VisionSection], PictureReader], dict[str, str]]] = {
    "internvl": (_internvl, {"GotOcr2ImageProcessor": GOT_OCR2}),
}
