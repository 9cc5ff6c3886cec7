"""Data of Hermes and xLAM become OpenAI's messages: calls as text, tools in the system prompt, calls without turns."""

from __future__ import annotations

import json

import pytest

from data.stock_templates import encode_conversation, learned_pieces, tokenizer_of
from meshtune.config.sections import DataSection
from meshtune.data.conversation import Conversation, Message
from meshtune.data.documents import load_documents
from meshtune.errors import UserError

TOOL = {"type": "function", "function": {"name": "weather", "parameters": {"type": "object", "properties": {}}}}
CALL = {"type": "function", "function": {"name": "weather", "arguments": {"city": "Porto"}}}
WEATHER_CALL = {"type": "function", "function": {"name": "weather", "arguments": {"city": "Turin"}}}
PROMPT = (
    "You may call functions. Here are they: <tools> {tools} </tools> For each call return an object:\n"
    "<tool_call>\n{{'arguments': <args-dict>, 'name': <function-name>}}\n</tool_call>"
)
TURNS = [
    {"from": "human", "value": "Which is warmer?"},
    {
        "from": "gpt",
        "value": "Let me see.\n<tool_call>\n{'arguments': {'city': 'Porto'}, 'name': 'weather'}\n</tool_call>\n"
        '<tool_call>\n{"name": "weather", "arguments": {"city": "Turin"}}\n</tool_call>\n',
    },
    {"from": "tool", "value": "<tool_response>\n21\n</tool_response>\n<tool_response>\n17\n</tool_response>\n"},
    {"from": "gpt", "value": "Porto."},
]
READ = (
    Message("user", "Which is warmer?"),
    Message("assistant", "Let me see.", tool_calls=(CALL, WEATHER_CALL)),
    Message("tool", "21"),
    Message("tool", "17"),
    Message("assistant", "Porto."),
)


def read(tmp_path, record, **source):
    file = tmp_path / "calls.jsonl"
    file.write_text(json.dumps(record))
    section = DataSection.model_validate({"train": {"path": str(file), **source}})
    return load_documents(section, seed=0).train[0]


def system(tools):
    return {"from": "system", "value": PROMPT.format(tools=tools)}


@pytest.mark.parametrize(
    "record",
    [
        {"conversations": [system(json.dumps([TOOL])), *TURNS], "tools": json.dumps([TOOL])},
        {"conversations": [system(json.dumps([TOOL])), *TURNS]},
        {"conversations": [system(str([TOOL])), *TURNS], "tools": None},
        {"conversations": [system(json.dumps(TOOL)), *TURNS], "tools": ""},
        {"conversations": TURNS, "system": PROMPT.format(tools=json.dumps(TOOL))},
        {"conversations": [{"role": turn["from"], "content": turn["value"]} for turn in TURNS], "tools": [TOOL]},
    ],
)
def test_hermes_records_become_messages_with_calls_and_the_tools_of_the_prompt(tmp_path, record):
    document = read(tmp_path, record, format="hermes")
    assert isinstance(document, Conversation)
    assert (document.messages, document.tools) == (READ, (TOOL,))


def test_calls_in_the_text_of_sharegpt_and_messages_are_calls_where_the_record_declares_tools(tmp_path):
    roles = {"human": "user", "gpt": "assistant", "tool": "user"}  # a result as a user's turn, as templates write it
    messages = [{"role": roles[turn["from"]], "content": turn["value"]} for turn in TURNS]
    assert read(tmp_path, {"conversations": TURNS, "tools": [TOOL]}).messages == READ
    assert read(tmp_path, {"messages": messages, "tools": [TOOL]}).messages == READ
    text = read(tmp_path, {"messages": messages})
    assert [(message.content, message.tool_calls) for message in text.messages] == [
        (message["content"], ()) for message in messages
    ]


@pytest.mark.parametrize(
    "text", ["Write <tool_call> before it.", "<tool_call>\n{}\n</tool_call> is a call.", "<tool_call>x"]
)
def test_text_about_calls_stays_text(tmp_path, text):
    turns = [TURNS[0], {"from": "gpt", "value": text}]
    assert read(tmp_path, {"conversations": turns, "tools": [TOOL]}).messages[1] == Message("assistant", text)


