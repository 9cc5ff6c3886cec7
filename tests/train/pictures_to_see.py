"""A tiny InternVL with a tokenizer and a chat template, and records with pictures that it can learn."""

from __future__ import annotations

import json
import pathlib

import numpy as np
import torch
import transformers
from PIL import Image

from meshtune import quickstart

WORDS = ("<img>", "</img>", "<IMG_CONTEXT>", "<|im_start|>", "<|im_end|>")
TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n"
    "{% if message['content'] is string %}{{ message['content'] }}{% else %}{% for part in message['content'] %}"
    "{% if part['type'] == 'image' %}<IMG_CONTEXT>\n{% else %}{{ part['text'] }}{% endif %}{% endfor %}{% endif %}"
    "<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
COLOURS = {"red": (255, 0, 0), "green": (0, 255, 0), "blue": (0, 0, 255)}


def write_model(directory: pathlib.Path) -> pathlib.Path:
    """A random InternVL of two layers in the tower and two in the text model, with quickstart's tokenizer."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(quickstart.MODEL)
    tokenizer.add_special_tokens({"additional_special_tokens": list(WORDS)})
    tokenizer.eos_token = "<|im_end|>"
    tokenizer.chat_template = TEMPLATE
    vision = {"hidden_size": 24, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 40}
    vision |= {"image_size": [28, 28], "patch_size": [7, 7], "attention_bias": True, "use_mean_pooling": False}
    text = {"model_type": "llama", "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
    text |= {"num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 520, "max_position_embeddings": 256}
    config = transformers.InternVLConfig(
        vision_config=vision, text_config=text, image_token_id=tokenizer.convert_tokens_to_ids("<IMG_CONTEXT>")
    )
    torch.manual_seed(0)
    model = transformers.InternVLForConditionalGeneration(config)
    with torch.no_grad():
        for parameter in model.parameters():  # none is trivially constant
            parameter.add_(torch.randn_like(parameter) * 0.02)
    model.save_pretrained(directory)
    tokenizer.save_pretrained(directory)
    pixels = {"image_processor_type": "GotOcr2ImageProcessor", "size": {"height": 28, "width": 28}, "max_patches": 1}
    pixels |= {"image_mean": [0.5] * 3, "image_std": [0.5] * 3, "resample": 3, "do_convert_rgb": True}
    (directory / "preprocessor_config.json").write_text(json.dumps(pixels))
    return directory


def write_records(folder: pathlib.Path, count: int = 24, *, pairs: bool = False) -> pathlib.Path:
    """Questions about pictures of one colour each, with some noise; every fourth record is text alone."""
    rng, rows = np.random.default_rng(1), []
    folder.mkdir(parents=True, exist_ok=True)
    for number in range(count):
        colour = list(COLOURS)[number % 3]
        noise = rng.integers(0, 40, (20 + number, 30, 3))
        pixels = np.clip(np.array(COLOURS[colour]) * 0.8 + noise, 0, 255).astype(np.uint8)
        Image.fromarray(pixels).save(folder / f"{number}.png")
        seen = number % 4 != 3
        question = "<image>what colour?" if seen else "say red"
        answer = colour if seen else "red"
        row: dict[str, object] = {"messages": [{"role": "user", "content": question}]}
        if pairs:
            wrong = "red" if answer != "red" else "blue"
            row |= {"chosen": {"role": "assistant", "content": answer}}
            row |= {"rejected": {"role": "assistant", "content": wrong}}
        else:
            row["messages"] = [*row["messages"], {"role": "assistant", "content": answer}]  # pyright: ignore
        rows.append(row | {"images": [f"{number}.png"] if seen else []})
    path = folder / "train.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path
