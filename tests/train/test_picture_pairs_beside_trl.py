"""Updates of DPO on pairs with pictures are those of trl's DPOTrainer, from files to losses and gradient norms.

Full tuning of tower, projector and language model of a tiny LLaVA on the same records. A batch is all pairs, so that
their order is no matter; ours packs them, trl's pads them. Tolerance: 1e-3 relative on losses and gradient norms of six
updates by AdamW, which sums of float32 in other orders keep.
"""

from __future__ import annotations

import json

import datasets
import numpy as np
import pytest
import torch
import transformers
from pictures_to_see import COLOURS, WORDS
from PIL import Image
from trl import DPOConfig, DPOTrainer

import meshtune
from meshtune import quickstart
from meshtune.train.report.metrics_log import read

pytestmark = pytest.mark.slow  # half a minute

PAIRS, STEPS, RATE, BETA = 6, 6, 1e-3, 0.3
PLACE = "<image>"
# An answer begins after a token and ends with one: trl tokenises it without the prompt, and trains on all that follows.
TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}<says>"
    "{% if message['content'] is string %}{{ message['content'] }}{% else %}{% for part in message['content'] %}"
    "{% if part['type'] == 'image' %}" + PLACE + "{% else %}{{ part['text'] }}{% endif %}{% endfor %}{% endif %}"
    "<|im_end|>{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant<says>{% endif %}"
)


def write_model(directory) -> None:
    """A random LLaVA of 16 tokens a picture."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(quickstart.MODEL)
    tokenizer.add_special_tokens({"additional_special_tokens": [*WORDS, PLACE, "<says>", "<unused>"]})
    tokenizer.eos_token, tokenizer.pad_token, tokenizer.chat_template = "<|im_end|>", "<unused>", TEMPLATE
    vision = {"hidden_size": 24, "num_hidden_layers": 3, "num_attention_heads": 4, "intermediate_size": 40}
    vision |= {"model_type": "clip_vision_model", "image_size": 28, "patch_size": 7, "projection_dim": 24}
    text = {"model_type": "llama", "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
    text |= {"num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 520, "max_position_embeddings": 256}
    text |= {"pad_token_id": tokenizer.pad_token_id}
    config = transformers.LlavaConfig(
        vision_config=vision, text_config=text, image_token_index=tokenizer.convert_tokens_to_ids(PLACE)
    )
    torch.manual_seed(0)
    model = transformers.LlavaForConditionalGeneration(config)
    with torch.no_grad():
        for parameter in model.parameters():  # none is trivially constant
            parameter.add_(torch.randn_like(parameter) * 0.05)
    model.save_pretrained(directory)
    processor = transformers.LlavaProcessor(
        transformers.CLIPImageProcessor(size={"shortest_edge": 28}, crop_size={"height": 28, "width": 28}),
        tokenizer,
        patch_size=7,
        vision_feature_select_strategy="default",
        chat_template=TEMPLATE,
        image_token=PLACE,
        num_additional_image_tokens=1,
    )
    processor.save_pretrained(directory)


def write_pairs(folder) -> tuple[str, list[dict]]:
    """Pairs about pictures of different sizes: (our file, trl's records)."""
    rng, rows, records = np.random.default_rng(1), [], []
    folder.mkdir()
    for number in range(PAIRS):
        right, wrong = list(COLOURS)[number % 3], list(COLOURS)[(number + 1) % 3]
        noise = rng.integers(0, 90, (30 + 5 * number, 60 - 4 * number, 3))
        image = Image.fromarray(np.clip(np.array(COLOURS[right]) * 0.6 + noise, 0, 255).astype(np.uint8))
        image.save(folder / f"{number}.png")
        question = f"what colour is {number}?"
        answers = {"chosen": f"it is {right}", "rejected": f"{wrong} {number}"}
        sides = {side: {"role": "assistant", "content": answer} for side, answer in answers.items()}
        rows.append({"messages": [{"role": "user", "content": f"<image>{question}"}], "images": [f"{number}.png"]})
        rows[-1] |= sides
        records.append({"prompt": [{"role": "user", "content": question}], "images": [image]})
        records[-1] |= {side: [message] for side, message in sides.items()}
    path = folder / "train.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path), records


def test_losses_and_gradient_norms_are_those_of_trl(tmp_path):
    directory = tmp_path / "model"
    write_model(directory)
    data, records = write_pairs(tmp_path / "data")
    recipe = {
        "model": str(directory),
        "stage": {"kind": "dpo", "beta": BETA},
        "method": "full",
        "vision": {"train": ["projector", "tower"]},
        "data": {"train": data, "max_length": 128},
        "train": {"steps": STEPS, "batch_size": PAIRS},
        "optimizer": {"learning_rate": RATE, "schedule": "linear", "warmup_steps": 0, "max_grad_norm": 1.0},
        "output": str(tmp_path / "ours"),
    }
    meshtune.train(recipe)
    ours = [row for row in read(tmp_path / "ours" / "metrics.jsonl") if row["kind"] == "train"]
    arguments = DPOConfig(
        output_dir=str(tmp_path / "theirs"),
        beta=BETA,
        per_device_train_batch_size=PAIRS,
        max_steps=STEPS,
        learning_rate=RATE,
        lr_scheduler_type="linear",
        weight_decay=0.0,
        max_grad_norm=1.0,
        logging_steps=1,
        max_length=None,
        save_strategy="no",
        report_to=[],
        use_cpu=True,
        bf16=False,
        disable_tqdm=True,
        gradient_checkpointing=False,
    )
    trainer = DPOTrainer(
        model=transformers.LlavaForConditionalGeneration.from_pretrained(directory, dtype=torch.float32),
        args=arguments,
        train_dataset=datasets.Dataset.from_list(records),
        processing_class=transformers.AutoProcessor.from_pretrained(directory),
    )
    trainer.train()
    theirs = [row for row in trainer.state.log_history if "grad_norm" in row]
    for key in ("loss", "grad_norm"):
        got, expected = ([row[key] for row in rows] for rows in (ours, theirs))
        np.testing.assert_allclose(got, expected, rtol=1e-3, err_msg=key)
    assert theirs[0]["loss"] == pytest.approx(np.log(2), abs=1e-3)
    assert theirs[-1]["loss"] < 0.9 * theirs[0]["loss"]
