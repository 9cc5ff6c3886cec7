"""Tiny models that see, as far as data need them: settings of processors, tokenizers, and pictures."""

from __future__ import annotations

import importlib
import io
import json
import pathlib

import numpy as np
from PIL import Image
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

from meshtune.config.sections import VisionSection
from meshtune.data.pictures.families import picture_reader
from meshtune.data.tokenizer import load_tokenizer

PARTS = (
    "{% for m in messages %}<s>{{ m.role }}\n{% if m.content is string %}{{ m.content }}{% else %}"
    "{% for p in m.content %}{% if p.type == 'image' %}PICTURE"
    "{% else %}{{ p.text }}{% endif %}{% endfor %}{% endif %}</s>\n{% endfor %}"
    "{% if add_generation_prompt %}<s>assistant\n{% endif %}"
)
SMOLVLM_TEMPLATE = (
    "<s>{% for message in messages %}{{message['role'] | capitalize}}{% if message['content'][0]['type'] == 'image' %}"
    "{{':'}}{% else %}{{': '}}{% endif %}{% for line in message['content'] %}{% if line['type'] == 'text' %}"
    "{{line['text']}}{% elif line['type'] == 'image' %}{{ '<image>' }}{% endif %}{% endfor %}</s>\n{% endfor %}"
    "{% if add_generation_prompt %}{{ 'Assistant:' }}{% endif %}"
)
LLAVA_TEMPLATE = (
    "{% for message in messages %}{{ message['role'].upper() + ': ' }}{% for content in message['content'] | "
    "selectattr('type', 'equalto', 'image') %}{{ '<image>\n' }}{% endfor %}{% for content in message['content'] | "
    "selectattr('type', 'equalto', 'text') %}{{ content['text'] }}{% endfor %}</s>{% endfor %}"
    "{% if add_generation_prompt %}{{ 'ASSISTANT: ' }}{% endif %}"
)
ROWS = [f"<row_{row}_col_{column}>" for row in range(1, 5) for column in range(1, 5)]
LFM2_TILES = [f"<|img_row_{row}_col_{column}|>" for row in range(1, 5) for column in range(1, 5) if row * column <= 4]
# Family -> (config, preprocessor_config, special tokens, chat template).
MODELS = {
    "internvl": (
        {"model_type": "internvl", "downsample_ratio": 0.5, "vision_config": {"patch_size": [14, 14]}},
        {"image_processor_type": "GotOcr2ImageProcessorFast", "size": {"height": 56, "width": 56}, "max_patches": 6},
        ["<img>", "</img>", "<IMG_CONTEXT>"],
        PARTS.replace("PICTURE", "<IMG_CONTEXT>\n"),
    ),
    "smolvlm": (
        {"model_type": "smolvlm", "scale_factor": 2, "vision_config": {"patch_size": 14}},
        {"image_processor_type": "SmolVLMImageProcessor", "size": {"longest_edge": 180}, "do_image_splitting": True,
         "max_image_size": {"longest_edge": 60}},
        ["<fake_token_around_image>", "<global-img>", "<image>", *ROWS],
        SMOLVLM_TEMPLATE,
    ),
    "qwen2_vl": (
        {"model_type": "qwen2_vl", "vision_config": {"in_channels": 3}},
        {"image_processor_type": "Qwen2VLImageProcessor", "min_pixels": 3136, "max_pixels": 40000},
        ["<|image_pad|>", "<|vision_start|>", "<|vision_end|>"],
        PARTS.replace("PICTURE", "<|vision_start|><|image_pad|><|vision_end|>"),
    ),
    "qwen3_vl": (
        {"model_type": "qwen3_vl", "vision_config": {"patch_size": 16}},
        {"image_processor_type": "Qwen2VLImageProcessorFast", "size": {"shortest_edge": 4096, "longest_edge": 90000},
         "patch_size": 16, "image_mean": [0.5, 0.5, 0.5], "image_std": [0.5, 0.5, 0.5]},
        ["<|image_pad|>", "<|vision_start|>", "<|vision_end|>"],
        PARTS.replace("PICTURE", "<|vision_start|><|image_pad|><|vision_end|>"),
    ),
    "gemma3": (
        {"model_type": "gemma3", "mm_tokens_per_image": 4, "vision_config": {"patch_size": 14}},
        {"image_processor_type": "Gemma3ImageProcessor", "size": {"height": 56, "width": 56}, "resample": 2},
        ["<start_of_image>", "<image_soft_token>", "<end_of_image>"],
        PARTS.replace("PICTURE", "<start_of_image>"),
    ),
    "gemma4": (
        {"model_type": "gemma4", "vision_config": {"patch_size": 4, "pooling_kernel_size": 2},
         "text_config": {"use_bidirectional_attention": "vision"}},
        {"image_processor_type": "Gemma4ImageProcessor", "patch_size": 4, "pooling_kernel_size": 2,
         "max_soft_tokens": 70},
        ["<|image>", "<|image|>", "<image|>"],
        PARTS.replace("PICTURE", "<|image|>"),
    ),
    "gemma4_unified": (
        {"model_type": "gemma4_unified", "vision_config": {"patch_size": 4, "pooling_kernel_size": 2}},
        {"image_processor_type": "Gemma4UnifiedImageProcessor", "patch_size": 4, "pooling_kernel_size": 2,
         "max_soft_tokens": 70},
        ["<|image>", "<|image|>", "<image|>"],
        PARTS.replace("PICTURE", "<|image|>"),
    ),
    "glm4v": (
        {"model_type": "glm4v", "vision_config": {"in_channels": 3}},
        {"image_processor_type": "Glm4vImageProcessor", "size": {"shortest_edge": 6272, "longest_edge": 40000}},
        ["<|image|>", "<|begin_of_image|>", "<|end_of_image|>"],
        PARTS.replace("PICTURE", "<|begin_of_image|><|image|><|end_of_image|>"),
    ),
    "lfm2_vl": (
        {"model_type": "lfm2_vl", "downsample_factor": 2, "vision_config": {"patch_size": 7}},
        {"image_processor_type": "Lfm2VlImageProcessorFast", "tile_size": 56, "min_image_tokens": 4, "max_tiles": 4,
         "max_image_tokens": 16, "image_mean": [0.5, 0.4, 0.5], "image_std": [0.5, 0.5, 0.6]},
        ["<image>", "<|image_start|>", "<|image_end|>", "<|img_thumbnail|>", *LFM2_TILES],
        PARTS.replace("PICTURE", "<image>"),
    ),
    "paligemma": (
        {"model_type": "paligemma", "vision_config": {"patch_size": 14}},
        {"image_processor_type": "SiglipImageProcessor", "size": {"height": 56, "width": 56}, "resample": 3,
         "image_seq_length": 16},
        ["<image>", "<loc0000>"],
        None,  # that which ships with Meshtune
    ),
    "mistral3": (
        {"model_type": "mistral3", "spatial_merge_size": 2, "vision_config": {"patch_size": 14}},
        {"image_processor_type": "PixtralImageProcessorFast", "size": {"longest_edge": 150}},
        ["[IMG]", "[IMG_BREAK]", "[IMG_END]"],
        PARTS.replace("PICTURE", "[IMG]"),
    ),
    "llava": (
        {"model_type": "llava", "vision_config": {"patch_size": 14}},
        {"image_processor_type": "CLIPImageProcessor", "crop_size": 56, "size": 56},
        ["<image>"],
        LLAVA_TEMPLATE,
    ),
    "llava_next": (
        {"model_type": "llava_next", "vision_config": {"patch_size": 14}},
        {"image_processor_type": "LlavaNextImageProcessor", "crop_size": {"height": 56, "width": 56},
         "size": {"shortest_edge": 56}, "image_grid_pinpoints": [[56, 112], [112, 56], [112, 112], [168, 56]]},
        ["<image>"],
        LLAVA_TEMPLATE,
    ),
}  # fmt: skip


