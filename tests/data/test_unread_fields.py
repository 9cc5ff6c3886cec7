"""A field that means something elsewhere is read by every format, or refused by name with a way out that works."""

from __future__ import annotations

import json
import re

import pytest
import yaml

from data.stock_templates import tokenizer_of
from meshtune.config.data_options import LossPolicy
from meshtune.config.sections import DataSection
from meshtune.data.chat import ChatTemplate
from meshtune.data.conversation import Conversation, Labelled, Origin, Pair, PlacedPicture
from meshtune.data.documents import load_documents
from meshtune.data.formats import FORMATS_BY_TYPE, select_format
from meshtune.data.formats.pictures import place_pictures
from meshtune.data.formats.record import FIELDS, TURN_FIELDS, read_record
from meshtune.data.masks import mask_conversation
from meshtune.errors import UserError

ORIGIN = Origin("data.jsonl", 7)
QUESTION, ANSWER, WORSE = ({"role": role, "content": text} for role, text in
                          (("user", "quid"), ("assistant", "respondeo"), ("assistant", "nescio")))  # fmt: skip
TURNS = [{"from": "human", "value": "quid"}, {"from": "gpt", "value": "respondeo"}]
TOOL = {"type": "function", "function": {"name": "adde", "parameters": {"type": "object", "properties": {}}}}
SIDES = {"chosen": "respondeo", "rejected": "nescio"}
RECORDS = {
    "documents": {
        "alpaca": [{"instruction": "quid", "output": "respondeo"}],
        "sharegpt": [{"conversations": TURNS}],
        "hermes": [{"conversations": TURNS}],
        "messages": [{"messages": [QUESTION, ANSWER]}],
        "prompt_completion": [
            {"prompt": "quid", "completion": "respondeo"},
            {"prompt": [QUESTION], "completion": [ANSWER]},
        ],
        "text": [{"text": "respondeo"}],
        "stanford_alpaca": [{"instruction": "quid", "output": "respondeo"}],
        "xlam": [{"query": "quid", "answers": [{"name": "adde", "arguments": {}}], "tools": [TOOL]}],
    },
    "pairs": {
        "alpaca": [{"instruction": "quid", **SIDES}],
        "sharegpt": [{"conversations": TURNS[:1], "chosen": TURNS[1], "rejected": {"from": "gpt", "value": "nescio"}}],
        "messages": [{"messages": [QUESTION], "chosen": ANSWER, "rejected": WORSE}],
        "preference": [
            {"prompt": "quid", **SIDES},
            {"prompt": [QUESTION], "chosen": [ANSWER], "rejected": [WORSE]},
            {"chosen": [QUESTION, ANSWER], "rejected": [QUESTION, WORSE]},
        ],
        "openai": [{"input": {"messages": [QUESTION]}, "preferred_output": [ANSWER], "non_preferred_output": [WORSE]}],
        "hh": [{side: f"\n\nHuman: quid\n\nAssistant: {text}" for side, text in SIDES.items()}],
    },
}
RECORDS["labelled"] = {
    name: [{**record, "label": True} for record in RECORDS["documents"][name]] for name in FORMATS_BY_TYPE["labelled"]
}
FORMATS = [(kind, name) for kind, formats in RECORDS.items() for name in formats]
VALUES = {
    **{name: ["a"] for name in FIELDS},
    "system": "Brevis esto.",
    "system_prompt": "Brevis esto.",
    "tools": [TOOL],
    "functions": [TOOL["function"]],
    "chat_template_kwargs": {"enable_thinking": False},
    "history": [["a", "b"]],
    "label": False,
    "kto_tag": False,
    "rejected_response": "nescio",
    "mask": "User",
    **dict.fromkeys(("weight", "loss_weight", "loss_scale", "loss", "train", "training", "trainable"), False),
}
EMPTY = [None, "", [], {}, "[]", [None], {"a": None}]


def read(kind, name, record, columns=None):
    """The sample of a record, as the recipe's `format` and `columns` have it read."""
    form = select_format(name, [], "data.jsonl", columns or {}, {}, kind)
    fields = form.resolve(columns or {})
    return place_pictures(read_record(form, record, fields, {}, ORIGIN), record, fields, ORIGIN)


def documents_of(sample):
    match sample:
        case Pair():
            return [sample.chosen, sample.rejected]
        case Labelled():
            return [sample.document]
        case _:
            return [sample]


