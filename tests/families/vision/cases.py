"""Tiny models that see, one a family, with the picture processors of transformers."""

from __future__ import annotations

import numpy as np
import torch
import transformers
from PIL import Image
from transformers.models.got_ocr2.image_processing_pil_got_ocr2 import GotOcr2ImageProcessorPil

from families.case import Case
from families.vision.sights import Sight, VisionCase, cut_tiles

IMAGE = 95  # the id that stands for a picture
SEES = transformers.AutoModelForImageTextToText


def tiled(pixels: np.ndarray, side: int, merge: int, inputs: dict[str, torch.Tensor]) -> Sight:
    """A picture of equal tiles [N, C, H, W], whose features follow one another."""
    patches, tiles, grid = cut_tiles(list(pixels), side, merge)
    count = len(patches) // merge**2
    return Sight(inputs, patches, tiles, grid, [IMAGE] * count, list(range(1, count + 1)))


INTERNVL_PIXELS = GotOcr2ImageProcessorPil(
    size={"height": 28, "width": 28}, crop_to_patches=True, min_patches=1, max_patches=4
)


def read_internvl(image: Image.Image) -> Sight:
    pixels = np.stack(INTERNVL_PIXELS(image)["pixel_values"])
    return tiled(pixels, 7, 2, {"pixel_values": torch.tensor(pixels)})


INTERNVIT = {
    "model_type": "internvl_vision",
    "hidden_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 3,
    "intermediate_size": 40,
    "image_size": [28, 28],
    "patch_size": [7, 7],
    "attention_bias": True,
    "use_mean_pooling": False,
    "initializer_range": 0.2,
}
INTERNVL = VisionCase(
    Case(
        "internvl",
        "internvl",
        text="qwen2",
        outside={"vision_config": INTERNVIT, "image_token_id": IMAGE, "tie_word_embeddings": False},
        auto_class=SEES,
    ),
    read_internvl,
    merge=2,
)
# InternVL 3's other tower: norms of queries and keys over all heads, root mean square norms, no norm at the end.
INTERNVL_6B = VisionCase(
    Case(
        "internvl_6b",
        "internvl",
        text="llama",
        outside={
            "vision_config": INTERNVIT
            | {"attention_bias": False, "use_qk_norm": True, "norm_type": "rms_norm", "use_mean_pooling": True},
            "image_token_id": IMAGE,
            "tie_word_embeddings": True,
        },
        auto_class=SEES,
        variant=True,
    ),
    read_internvl,
    merge=2,
)
CASES = (INTERNVL, INTERNVL_6B)
