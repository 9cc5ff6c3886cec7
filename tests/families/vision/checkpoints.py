"""Complete checkpoints of the tiny models that see: config, weights, tokenizer, template and picture processor."""

from __future__ import annotations

import dataclasses
import inspect
import json
import pathlib
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
import transformers
from PIL import Image
from transformers.models.gemma4.image_processing_pil_gemma4 import convert_image_to_patches, pad_along_first_dim

from data.pictures import make_model, processed_by
from families.case import torch_model
from families.vision.cases import PINPOINTS
from families.vision.sights import VisionCase, fill_up, mask_of_unified
from meshtune.data.pictures.reader import PictureReader
from meshtune.data.tokenizer import load_tokenizer

# The settings of the processors that the cases use.
ONE_TILE = {"size": {"height": 28, "width": 28}}
TILES = {"size": {"longest_edge": 60}, "max_image_size": {"longest_edge": 30}}
QWEN = {"patch_size": 6, "merge_size": 2, "min_pixels": 24**2, "max_pixels": 60**2}
GEMMA4 = {"patch_size": 5, "pooling_kernel_size": 2, "max_soft_tokens": 70}
LLAVA = {"size": {"shortest_edge": 28}, "crop_size": {"height": 28, "width": 28}}
PREPROCESSORS: dict[str, dict[str, Any]] = {
    "internvl": {**ONE_TILE, "max_patches": 4},
    "smolvlm": TILES,
    "qwen2_vl": QWEN,
    "qwen3_vl": {**QWEN, "size": None},
    "glm4v": {"patch_size": 6, "merge_size": 2, "size": {"shortest_edge": 2 * 24**2, "longest_edge": 2 * 60**2}},
    "gemma3": ONE_TILE,
    "paligemma": {**ONE_TILE, "image_seq_length": 16},
    "llava": LLAVA,
    "llava_next": {**LLAVA, "image_grid_pinpoints": PINPOINTS},
    "gemma4": GEMMA4,
    "gemma4_unified": GEMMA4,
    "mistral3": {"size": {"longest_edge": 60}},
    "lfm2_vl": {"tile_size": 40},
}
FILES_OF = {
    "idefics3": "smolvlm",
    "qwen2_5_vl": "qwen2_vl",
    "qwen3_vl_moe": "qwen3_vl",
    "qwen3_5": "qwen3_vl",
    "qwen3_5_moe": "qwen3_vl",
    "glm4v_moe": "glm4v",
}


