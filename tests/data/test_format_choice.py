"""Which format records are of: recognised, or named; others get an error with what each format wants."""

from __future__ import annotations

import itertools
import json
import re
import typing

import pytest
import yaml

from meshtune.config.sections import DataSection, SourceSection
from meshtune.data.conversation import Origin
from meshtune.data.documents import load_documents
from meshtune.data.formats import DOCUMENT_FORMATS, FORMATS_BY_TYPE, select_format
from meshtune.data.formats.record import read_record
from meshtune.errors import UserError

EXAMPLES = {
    "alpaca": {"instruction": "i", "output": "o"},
    "sharegpt": {"conversations": [{"from": "human", "value": "q"}, {"from": "gpt", "value": "a"}]},
    "messages": {"messages": [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]},
    "prompt_completion": {"prompt": "p", "completion": "c"},
    "text": {"text": "t"},
    "xlam": {"query": "q", "answers": "[]", "tools": "[]"},
}


NAMED_ONLY = {"stanford_alpaca": "alpaca", "hermes": "sharegpt"}  # a format of the same records as another


@pytest.mark.parametrize("name", sorted(DOCUMENT_FORMATS.keys() - NAMED_ONLY.keys()))
def test_every_format_is_recognised_also_with_a_rendered_text_beside_it(name):
    assert select_format("auto", [EXAMPLES[name]], "here").name == name
    assert select_format("auto", [EXAMPLES[name] | {"text": "rendered", "id": 3}], "here").name == name


@pytest.mark.parametrize("name", NAMED_ONLY)
def test_a_format_of_the_same_records_as_another_is_taken_where_it_is_named(name):
    assert select_format(name, [EXAMPLES[NAMED_ONLY[name]]], "here").name == name


def test_one_odd_record_among_the_first_does_not_hide_the_format():
    assert select_format("auto", [{"x": 1}, "junk", EXAMPLES["alpaca"]], "here").name == "alpaca"


def refusal(*args, **options) -> UserError:
    with pytest.raises(UserError) as caught:
        select_format(*args, **options)
    return caught.value


def test_unknown_records_list_their_fields_and_those_of_each_format():
    error = refusal("auto", [{"question": "q", "answer": "a"}], "data.json")
    assert "question, answer" in error.what
    for form in DOCUMENT_FORMATS.values():
        assert f"{form.name}: {form.expects}" in error.what
    assert error.where == "data.json"
    assert "columns" in error.fix


def test_ambiguous_records_name_the_formats():
    error = refusal("auto", [EXAMPLES["alpaca"] | EXAMPLES["messages"]], "data.json")
    assert "alpaca, messages" in error.what
    assert "instruction, output, messages" in error.what
    assert error.fix == "name the one you mean: format: alpaca, or format: messages"
    broken = EXAMPLES["alpaca"] | EXAMPLES["messages"] | {"output": ""}
    assert refusal("auto", [broken], "data.json").fix == "name the one you mean: format: messages"


RECORDS = {
    "documents": [
        {"frage": "q", "antwort": "a"},
        {"answer": "a", "question": "q"},
        {"id": "7", "question": "q", "answer": "a", "source": "s"},
        {"dialogue": EXAMPLES["messages"]["messages"]},
        {"dialogue": EXAMPLES["sharegpt"]["conversations"], "id": 3},
        {"Inhalt mit Zeichen: {x}": "t"},
        {"instruction": "q", "context": "c", "response": "a", "category": "qa"},
    ],
    "pairs": [
        {"q": "q", "good": "a", "bad": "b"},
        {"system": "s", "question": "q", "chosen": "a", "rejected": "b"},
        {"better": EXAMPLES["messages"]["messages"], "worse": [{"role": "user", "content": "q"},
                                                              {"role": "assistant", "content": "b"}]},
    ],
    "labelled": [{"question": "q", "answer": "a", "good": True}],
}  # fmt: skip


@pytest.mark.parametrize(
    ("kind", "record"), [(kind, record) for kind, records in RECORDS.items() for record in records]
)
def test_records_with_names_of_their_own_get_a_source_to_paste(kind, record, tmp_path):
    file = tmp_path / "own data.jsonl"
    file.write_text(json.dumps(record))
    error = refusal("auto", [record], str(file), dataset_type=kind)
    source = yaml.safe_load(re.search(r"'data\.train=(\{.*\})'", error.fix)[1])
    section = DataSection.model_validate({"train": source})
    assert len(load_documents(section, seed=0, dataset_type=kind).train) == 1


def test_the_question_is_told_from_the_answer_by_its_name():
    error = refusal("auto", [{"answer": "a", "question": "q"}], "x")
    assert "{instruction: question, output: answer}" in error.fix
    assert "'data.train" not in refusal("auto", [{"a": "x", "b": "y", "c": "z"}], "x").fix
    passage = refusal("auto", [{"instruction": "q", "context": "c", "response": "a", "category": "qa"}], "x")
    assert "{instruction: instruction, input: context, output: response}" in passage.fix


