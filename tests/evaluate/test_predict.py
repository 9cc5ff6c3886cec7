"""`meshtune predict` on a real small model: answers, resuming, losses against transformers, bad input."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch

import meshtune
from meshtune.cli.evaluate import source_section
from meshtune.errors import UserError
from meshtune.evaluate import blocks
from meshtune.evaluate.blocks import predict
from meshtune.evaluate.folder import PREDICTIONS
from meshtune.evaluate.predict import PredictOptions, held_out_loss, read_records
from meshtune.options import Shard, parse_shard
from meshtune.terminal import console

PROMPTS = ["Once upon a time", "Lily and Tom went to", "The dog was", "One day, a"]
OPTIONS = PredictOptions(metrics=("exact_match", "f1"), max_tokens=8, rows=2)


@pytest.fixture(scope="module")
def model(stories260k):
    return meshtune.load(stories260k)


@pytest.fixture
def data(tmp_path):
    path = tmp_path / "stories.jsonl"
    rows = [{"prompt": prompt, "completion": " there was a girl."} for prompt in PROMPTS]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def run(model, data, output, options=OPTIONS, **flags):
    records = read_records(source_section(str(data), columns=None))
    return predict(model, records, output, options, identity="test", console=console(quiet=True), **flags)


def test_answers_are_those_of_generate_in_the_order_of_the_data(model, data, tmp_path):
    result = run(model, data, tmp_path / "out")
    lines = [json.loads(line) for line in (tmp_path / "out" / PREDICTIONS).read_text().splitlines()]
    assert [line["prompt"] for line in lines] == PROMPTS
    assert [line["answer"] for line in lines] == model.generate(PROMPTS, max_tokens=8)
    assert lines == list(result.rows) == [result.rows[number] for number in range(4)]
    assert result.totals["records"] == 4
    assert json.loads((tmp_path / "out/metrics.json").read_text()) == result.totals


def test_the_loss_is_that_of_transformers(model, data, stories260k):
    from transformers import AutoModelForCausalLM

    records = read_records(source_section(str(data), columns=None))
    held_out = held_out_loss(model, records)
    reference = AutoModelForCausalLM.from_pretrained(stories260k)
    total, tokens = 0.0, 0
    for record, loss in zip(records, held_out.records, strict=True):
        prompt = model.tokenizer(record.prompt)["input_ids"]
        ids = [*model.tokenizer(record.prompt + record.reference)["input_ids"], model.tokenizer.eos_token_id]
        labels = [-100] * len(prompt) + ids[len(prompt) :]
        with torch.no_grad():
            expected = reference(torch.tensor([ids]), labels=torch.tensor([labels])).loss.item()
        assert loss == pytest.approx(expected, abs=2e-5)  # float32 in another order
        total, tokens = total + expected * (len(ids) - len(prompt)), tokens + len(ids) - len(prompt)
    assert held_out.nats / held_out.weight == pytest.approx(total / tokens, abs=2e-5)
    assert sum(held_out.tokens) == tokens


def test_blocks_that_are_complete_stay_and_all_others_are_computed(model, data, tmp_path, monkeypatch):
    monkeypatch.setattr(blocks, "RECORDS", 2)
    run(model, data, tmp_path / "one")
    output = tmp_path / "out"
    assert run(model, data, output, shard=Shard(1, 2)) is None
    file = output / "blocks/000000.jsonl"
    file.write_text(file.read_text().replace('"answer": "', '"answer": "(from before) ', 1))
    (output / "blocks/.000001.jsonl.99.partial").write_text("{")  # of a process that was killed
    rows = run(model, data, output, resume=True).rows
    expected = run(model, data, tmp_path / "one", resume=True).rows
    assert rows[0] == expected[0] | {"answer": "(from before) " + expected[0]["answer"]}
    assert rows[1:] == expected[1:]
    assert sorted(path.name for path in output.iterdir() if path.name[0] != ".") == [
        "metrics.json", "predictions.jsonl", "settings.json",
    ]  # fmt: skip


def test_the_shards_of_any_order_make_the_files_of_one_run(model, data, tmp_path, monkeypatch):
    monkeypatch.setattr(blocks, "RECORDS", 1)
    options = PredictOptions(metrics=("f1", "bleu", "chrf"), max_tokens=8)
    run(model, data, tmp_path / "one", options)
    results = [run(model, data, tmp_path / "many", options, shard=Shard(index, 3)) for index in (3, 1, 2)]
    assert [result is None for result in results] == [True, True, False]
    for name in (PREDICTIONS, "metrics.json"):
        assert (tmp_path / "many" / name).read_bytes() == (tmp_path / "one" / name).read_bytes()
    again = run(model, data, tmp_path / "many", options, shard=Shard(1, 3))
    assert again.totals == results[-1].totals, "a shard that is started again finds the results joined"


def test_results_of_other_data_are_not_gone_on_with(model, data, tmp_path):
    run(model, data, tmp_path / "out")
    data.write_text(data.read_text().replace("Lily", "Anna"))
    with pytest.raises(UserError, match="these results are of other data: record 1"):
        run(model, data, tmp_path / "out", resume=True)


@pytest.mark.parametrize(
    ("text", "fix"), [("0/4", "1/4 to 4/4"), ("5/4", "1/4 to 4/4"), ("1/0", "write 2/8"), ("two", "write 2/8")]
)
def test_a_shard_that_does_not_exist_is_refused(text, fix):
    with pytest.raises(UserError, match=f"there is no shard '{text}'[\\s\\S]*{fix}"):
        parse_shard(text)


def test_results_are_never_overwritten_silently(model, data, tmp_path):
    run(model, data, tmp_path / "out")
    before = (tmp_path / "out" / PREDICTIONS).read_text()
    with pytest.raises(UserError, match="the folder is not empty"):
        run(model, data, tmp_path / "out")
    with pytest.raises(UserError, match="another max_tokens: 8, not 4"):
        run(model, data, tmp_path / "out", PredictOptions(metrics=("f1",), max_tokens=4), resume=True)
    run(model, data, tmp_path / "out", overwrite=True)
    (aside,) = tmp_path.glob("out.old-*")
    assert (aside / PREDICTIONS).read_text() == before


def test_a_prompt_longer_than_the_context_is_named_before_anything_is_computed(model, data, tmp_path):
    data.write_text(data.read_text() + json.dumps({"prompt": "and then " * 400, "completion": "x"}) + "\n")
    with pytest.raises(UserError, match=r"no room for an answer[\s\S]*record 4"):
        run(model, data, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_an_empty_data_set_is_refused(model, tmp_path):
    (tmp_path / "empty.jsonl").write_text("")
    with pytest.raises(UserError, match=r"empty\.jsonl"):
        run(model, tmp_path / "empty.jsonl", tmp_path / "out")


def test_a_conversation_without_an_answer_is_named(model, tmp_path):
    file = tmp_path / "chat.jsonl"
    file.write_text(json.dumps({"messages": [{"role": "user", "content": "hi"}]}) + "\n")
    with pytest.raises(UserError, match=r"there is no answer to it[\s\S]*record 0"):
        run(model, file, tmp_path / "out")


def test_sampled_answers_do_not_depend_on_how_many_are_computed_at_once(model, data, tmp_path):
    from meshtune.generate.request import Sampling

    sampling = Sampling(temperature=1.0, seed=3)
    answers = [
        [row["answer"] for row in run(model, data, tmp_path / f"{rows}", PredictOptions(
            metrics=("f1",), loss=False, max_tokens=8, sampling=sampling, rows=rows)).rows]
        for rows in (1, 4)
    ]  # fmt: skip
    assert answers[0] == answers[1]
    assert len(set(answers[0])) > 1
    assert np.all([len(answer) > 0 for answer in answers[0]])