def write_checkpoint(case: VisionCase, folder: pathlib.Path) -> pathlib.Path:
    """Writes the model of a case with a vocabulary for the tokenizer of its family, and room for 512 tokens."""
    family = FILES_OF.get(case.case.model_type, case.case.model_type)
    make_model(folder, family)
    processor = folder / "preprocessor_config.json"
    settings = json.loads(processor.read_text()) | PREPROCESSORS[family]
    if case.case.model_type == "idefics3":
        settings["image_processor_type"] = "Idefics3ImageProcessor"
    processor.write_text(json.dumps({name: value for name, value in settings.items() if value is not None}))
    tokenizer = load_tokenizer(folder)
    placeholder = {"gemma3": "<image_soft_token>"}.get(family) or next(
        token for token in ("<IMG_CONTEXT>", "<|image_pad|>", "<|image|>", "[IMG]", "<image>")
        if token in tokenizer.get_vocab()
    )  # fmt: skip
    image = tokenizer.convert_tokens_to_ids(placeholder)
    name = next(name for name in ("image_token_id", "image_token_index") if name in case.case.outside)
    fields: dict[str, Any] = {"vocab_size": -(-len(tokenizer) // 8) * 8, "max_position_embeddings": 512}
    if "vocab_size_per_layer_input" in case.case.config:
        fields["vocab_size_per_layer_input"] = fields["vocab_size"]
    model = dataclasses.replace(case.case.changed(**fields), outside={**case.case.outside, name: image})
    written = torch_model(model)
    with torch.no_grad():
        for table in tables_with_padding(written):  # a row of zeros has no finite gradient behind a norm
            table.weight[table.padding_idx].normal_(std=0.2)
    written.save_pretrained(folder)
    return folder


def tables_with_padding(model: torch.nn.Module) -> list[torch.nn.Embedding]:
    """The embeddings whose row of the padding token is not trained: here that token begins every text."""
    return [m for m in model.modules() if isinstance(m, torch.nn.Embedding) and m.padding_idx is not None]


def open_in_torch(folder: pathlib.Path) -> transformers.PreTrainedModel:
    """The model of a checkpoint in transformers, with the plain forms of its blocks."""
    return transformers.AutoModelForImageTextToText.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager", experts_implementation="eager"
    ).eval()


def answer_log_probs(
    model: transformers.PreTrainedModel, reader: PictureReader, ids: Sequence[int], files: Sequence[str], start: int
) -> torch.Tensor:
    """transformers' log-probabilities of the tokens of a text from position `start`, a row by itself with the pictures
    in `files`, each by the image processor of the model."""
    inputs = torch_inputs(model, reader, [Image.open(file).convert("RGB") for file in files])
    tokens = torch.tensor([list(ids)])
    images = (tokens == model.config.image_token_id).int()
    forward = inspect.signature(model.forward).parameters
    if model.config.model_type == "paligemma":
        inputs["token_type_ids"] = (torch.arange(len(ids)) >= start).int()[None]
    elif files:
        inputs |= {name: images for name in ("mm_token_type_ids", "token_type_ids") if name in forward}
    inputs = mask_of_unified(model, {"input_ids": tokens} | {k: v for k, v in inputs.items() if k in forward})
    logits = model(**inputs).logits[0, start - 1 : -1].log_softmax(-1)
    return logits.gather(1, tokens[0, start:, None])[:, 0]


def torch_inputs(
    model: transformers.PreTrainedModel, reader: PictureReader, images: Sequence[Image.Image]
) -> dict[str, torch.Tensor]:
    """Pictures as transformers' processor gives them to its model: all of a text in arrays of the largest."""
    kind, parts = model.config.model_type, list[dict[str, torch.Tensor]]()
    for image in images:
        output = processed_by(reader)(images=[image], return_tensors="np")
        arrays: dict[str, Any] = (
            {name: np.asarray(array) for name, array in output.items()} if kind != "lfm2_vl" else {}
        )
        if kind in ("lfm2_vl", "gemma4_unified"):  # whose processors need torchvision
            arrays = cut_for(kind, reader.family.patch, reader.family.pixels(output))
        if kind in ("smolvlm", "idefics3"):
            arrays = {"pixel_values": np.swapaxes(arrays["pixel_values"], 0, 1)}
        parts.append({name: torch.tensor(array) for name, array in arrays.items()})
    return {name: torch.cat(fill_up([part[name] for part in parts])) for name in (parts[0] if parts else ())}


def cut_for(kind: str, side: int, tiles: Sequence[np.ndarray]) -> dict[str, np.ndarray]:
    """Tiles [C, H, W] in patches, row by row, as LFM2-VL and Gemma 4 12B read them."""
    patches = [convert_image_to_patches(tile, side) for tile in tiles]
    sizes = np.array([(tile.shape[1] // side, tile.shape[2] // side) for tile in tiles])
    if kind == "gemma4_unified":
        places = np.stack(np.meshgrid(np.arange(sizes[0, 1]), np.arange(sizes[0, 0])), -1).reshape(-1, 2)
        padded, places = pad_along_first_dim(patches[0], places, GEMMA4["max_soft_tokens"])
        return {"pixel_values": padded[None], "image_position_ids": places[None]}
    room = max(map(len, patches))
    masks = [np.arange(room) < len(part) for part in patches]
    filled = [np.pad(part, ((0, room - len(part)), (0, 0))) for part in patches]
    return {"pixel_values": np.stack(filled), "pixel_attention_mask": np.stack(masks), "spatial_shapes": sizes}
