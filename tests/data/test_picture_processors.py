"""Tokens, pixels and positions of pictures, of every family, are those of transformers' processors."""

from __future__ import annotations

import importlib
import sys
from types import SimpleNamespace
from unittest import mock

import numpy as np
import pytest

from data.pictures import MODELS, picture, processed_by, reader_of
from meshtune.data.pictures.expansion import expand
from meshtune.data.pictures.positions import mrope_positions, reach_positions
from meshtune.data.tokenizer import load_tokenizer

SIZES = [(56, 56), (150, 60), (40, 130), (200, 190), (57, 31)]


def processed(reader, image):
    """The output of that processor for a picture."""
    return processed_by(reader)([image], return_tensors="np")


# Modules that LFM2-VL's processors import, and which scale pictures; the rules of their sizes do without.
TORCHVISION = {
    name: mock.MagicMock() for name in ("torchvision", "torchvision.transforms", "torchvision.transforms.v2")
}


def lfm2_processor():
    """transformers' image processor without torchvision: its rules, and no pixels."""
    with mock.patch.dict(sys.modules, TORCHVISION):
        module = importlib.import_module("transformers.models.lfm2_vl.image_processing_lfm2_vl")
    processor = object.__new__(module.Lfm2VlImageProcessor)
    for name, value in MODELS["lfm2_vl"][1].items():
        setattr(processor, name, value)
    processor.encoder_patch_size = 7
    return processor


def lfm2_grid(processor, width, height):
    """((columns, rows), (width, height) of the whole picture or thumbnail) by transformers."""
    sizes = {name: getattr(processor, name) for name in ("max_image_tokens", "encoder_patch_size", "downsample_factor")}
    grid = (1, 1)
    if processor._is_image_too_large(height, width, **sizes, max_pixels_tolerance=processor.max_pixels_tolerance):
        grid = processor._get_grid_layout(height, width, processor.min_tiles, processor.max_tiles, processor.tile_size)
    return grid[:2], processor.smart_resize(height, width, **sizes, min_image_tokens=processor.min_image_tokens)


def lfm2_tiles(image):
    """The tiles as transformers computes them, by torch's antialiased bilinear filter of bytes."""
    import torch

    processor, pixels = lfm2_processor(), torch.tensor(np.asarray(image)).permute(2, 0, 1)[None]
    (columns, rows), whole = lfm2_grid(processor, *image.size)
    side = processor.tile_size

    def resize(width, height):
        return torch.nn.functional.interpolate(pixels, (height, width), mode="bilinear", antialias=True)[0].numpy()

    tiles = []
    if columns * rows > 1:
        large = resize(columns * side, rows * side)
        tiles = [large[:, r * side :, c * side :][:, :side, :side] for r in range(rows) for c in range(columns)]
    return [*tiles, resize(*whole)]


