"""Every format becomes the documents its definition says, and a record that does not fit names its field."""

from __future__ import annotations

import json

import pytest

from meshtune.data.conversation import Conversation, Message, Origin, Text
from meshtune.data.formats import DOCUMENT_FORMATS
from meshtune.errors import UserError

ORIGIN = Origin("data.jsonl", 7)


def convert(name: str, record, columns=None, tags=None):
    form = DOCUMENT_FORMATS[name]
    return form.convert(record, form.resolve(columns or {}), tags or {}, ORIGIN)


def refuses(name: str, record, **options) -> UserError:
    with pytest.raises(UserError) as caught:
        convert(name, record, **options)
    assert caught.value.where.startswith("data.jsonl, record 7, field '")
    assert caught.value.fix
    return caught.value


def field(error: UserError) -> str:
    return error.where.split("field '")[1].removesuffix("'")


def turns(document) -> list[tuple[str, str]]:
    assert isinstance(document, Conversation)
    return [(message.role, message.content) for message in document.messages]


def sharegpt(*pairs: tuple[str, str], **fields):
    return {"conversations": [{"from": who, "value": text} for who, text in pairs]} | fields


def messages(*pairs: tuple[str, str], **fields):
    return {"messages": [{"role": who, "content": text} for who, text in pairs]} | fields


def test_alpaca_joins_instruction_and_input_after_system_and_history():
    record = {
        "instruction": "Add.",
        "input": "1 2",
        "output": "3",
        "system": "Be brief.",
        "history": [["hi", "hello"], ["you?", "fine"]],
    }
    assert turns(convert("alpaca", record)) == [
        ("system", "Be brief."),
        ("user", "hi"),
        ("assistant", "hello"),
        ("user", "you?"),
        ("assistant", "fine"),
        ("user", "Add.\n1 2"),
        ("assistant", "3"),
    ]
    assert turns(convert("alpaca", {"instruction": "Add.", "input": "", "output": "3"}))[0] == ("user", "Add.")
    assert turns(convert("alpaca", {"instruction": "", "input": "1 2", "output": "3"}))[0] == ("user", "1 2")


def test_alpaca_columns_rename_fields_under_our_names_and_llama_factorys():
    record = {"question": "q", "answer": "a"}
    for columns in ({"instruction": "question", "output": "answer"}, {"prompt": "question", "response": "answer"}):
        assert turns(convert("alpaca", record, columns)) == [("user", "q"), ("assistant", "a")]


@pytest.mark.parametrize(
    ("change", "at", "message"),
    [
        ({"output": ""}, "output", "empty"),
        ({"output": " \n"}, "output", "empty"),
        ({"output": None}, "output", "null"),
        ({"output": ["x"]}, "output", "expected text, found a list"),
        ({"output": 3}, "output", "expected text, found a number: 3"),
        ({"output": True}, "output", "true/false"),
        ({"instruction": ""}, "instruction", "empty"),
        ({"instruction": {"a": 1}}, "instruction", "an object"),
        ({"input": 5}, "input", "a number"),
        ({"system": 5}, "system", "a number"),
        ({"history": "x"}, "history", "expected a list of [user, assistant] pairs"),
        ({"history": [["a"]]}, "history[0]", "expected a pair"),
        ({"history": [["a", "b"], ["c", ""]]}, "history[1][1]", "empty"),
        ({"output": "\ud800"}, "output", "half of a character (\\ud800) at position 0"),
        ({"tools": "[{"}, "tools", "not JSON"),
    ],
)
def test_a_bad_alpaca_field_is_named(change, at, message):
    error = refuses("alpaca", {"instruction": "i", "input": "", "output": "o"} | change)
    assert field(error) == at
    assert message in error.what


def test_a_missing_field_lists_the_fields_of_the_record():
    error = refuses("alpaca", {"instruction": "i", "answer": "o"})
    assert field(error) == "output"
    assert "instruction, answer" in error.what


