"""Pairs and labelled answers: the public files unchanged, and records that are wrong."""

from __future__ import annotations

import json
import re

import pytest
import yaml

from meshtune.config.sections import DataSection
from meshtune.data.conversation import Labelled, Origin, Pair
from meshtune.data.documents import load_documents
from meshtune.data.formats import FORMATS_BY_TYPE
from meshtune.data.formats.record import MARGIN
from meshtune.errors import UserError

ORIGIN = Origin("made.json", 0)


def read(tmp_path, records, learns, **source):
    file = tmp_path / "made.json"
    file.write_text(json.dumps(records))
    section = DataSection.model_validate({"train": [{"path": str(file), **source}]})
    documents = load_documents(section, seed=0, dataset_type=learns)
    return documents.train, documents.formats


@pytest.mark.parametrize(
    ("name", "learns", "kind"),
    [("dpo_en_demo", "pairs", Pair), ("dpo_zh_demo", "pairs", Pair), ("kto_en_demo", "labelled", Labelled)],
)
def test_demo_files_are_read_through_the_registry_and_by_path(name, learns, kind, shared):
    folder = shared / "assets/data/llamafactory"
    records = json.loads((folder / f"{name}.json").read_text())
    named = DataSection.model_validate({"registry": str(folder), "train": [{"name": name}]})
    alone = DataSection.model_validate({"train": [{"path": str(folder / f"{name}.json")}]})
    for section in (named, alone):
        documents = load_documents(section, seed=0, dataset_type=learns).train
        assert len(documents) == len(records) == 300
        assert all(isinstance(documents[n], kind) for n in (0, 150, 299))
    if learns == "pairs":
        pair, record = documents[7], records[7]
        assert pair.chosen.messages[-1].content == record["chosen"]["value"]
        assert pair.rejected.messages[-1].content == record["rejected"]["value"]
        assert [m.content for m in pair.chosen.messages[:-1]] == [t["value"] for t in record["conversations"]]
    else:
        assert [documents[n].good for n in range(300)] == [record["label"] for record in records]


def test_hh_rlhf_transcripts_become_pairs(shared):
    import gzip

    file = shared / "assets/data/hh-rlhf/harmless-base-test.jsonl.gz"
    section = DataSection.model_validate({"train": [{"path": str(file)}], "on_bad": "skip"})
    documents = load_documents(section, seed=0, dataset_type="pairs")
    assert list(documents.formats.values()) == ["hh"]
    assert len(documents.train) > 2000
    with gzip.open(file, "rt") as lines:
        first = json.loads(next(lines))
    pair = documents.train[0]
    assert pair.chosen.messages[:-1] == pair.rejected.messages[:-1]
    assert first["chosen"].endswith(pair.chosen.messages[-1].content)
    assert first["rejected"].endswith(pair.rejected.messages[-1].content)


PROMPT = [{"role": "user", "content": "hi"}]
GOOD, BAD = ({"role": "assistant", "content": text} for text in ("hello", "go"))


@pytest.mark.parametrize(
    ("record", "form"),
    [
        ({"instruction": "hi", "input": "", "chosen": "hello", "rejected": "go"}, "alpaca"),
        (
            {
                "conversations": [{"from": "human", "value": "hi"}],
                "chosen": {"from": "gpt", "value": "hello"},
                "rejected": {"from": "gpt", "value": "go"},
            },
            "sharegpt",
        ),
        ({"messages": PROMPT, "chosen": GOOD, "rejected": [BAD]}, "messages"),
        ({"prompt": PROMPT, "chosen": [GOOD], "rejected": [BAD]}, "preference"),
        ({"chosen": [*PROMPT, GOOD], "rejected": [*PROMPT, BAD]}, "preference"),
        ({"input": {"messages": PROMPT}, "preferred_output": [GOOD], "non_preferred_output": [BAD]}, "openai"),
        ({"chosen": "\n\nHuman: hi\n\nAssistant: hello", "rejected": "\n\nHuman: hi\n\nAssistant: go"}, "hh"),
    ],
)
def test_every_format_gives_the_same_pair(record, form, tmp_path):
    train, formats = read(tmp_path, [record], "pairs")
    assert list(formats.values()) == [form]
    pair = train[0]
    assert [(m.role, m.content) for m in pair.chosen.messages] == [("user", "hi"), ("assistant", "hello")]
    assert [(m.role, m.content) for m in pair.rejected.messages] == [("user", "hi"), ("assistant", "go")]