def has_read(sample, field):
    """Whether all documents of a sample have what the field says."""
    if field == "label":
        return isinstance(sample, Labelled)
    documents = documents_of(sample)
    if not all(isinstance(document, Conversation) for document in documents):
        return False
    match field:
        case "system":
            return all(document.messages[0].content == VALUES["system"] for document in documents)
        case "tools" | "functions":
            return all(document.tools[0]["function"]["name"] == "adde" for document in documents)
        case "chat_template_kwargs":
            return all(document.variables == VALUES[field] for document in documents)
        case "history":
            return all(document.messages[0].content == "a" for document in documents)
        case "images" | "image":
            return all(document.messages[0].pictures == (PlacedPicture(0, "a"),) for document in documents)
        case _:
            return False


def fixes_of(fix):
    """(stage's kind or None, format or None, columns) of each remedy in the text of a fix."""
    for part in fix.split("; or "):
        columns = re.search(r"columns: (\{.*?\})", part)
        form = re.search(r"format: (\w+)", part)
        kind = "labelled" if "stage: kto" in part else None
        if columns or form or kind:
            yield kind, form and form[1], yaml.safe_load(columns[1]) if columns else {}


def test_every_format_is_tried():
    assert {kind: set(formats) for kind, formats in RECORDS.items()} == {
        kind: set(formats)
        for kind, formats in FORMATS_BY_TYPE.items()
        if kind != "prompts"  # whose further fields are columns for rewards
    }


@pytest.mark.parametrize("field", FIELDS)
@pytest.mark.parametrize(("kind", "name"), FORMATS)
def test_a_field_is_read_or_refused_with_ways_out_that_work(kind, name, field):
    for base in RECORDS[kind][name]:
        if field in base and field != "label":
            continue
        record = {**base, field: VALUES[field]}
        try:
            sample = read(kind, name, record)
        except UserError as error:
            problem = error
        else:
            assert has_read(sample, field)
            continue
        assert f"'{field}'" in problem.where
        fixes = list(fixes_of(problem.fix))
        assert fixes or problem.fix == "remove one of label and kto_tag"
        for other_kind, form, columns in fixes:
            fixed = read(other_kind or kind, form or name, record, columns)
            if None not in columns.values():
                meaning = {"system_prompt": "system", "kto_tag": "label"}.get(field, field)
                assert has_read(fixed, meaning)


@pytest.mark.parametrize(("kind", "name"), FORMATS)
def test_empty_fields_are_no_fault(kind, name):
    for base in RECORDS[kind][name]:
        expected = read(kind, name, base)
        for empty in EMPTY:
            fields = {key: empty for key in FIELDS if key not in base and not (key == "system" and empty)}
            fields = {key: value for key, value in fields.items() if key not in ("tools", "functions") or value != {}}
            assert read(kind, name, {**base, **fields}) == expected


CHAT = [(k, n) for k, n in FORMATS if n in ("sharegpt", "messages", "preference", "openai")]
SWITCHES = [
    ("loss", False),
    ("train", False),
    ("training", 0),
    ("trainable", False),
    ("weight", 0),
    ("loss_weight", 0.0),
]


def with_turn_field(record, field, value):
    """The record with a field added to its last answers."""
    record = json.loads(json.dumps(record))
    for key in (
        "conversations",
        "messages",
        "chosen",
        "rejected",
        "completion",
        "preferred_output",
        "non_preferred_output",
    ):
        turns = record.get(key)
        turns = [turns] if isinstance(turns, dict) else turns
        for turn in turns if isinstance(turns, list) else ():
            if turn.get("role") == "assistant" or turn.get("from") == "gpt":
                turn[field] = value
    return record


@pytest.mark.parametrize(("field", "value"), SWITCHES)
@pytest.mark.parametrize(("kind", "name"), CHAT)
def test_a_turn_that_is_not_to_be_trained_on_has_no_weight(kind, name, field, value):
    base = RECORDS[kind][name][-1]
    for document in documents_of(read(kind, name, with_turn_field(base, field, value))):
        assert document.messages[-1].weight == 0
        assert not document.messages[-1].extra
    for document in documents_of(read(kind, name, with_turn_field(base, field, None))):
        assert document.messages[-1].weight is None