def test_sharegpt_turns_become_roles_and_tool_calls():
    call = {"name": "add", "arguments": {"x": [1, 2]}}
    record = sharegpt(
        ("system", "s"),
        ("human", "q"),
        ("function_call", json.dumps(call)),
        ("observation", "3"),
        ("gpt", "it is 3"),
        tools=json.dumps([{"name": "add", "parameters": {}}]),
    )
    document = convert("sharegpt", record)
    assert turns(document) == [
        ("system", "s"),
        ("user", "q"),
        ("assistant", ""),
        ("tool", "3"),
        ("assistant", "it is 3"),
    ]
    assert document.messages[2].tool_calls == ({"type": "function", "function": call},)
    assert document.tools == ({"type": "function", "function": {"name": "add", "parameters": {}}},)
    several = sharegpt(("human", "q"), ("function_call", json.dumps([call, call])))
    assert len(convert("sharegpt", several).messages[1].tool_calls) == 2


def test_sharegpt_tags_name_the_keys_and_roles():
    record = {"chat": [{"who": "me", "said": "q"}, {"who": "bot", "said": "a"}], "sys": "s"}
    tags = {"role_tag": "who", "content_tag": "said", "user_tag": "me", "assistant_tag": "bot"}
    document = convert("sharegpt", record, {"messages": "chat", "system": "sys"}, tags)
    assert turns(document) == [("system", "s"), ("user", "q"), ("assistant", "a")]


def test_sharegpt_understands_user_and_assistant_and_role_and_content():
    expected = [("user", "q"), ("assistant", "a")]
    assert turns(convert("sharegpt", sharegpt(("user", "q"), ("assistant", "a")))) == expected
    record = {"conversations": messages(("user", "q"), ("assistant", "a"))["messages"]}
    assert turns(convert("sharegpt", record)) == expected


@pytest.mark.parametrize(
    ("record", "at", "message"),
    [
        (sharegpt(("human", "q"), ("gpt", "")), "conversations[1].value", "empty"),
        (sharegpt(("human", "q")), "conversations[0]", "ends with human"),
        (sharegpt(("gpt", "a")), "conversations[0]", "'gpt' at the start, where user is expected"),
        (sharegpt(("human", "q"), ("human", "q")), "conversations[1]", "'human' after human, where assistant"),
        (sharegpt(("human", "q"), ("gpt", "a"), ("gpt", "b")), "conversations[2]", "'gpt' after gpt"),
        (sharegpt(("human", "q"), ("gpt", "a"), ("system", "s")), "conversations[2]", "wrong role order: 'system'"),
        (sharegpt(("human", "q"), ("observation", "a")), "conversations[1]", "'observation' after human"),
        (sharegpt(("humen", "q"), ("gpt", "a")), "conversations[0].from", 'unknown role "humen"'),
        (sharegpt(("human", "q"), ("function_call", "add(1)")), "conversations[1].value", "not JSON"),
        (sharegpt(("human", "q"), ("function_call", "[]")), "conversations[1].value", "empty"),
        (sharegpt(("human", "q"), ("function_call", '{"x": 1}')), "conversations[1].value.name", "no name"),
        (sharegpt(("human", 3), ("gpt", "a")), "conversations[0].value", "expected text, found a number: 3"),
        ({"conversations": [{"from": "human"}]}, "conversations[0].value", "the turn has no 'value'"),
        ({"conversations": ["hi"]}, "conversations[0]", "expected a turn, found text"),
        ({"conversations": []}, "conversations", "empty"),
        ({"conversations": "hi"}, "conversations", "expected a list of turns"),
        ({"messages": []}, "conversations", "missing"),
        (sharegpt(("human", "q"), ("gpt", "a"), tools=[3]), "tools[0]", "function schema"),
        (sharegpt(("system", "s"), ("human", "q"), ("gpt", "a"), system="t"), "system", "another as the first turn"),
    ],
)
def test_a_bad_sharegpt_field_is_named(record, at, message):
    error = refuses("sharegpt", record)
    assert field(error) == at
    assert message in error.what


