"""Tool calls and results in the forms in common use become the same messages; a malformed record names its field."""

from __future__ import annotations

import json

import pytest

from meshtune.data.conversation import Conversation, Message, Origin
from meshtune.data.formats import DOCUMENT_FORMATS, FORMATS_BY_TYPE
from meshtune.errors import UserError

ORIGIN = Origin("calls.jsonl", 7)
ADD = {
    "name": "add",
    "description": "Adds.",
    "parameters": {"type": "object", "properties": {"a": {"type": "integer"}}},
}
CALL = {"type": "function", "function": {"name": "add", "arguments": {"a": 1}}}


def convert(name, record):
    form = DOCUMENT_FORMATS[name]
    return form.convert(record, form.resolve({}), {}, ORIGIN)


def refuses(name, record) -> UserError:
    with pytest.raises(UserError) as caught:
        convert(name, record)
    assert caught.value.where.startswith("calls.jsonl, record 7, field '")
    assert caught.value.fix
    return caught.value


def field(error):
    return error.where.split("field '")[1].removesuffix("'")


REASON = (("reasoning_content", "Hm."),)
EXPECTED = Conversation(
    (
        Message("user", "Add 1."),
        Message("assistant", "", tool_calls=(CALL, CALL), extra=REASON),
        Message("tool", "[1]"),
        Message("tool", "[1]"),
        Message("assistant", "Done."),
    ),
    ORIGIN,
    ({"type": "function", "function": ADD},),
)
SHAREGPT = {
    "conversations": [
        {"from": "human", "value": "Add 1."},
        {"from": "function_call", "value": f"<think>\nHm.\n</think>\n\n{json.dumps([CALL['function']] * 2)}"},
        {"from": "observation", "value": "[1]"},
        {"from": "observation", "value": [1]},
        {"from": "gpt", "value": "Done."},
    ],
    "tools": json.dumps([ADD]),
}
OPENAI = {
    "messages": [
        {"role": "user", "content": "Add 1."},
        {
            "role": "assistant",
            "content": None,
            "reasoning_content": "Hm.",
            "tool_calls": [{"type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}] * 2,
        },
        {"role": "tool", "content": "[1]"},
        {"role": "tool", "content": "[1]"},
        {"role": "assistant", "content": "Done."},
    ],
    "tools": [{"type": "function", "function": ADD}],
}
CALL_PART = {"type": "tool_call", "value": '{"name": "add", "arguments": {"a": 1}}'}
PARTS = {
    "messages": [
        {"role": "user", "content": [{"type": "text", "value": "Add 1."}]},
        {"role": "assistant", "content": [{"type": "reasoning", "value": "Hm."}, CALL_PART, CALL_PART]},
        {"role": "tool", "content": [{"type": "text", "value": "[1]"}]},
        {"role": "tool", "content": [{"type": "text", "value": "[1]"}]},
        {"role": "assistant", "content": [{"type": "text", "value": "Done."}]},
    ],
    "tools": json.dumps([{"type": "function", "function": ADD}]),
}


@pytest.mark.parametrize(("name", "record"), [("sharegpt", SHAREGPT), ("messages", OPENAI), ("messages", PARTS)])
def test_every_form_of_calls_becomes_the_same_conversation(name, record):
    assert convert(name, record) == EXPECTED


def turns(*changes, tools=(ADD,)):
    """A record of messages with a call, changed."""
    messages = [
        {"role": "user", "content": "Add 1."},
        {"role": "assistant", "content": "", "tool_calls": [{"id": "c1", **CALL}]},
        {"role": "tool", "tool_call_id": "c1", "content": "1"},
        {"role": "assistant", "content": "Done."},
    ]
    for index, change in changes:
        messages[index] = messages[index] | change
    return {"messages": messages, "tools": list(tools) if isinstance(tools, tuple) else tools}


@pytest.mark.parametrize(
    ("record", "at", "message"),
    [
        (turns((1, {"tool_calls": [{"function": {"name": "sub", "arguments": {}}}]})), "messages[1]",
         "a call of 'sub', which the record does not declare"),
        (turns((2, {"tool_call_id": "c2"})), "messages[2].tool_call_id", "a result of the call 'c2'"),
        (turns((1, {"tool_calls": None, "content": "No."})), "messages[2]", "'tool' after assistant"),
        (turns((1, {"tool_calls": [{"function": {"name": "add", "arguments": "{a: 1}"}}]})),
         "messages[1].tool_calls[0].function.arguments", "not JSON"),
        (turns((1, {"tool_calls": [{"function": {"name": "add", "arguments": "[1]"}}]})),
         "messages[1].tool_calls[0].function.arguments", "expected an object of arguments"),
        (turns(tools={"add": ADD}), "tools", "expected a list of tools"),
        (turns(tools="add(a)"), "tools", "not JSON"),
        (turns(tools=("add",)), "tools[0]", "not JSON"),
        (turns(tools=(3,)), "tools[0]", "expected a function schema"),
        (turns(tools=(ADD, ADD)), "tools[1].name", "a second tool of the name 'add'"),
        (turns() | {"functions": [ADD]}, "functions", "the record has tools, and functions as well"),
        (turns(tools=()) | {"chat_template_kwargs": {"tools": [ADD]}}, "chat_template_kwargs.tools",
         "not a variable of a chat template"),
        (turns((1, {"tool_calls": [{"function": {"name": "add", "arguments": '{"a": NaN}'}}]})),
         "messages[1].tool_calls[0].function.arguments", "NaN or infinite"),
        (turns((1, {"tool_calls": [{"id": 1, **CALL}]})), "messages[1].tool_calls[0].id", "as text, found a number: 1"),
        (turns((2, {"tool_call_id": 1})), "messages[2].tool_call_id", "as text, found a number: 1"),
        (turns((1, {"tool_calls": [{"id": "c1", **CALL}] * 2})), "messages[1]",
         "two calls of the turn have the id 'c1'"),
        (turns((1, {"tool_calls": [{"id": "c1", **CALL}, {"id": "c2", **CALL}]})), "messages[1]",
         "no result of the call c2"),
        (turns((1, {"tool_calls": [{"id": "c1", **CALL}]}), (2, {"role": "assistant", "content": "Done."})),
         "messages[2]", "'assistant' after assistant, where tool is expected"),
        (turns(tools=({"description": "Adds."},)), "tools[0].name", "no name"),
        (turns(tools=({"name": "add", "parameters": "a: integer"},)), "tools[0].parameters", "expected a JSON schema"),
    ],
)  # fmt: skip
def test_bad_tool_data_are_refused_with_their_field(record, at, message):
    error = refuses("messages", record)
    assert field(error) == at
    assert message in error.what


def test_a_misspelt_tool_calls_is_named():
    calls = [{"function": {"name": "add", "arguments": "{}"}}]
    error = refuses("messages", turns((1, {"tool_calls": None, "tool_call": calls})))
    assert error.fix == "rename 'tool_call' to tool_calls"


def test_an_undeclared_tool_is_refused_with_the_nearest_declared_one():
    record = turns((1, {"tool_calls": [{"function": {"name": "ad", "arguments": {}}}]}))
    assert "did you mean 'add'" in refuses("messages", record).fix


def sharegpt(*pairs, tools=(ADD,)):
    return {"conversations": [{"from": role, "value": value} for role, value in pairs], "tools": json.dumps(tools)}


def test_sharegpt_results_need_a_call():
    call = json.dumps(CALL["function"])
    twice = sharegpt(("human", "q"), ("function_call", call), ("observation", "1"), ("observation", "1"), ("gpt", "a"))
    error = refuses("sharegpt", twice)
    assert (field(error), error.what) == ("conversations[3]", "more results than calls")
    without = sharegpt(("human", "q"), ("observation", "1"), ("gpt", "a"))
    assert "'observation' after human" in refuses("sharegpt", without).what
    in_text = sharegpt(("human", "q"), ("gpt", f"<tool_call>{call}</tool_call>"), ("observation", "1"), ("gpt", "a"))
    assert len(convert("sharegpt", in_text).messages) == 4
    assert "sub" in refuses("sharegpt", sharegpt(("human", "q"), ("function_call", '{"name": "sub"}'))).what


def test_calls_are_free_where_a_record_declares_no_tools():
    assert convert("messages", turns(tools=())).messages[1].tool_calls[0]["function"]["name"] == "add"


def test_real_reasoning_before_calls_is_read(shared):
    lines = (shared / "assets/data/llamafactory/reason_tool_use_demo_50.jsonl").read_text().splitlines()
    documents = [convert("messages", json.loads(line)) for line in lines]
    calls = [message for document in documents for message in document.messages if message.tool_calls]
    assert len(calls) == 53
    assert sum(len(message.tool_calls) > 1 for message in calls) == 12
    assert all(dict(message.extra)["reasoning_content"] for message in calls)


def test_results_follow_in_the_order_of_their_calls_which_most_templates_write_without_ids():
    calls = [{"id": id_, "function": {"name": "add", "arguments": {"a": n}}} for n, id_ in enumerate("abc")]
    record = turns((1, {"tool_calls": calls}))
    results = [{"role": "tool", "tool_call_id": id_, "content": f"of {id_}"} for id_ in "cab"]
    record["messages"][2:3] = results
    assert [message.content for message in convert("messages", record).messages[2:5]] == ["of a", "of b", "of c"]
    by_name = turns((1, {"tool_calls": [{"function": {"name": name}} for name in ("add", "now")]}), tools=())
    by_name["messages"][2:3] = [{"role": "tool", "name": name, "content": f"of {name}"} for name in ("now", "add")]
    assert [message.content for message in convert("messages", by_name).messages[2:4]] == ["of add", "of now"]


def test_one_result_without_an_id_may_hold_those_of_all_calls():
    calls = [{"id": id_, **CALL} for id_ in "ab"]
    record = turns((1, {"tool_calls": calls}), (2, {"tool_call_id": None, "content": "[1, 1]"}))
    assert len(convert("messages", record).messages) == 4
    assert len(convert("messages", {**record, "messages": record["messages"][:2]}).messages) == 2  # a call at the end


@pytest.mark.parametrize(
    "change",
    [
        {"tools": json.dumps([ADD])},
        {"tools": [json.dumps(ADD)]},
        {"tools": None, "functions": [ADD]},
    ],
)
def test_tools_are_read_as_text_and_in_the_older_field(change):
    assert convert("messages", turns() | change) == convert("messages", turns())


def test_calls_and_results_are_read_as_json_text_and_objects():
    text = turns((1, {"tool_calls": json.dumps([{"id": "c1", **CALL}])}), (2, {"content": {"sum": 1}}))
    expected = turns((2, {"content": '{"sum": 1}'}))
    assert convert("messages", text) == convert("messages", expected)


def test_parameters_that_are_described_by_name_become_a_json_schema():
    """In the words of xLAM's data; what Python's types mean is JSON Schema's own specification."""
    described = {
        "type": {"type": "str", "description": "Which."},
        "n": {"type": "int, optional", "default": 3},
        "ids": {"type": "List[float]"},
        "point": {"type": "Tuple[float, float]"},
        "to": {"type": "Callable", "required": False},
    }
    (tool,) = convert("messages", turns(tools=({"name": "add", "parameters": described},))).tools
    assert tool["function"]["parameters"] == {
        "type": "object",
        "properties": {
            "type": {"type": "string", "description": "Which."},
            "n": {"type": "integer", "default": 3},
            "ids": {"type": "array", "items": {"type": "number"}},
            "point": {"type": "array"},
            "to": {"type": "Callable"},
        },
        "required": ["type", "ids", "point"],
    }
    schema = {"type": "object", "properties": {"type": {"type": "string"}}}
    (declared,) = convert("messages", turns(tools=({"name": "add", "parameters": schema},))).tools
    assert declared["function"]["parameters"] == schema


NONE_SUCH = {"role": "assistant", "content": None, "tool_calls": [{"function": {"name": "sub", "arguments": {}}}]}
GOOD = {"role": "assistant", "content": None, "tool_calls": [CALL]}
QUESTION = {"role": "user", "content": "Add 1."}
CALLS = {role: {"from": "function_call", "value": json.dumps(message["tool_calls"][0]["function"])}
         for role, message in (("good", GOOD), ("bad", NONE_SUCH))}  # fmt: skip


def convert_record(kind, name, record):
    form = FORMATS_BY_TYPE[kind][name]
    return form.convert(record, form.resolve({}), {}, ORIGIN)


@pytest.mark.parametrize(
    ("name", "record", "good", "bad"),
    [
        ("preference", {"prompt": [QUESTION]}, [GOOD], [NONE_SUCH]),
        ("messages", {"messages": [QUESTION]}, GOOD, NONE_SUCH),
        ("sharegpt", {"conversations": [{"from": "human", "value": "Add 1."}]}, CALLS["good"], CALLS["bad"]),
    ],
)
def test_a_rejected_answer_may_call_a_tool_that_does_not_exist_and_a_chosen_one_not(name, record, good, bad):
    record = record | {"tools": [ADD]}
    pair = convert_record("pairs", name, record | {"chosen": good, "rejected": bad})
    assert [side.messages[-1].tool_calls[0]["function"]["name"] for side in (pair.chosen, pair.rejected)] == [
        "add",
        "sub",
    ]
    assert pair.chosen.tools == pair.rejected.tools == ({"type": "function", "function": ADD},)
    with pytest.raises(UserError, match="a call of 'sub', which the record does not declare"):
        convert_record("pairs", name, record | {"chosen": bad, "rejected": good})


@pytest.mark.parametrize(
    ("name", "record"),
    [
        ("messages", {"messages": [QUESTION, NONE_SUCH]}),
        ("sharegpt", {"conversations": [{"from": "human", "value": "Add 1."}, CALLS["bad"]]}),
    ],
)
def test_an_answer_labelled_bad_may_call_a_tool_that_does_not_exist_and_a_good_one_not(name, record):
    record = record | {"tools": [ADD]}
    assert convert_record("labelled", name, record | {"label": False}).document.messages[-1].tool_calls
    with pytest.raises(UserError, match="a call of 'sub', which the record does not declare"):
        convert_record("labelled", name, record | {"label": True})
