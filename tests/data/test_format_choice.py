"""Which format records are of: recognised, or named; what is neither says what each format wants."""

from __future__ import annotations

import typing

import pytest

from meshtune.config.data import SourceSection
from meshtune.data.formats import DOCUMENT_FORMATS, FORMATS_BY_TYPE, select_format
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


def chosen(*args, **options) -> UserError:
    with pytest.raises(UserError) as caught:
        select_format(*args, **options)
    return caught.value


def test_unknown_records_list_their_fields_and_those_of_each_format():
    error = chosen("auto", [{"question": "q", "answer": "a"}], "data.json")
    assert "question, answer" in error.what
    for form in DOCUMENT_FORMATS.values():
        assert f"{form.name}: {form.expects}" in error.what
    assert error.where == "data.json"
    assert "columns" in error.fix


def test_ambiguous_records_name_the_formats():
    error = chosen("auto", [EXAMPLES["alpaca"] | EXAMPLES["messages"]], "data.json")
    assert "alpaca, messages" in error.what
    assert "instruction, output, messages" in error.what
    assert error.fix == "name the one you mean: format: alpaca, or format: messages"
    broken = EXAMPLES["alpaca"] | EXAMPLES["messages"] | {"output": ""}
    assert chosen("auto", [broken], "data.json").fix == "name the one you mean: format: messages"


def test_preferences_are_refused():
    assert "chosen and rejected" in chosen("auto", [{"chosen": "a", "rejected": "b"}], "x").what
    assert "true/false label" in chosen("auto", [EXAMPLES["messages"] | {"label": False}], "x").what


def test_columns_and_tags_are_known_names():
    assert "did you mean 'instruction'?" in chosen("alpaca", [], "x", {"instruktion": "q"}).fix
    assert "did you mean 'role_tag'?" in chosen("auto", [], "x", {}, {"roletag": "q"}).fix
    assert "did you mean 'alpaca'?" in chosen("alpacca", [], "x").fix
    assert "format text has none" in chosen("text", [], "x", {}, {"role_tag": "who"}).fix
    assert "no format has all" in chosen("auto", [], "x", {"completion": "a", "text": "b"}).what
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