def test_an_unknown_role_suggests_the_nearest():
    assert "did you mean 'human'?" in refuses("sharegpt", sharegpt(("humen", "q"), ("gpt", "a"))).fix
    assert "did you mean 'assistant'?" in refuses("messages", messages(("user", "q"), ("asistant", "a"))).fix


def test_messages_keep_weights_names_tool_calls_and_reasoning():
    call = {"id": "1", "type": "function", "function": {"name": "add", "arguments": '{"x": 1}'}}
    record = {
        "messages": [
            {"role": "developer", "content": "s"},
            {"role": "user", "name": "Ann", "content": [{"type": "text", "text": "q"}, {"type": "text", "text": "!"}]},
            {"role": "assistant", "content": None, "tool_calls": [call, call | {"id": "2"}], "weight": 0},
            {"role": "tool", "tool_call_id": "1", "content": "3"},
            {"role": "tool", "tool_call_id": "2", "content": ""},
            {"role": "assistant", "content": "it is 3", "reasoning_content": "hm", "weight": 1, "audio": None},
        ],
        "tools": [{"type": "function", "function": {"name": "add"}}],
    }
    parsed = {"id": "1", "type": "function", "function": {"name": "add", "arguments": {"x": 1}}}
    document = convert("messages", record)
    assert document.messages == (
        Message("system", "s"),
        Message("user", "q!", extra=(("name", "Ann"),)),
        Message("assistant", "", 0.0, (parsed, parsed | {"id": "2"})),
        Message("tool", "3", extra=(("tool_call_id", "1"),)),
        Message("tool", "", extra=(("tool_call_id", "2"),)),
        Message("assistant", "it is 3", 1.0, extra=(("reasoning_content", "hm"),)),
    )
    assert document.tools == tuple(record["tools"])


def test_message_parts_may_be_reasoning_and_tool_calls():
    record = {
        "messages": [
            {"role": "user", "content": [{"type": "text", "value": "q"}], "loss_weight": 0.0},
            {
                "role": "assistant",
                "content": [
                    {"type": "reasoning", "value": "hm"},
                    {"type": "tool_call", "value": '{"name": "add", "arguments": {}}'},
                ],
            },
        ]
    }
    first, second = convert("messages", record).messages
    assert first == Message("user", "q", 0.0)
    assert second.content == ""
    assert second.tool_calls == ({"type": "function", "function": {"name": "add", "arguments": {}}},)
    assert second.extra == (("reasoning_content", "hm"),)


def after_user(**turn):
    return {"messages": [{"role": "user", "content": "q"}, turn]}


@pytest.mark.parametrize(
    ("record", "at", "message"),
    [
        (messages(("user", "q"), ("assistant", "")), "messages[1].content", "empty"),
        (messages(("user", " "), ("assistant", "a")), "messages[0].content", "empty"),
        (messages(("user", "q"), ("assistant", "a"), ("user", "q")), "messages[2]", "ends with user"),
        (messages(("system", "s")), "messages[0]", "ends with system"),
        (messages(("assistant", "a")), "messages[0]", "'assistant' at the start"),
        (messages(("system", "s"), ("system", "s")), "messages[1]", "'system' after system, where user is expected"),
        (messages(("user", "q"), ("assistant", "a"), ("tool", "t")), "messages[2]", "'tool' after assistant"),
        (messages(("user", "q"), ("bot", "a")), "messages[1].role", 'unknown role "bot"'),
        (after_user(content="a"), "messages[1].role", "no role; its fields are: content"),
        (after_user(role="assistant"), "messages[1].content", "neither content nor tool_calls"),
        (after_user(role="assistant", content=None), "messages[1].content", "neither content nor tool_calls"),
        ({"messages": [{"role": "user"}]}, "messages[0].content", "no content"),
        (after_user(role="assistant", content="a", weight=-1), "messages[1].weight", ">= 0"),
        (after_user(role="assistant", content="a", weight=True), "messages[1].weight", "true/false"),
        (after_user(role="assistant", content="a", loss_weight="1"), "messages[1].loss_weight", "found text"),
        (after_user(role="assistant", tool_calls={"a": 1}), "messages[1].tool_calls", "expected a list"),
        (after_user(role="assistant", tool_calls=[{"function": {"name": "f", "arguments": "{"}}]),
         "messages[1].tool_calls[0].function.arguments", "not JSON"),
        (after_user(role="assistant", content=[{"type": "image_url"}]), "messages[1].content[0]", "image_url"),
        (after_user(role="assistant", content=[{"type": "poem"}]), "messages[1].content[0]", "not a text part"),
        ({"messages": [3]}, "messages[0]", "expected a message"),
        ({"messages": {}}, "messages", "expected a list of messages"),
    ],
)  # fmt: skip
def test_a_bad_message_is_named(record, at, message):
    error = refuses("messages", record)
    assert field(error) == at
    assert message in error.what


