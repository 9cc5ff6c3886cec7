"""Complete checkpoints of the tiny models that see: config, weights, tokenizer, template and picture processor."""

from __future__ import annotations

import dataclasses
import json
import pathlib
from typing import Any

from data.pictures import make_model
from families.case import torch_model
from families.vision.cases import PINPOINTS
from families.vision.sights import VisionCase
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
    torch_model(model).save_pretrained(folder)
    return folder