FULL_PAIR = {"chosen": [*PROMPT, GOOD], "rejected": [*PROMPT, BAD]}
SYSTEM = {"role": "system", "content": "Be brief."}


@pytest.mark.parametrize(
    ("record", "source"),
    [
        ({"prompt": "hi", "messages": [*PROMPT, GOOD], **FULL_PAIR}, {}),  # ultrafeedback_binarized's shape
        ({"prompt": "hi", "prompt_id": "1", **FULL_PAIR, "score_chosen": 8.5}, {}),
        (
            {"prompt": " hi ", "chosen": [SYSTEM, *FULL_PAIR["chosen"]], "rejected": [SYSTEM, *FULL_PAIR["rejected"]]},
            {},
        ),
        ({"prompt": "other", **FULL_PAIR}, {"columns": {"prompt": None}}),
        ({"prompt": PROMPT, **FULL_PAIR}, {"columns": {"prompt": None}}),
        ({"prompt": PROMPT, "messages": PROMPT, **FULL_PAIR}, {"format": "preference", "columns": {"prompt": None}}),
        (FULL_PAIR, {}),
    ],
)
def test_whole_conversations_beside_a_prompt_are_read_as_trl_does(record, source, tmp_path):
    data_utils = pytest.importorskip("trl.data_utils")
    (pair,) = read(tmp_path, [record], "pairs", **source)[0]
    theirs = data_utils.maybe_extract_prompt({**record, "prompt": "text"} if "prompt" in record else record)
    for side, document in (("chosen", pair.chosen), ("rejected", pair.rejected)):
        messages = [{"role": message.role, "content": message.content} for message in document.messages]
        assert messages == [*theirs["prompt"], *theirs[side]]


@pytest.mark.parametrize("beside", [{}, {"prompt": "hi"}])
def test_whole_conversations_of_from_and_value_are_read_as_trl_does(beside, tmp_path):
    data_utils = pytest.importorskip("trl.data_utils")
    names = {"user": "human", "assistant": "gpt"}
    record = beside | {
        side: [{"from": names[turn["role"]], "value": turn["content"]} for turn in turns]
        for side, turns in FULL_PAIR.items()
    }
    (pair,) = read(tmp_path, [record], "pairs")[0]
    theirs = data_utils.maybe_convert_to_chatml({side: record[side] for side in FULL_PAIR})
    for side, document in (("chosen", pair.chosen), ("rejected", pair.rejected)):
        assert [(names[m.role], m.content) for m in document.messages] == [
            (t["role"], t["content"]) for t in theirs[side]
        ]


def test_labels_of_a_csv_file_are_read(tmp_path):
    file = tmp_path / "labels.csv"
    file.write_text("prompt,completion,label\nq,a,True\nq,b,false\n")
    section = DataSection.model_validate({"train": str(file)})
    assert [sample.good for sample in load_documents(section, seed=0, dataset_type="labelled").train] == [True, False]
    with pytest.raises(UserError, match="stage: kto"):
        load_documents(section, seed=0)


@pytest.mark.parametrize(
    ("record", "source"),
    [
        ({"prompt": "hi", "messages": [*PROMPT, GOOD], **FULL_PAIR}, {"format": "messages"}),
        ({"prompt": PROMPT, "messages": [*PROMPT, GOOD], **FULL_PAIR}, {"format": "messages"}),
        ({"prompt": "other", **FULL_PAIR}, {}),
        ({"prompt": PROMPT, **FULL_PAIR}, {}),
        ({"prompt": "hi", "chosen": "a", "rejected": "b"}, {"format": "preference", "columns": {"prompt": None}}),
    ],
)
def test_a_prompt_that_does_not_fit_the_answers_says_how_they_are_read(record, source, tmp_path):
    with pytest.raises(UserError) as caught:
        read(tmp_path, [record], "pairs", **source)
    fix = caught.value.fix
    form = re.search(r"format: (\w+)", fix)
    columns = re.search(r"columns: (\{.*?\})", fix)
    options = {"format": form[1] if form else source.get("format", "auto")}
    options["columns"] = yaml.safe_load(columns[1].replace("NAME", "prompt")) if columns else {}
    (pair,) = read(tmp_path, [record], "pairs", **options)[0]
    assert isinstance(pair, Pair)