def test_prompt_and_completion_are_texts_or_messages():
    assert convert("prompt_completion", {"prompt": "p", "completion": "c"}) == Text("c", ORIGIN, prompt="p")
    head = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}, {"role": "user", "content": "c"}]
    tail = [{"role": "assistant", "content": "d"}]
    document = convert("prompt_completion", {"prompt": head, "completion": tail})
    assert [(message.role, message.weight) for message in document.messages] == [
        ("user", None),
        ("assistant", 0.0),
        ("user", None),
        ("assistant", None),
    ]
    assert convert("prompt_completion", {"prompt": head, "completion": "d"}) == document
    assert turns(convert("prompt_completion", {"prompt": "c", "completion": tail})) == [
        ("user", "c"),
        ("assistant", "d"),
    ]


@pytest.mark.parametrize(
    ("record", "at", "message"),
    [
        ({"prompt": "p", "completion": ""}, "completion", "empty"),
        ({"prompt": "", "completion": "c"}, "prompt", "empty"),
        ({"prompt": "p"}, "completion", "missing"),
        ({"prompt": "p", "completion": 4}, "completion", "a number"),
        ({"prompt": "p", "completion": [{"role": "user", "content": "x"}]}, "completion[0]", "begins with user"),
        ({"prompt": [], "completion": "c"}, "prompt", "empty"),
        (
            {"prompt": [{"role": "assistant", "content": "x"}], "completion": "c"},
            "prompt + completion[0]",
            "wrong role order",
        ),
    ],
)
def test_a_bad_prompt_or_completion_is_named(record, at, message):
    error = refuses("prompt_completion", record)
    assert field(error) == at
    assert message in error.what


def test_text_is_one_document_per_record():
    assert convert("text", {"text": "once"}) == Text("once", ORIGIN)
    assert convert("text", {"body": "once"}, {"text": "body"}) == Text("once", ORIGIN)
    assert field(refuses("text", {"text": " "})) == "text"
    assert "body" in refuses("text", {"body": "once"}).what


@pytest.mark.parametrize(
    ("name", "record", "fix"),
    [
        ("messages", {"messages": [{"role": "user", "contnet": "q"}]}, "rename 'contnet' to content"),
        (
            "messages",
            messages(("user", "q"))
            | {"messages": [{"role": "user", "content": "q"}, {"role": "assistant", "contnet": "a"}]},
            "rename 'contnet' to content",
        ),
        ("messages", {"messages": [{"rolle": "user", "content": "q"}]}, "rename 'rolle' to role"),
        ("sharegpt", {"conversations": [{"from": "human", "vlaue": "q"}]}, "rename 'vlaue' to value"),
        ("alpaca", {"instruction": "i", "ouput": "o"}, "did you mean 'ouput'"),
    ],
)
def test_a_misspelt_field_is_named(name, record, fix):
    assert refuses(name, record).fix.startswith(fix)


def test_a_system_prompt_that_is_given_twice_is_read_once():
    record = messages(("system", "s"), ("user", "q"), ("assistant", "a"), system="s")
    assert turns(convert("messages", record)) == [("system", "s"), ("user", "q"), ("assistant", "a")]
    assert "remove one of the two" in refuses("messages", record | {"system": "other"}).fix