def written(family, tokenizer, output, image):
    """The text that transformers' processor writes in the place of a picture."""
    from transformers.models.gemma3.processing_gemma3 import Gemma3Processor
    from transformers.models.gemma4.processing_gemma4 import Gemma4Processor
    from transformers.models.internvl.processing_internvl import InternVLProcessor
    from transformers.models.llava.processing_llava import LlavaProcessor
    from transformers.models.llava_next.processing_llava_next import LlavaNextProcessor
    from transformers.models.paligemma.processing_paligemma import PaliGemmaProcessor
    from transformers.models.qwen2_vl.processing_qwen2_vl import Qwen2VLProcessor
    from transformers.models.smolvlm.image_processing_pil_smolvlm import SmolVLMImageProcessorPil
    from transformers.models.smolvlm.processing_smolvlm import get_image_prompt_string

    match family:
        case "internvl":
            fields = {"start_image_token": "<img>", "end_image_token": "</img>", "image_token": "<IMG_CONTEXT>"}
            return InternVLProcessor.replace_image_token(SimpleNamespace(**fields, image_seq_length=4), output, 0)
        case "smolvlm":
            settings = {key: value for key, value in MODELS["smolvlm"][1].items() if key != "image_processor_type"}
            shown = SmolVLMImageProcessorPil(**settings)([image], return_row_col_info=True, return_tensors="np")
            return get_image_prompt_string(
                shown["rows"][0][0], shown["cols"][0][0], 4, "<fake_token_around_image>", "<image>", "<global-img>"
            )
        case "gemma3":
            whole = f"\n\n<start_of_image>{'<image_soft_token>' * 4}<end_of_image>\n\n"
            return Gemma3Processor.replace_image_token(SimpleNamespace(full_image_sequence=whole), output, 0)
        case "paligemma":
            fields = SimpleNamespace(image_token="<image>", image_seq_length=16)
            return PaliGemmaProcessor.replace_image_token(fields, output, 0)
        case "gemma4" | "gemma4_unified":
            names = {"boi_token": "<|image>", "image_token": "<|image|>", "eoi_token": "<image|>"}
            return Gemma4Processor.replace_image_token(SimpleNamespace(**names), output, 0)
        case "lfm2_vl":
            with mock.patch.dict(sys.modules, TORCHVISION):
                from transformers.models.lfm2_vl.processing_lfm2_vl import Lfm2VlProcessor
            processor = object.__new__(Lfm2VlProcessor)
            processor.image_processor = lfm2_processor()
            names = ("image", "image_start", "image_end", "image_thumbnail")
            for name, token in zip(names, ("<image>", *MODELS[family][2][1:4]), strict=True):
                setattr(processor, f"{name}_token", token)
            (columns, rows), size = lfm2_grid(processor.image_processor, *image.size)
            inputs = {"image_rows": [rows], "image_cols": [columns], "image_sizes": [size[::-1]]}
            return processor.replace_image_token(inputs, 0, use_image_special_tokens=True)
        case "mistral3":
            # The module of its processor imports the image processor that needs torchvision.
            pil = importlib.import_module("transformers.models.pixtral.image_processing_pil_pixtral")
            with mock.patch.dict(sys.modules, {"transformers.models.pixtral.image_processing_pixtral": pil}):
                from transformers.models.pixtral.processing_pixtral import PixtralProcessor
            names = {f"image{n}_token": f"[IMG{n.upper()}]" for n in ("", "_break", "_end")}
            return PixtralProcessor.replace_image_token(
                SimpleNamespace(patch_size=14, spatial_merge_size=2, **names), output, 0
            )
        case "llava":
            fields = {"patch_size": 14, "num_additional_image_tokens": 1, "vision_feature_select_strategy": "default"}
            return LlavaProcessor.replace_image_token(SimpleNamespace(image_token="<image>", **fields), output, 0)
        case "llava_next":
            processor = object.__new__(LlavaNextProcessor)
            processor.patch_size, processor.num_additional_image_tokens = 14, 1
            processor.vision_feature_select_strategy, processor.image_token = "default", "<image>"
            processor.image_processor = SimpleNamespace(image_grid_pinpoints=MODELS[family][1]["image_grid_pinpoints"])
            return LlavaNextProcessor.replace_image_token(processor, output, 0)
        case _:
            token = "<|image|>" if family == "glm4v" else "<|image_pad|>"
            fields = SimpleNamespace(image_processor=SimpleNamespace(merge_size=2), image_token=token)
            return Qwen2VLProcessor.replace_image_token(fields, output, 0)


@pytest.mark.parametrize("family", MODELS)
def test_tokens_are_those_of_transformers(model, family):
    """Of two pictures in a rendered conversation: transformers replaces the text of the placeholder, then tokenises."""
    directory = model(family)
    tokenizer, reader = load_tokenizer(directory), reader_of(directory)
    parts = [{"type": "image"}, {"type": "text", "text": "what is it?\n"}, {"type": "image"}]
    messages = [{"role": "user", "content": parts}, {"role": "assistant", "content": [{"type": "text", "text": "a"}]}]
    text = tokenizer.apply_chat_template(messages, tokenize=False)
    for size in SIZES:
        images = [picture(*size), picture(120, 70)]
        pieces = text.split(reader.placeholder)
        assert len(pieces) == 3
        replaced = [written(family, tokenizer, processed(reader, image), image) for image in images]
        expected = tokenizer("".join([pieces[0], replaced[0], pieces[1], replaced[1], pieces[2]]))["input_ids"]
        ids = np.asarray(tokenizer(reader.write(text))["input_ids"], np.int32)
        expanded = expand(reader, ids, [image.size for image in images], "here")
        assert expanded.ids.tolist() == expected
        layouts = [reader.layout(*image.size) for image in images]
        used = expanded.visual[expanded.visual > 0]
        assert len(set(used.tolist())) == len(used) <= sum(layout.features for layout in layouts)
        if family != "llava_next":  # whose padding has features that no token takes
            assert len(used) == sum(layout.features for layout in layouts)
        for start, layout in zip(expanded.starts, layouts, strict=True):
            assert expanded.ids[start : start + len(layout.ids)].tolist() == layout.ids.tolist()
        assert (expanded.unweighted >= (expanded.visual != 0)).all()