@pytest.mark.parametrize("field", TURN_FIELDS)
@pytest.mark.parametrize(("kind", "name"), CHAT)
def test_a_field_of_a_turn_that_cannot_be_read_is_named(kind, name, field):
    with pytest.raises(UserError) as caught:
        read(kind, name, with_turn_field(RECORDS[kind][name][-1], field, [1]))
    assert caught.value.where.endswith(f".{field}'")
    assert read(kind, name, with_turn_field(RECORDS[kind][name][-1], field, None))


def test_switches_are_true_or_false_and_do_not_contradict_each_other():
    base = RECORDS["documents"]["messages"][0]
    for record, message in (
        (with_turn_field(base, "loss", "no"), "expected true or false"),
        (with_turn_field(with_turn_field(base, "loss", True), "weight", 0), "contradict each other"),
    ):
        with pytest.raises(UserError, match=message):
            read("documents", "messages", record)
    (document,) = documents_of(read("documents", "messages", with_turn_field(base, "train", True)))
    assert document.messages[-1].weight == 1


@pytest.mark.parametrize("field", ["tool_calls", "reasoning_content", "tool_call_id"])
def test_what_turns_of_sharegpt_cannot_hold_is_read_by_messages(field):
    turns = [QUESTION, {**ANSWER, "reasoning_content": "cogito"}]
    if field != "reasoning_content":
        call = {"id": "c", "function": {"name": "adde", "arguments": {}}}
        turns = [QUESTION, {"role": "assistant", "content": "", "tool_calls": [call]}]
        turns += [{"role": "tool", "tool_call_id": "c", "content": "3"}, ANSWER]
    record = {"conversations": turns}
    if field == "tool_call_id":
        del turns[1]["tool_calls"]
    with pytest.raises(UserError) as caught:
        read("documents", "sharegpt", record)
    assert caught.value.where.endswith(f".{field}'") or field == "tool_call_id"
    if field != "tool_call_id":
        ((_, form, columns),) = fixes_of(caught.value.fix.replace("set ", ""))
        assert read("documents", form, record, columns).messages[1].tool_calls or field == "reasoning_content"


@pytest.mark.parametrize("thinking", [True, False])
def test_variables_of_a_record_are_rendered_as_transformers_does(shared, thinking):
    for name in ("HuggingFaceTB-SmolLM3-3B", "Qwen-Qwen3-0.6B"):
        tokenizer = tokenizer_of(name, shared)
        record = {
            "messages": [QUESTION, ANSWER, QUESTION, ANSWER],
            "chat_template_kwargs": {"enable_thinking": thinking},
        }
        document = read("documents", "messages", record)
        masked = mask_conversation(ChatTemplate(tokenizer), document)
        expected = tokenizer.apply_chat_template(record["messages"], tokenize=False, enable_thinking=thinking)
        assert masked.text == expected
        prompt = tokenizer.apply_chat_template(
            record["messages"][:-1], tokenize=False, enable_thinking=thinking, add_generation_prompt=True
        )
        assert masked.spans[-1][0] == len(prompt)


def test_a_variable_that_the_template_does_not_read_is_refused(shared, tmp_path):
    record = {"messages": [QUESTION, ANSWER], "chat_template_kwargs": {"enable_thinking": False, "other": None}}
    chat = ChatTemplate(tokenizer_of("SmolLM2", shared))
    with pytest.raises(UserError, match=r"does not read chat_template_kwargs of the record: enable_thinking") as caught:
        mask_conversation(chat, read("documents", "messages", record), LossPolicy())
    ((_, _, columns),) = fixes_of(caught.value.fix)
    assert mask_conversation(chat, read("documents", "messages", record, columns))


def test_fields_of_turns_that_are_not_read_are_listed(tmp_path):
    file = tmp_path / "made.jsonl"
    turns = [
        {"role": "user", "content": "q"},
        {"role": "assistant", "content": "a", "thought": "cogito", "refusal": None},
    ]
    file.write_text(json.dumps({"messages": turns}))
    section = DataSection.model_validate({"train": str(file)})
    assert load_documents(section, seed=0).unread == {str(file): ("messages[].thought",)}


def test_other_fields_are_listed_once(tmp_path):
    file = tmp_path / "made.jsonl"
    records = [{**RECORDS["documents"]["messages"][0], "id": n, "images": [], f"field{n}": 1} for n in range(3)]
    file.write_text("\n".join(map(json.dumps, records)))
    section = DataSection.model_validate({"train": [{"path": str(file)}], "validation": 1})
    assert load_documents(section, seed=0).unread == {str(file): ("field0", "field1", "field2", "id")}