AMBIGUOUS = [
    ("documents", EXAMPLES[first] | EXAMPLES[second]) for first, second in itertools.combinations(sorted(EXAMPLES), 2)
]
PAIR = {"chosen": "a", "rejected": "b"}
AMBIGUOUS += [
    ("pairs", {"prompt": "q", "instruction": "q", **PAIR}),
    ("pairs", {"instruction": "q", "conversations": EXAMPLES["sharegpt"]["conversations"][:1], **PAIR}),
    ("pairs", {"messages": EXAMPLES["messages"]["messages"][:1], "prompt": "q",
               "chosen": [EXAMPLES["messages"]["messages"][1]], "rejected": [{"role": "assistant", "content": "b"}]}),
    ("labelled", EXAMPLES["alpaca"] | EXAMPLES["prompt_completion"] | {"label": True}),
]  # fmt: skip


@pytest.mark.parametrize(("kind", "record"), AMBIGUOUS)
def test_every_format_that_is_offered_reads_the_records(kind, record):
    try:
        assert select_format("auto", [record], "x", dataset_type=kind)
    except UserError as error:
        offered = re.findall(r"format: (\w+)", error.fix)
    else:
        return
    assert offered
    for name in offered:
        form = select_format(name, [], "x", dataset_type=kind)
        assert read_record(form, record, form.resolve({}), {}, Origin("x", 0))


@pytest.mark.parametrize(
    "record",
    [
        PAIR,
        {"prompt": "q", **PAIR},
        {"chosen": EXAMPLES["messages"]["messages"], "rejected": EXAMPLES["messages"]["messages"]},
        {"instruction": "q", **PAIR},
        {"messages": EXAMPLES["messages"]["messages"], **PAIR},
        EXAMPLES["prompt_completion"] | {"label": False},
        EXAMPLES["alpaca"] | {"label": True},
        EXAMPLES["messages"] | {"label": True},
    ],
)
def test_the_ways_out_for_preferences_work(record):
    fix = refusal("auto", [record], "x").fix
    form, columns = re.search(r"format: (\w+)", fix), re.search(r"columns: (\{.*?\})", fix)
    columns = yaml.safe_load(columns[1])
    form = select_format(form[1] if form else "auto", [record], "x", columns)
    assert read_record(form, record, form.resolve(columns), {}, Origin("x", 0))
    if "label" in record:
        assert select_format("auto", [record], "x", dataset_type="labelled")


def test_a_stage_that_is_named_reads_the_records():
    pair = {"messages": EXAMPLES["messages"]["messages"][:1], "chosen": EXAMPLES["messages"]["messages"][1]}
    pair["rejected"] = {"role": "assistant", "content": "b"}
    for record, kind, stage in (
        (EXAMPLES["alpaca"], "pairs", "sft"),
        (EXAMPLES["alpaca"] | {"label": True}, "pairs", "kto"),
        (pair, "labelled", "dpo"),
    ):
        assert f"they would fit stage {stage}" in refusal("auto", [record], "x", dataset_type=kind).what


def test_a_column_of_null_is_not_read_in_any_format():
    both = EXAMPLES["alpaca"] | EXAMPLES["messages"]
    assert select_format("auto", [both], "x", {"messages": None}).name == "alpaca"
    assert select_format("auto", [both], "x", {"output": None}).name == "messages"
    assert select_format("messages", [], "x", {"images": None, "instruction": None}).name == "messages"
    assert "did you mean 'images'" in refusal("messages", [], "x", {"imges": None}).fix


def test_preferences_are_refused():
    assert "chosen and rejected" in refusal("auto", [{"chosen": "a", "rejected": "b"}], "x").what
    assert "true/false label" in refusal("auto", [EXAMPLES["messages"] | {"label": False}], "x").what


def test_columns_and_tags_are_known_names():
    assert "did you mean 'instruction'?" in refusal("alpaca", [], "x", {"instruktion": "q"}).fix
    assert "did you mean 'role_tag'?" in refusal("auto", [], "x", {}, {"roletag": "q"}).fix
    assert "did you mean 'alpaca'?" in refusal("alpacca", [], "x").fix
    assert "format text has none" in refusal("text", [], "x", {}, {"role_tag": "who"}).fix
    assert "no format has all" in refusal("auto", [], "x", {"completion": "a", "text": "b"}).what
    assert (
        select_format(
            "auto", [{"question": "q", "answer": "a"}], "x", {"prompt": "question", "response": "answer"}
        ).name
        == "alpaca"
    )


def test_a_new_format_is_picked_up_from_its_line_in_the_registry(monkeypatch):
    poem = DOCUMENT_FORMATS["text"]
    poem = type(poem)("poem", "verse", {"verse": "verse"}, lambda record, *_: 2 * ("verse" in record), poem.convert)
    monkeypatch.setitem(DOCUMENT_FORMATS, "poem", poem)
    assert select_format("auto", [{"verse": "x"}], "here") is poem


def test_a_recipe_may_name_every_format():
    named = typing.get_args(SourceSection.model_fields["format"].annotation)
    assert set(named) == {"auto", *(name for kind in FORMATS_BY_TYPE.values() for name in kind)}