@pytest.mark.parametrize("family", MODELS)
def test_pixels_are_those_of_transformers(model, family):
    reader = reader_of(model(family))
    for size in SIZES:
        image = picture(*size)
        patches, segments, grid = reader.patches(image)
        layout, output, side = reader.layout(*size), processed(reader, image), reader.family.patch
        assert len(patches) == len(segments) == len(grid) == layout.patches
        assert np.unique(segments).tolist() == list(range(1, len(layout.tiles) + 1))
        if family.startswith(("qwen", "glm")):
            expected = output["pixel_values"].reshape(len(patches), 3, 2, side**2)
            assert np.array_equal(expected[:, :, 0], expected[:, :, 1])
            assert np.array_equal(patches, expected[:, :, 0].reshape(patches.shape))
        elif family == "lfm2_vl":
            tiles, (_, options, *_) = lfm2_tiles(image), MODELS[family]
            mean, deviation = (np.array(options[name])[:, None] for name in ("image_mean", "image_std"))
            assert [tile.shape[1:] for tile in tiles] == [(r * side, c * side) for r, c in layout.tiles]
            for number, tile in enumerate(tiles, start=1):
                for patch, (row, column, *_) in zip(patches[segments == number], grid[segments == number], strict=True):
                    box = tile[:, row * side : row * side + side, column * side : column * side + side]
                    levels = (patch.reshape(3, -1) * deviation + mean) * 255
                    assert np.abs(levels - box.reshape(3, -1)).max() < 1.001  # torch rounds some bytes otherwise
        elif family == "gemma4_unified":
            torch = pytest.importorskip("torch")
            with mock.patch.dict(sys.modules, TORCHVISION):
                module = importlib.import_module("transformers.models.gemma4_unified.image_processing_gemma4_unified")
            (squares,), (places,) = (torch.tensor(output[name]) for name in ("pixel_values", "image_position_ids"))
            real = (places >= 0).all(-1)
            expected, places = module.patches_merge(squares[real][None], places[real][None], len(patches))
            assert places[0].tolist() == grid[:, [1, 0]].tolist()
            own = patches.reshape(-1, 3, side, side).transpose(0, 2, 3, 1)
            assert np.array_equal(own.reshape(len(patches), -1), expected[0])
        elif family == "gemma4":
            count, (rows, columns) = len(patches), layout.tiles[0]
            expected = output["pixel_values"][0][:count].reshape(rows * columns, side * side, 3).swapaxes(1, 2)
            assert np.array_equal(patches, expected[grid[:, 0] * columns + grid[:, 1]].reshape(count, -1))
        else:
            tiles = np.asarray(output["pixel_values"])
            tiles = tiles.reshape(-1, *tiles.shape[-3:])
            for number, (tile, (rows, columns)) in enumerate(zip(tiles, layout.tiles, strict=True), start=1):
                assert tuple(grid[segments == number][0, 2:]) == (rows, columns)
                for patch, (row, column, *_) in zip(patches[segments == number], grid[segments == number], strict=True):
                    box = tile[:, row * side : row * side + side, column * side : column * side + side]
                    assert np.array_equal(patch, box.ravel().astype(np.float32))
        blocks = grid.reshape(-1, reader.merge, reader.merge, 4)
        assert (blocks[:, :1, :1] + np.stack(np.broadcast_arrays(
            *np.mgrid[: reader.merge, : reader.merge], 0, 0), -1) == blocks).all()  # fmt: skip


def test_positions_are_those_of_get_rope_index(model):
    torch = pytest.importorskip("torch")
    from transformers.models.qwen2_vl.configuration_qwen2_vl import Qwen2VLConfig
    from transformers.models.qwen2_vl.modeling_qwen2_vl import Qwen2VLModel

    reader = reader_of(model("qwen2_vl"))
    layouts = [reader.layout(200, 90), reader.layout(56, 190)]
    types = [0, 0, 0, *[1] * layouts[0].features, 0, 0, *[1] * layouts[1].features, 0]
    starts = [3, 5 + layouts[0].features]
    fake = SimpleNamespace(config=Qwen2VLConfig(), get_vision_position_ids=Qwen2VLModel.get_vision_position_ids)
    fake.get_vision_position_ids = lambda *a, **k: Qwen2VLModel.get_vision_position_ids(fake, *a, **k)
    grids = torch.tensor([[1, 2 * layout.grid[1], 2 * layout.grid[2]] for layout in layouts])
    expected, _ = Qwen2VLModel.get_rope_index(
        fake, torch.zeros(1, len(types), dtype=torch.long), torch.tensor([types]), image_grid_thw=grids
    )
    pictures = [(start, layout.grid) for start, layout in zip(starts, layouts, strict=True)]
    assert np.array_equal(mrope_positions(len(types), pictures), expected[:, 0].T.numpy())
    cut = mrope_positions(len(types) - 2, pictures)
    assert np.array_equal(cut, expected[:, 0].T.numpy()[:-2])
    assert np.array_equal(mrope_positions(4, []), np.repeat(np.arange(4)[:, None], 3, 1))


def test_tokens_of_a_picture_reach_its_last(model):
    assert reach_positions(np.array([0, 1, 2, 3, 0, 0, 4, 5, 0])).tolist() == [0, 3, 3, 3, 0, 0, 7, 7, 0]
