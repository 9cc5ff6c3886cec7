"""`meshtune predict` over records with pictures: answers and losses are those of transformers; float32."""

from __future__ import annotations

import json

import pytest
import torch
import transformers

from meshtune.cli.evaluate import source_section
from meshtune.errors import UserError
from meshtune.evaluate.blocks import predict
from meshtune.evaluate.predict import PredictOptions, Records, picture_digests, read_records
from meshtune.evaluate.statistics import overlap
from meshtune.generate.api import load
from meshtune.terminal import console
from seeing_model import picture, processed, save_seeing_model

ASKED = [("What is it?", [1], "A cat."), ("Which one?", [2, 3], "The second."), ("Hello!", [], "Hello.")]
NEW = 6


@pytest.fixture(scope="module")
def folder(shared, tmp_path_factory):
    return save_seeing_model(tmp_path_factory.mktemp("sees"), shared)


@pytest.fixture(scope="module")
def records(tmp_path_factory) -> Records:
    """Records of LLaMA-Factory's form, with files below the folder of the data."""
    directory = tmp_path_factory.mktemp("data")
    rows = []
    for question, seeds, answer in ASKED:
        for seed in seeds:
            picture(seed).save(directory / f"{seed}.png")
        marks = "".join("<image>" for _ in seeds)
        turns = [("system", "Look."), ("user", f"{marks}{question}"), ("assistant", answer)]
        messages = [{"role": role, "content": content} for role, content in turns]
        rows.append({"messages": messages, "images": [f"{seed}.png" for seed in seeds]})
    (directory / "data.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return read_records(source_section(str(directory / "data.jsonl"), columns=None))


def test_answers_and_losses_are_those_of_transformers(folder, records, tmp_path):
    """The tokens of the shown prompt have no part in the loss. 2e-5: float32 in another order."""
    options = PredictOptions(metrics=("f1",), max_tokens=NEW, rows=2)
    ours = load(folder, dtype="float32")
    result = predict(ours, records, tmp_path, options, identity="x", console=console(quiet=True))
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    model = transformers.AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float32)
    end = tokenizer.convert_tokens_to_ids("<|im_end|>")
    for row, (question, seeds, answer) in zip(result.rows, ASKED, strict=True):
        images = [picture(seed) for seed in seeds]
        prompt = processed(folder, question, images)
        length = prompt["input_ids"].shape[1]
        out = model.generate(**prompt, max_new_tokens=NEW, do_sample=False, eos_token_id=end)
        assert row["answer"] == tokenizer.decode(out[0, length:], skip_special_tokens=True)
        whole = processed(folder, question, images, f"{answer}<|im_end|>")
        labels = torch.cat([torch.full((1, length), -100), whole["input_ids"][:, length:]], 1)
        with torch.no_grad():
            expected = model(**whole, labels=labels).loss.item()
        assert row["loss"] == pytest.approx(expected, abs=2e-5)
    assert result.rows[0]["answer"] != result.rows[1]["answer"]


def test_the_pictures_are_part_of_the_data_of_results(folder, tmp_path):
    """Results of other pictures under the same words are not resumed."""

    def one_record(seed: int) -> Records:
        (directory := tmp_path / str(seed)).mkdir()
        picture(seed).save(directory / "1.png")
        turns = [{"role": "user", "content": "<image>What is it?"}, {"role": "assistant", "content": "A cat."}]
        (directory / "data.jsonl").write_text(json.dumps({"messages": turns, "images": ["1.png"]}) + "\n")
        return read_records(source_section(str(directory / "data.jsonl"), columns=None))

    options = PredictOptions(metrics=("f1",), max_tokens=NEW, rows=2, loss=False)
    ours, quiet = load(folder, dtype="float32"), console(quiet=True)
    (first, second), out = map(one_record, (1, 2)), tmp_path / "out"
    (row,) = predict(ours, first, out, options, identity="x", console=quiet).rows
    assert row["pictures"] == picture_digests(first[0])
    with pytest.raises(UserError, match="these results are of other data"):
        predict(ours, second, out, options, identity="x", resume=True, console=quiet)


def test_the_same_words_about_another_picture_were_not_trained_on(records, tmp_path):
    lines = []
    for seed in (1, 2):
        picture(seed).save(tmp_path / f"{seed}.png")
        turns = [{"role": "user", "content": "<image>What is it?"}, {"role": "assistant", "content": "A cat."}]
        lines.append(json.dumps({"messages": turns, "images": [f"{seed}.png"]}) + "\n")
    (tmp_path / "data.jsonl").write_text("".join(lines))
    first, second = (
        record.document for record in read_records(source_section(str(tmp_path / "data.jsonl"), columns=None))
    )
    assert overlap([records[0].document], [first]).is_training_set
    assert not overlap([records[0].document], [second]).is_training_set


def test_a_model_that_reads_text_only_refuses_records_with_pictures(records, stories260k, tmp_path):
    model = load(stories260k, dtype="float32", chat_template="plain")
    with pytest.raises(UserError, match="this model reads text only") as problem:
        predict(model, records, tmp_path, identity="x", console=console(quiet=True))
    assert problem.value.where is not None
    assert "record 0" in problem.value.where
