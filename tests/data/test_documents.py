"""Documents are checked once, split and mixed by the seed, and read when asked for."""

from __future__ import annotations

import json
import pickle

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from meshtune.config.sections import DataSection
from meshtune.data.checking import open_unchecked
from meshtune.data.conversation import Conversation, Text
from meshtune.data.documents import data_sources, load_documents
from meshtune.data.formats import FORMATS_BY_TYPE
from meshtune.errors import UserError

GOOD = {"instruction": "q", "output": "a"}


def write(path, records) -> str:
    path.write_text("".join((item if isinstance(item, str) else json.dumps(item)) + "\n" for item in records))
    return str(path)


def write_numbered(path, count: int, letter: str = "") -> str:
    return write(path, [{"text": f"{letter}{number}"} for number in range(count)])


def texts(documents) -> list[str]:
    return [document.text for document in documents]


def fails(seed: int = 0, **section) -> UserError:
    with pytest.raises(UserError) as caught:
        load_documents(DataSection(**section), seed=seed)
    return caught.value


def test_the_first_bad_record_is_named_with_file_record_line_field_and_format(tmp_path):
    path = write(tmp_path / "a.jsonl", [GOOD, GOOD, "", GOOD | {"output": ""}, GOOD | {"output": 3}])
    error = fails(train=[path])
    assert error.what == "the text is empty"
    assert error.where == f"{path}, record 2 (line 4), field 'output' (format alpaca)"
    assert "data.on_bad=skip" in error.fix


def test_malformed_json_is_named_with_its_line_and_record(tmp_path):
    path = write(tmp_path / "a.jsonl", [GOOD, '{"instruction": '])
    error = fails(train=[path])
    assert error.where.startswith(f"{path}, line 2, column ")
    assert "record 1" in error.where


def test_bad_records_are_skipped_counted_and_listed_when_asked(tmp_path):
    bad = [GOOD | {"output": ""}, '{"broken', "[1]", {"instruction": "q"}]
    path = write(tmp_path / "a.jsonl", [GOOD, *bad, GOOD])
    documents = load_documents(DataSection(train=[path], on_bad="skip"), seed=0)
    assert len(documents.train) == 2
    assert [skipped.origin for skipped in documents.skipped] == [f"{path}, record {index}" for index in (1, 2, 3, 4)]
    reasons = [skipped.reason for skipped in documents.skipped]
    assert reasons[0] == "field 'output': the text is empty"
    assert "malformed JSON" in reasons[1]
    assert "line 3" in reasons[1]
    assert "not an object, found a list" in reasons[2]
    assert "missing" in reasons[3]
    assert documents.train[1].origin.record == 5


def test_a_source_without_a_usable_record_is_an_error(tmp_path):
    path = write(tmp_path / "a.jsonl", [GOOD | {"output": ""}] * 3)
    error = fails(train=[path], on_bad="skip")
    assert "all 3 were skipped" in error.what
    assert "field 'output': the text is empty" in error.what
    assert error.where == path


def test_a_named_format_that_does_not_fit_names_record_and_field(tmp_path):
    path = write(tmp_path / "a.jsonl", [GOOD])
    error = fails(train=[{"path": path, "format": "messages"}])
    assert error.where == f"{path}, record 0 (line 1), field 'messages' (format messages)"
    assert "instruction, output" in error.what


