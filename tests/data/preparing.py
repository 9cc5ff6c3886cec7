"""Prepares small files of conversations, pairs or labelled answers with the quickstart's model."""

from __future__ import annotations

import pathlib

import meshtune.quickstart
from meshtune.config.load import load_recipe
from meshtune.data.prepare import prepare_data
from meshtune.data.tokenizer import load_tokenizer

MODEL = pathlib.Path(meshtune.quickstart.__file__).parent / "model"


def prepared(file, cache, stage, progress=None, share=(0, 1)):
    fields = [f"model.path={MODEL}", "model.chat_template=plain", f"data.train={file}", f"stage={stage}"]
    tokenizer = load_tokenizer(MODEL, "plain")
    return prepare_data(
        load_recipe(None, [*fields, "output=x"]), tokenizer, cache=cache, progress=progress, share=share
    )


def records(stage, count):
    for index in range(count):
        question = {"role": "user", "content": f"What is {index}?"}
        answers = [{"role": "assistant", "content": f"{word} {index}"} for word in ("It is", "Not")]
        if stage == "sft":
            yield {"messages": [question, answers[0]]}
        elif stage == "dpo":
            yield {"prompt": [question], "chosen": answers[:1], "rejected": answers[1:]}
        else:
            yield {"messages": [question, answers[0]], "label": bool(index % 3)}


def contents(data):
    return {file.name: file.read_bytes() for file in data.train.store.path.iterdir()}