def test_a_field_that_a_format_needs_cannot_be_left_out(tmp_path):
    with pytest.raises(UserError, match="cannot do without chosen"):
        read(tmp_path, [FULL_PAIR], "pairs", format="preference", columns={"chosen": None})


def test_plain_texts_keep_their_prompt_and_margin(tmp_path):
    train, _ = read(tmp_path, [{"prompt": "1+1=", "chosen": "2", "rejected": "3", "margin": 1.5}], "pairs")
    assert (train[0].chosen.prompt, train[0].chosen.text, train[0].rejected.text) == ("1+1=", "2", "3")
    assert train[0].margin == 1.5


@pytest.mark.parametrize(
    ("record", "message"),
    [
        ({"prompt": "a", "chosen": "same", "rejected": "same"}, "the same answer"),
        ({"prompt": "a", "chosen": "x", "rejected": None}, "null"),
        ({"prompt": "", "chosen": "x", "rejected": "y"}, "empty"),
        ({"prompt": "a", "chosen": "x", "rejected": "y", "margin": "big"}, "expected a number"),
        ({"instruction": "", "input": "", "chosen": "x", "rejected": "y"}, "empty"),
        ({"messages": PROMPT, "chosen": GOOD, "rejected": "go"}, "expected a turn"),
        ({"messages": PROMPT, "chosen": GOOD, "rejected": PROMPT[0]}, "wrong role order"),
        ({"chosen": [*PROMPT, GOOD], "rejected": [{"role": "user", "content": "ho"}, BAD]}, "different conversations"),
        ({"chosen": "\n\nHuman: hi", "rejected": "\n\nHuman: hi\n\nAssistant: go"}, "no answer to it"),
    ],
)
def test_a_wrong_pair_names_its_record_and_field(record, message, tmp_path):
    with pytest.raises(UserError, match=message) as caught:
        read(tmp_path, [record], "pairs")
    assert "record 0" in str(caught.value.where)


def test_a_missing_rejected_side_is_named(tmp_path):
    records = [{"prompt": "a", "chosen": "x", "rejected": "y"}, {"prompt": "a", "chosen": "x"}]
    with pytest.raises(UserError, match="missing") as caught:
        read(tmp_path, records, "pairs")
    assert "rejected" in str(caught.value.where)


@pytest.mark.parametrize("label", ["yes", 1, 0.5, None])
def test_a_label_is_true_or_false(label, tmp_path):
    with pytest.raises(UserError, match=r"true or false|null"):
        read(tmp_path, [{"prompt": "a", "completion": "b", "label": label}], "labelled")


def test_data_of_another_stage_name_that_stage(tmp_path):
    pairs = [{"prompt": "a", "chosen": "x", "rejected": "y"}]
    with pytest.raises(UserError) as caught:
        read(tmp_path, pairs, "documents")
    assert "stage: dpo" in str(caught.value.fix)
    with pytest.raises(UserError, match="stage dpo"):
        read(tmp_path, pairs, "labelled")


def test_every_dataset_type_has_its_formats():
    assert set(FORMATS_BY_TYPE["pairs"]) == {"alpaca", "sharegpt", "messages", "preference", "openai", "hh"}
    assert set(FORMATS_BY_TYPE["labelled"]) == {"alpaca", "sharegpt", "messages", "prompt_completion"}


def test_a_margin_is_listed_as_not_read_but_by_reward_models(tmp_path):
    data = read(tmp_path, [{"prompt": "hi", "chosen": "a", "rejected": "b", "margin": 2.0}], "pairs")[0]
    assert data[0].margin == 2.0
    section = DataSection.model_validate({"train": str(next(tmp_path.glob("*.json*")))})
    (fields,) = load_documents(section, seed=0, dataset_type="pairs").unread.values()
    assert fields == (MARGIN,)