def test_records_of_any_shape_are_documents_or_named_errors(tmp_path_factory):
    """Whatever JSON a file has, only UserError comes out, and it names the file."""
    folder = tmp_path_factory.mktemp("any")
    keys = st.sampled_from(
        ["instruction", "output", "conversations", "messages", "text", "prompt", "from", "role", "x"]
    )
    leaves = st.none() | st.integers() | st.text(max_size=3) | st.sampled_from(["user", "assistant", "human", "gpt"])
    values = st.recursive(
        leaves, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(keys, inner, max_size=3), max_leaves=8
    )

    @settings(max_examples=150, deadline=None, suppress_health_check=list(HealthCheck))
    @given(records=st.lists(st.dictionaries(keys, values, max_size=4) | values, min_size=1, max_size=3))
    def check(records):
        path = write(folder / "a.jsonl", [json.dumps(record) for record in records])
        try:
            documents = load_documents(DataSection(train=[path], on_bad="error"), seed=0)
        except UserError as error:
            assert path in error.where  # noqa: PT017
        else:
            assert len(documents.train) == len(records)
            assert all(isinstance(document, Conversation | Text) for document in documents.train)

    check()


def test_documents_are_read_by_index_slice_and_iteration(tmp_path):
    documents = load_documents(DataSection(train=[write_numbered(tmp_path / "a.jsonl", 10)]), seed=0)
    assert texts(documents.train) == [str(number) for number in range(10)]
    assert documents.train[-1].text == "9"
    assert texts(documents.train[2:4]) == ["2", "3"]
    assert documents.train.origin(4) == documents.train[4].origin
    with pytest.raises(IndexError):
        documents.train[10]
    assert documents.formats == {str(tmp_path / "a.jsonl"): "text"}


def test_documents_can_be_pickled(tmp_path):
    documents = load_documents(DataSection(train=[write_numbered(tmp_path / "a.jsonl", 4)]), seed=0)
    assert texts(pickle.loads(pickle.dumps(documents.train))) == texts(documents.train)


@pytest.mark.parametrize(("validation", "expected"), [(0.25, 10), (7, 7), (1, 1), (0.001, 1), (39, 39)])
def test_validation_is_held_out_by_share_or_number(tmp_path, validation, expected):
    path = write_numbered(tmp_path / "a.jsonl", 40)

    def split(seed):
        documents = load_documents(DataSection(train=[path], validation=validation), seed=seed)
        return texts(documents.train), texts(documents.validation)

    train, held_out = split(0)
    assert len(held_out) == expected
    assert sorted(train + held_out, key=int) == [str(number) for number in range(40)]
    assert split(0) == (train, held_out)
    assert split(1) != (train, held_out)


def test_validation_is_taken_from_every_source_in_proportion(tmp_path):
    sources = [
        write_numbered(tmp_path / "a.jsonl", 80, "a"),
        write_numbered(tmp_path / "b.jsonl", 20, "b"),
        write_numbered(tmp_path / "c.jsonl", 1, "c"),
    ]
    documents = load_documents(DataSection(train=sources, validation=10), seed=0)
    assert [sum(text[0] == letter for text in texts(documents.validation)) for letter in "abc"] == [8, 2, 0]
    assert "c0" in texts(documents.train)


def test_a_repeated_record_is_never_on_both_sides(tmp_path):
    sources = [
        {"path": write_numbered(tmp_path / "a.jsonl", 60, "a"), "weight": 1.0},
        {"path": write_numbered(tmp_path / "b.jsonl", 12, "b"), "weight": 1.0},
    ]
    for mixing in ("concat", "interleave_over", "interleave_under"):
        documents = load_documents(DataSection(train=sources, validation=0.25, mixing=mixing), seed=0)
        assert not set(texts(documents.train)) & set(texts(documents.validation))
        assert len(set(texts(documents.validation))) == len(documents.validation) == 18


def test_holding_out_everything_is_an_error(tmp_path):
    error = fails(train=[write_numbered(tmp_path / "a.jsonl", 4)], validation=4)
    assert "holding out 4 of 4 records" in error.what
    assert error.where == "data.validation"
    assert "hold out at most 3" in error.fix
    assert "a share of 0.5 of 1 record (" in fails(train=[write_numbered(tmp_path / "b.jsonl", 1)], validation=0.5).what


