"""A tiny random model that sees, of InternVL's shape, with a real tokenizer and a chat template."""

from __future__ import annotations

import json
import pathlib
from collections.abc import Sequence

import numpy as np
import torch
import transformers
from PIL import Image
from transformers.models.got_ocr2.image_processing_pil_got_ocr2 import GotOcr2ImageProcessorPil

from families.case import randomise

SIDE, PATCH = 28, 7  # pixels of a tile, and of a patch: 4 features a tile
TOKENS = {"context_image_token": "<IMG_CONTEXT>", "start_image_token": "<img>", "end_image_token": "</img>"}
TEMPLATE = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' }}"
    "{% if message['content'] is string %}{{ message['content'] }}{% else %}{% for part in message['content'] %}"
    "{% if part['type'] == 'image' %}{{ '<IMG_CONTEXT>\n' }}{% else %}{{ part['text'] }}{% endif %}"
    "{% endfor %}{% endif %}"
    "{{ '<|im_end|>\n' }}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
VISION = {
    "model_type": "internvl_vision", "hidden_size": 24, "num_hidden_layers": 1, "num_attention_heads": 2,
    "intermediate_size": 32, "image_size": [SIDE, SIDE], "patch_size": [PATCH, PATCH], "attention_bias": True,
    "use_mean_pooling": False, "initializer_range": 0.2,
}  # fmt: skip
PREPROCESSOR = {
    "image_processor_type": "GotOcr2ImageProcessor", "processor_class": "InternVLProcessor", "do_convert_rgb": True,
    "do_resize": True, "size": {"height": SIDE, "width": SIDE}, "resample": 3, "do_rescale": True,
    "rescale_factor": 1 / 255, "do_normalize": True, "image_mean": [0.5, 0.5, 0.5], "image_std": [0.25, 0.25, 0.25],
    "crop_to_patches": True, "min_patches": 1, "max_patches": 4,
}  # fmt: skip


def save_seeing_model(path: pathlib.Path, shared: pathlib.Path) -> pathlib.Path:
    """Writes the model to `path` and returns it."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(shared / "assets/tokenizers/smollm2")
    tokenizer.add_special_tokens({"additional_special_tokens": list(TOKENS.values())})
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(path)
    text = transformers.LlamaConfig(
        vocab_size=len(tokenizer), hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, max_position_embeddings=512, bos_token_id=1, eos_token_id=2, tie_word_embeddings=True,
        initializer_range=0.2,
    )  # fmt: skip
    image = tokenizer.convert_tokens_to_ids(TOKENS["context_image_token"])
    config = transformers.InternVLConfig(
        vision_config=VISION, text_config=text.to_dict(), image_token_id=image, tie_word_embeddings=True
    )
    torch.manual_seed(0)
    model = transformers.InternVLForConditionalGeneration(config).float().eval()
    with torch.no_grad():
        for name, tensor in model.named_parameters():
            randomise(name, tensor)
    model.save_pretrained(path)
    (path / "preprocessor_config.json").write_text(json.dumps(PREPROCESSOR))
    return path


def processed(
    folder: pathlib.Path, text: str, images: Sequence[Image.Image], answer: str = ""
) -> dict[str, torch.Tensor]:
    """A question after the system prompt "Look.", as transformers' processor (which needs torchvision) gives it to the
    model, with the beginning of an answer."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    processor = GotOcr2ImageProcessorPil.from_pretrained(folder)
    pixels = [np.asarray(processor([image], crop_to_patches=True)["pixel_values"]) for image in images]
    shown = "".join(f"<img>{'<IMG_CONTEXT>' * 4 * len(tiles)}</img>\n" for tiles in pixels)
    prompt = f"<|im_start|>system\nLook.<|im_end|>\n<|im_start|>user\n{shown}{text}<|im_end|>\n<|im_start|>assistant\n"
    ids = torch.tensor([tokenizer(prompt + answer, add_special_tokens=False)["input_ids"]])
    inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    return inputs | ({"pixel_values": torch.tensor(np.concatenate(pixels))} if pixels else {})


def picture(seed: int, width: int = 40, height: int = 30) -> Image.Image:
    """A picture of a few colours."""
    colours = np.random.default_rng(seed).integers(0, 256, (3, 4, 3), np.uint8)
    return Image.fromarray(colours).resize((width, height), Image.Resampling.NEAREST)