def test_tools_in_the_prompt_and_in_a_field_are_refused_unless_hermes_is_named(tmp_path):
    record = {"conversations": [system(json.dumps([TOOL])), *TURNS], "tools": json.dumps([TOOL])}
    with pytest.raises(UserError, match=r"declares tools too[\s\S]*record 0[\s\S]*conversations[\s\S]*format: hermes"):
        read(tmp_path, record)
    as_it_is = read(tmp_path, record, columns={"tools": None})
    assert as_it_is.messages[2] == Message("assistant", TURNS[1]["value"])
    assert as_it_is.tools == ()


@pytest.mark.parametrize(
    ("value", "at", "message"),
    [
        ("<tool_call>\n{name: weather}\n</tool_call>", "conversations[1]", "the call in <tool_call>: not JSON"),
        ('<tool_call>{"name": "wether"}</tool_call>', "conversations[1]", "which the record does not declare"),
        ('<tool_call>{"arguments": {}}</tool_call>', "conversations[1].name", "has no name"),
    ],
)
def test_bad_calls_in_text_are_refused(tmp_path, value, at, message):
    with pytest.raises(UserError) as caught:
        read(tmp_path, {"conversations": [TURNS[0], {"from": "gpt", "value": value}], "tools": [TOOL]})
    assert f"field '{at}'" in str(caught.value.where)
    assert message in caught.value.what


def test_tools_of_a_prompt_that_are_no_json_are_refused(tmp_path):
    with pytest.raises(UserError, match="the tools in <tools>: not JSON"):
        read(tmp_path, {"conversations": [system("[weather(city)]"), *TURNS]}, format="hermes")


XLAM = {
    "id": 3,
    "query": "Which is warmer?",
    "answers": json.dumps([CALL["function"], WEATHER_CALL["function"]]),
    "tools": json.dumps([{"name": "weather", "parameters": {"city": {"type": "str", "description": "Where."}}}]),
}


def test_xlam_records_are_a_question_and_its_calls(tmp_path):
    document = read(tmp_path, XLAM)
    assert document.messages == (
        Message("user", XLAM["query"]),
        Message("assistant", "", tool_calls=(CALL, WEATHER_CALL)),
    )
    schema = {
        "type": "object",
        "properties": {"city": {"type": "string", "description": "Where."}},
        "required": ["city"],
    }
    assert document.tools[0]["function"] == {"name": "weather", "parameters": schema}
    objects = {key: json.loads(XLAM[key]) for key in ("answers", "tools")}
    assert read(tmp_path, XLAM | objects).messages == document.messages


@pytest.mark.parametrize(
    ("change", "at", "message"),
    [
        ({"answers": "[]"}, "answers", "expected a list of calls"),
        ({"answers": None}, "answers", "null"),
        ({"answers": "weather()"}, "answers", "not JSON"),
        ({"answers": [{"name": "rain"}]}, "answers[1]", "a call of 'rain', which the record does not declare"),
        ({"query": ""}, "query", "empty"),
    ],
)
def test_bad_xlam_records_are_refused(tmp_path, change, at, message):
    with pytest.raises(UserError) as caught:
        read(tmp_path, XLAM | change)
    assert f"field '{at}'" in str(caught.value.where)
    assert message in caught.value.what


def test_what_is_trained_on_of_hermes_is_the_calls_in_the_templates_form(tmp_path, shared):
    record = {"conversations": [system(json.dumps([TOOL])), *TURNS], "tools": json.dumps([TOOL])}
    tokenizer = tokenizer_of("Qwen-Qwen2.5-7B-Instruct", shared)
    example, _ = encode_conversation(tokenizer, read(tmp_path, record, format="hermes"))
    calls = [
        f'<tool_call>\n{{"name": "weather", "arguments": {{"city": "{c}"}}}}\n</tool_call>' for c in ("Porto", "Turin")
    ]
    assert learned_pieces(tokenizer, example) == ["\n".join(["Let me see.", *calls]) + "<|im_end|>", "Porto.<|im_end|>"]
    text = tokenizer.decode(example.ids.tolist())
    assert text.count("<tools>") == 2  # the template's sentence about the tags, and the tools
    assert text.count("<tool_response>") == 2