def test_validation_may_have_separate_sources(tmp_path):
    train, validation_file = write_numbered(tmp_path / "a.jsonl", 3, "a"), write_numbered(tmp_path / "b.jsonl", 9, "b")
    documents = load_documents(DataSection(train=[train], validation=[{"path": validation_file, "cap": 2}]), seed=0)
    assert texts(documents.validation) == ["b0", "b1"]
    assert len(documents.train) == 3
    error = fails(train=[train], validation=[{"path": validation_file, "weight": 2.0}])
    assert error.where == "data.validation[0].weight"


def test_a_cap_takes_the_first_usable_records_and_reads_no_further(tmp_path):
    path = write(tmp_path / "a.jsonl", [{"text": "a"}, {"text": ""}, {"text": "b"}, {"text": "c"}, "{broken"])
    documents = load_documents(DataSection(train=[{"path": path, "cap": 2}], on_bad="skip"), seed=0)
    assert texts(documents.train) == ["a", "b"]
    assert len(documents.skipped) == 1


def test_sources_are_mixed_by_weight(tmp_path):
    sources = [
        {"path": write_numbered(tmp_path / "a.jsonl", 30, "a"), "weight": 1.0},
        {"path": write_numbered(tmp_path / "b.jsonl", 10, "b"), "weight": 3.0},
    ]
    documents = texts(load_documents(DataSection(train=sources), seed=0).train)
    assert [sum(text[0] == letter for text in documents) for letter in "ab"] == [10, 30]


@pytest.mark.parametrize(
    ("file", "count", "form"),
    [
        ("fastchat/dummy_conversation.json", 500, "sharegpt"),
        ("llamafactory/v1_sft_demo.jsonl", 500, "messages"),
        ("llamafactory/reason_tool_use_demo_50.jsonl", 50, "messages"),
        ("llamafactory/wiki_demo.txt", 30, "text"),
        ("tinystories", 806, "text"),
    ],
)
def test_real_files_are_recognised_and_read_whole(shared, file, count, form):
    path = str(shared / "assets/data" / file)
    documents = load_documents(DataSection(train=[path]), seed=0)
    assert len(documents.train) == count
    assert documents.formats == {path: form}


def test_weights_and_reasoning_of_real_messages_arrive(shared):
    folder = shared / "assets/data/llamafactory"
    weighted = load_documents(DataSection(train=[str(folder / "v1_sft_demo.jsonl")]), seed=0).train
    assert {(item.role, item.weight) for document in weighted for item in document.messages} == {
        ("user", 0.0),
        ("assistant", 1.0),
    }
    tools = load_documents(DataSection(train=[str(folder / "reason_tool_use_demo_50.jsonl")]), seed=0).train
    calls = sum(len(item.tool_calls) for document in tools for item in document.messages)
    raw = (folder / "reason_tool_use_demo_50.jsonl").read_text()
    assert calls == raw.count('"type": "tool_call"') > 0


def test_preference_files_are_refused_and_can_be_read_as_text(shared):
    path = str(shared / "assets/data/hh-rlhf/harmless-base-test.jsonl.gz")
    assert "preference data (chosen and rejected)" in fails(train=[path]).what
    documents = load_documents(
        DataSection(train=[{"path": path, "format": "text", "columns": {"text": "chosen"}}]), seed=0
    )
    assert documents.train[0].text.startswith("\n\nHuman:")


@pytest.mark.parametrize(("kind", "name"), [(kind, name) for kind, forms in FORMATS_BY_TYPE.items() for name in forms])
def test_every_format_is_known_in_another_process(tmp_path, kind, name):
    (tmp_path / "a.jsonl").write_text('{"a": 1}')
    section = DataSection(train=[{"path": str(tmp_path / "a.jsonl"), "format": name}])
    (source,) = data_sources(section, section.train, kind)
    checked = open_unchecked(source, "error", 0, kind)
    copy = pickle.loads(pickle.dumps(checked))
    assert copy.format is checked.format
    assert copy.records[0] == {"a": 1}
