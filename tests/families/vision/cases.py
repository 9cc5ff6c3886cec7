"""Tiny models that see, one a family, with the picture processors of transformers."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
import transformers
from PIL import Image
from transformers.image_processing_utils import select_best_resolution
from transformers.models.clip.image_processing_pil_clip import CLIPImageProcessorPil
from transformers.models.gemma3.image_processing_pil_gemma3 import Gemma3ImageProcessorPil
from transformers.models.gemma4.image_processing_pil_gemma4 import (
    convert_image_to_patches,
    get_aspect_ratio_preserving_size,
    pad_along_first_dim,
)
from transformers.models.got_ocr2.image_processing_pil_got_ocr2 import GotOcr2ImageProcessorPil
from transformers.models.llava_next.image_processing_pil_llava_next import LlavaNextImageProcessorPil
from transformers.models.llava_next.modeling_llava_next import unpad_image
from transformers.models.pixtral.image_processing_pil_pixtral import PixtralImageProcessorPil
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil
from transformers.models.siglip.image_processing_pil_siglip import SiglipImageProcessorPil
from transformers.models.smolvlm.image_processing_pil_smolvlm import SmolVLMImageProcessorPil

from families.case import Case, Randomise
from families.cases.gemma2 import CASES as GEMMA2
from families.cases.gemma4 import CASES as GEMMA4_TEXT
from families.cases.lfm2 import CASES as LFM2
from families.cases.ministral import CASES as MINISTRAL
from families.cases.qwen3_5 import DELTA
from families.cases.qwen3_5_moe import SPARSE
from families.decays import decays
from families.vision.sights import IMAGE, Sight, VisionCase, cut_tiles

SEES = transformers.AutoModelForImageTextToText


def sight_of_tiles(pixels: np.ndarray, side: int, merge: int, inputs: dict[str, torch.Tensor]) -> Sight:
    """A picture of equal tiles [N, C, H, W], whose features follow one another."""
    patches, tiles, grid = cut_tiles(list(pixels), side, merge)
    count = len(patches) // merge**2
    return Sight(inputs, patches, tiles, grid, [IMAGE] * count, list(range(1, count + 1)))


INTERNVL_PIXELS = GotOcr2ImageProcessorPil(
    size={"height": 28, "width": 28}, crop_to_patches=True, min_patches=1, max_patches=4
)


def read_internvl(image: Image.Image) -> Sight:
    pixels = np.stack(INTERNVL_PIXELS(image)["pixel_values"])
    return sight_of_tiles(pixels, 7, 2, {"pixel_values": torch.tensor(pixels)})


INTERNVIT = {
    "model_type": "internvl_vision",
    "hidden_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
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


SMOLVLM_PIXELS = SmolVLMImageProcessorPil(
    size={"longest_edge": 60}, max_image_size={"longest_edge": 30}, do_image_splitting=True
)
MARKS = (91, 92)  # ids of words around the tiles


def read_smolvlm(image: Image.Image) -> Sight:
    """Words stand between the features of the tiles."""
    pixels = SMOLVLM_PIXELS([[image]])["pixel_values"][0]
    sight = sight_of_tiles(np.stack(pixels), 5, 3, {"pixel_values": torch.tensor(np.stack(pixels))[:, None]})
    each = len(sight.tokens) // len(pixels)
    tokens, visual = list[int](), list[int]()
    for tile in range(len(pixels)):
        tokens += [MARKS[0], *[IMAGE] * each]
        visual += [0, *range(tile * each + 1, (tile + 1) * each + 1)]
    return dataclasses.replace(sight, tokens=[*tokens, MARKS[1]], visual=[*visual, 0])


def smolvlm(kind: str) -> VisionCase:
    vision = {
        "hidden_size": 24,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "intermediate_size": 40,
        "image_size": 30,
        "patch_size": 5,
        "initializer_range": 0.2,
    }
    outside = {"vision_config": vision, "image_token_id": IMAGE, "scale_factor": 3, "tie_word_embeddings": False}
    case = Case(kind, kind, text="llama", outside=outside, auto_class=SEES, variant=kind == "idefics3")
    return VisionCase(case, read_smolvlm, merge=3)


QWEN_PIXELS = Qwen2VLImageProcessorPil(patch_size=6, merge_size=2, min_pixels=24**2, max_pixels=60**2)
QWEN_MARKS = (91, 92)  # the ids of <|vision_start|> and <|vision_end|>


def read_qwen(image: Image.Image) -> Sight:
    """Patches of any number; the processor gives them in our order, with two frames [P, (C, T, side, side)]."""
    inputs = QWEN_PIXELS(image)
    pixels, (frames, rows, columns) = np.asarray(inputs["pixel_values"]), inputs["image_grid_thw"][0]
    assert frames == 1
    patches = pixels.reshape(len(pixels), 3, 2, -1)
    assert np.array_equal(patches[:, :, 0], patches[:, :, 1])
    places = np.stack(np.meshgrid(np.arange(rows), np.arange(columns), indexing="ij"), axis=-1)
    places = places.reshape(rows // 2, 2, columns // 2, 2, 2).transpose(0, 2, 1, 3, 4).reshape(-1, 2)
    grid = np.concatenate([places, np.broadcast_to((rows, columns), places.shape)], axis=1)
    count = len(pixels) // 4
    turns = np.stack(np.meshgrid([0], np.arange(rows // 2), np.arange(columns // 2), indexing="ij"), axis=-1)
    return Sight(
        {"pixel_values": torch.tensor(pixels), "image_grid_thw": torch.tensor(np.array([[1, rows, columns]]))},
        patches[:, :, 0].reshape(len(pixels), -1),
        np.ones(len(pixels), np.int32),
        grid.astype(np.int32),
        [IMAGE] * count,
        list(range(1, count + 1)),
        turns.reshape(-1, 3),
        kinds="mm_token_type_ids",
    )


def qwen(
    kind: str,
    text: str,
    vision: dict[str, Any],
    sections: list[int],
    randomise: Randomise | None = None,
    rounding: float = 1e-5,
    **config: Any,
) -> VisionCase:
    tower = {
        "depth": 2,
        "num_heads": 4,
        "patch_size": 6,
        "spatial_merge_size": 2,
        "temporal_patch_size": 2,
        "initializer_range": 0.2,
    }
    rope = {"rope_type": "default", "rope_theta": 10_000.0, "mrope_section": sections}
    rope |= config.pop("rope", {})
    outside = {
        "vision_config": tower | vision,
        "image_token_id": IMAGE,
        "video_token_id": 94,
        "vision_start_token_id": QWEN_MARKS[0],
        "vision_end_token_id": QWEN_MARKS[1],
        "tie_word_embeddings": False,
    }
    fields = {"rope_parameters": rope, **config}
    variant = kind in ("qwen3_5_moe", "glm4v_moe")
    case = Case(kind, kind, fields, text=text, outside=outside, auto_class=SEES, randomise=randomise, variant=variant)
    return VisionCase(case, read_qwen, merge=2, rounding=rounding)


QWEN2_VL = qwen("qwen2_vl", "qwen2_vl_text", {"embed_dim": 32, "hidden_size": 32, "mlp_ratio": 2}, [1, 2, 1])
QWEN2_5_VL = qwen(
    "qwen2_5_vl",
    "qwen2_5_vl_text",
    {
        "depth": 3,
        "hidden_size": 32,
        "out_hidden_size": 32,
        "intermediate_size": 40,
        "window_size": 24,
        "fullatt_block_indexes": [1],
    },
    [1, 2, 1],
)
DEEPSTACK = {
    "depth": 4,
    "hidden_size": 32,
    "out_hidden_size": 32,
    "intermediate_size": 40,
    "num_position_embeddings": 25,
    "deepstack_visual_indexes": [0, 2],
}
QWEN3_VL = qwen("qwen3_vl", "qwen3_vl_text", DEEPSTACK, [4, 2, 2], head_dim=16)
QWEN3_VL_MOE = qwen(
    "qwen3_vl_moe",
    "qwen3_vl_moe_text",
    DEEPSTACK,
    [4, 2, 2],
    head_dim=16,
    num_experts=4,
    num_experts_per_tok=2,
    moe_intermediate_size=24,
    decoder_sparse_step=2,
)
TAPLESS = {name: value for name, value in DEEPSTACK.items() if name != "deepstack_visual_indexes"}
HALF = {
    "rope": {"partial_rotary_factor": 0.5},
    "randomise": decays,
    "rounding": 1e-4,
}  # of heads of 16: four pairs for three positions
# With 0.2, float32 logits of transformers itself are more than 1e-5 from its float64 ones.
QWEN3_5 = qwen("qwen3_5", "qwen3_5_text", TAPLESS, [2, 1, 1], initializer_range=0.1, **DELTA, **HALF)
OF_MIXTURE = {name: value for name, value in SPARSE.items() if name != "rope_parameters"}
QWEN3_5_MOE = qwen("qwen3_5_moe", "qwen3_5_moe_text", TAPLESS, [2, 1, 1], **OF_MIXTURE, **HALF)
GLM_TOWER = {
    "hidden_size": 32,
    "out_hidden_size": 32,
    "intermediate_size": 40,
    "image_size": 30,
    "attention_bias": True,
}
GLM4V = qwen("glm4v", "glm4v_text", GLM_TOWER, [1, 1, 0], rope={"partial_rotary_factor": 0.5}, rounding=2e-5)
GLM4V_MOE = qwen(
    "glm4v_moe",
    "glm4v_moe_text",
    GLM_TOWER,
    [2, 1, 1],
    rope={"partial_rotary_factor": 0.5},
    head_dim=16,
    n_routed_experts=4,
    num_experts_per_tok=2,
    moe_intermediate_size=24,
    attention_bias=True,
)

GEMMA_PIXELS = Gemma3ImageProcessorPil(size={"height": 28, "width": 28})


def read_gemma(image: Image.Image) -> Sight:
    pixels = np.stack(GEMMA_PIXELS(image)["pixel_values"])
    return dataclasses.replace(
        sight_of_tiles(pixels, 7, 2, {"pixel_values": torch.tensor(pixels)}), mutual=True, kinds="token_type_ids"
    )


ENCODER = {
    "hidden_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 40,
    "image_size": 28,
    "patch_size": 7,
}
GEMMA3 = VisionCase(
    Case(
        "gemma3",
        "gemma3",
        {
            "head_dim": 8,
            "query_pre_attn_scalar": 16,
            "sliding_window": 6,
            "layer_types": ["sliding_attention", "full_attention"] * 2,
            "initializer_range": 0.2,
        },
        text="gemma3_text",
        outside={
            "vision_config": {"model_type": "siglip_vision_model", "vision_use_head": False} | ENCODER,
            "mm_tokens_per_image": 4,
            "image_token_index": IMAGE,
        },
        auto_class=SEES,
    ),
    read_gemma,
    merge=2,
)

PALI_PIXELS = SiglipImageProcessorPil(size={"height": 28, "width": 28})


def read_paligemma(image: Image.Image) -> Sight:
    pixels = np.stack(PALI_PIXELS(image)["pixel_values"])
    return sight_of_tiles(pixels, 7, 1, {"pixel_values": torch.tensor(pixels)})


def paligemma(name: str, text: str, **config: Any) -> VisionCase:
    vision = {"model_type": "siglip_vision_model", "vision_use_head": False} | ENCODER
    outside = {"vision_config": vision, "projection_dim": 32, "image_token_index": IMAGE}
    case = Case(name, "paligemma", {"head_dim": 8, **config}, text=text, outside=outside, auto_class=SEES)
    return VisionCase(dataclasses.replace(case, variant=text == "gemma"), read_paligemma, prefix=True)


PALIGEMMA = paligemma("paligemma", "gemma")
PALIGEMMA2 = paligemma("paligemma2", "gemma2", **GEMMA2[0].config)

LLAVA_PIXELS = CLIPImageProcessorPil(size={"shortest_edge": 28}, crop_size={"height": 28, "width": 28})
NEXT_PIXELS = LlavaNextImageProcessorPil(
    size={"shortest_edge": 28},
    crop_size={"height": 28, "width": 28},
    image_grid_pinpoints=(PINPOINTS := [[28, 56], [56, 28], [56, 56]]),
)


def read_llava(image: Image.Image) -> Sight:
    pixels = np.stack(LLAVA_PIXELS(image)["pixel_values"])
    return sight_of_tiles(pixels, 7, 1, {"pixel_values": torch.tensor(pixels)})


def read_llava_next(image: Image.Image) -> Sight:
    """The whole picture in one tile, then its tiles row by row without what was padded, each row with an end."""
    inputs = NEXT_PIXELS(image)
    pixels, size = np.stack(inputs["pixel_values"][0]), np.array(inputs["image_sizes"])
    sight = sight_of_tiles(
        pixels, 7, 1, {"pixel_values": torch.tensor(pixels)[None], "image_sizes": torch.tensor(size)}
    )
    across, down = (n // 28 for n in select_best_resolution(size[0].tolist(), PINPOINTS)[::-1])
    assert len(pixels) == 1 + across * down
    numbers = 17 + np.arange(16 * across * down).reshape(down, across, 4, 4).transpose(0, 2, 1, 3)
    numbers = unpad_image(torch.tensor(numbers.reshape(1, 4 * down, 4 * across)), torch.tensor(size[0]))[0].numpy()
    rows = np.concatenate([numbers, np.full((len(numbers), 1), -1)], axis=1).reshape(-1).tolist()
    visual = [*range(1, 17), *rows]
    return dataclasses.replace(sight, tokens=[IMAGE] * len(visual), visual=visual)


def llava(kind: str, read: Callable[[Image.Image], Sight], **fields: Any) -> VisionCase:
    vision = {"model_type": "clip_vision_model", "projection_dim": 24} | ENCODER | {"num_hidden_layers": 3}
    outside = {"vision_config": vision, "image_token_index": IMAGE, "tie_word_embeddings": False, **fields}
    return VisionCase(Case(kind, kind, text="llama", outside=outside, auto_class=SEES), read)


LLAVA = llava("llava", read_llava)
LLAVA_NEXT = llava("llava_next", read_llava_next, image_grid_pinpoints=PINPOINTS)


def gemma4(name: str, tokens: int, text: Mapping[str, Any], **vision: Any) -> VisionCase:
    """Pictures of at most `tokens` tokens: the processor itself makes 70 at least."""
    side, merge = 5, 2

    def read(image: Image.Image) -> Sight:
        height, width = get_aspect_ratio_preserving_size(image.height, image.width, side, tokens * merge**2, merge)
        pixels = (np.asarray(image.resize((width, height))) / np.float32(255)).transpose(2, 0, 1)
        places = np.stack(np.meshgrid(np.arange(width // side), np.arange(height // side)), -1).reshape(-1, 2)
        patches, places = pad_along_first_dim(convert_image_to_patches(pixels, side), places, tokens * merge**2)
        inputs = {"pixel_values": torch.tensor(patches)[None], "image_position_ids": torch.tensor(places)[None]}
        sight = sight_of_tiles(pixels[None], side, merge, inputs)
        mutual = text.get("use_bidirectional_attention") == "vision"
        return dataclasses.replace(sight, mutual=mutual, kinds="mm_token_type_ids")

    tower = {
        "hidden_size": 24,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "intermediate_size": 40,
        "patch_size": side,
        "pooling_kernel_size": merge,
        "position_embedding_size": 40,
        "initializer_range": 0.2,
        **vision,
    }
    outside = {"vision_config": tower, "audio_config": None, "image_token_id": IMAGE, "tie_word_embeddings": False}
    fields = {"vocab_size": 97, "pad_token_id": 0, **text}
    case = Case(
        name,
        "gemma4",
        fields,
        text="gemma4_text",
        outside=outside,
        auto_class=SEES,
        randomise=randomise_gemma4,
        variant=name != "gemma4",
    )
    return VisionCase(case, read, merge)


def gemma4_unified(tokens: int) -> VisionCase:
    """Patches of 10 x 10 pixels, each a token."""
    side, pool = 5, 2

    def read(image: Image.Image) -> Sight:
        height, width = get_aspect_ratio_preserving_size(image.height, image.width, side, tokens * pool**2, pool)
        pixels = (np.asarray(image.resize((width, height))) / np.float32(255)).transpose(2, 0, 1)
        places = np.stack(np.meshgrid(np.arange(width // 10), np.arange(height // 10)), -1).reshape(-1, 2)
        patches, places = pad_along_first_dim(convert_image_to_patches(pixels, 10), places, tokens)
        inputs = {"pixel_values": torch.tensor(patches)[None], "image_position_ids": torch.tensor(places)[None]}
        return dataclasses.replace(sight_of_tiles(pixels[None], 10, 1, inputs), mutual=True, kinds="mm_token_type_ids")

    embedder = {"patch_size": side, "pooling_kernel_size": pool, "mm_embed_dim": 24, "mm_posemb_size": 40}
    embedder |= {"output_proj_dims": 24, "initializer_range": 0.2}
    outside = {"vision_config": embedder, "audio_config": None, "image_token_id": IMAGE, "tie_word_embeddings": False}
    text = GEMMA4_TEXT[2]
    fields = {"vocab_size": 97, "pad_token_id": 0, **text.config}
    options = {"outside": outside, "auto_class": SEES, "randomise": text.randomise}
    return VisionCase(Case("gemma4_unified", "gemma4_unified", fields, text=text.model_type, **options), read)


def randomise_gemma4(name: str, tensor: torch.Tensor) -> bool:
    """Limits of linear layers that bite."""
    if name.endswith(("_min", "_max")):
        tensor.copy_(torch.rand_like(tensor) + 0.8)
        tensor.mul_(-1 if name.endswith("_min") else 1)
        return True
    return GEMMA4_TEXT[0].randomise is not None and GEMMA4_TEXT[0].randomise(name, tensor)


# As the smaller models are, and as the larger ones.
PER_LAYER = {name: value for name, value in GEMMA4_TEXT[0].config.items() if "expert" not in name and "moe" not in name}
MUTUAL = {**GEMMA4_TEXT[1].config, "use_bidirectional_attention": "vision"}
GEMMA4 = gemma4("gemma4", 12, PER_LAYER, use_clipped_linears=True)
GEMMA4_UNIFIED = gemma4_unified(12)
GEMMA4_MUTUAL = gemma4("gemma4_mutual", 12, MUTUAL, standardize=True)

PIXTRAL_PIXELS = PixtralImageProcessorPil(size={"longest_edge": 60}, patch_size={"height": 12, "width": 12})
PIXTRAL_MARKS = (91, 92)  # the ids of the ends of rows and of pictures


def read_pixtral(image: Image.Image) -> Sight:
    """A picture of any size, whose rows of features end with a token."""
    inputs = PIXTRAL_PIXELS(image)
    pixels, size = inputs["pixel_values"][0], np.array(inputs["image_sizes"])
    rows, columns = (size[0] // 12).tolist()
    sight = sight_of_tiles(pixels[None], 6, 2, {"pixel_values": torch.tensor(pixels)[None]})
    tokens, visual = list[int](), list[int]()
    for row in range(rows):
        tokens += [*[IMAGE] * columns, PIXTRAL_MARKS[0]]
        visual += [*range(row * columns + 1, (row + 1) * columns + 1), 0]
    inputs = dict(sight.inputs) | {"image_sizes": torch.tensor(size)}
    return dataclasses.replace(sight, inputs=inputs, tokens=[*tokens[:-1], PIXTRAL_MARKS[1]], visual=visual)


def pixtral(name: str, text: str, **config: Any) -> VisionCase:
    vision = {
        "model_type": "pixtral",
        "hidden_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "intermediate_size": 40,
        "image_size": 60,
        "patch_size": 6,
        "initializer_range": 0.2,
    }
    outside = {
        "vision_config": vision,
        "image_token_index": IMAGE,
        "tie_word_embeddings": False,
        "multimodal_projector_bias": text != "mistral",
    }
    case = Case(name, "mistral3", config, text=text, outside=outside, auto_class=SEES, variant=text != "mistral")
    return VisionCase(case, read_pixtral, merge=2)


MISTRAL3 = pixtral("mistral3", "mistral")
MINISTRAL3 = pixtral("mistral3_ministral", "ministral3", **MINISTRAL[0].config)


def read_lfm2(image: Image.Image) -> Sight:
    """A picture of any size, and another in half the size as its thumbnail, both for the model's limits of patches."""
    side, merge, limit, parts, masks, shapes = 5, 2, 120, list[np.ndarray](), list[np.ndarray](), list[list[int]]()
    tiles = list[np.ndarray]()
    for part in (1, 2):
        width, height = (max(1, n // part // (side * merge)) * side * merge for n in image.size)
        tiles.append((np.asarray(image.resize((width, height))) / np.float32(127.5) - 1).transpose(2, 0, 1))
        patches = convert_image_to_patches(tiles[-1], side)
        masks.append(np.pad(np.ones(len(patches), np.int32), (0, limit - len(patches))))
        parts.append(np.pad(patches, ((0, limit - len(patches)), (0, 0))))
        shapes.append([height // side, width // side])
    inputs = {"pixel_values": parts, "pixel_attention_mask": masks, "spatial_shapes": shapes}
    patches, numbers, grid = cut_tiles(tiles, side, merge)
    count = len(patches) // merge**2
    torch_inputs = {name: torch.tensor(np.stack(array)) for name, array in inputs.items()}
    return Sight(torch_inputs, patches, numbers, grid, [IMAGE] * count, list(range(1, count + 1)))


LFM2_VL = VisionCase(
    Case(
        "lfm2_vl",
        "lfm2_vl",
        LFM2[0].config,
        text="lfm2",
        outside={
            "vision_config": {
                "model_type": "siglip2_vision_model",
                "vision_use_head": False,
                "num_patches": 16,
                **{name: value for name, value in ENCODER.items() if name != "image_size"},
                "patch_size": 5,
            },
            "image_token_id": IMAGE,
            "projector_hidden_size": 40,
            "tie_word_embeddings": True,
        },
        auto_class=SEES,
        randomise=LFM2[0].randomise,
    ),
    read_lfm2,
    merge=2,
)
CASES = (
    INTERNVL,
    INTERNVL_6B,
    smolvlm("smolvlm"),
    smolvlm("idefics3"),
    QWEN2_VL,
    QWEN2_5_VL,
    QWEN3_VL,
    QWEN3_VL_MOE,
    GEMMA3,
    PALIGEMMA,
    PALIGEMMA2,
    LLAVA,
    LLAVA_NEXT,
    MISTRAL3,
    MINISTRAL3,
    QWEN3_5,
    QWEN3_5_MOE,
    GEMMA4,
    GEMMA4_MUTUAL,
    GEMMA4_UNIFIED,
    GLM4V,
    GLM4V_MOE,
    LFM2_VL,
)
