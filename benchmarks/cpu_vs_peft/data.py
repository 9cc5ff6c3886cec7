"""The data both sides train on: alpaca records, rendered by the model's chat template, loss on the answer alone."""

from __future__ import annotations

import json
import pathlib


def records(path: pathlib.Path, count: int) -> list[dict]:
    """The first records of an alpaca file."""
    return json.loads(path.read_text(encoding="utf-8"))[:count]


def tokenised(path: pathlib.Path, count: int, tokenizer, longest: int) -> list[dict[str, list[int]]]:
    """input_ids and labels of each record; -100 where nothing is learned. The mask is the template's answer with its
    end-of-turn token, as Meshtune derives it."""
    made = []
    for record in records(path, count):
        user = record["instruction"] + ("\n" + record["input"] if record["input"] else "")
        turns = [{"role": "user", "content": user}]
        prompt = tokenizer.apply_chat_template(turns, add_generation_prompt=True, tokenize=False)
        answer = record["output"] + "<|im_end|>"
        ids = tokenizer(prompt, add_special_tokens=False)["input_ids"]
        more = tokenizer(answer, add_special_tokens=False)["input_ids"]
        made.append({"input_ids": (ids + more)[:longest], "labels": ([-100] * len(ids) + more)[:longest]})
    return made