def make_model(directory: pathlib.Path, family: str) -> pathlib.Path:
    """Writes the files of a family that data are prepared with, and a tokenizer that merges line ends."""
    config, preprocessor, tokens, template = MODELS[family]
    directory.mkdir(parents=True)
    core = Tokenizer(models.BPE())
    core.pre_tokenizer, core.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    corpus = ["user\n\n\nwhat is it?\n\nassistant\n a red circle, a blue square\n\n\n"] * 4
    special = ["<s>", "</s>", *tokens]
    core.train_from_iterator(
        corpus,
        trainers.BpeTrainer(
            vocab_size=400, special_tokens=special, initial_alphabet=pre_tokenizers.ByteLevel.alphabet()
        ),
    )
    core.post_processor = processors.TemplateProcessing(single="$A", pair="$A $B:1", special_tokens=[])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=core, bos_token="<s>", eos_token="</s>")
    tokenizer.add_special_tokens({"additional_special_tokens": tokens})
    tokenizer.chat_template = template
    tokenizer.save_pretrained(directory)
    (directory / "config.json").write_text(json.dumps(config))
    (directory / "preprocessor_config.json").write_text(json.dumps(preprocessor))
    return directory


def picture(width: int, height: int, seed: int = 0) -> Image.Image:
    """A picture of smooth random colours, so that every way of resizing gives other values."""
    small = np.random.default_rng([seed, width, height]).integers(0, 256, (5, 7, 3), np.uint8)
    return Image.fromarray(small).resize((width, height), Image.Resampling.BICUBIC)


def file_of(image: Image.Image, kind: str = "PNG", **options: object) -> bytes:
    """The bytes of a picture's file."""
    stream = io.BytesIO()
    image.save(stream, kind, **options)
    return stream.getvalue()


def reader_of(directory, **vision):
    """The reader of pictures for a model with these options of `vision`."""
    return picture_reader(directory, VisionSection(**vision), load_tokenizer(directory))


def processed_by(reader):
    """transformers' image processor, with the settings of the model's processor."""
    module, _, name = reader.processor.partition(":")
    return getattr(importlib.import_module(module), name)(**json.loads(reader.settings))
