"""Tools over a real socket with OpenAI's client; the model is a tiny random one under published templates."""

from __future__ import annotations

import json

import openai
import pytest
from random_model import save_random_model
from serving import TOKEN, serving

from meshtune.generate.api import load
from meshtune.serve.models import Models

ASK = [{"role": "user", "content": "What is the weather in Oslo?"}]
WEATHER = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "The weather of a city.",
        "parameters": {
            "type": "object",
            "properties": {
                "city": {"type": "string", "maxLength": 10},
                "days": {"$ref": "#/$defs/Days"},
            },
            "required": ["city", "days"],
            "additionalProperties": False,
            "$defs": {"Days": {"type": "integer", "minimum": 1, "maximum": 9}},
        },
    },
}
CLOCK = {"type": "function", "function": {"name": "now"}}


@pytest.fixture(scope="module")
def models(shared, tmp_path_factory) -> Models:
    """Under three templates: one with tools and reasoning that may be switched off, one that begins with reasoning, and
    one that has neither."""
    folder = tmp_path_factory.mktemp("templates")
    silent, thinking = folder / "silent.jinja", folder / "thinking.jinja"
    for file, opening in ((silent, ""), (thinking, "<think>")):
        file.write_text(
            "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
            f"{{% if add_generation_prompt %}}assistant: {opening}\n{{% endif %}}"
        )
    qwen = shared / "assets/tokenizers/chat_templates/Qwen-Qwen3-0.6B.jinja"
    templates = {"qwen": qwen, "thinking": thinking, "silent": silent}
    path = save_random_model(tmp_path_factory.mktemp("models") / "random", shared)
    loaded = {name: load(path, dtype="float32", chat_template=str(template)) for name, template in templates.items()}
    return Models(loaded, rows=2, queue=64)


@pytest.fixture(scope="module")
def client(models):
    with serving(models, token=TOKEN) as url:
        yield openai.OpenAI(base_url=f"{url}/v1", api_key=TOKEN, max_retries=0)


def request_with(**changes):
    return {"model": "qwen", "messages": ASK, "tools": [WEATHER, CLOCK], "seed": 4, "max_tokens": 200} | changes


def check(name: str, arguments: str) -> None:
    if name == "weather":
        values = json.loads(arguments)
        assert set(values) == {"city", "days"}
        assert 1 <= values["days"] <= 9
        assert len(values["city"]) <= 10
    else:
        assert name == "now"
        assert isinstance(json.loads(arguments), dict)


NAMED = {"type": "function", "function": {"name": "weather"}}


@pytest.mark.parametrize("choice", [NAMED, "required"])
def test_a_call_that_is_demanded_is_made_whole_or_streamed(client, choice):
    request = request_with(
        tool_choice=choice, parallel_tool_calls=False, extra_body={"chat_template_kwargs": {"enable_thinking": False}}
    )
    answer = client.chat.completions.create(**request).choices[0]
    assert answer.finish_reason == "tool_calls"
    assert answer.message.content is None
    (call,) = answer.message.tool_calls or []
    assert call.id.startswith("call_")
    check(call.function.name, call.function.arguments)
    assert choice == "required" or call.function.name == "weather"

    with client.chat.completions.stream(**request) as stream:
        events = [event.type for event in stream]
        streamed = stream.get_final_completion().choices[0]
    assert "tool_calls.function.arguments.delta" in events
    assert streamed.finish_reason == "tool_calls"
    (streamed_call,) = streamed.message.tool_calls or []
    assert (streamed_call.function.name, streamed_call.function.arguments) == (
        call.function.name,
        call.function.arguments,
    )


def test_what_is_no_call_is_content(client, models):
    answer = client.chat.completions.create(**request_with(temperature=0, max_tokens=20))
    without = models["qwen"].model
    rendered = without.tokenizer.apply_chat_template(
        ASK, tools=[WEATHER, CLOCK | {"function": CLOCK["function"] | {"description": "", "parameters": EMPTY}}],
        tokenize=False, add_generation_prompt=True,
    )  # fmt: skip
    ids = without.tokenizer(rendered, add_special_tokens=False)["input_ids"]
    assert answer.usage is not None
    assert answer.usage.prompt_tokens == len(ids)
    assert answer.choices[0].message.tool_calls is None
    text = without.tokenizer.decode(without.engine.generate([ids], max_tokens=20)[0])
    assert (answer.choices[0].message.content or "").strip() == text.strip()


EMPTY = {"type": "object", "properties": {}}


def test_calls_and_results_of_earlier_turns_are_rendered_by_the_template(client, models):
    call = {"id": "c1", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Oslo", "days": 2}'}}
    turns = [*ASK, {"role": "assistant", "content": None, "tool_calls": [call]}]
    turns += [{"role": "tool", "tool_call_id": "c1", "content": "rain"}]
    answer = client.chat.completions.create(**request_with(messages=turns, tools=[WEATHER], max_tokens=1))
    tokenizer = models["qwen"].model.tokenizer
    as_object = call | {"function": {"name": "weather", "arguments": {"city": "Oslo", "days": 2}}}
    turns[1] = {"role": "assistant", "content": "", "tool_calls": [as_object]}
    text = tokenizer.apply_chat_template(turns, tools=[WEATHER], tokenize=False, add_generation_prompt=True)
    assert "<tool_response>\nrain" in text
    assert answer.usage is not None
    assert answer.usage.prompt_tokens == len(tokenizer(text, add_special_tokens=False)["input_ids"])


@pytest.mark.parametrize(
    ("options", "thinks"),
    [
        ({}, True),
        ({"extra_body": {"chat_template_kwargs": {"enable_thinking": False}}}, False),
        ({"extra_body": {"chat_template_kwargs": {"enable_thinking": True}}}, True),
        ({"reasoning_effort": "none"}, False),
        ({"reasoning_effort": "high"}, True),
    ],
)
def test_reasoning_is_switched_by_the_template(client, models, options, thinks):
    answer = client.chat.completions.create(model="qwen", messages=ASK, max_tokens=1, **options)
    tokenizer = models["qwen"].model.tokenizer
    text = tokenizer.apply_chat_template(ASK, tokenize=False, add_generation_prompt=True, enable_thinking=thinks)
    assert answer.usage is not None
    assert answer.usage.prompt_tokens == len(tokenizer(text, add_special_tokens=False)["input_ids"])


def test_reasoning_that_the_prompt_opens_is_not_content(client):
    request = {"model": "thinking", "messages": ASK, "max_tokens": 20, "temperature": 0}
    message = client.chat.completions.create(**request).choices[0].message
    assert message.content == ""
    assert len(message.reasoning_content) > 20
    pieces = [chunk.choices[0].delta for chunk in client.chat.completions.create(**request, stream=True)]
    assert "".join(getattr(piece, "reasoning_content", None) or "" for piece in pieces) == message.reasoning_content
    assert not any(piece.content for piece in pieces)


def test_no_tools_are_shown_where_none_may_be_called(client):
    with_none = client.chat.completions.create(**request_with(tool_choice="none", max_tokens=1))
    without = client.chat.completions.create(model="qwen", messages=ASK, max_tokens=1)
    assert with_none.usage == without.usage


def function(**fields):
    return {"type": "function", "function": fields}


def earlier(**fields):
    return {"messages": [*ASK, {"role": "assistant", "tool_calls": [fields]}, {"role": "tool", "content": "x"}]}


REFUSED = [
    ({"tools": [{"type": "function"}]}, "tools.0.function"),
    ({"tools": [function(description="x")]}, "tools.0.function"),
    ({"tools": [function(name="")]}, "no name for a tool"),
    ({"tools": [function(name="two words")]}, "no name for a tool"),
    ({"tools": [CLOCK, CLOCK]}, "two tools are called 'now'"),
    ({"tools": [{"type": "web_search", "function": {"name": "a"}}]}, "'web_search' are not known"),
    ({"tools": [function(name="a", parameters={"type": "array"})]}, "are an object"),
    ({"tools": [function(name="a", parameters={"type": "object", "properties": {"x": {"type": "nought"}}})],
      "tool_choice": "required"}, "cannot be compiled"),
    ({"tool_choice": function(name="unheard")}, "no tool is called 'unheard'; there are: weather, now"),
    ({"tool_choice": "sometimes"}, "tool_choice is auto, none, required"),
    ({"tool_choice": "required", "tools": None}, "there is none"),
    ({"model": "silent"}, "does not show it the tools"),
    ({"model": "silent", "tools": None, "reasoning_effort": "high"}, "has no reasoning"),
    ({"extra_body": {"chat_template_kwargs": {"enable_singing": True}}}, "no option 'enable_singing'"),
    ({"extra_body": {"chat_template_kwargs": {"messages": []}}}, "no option 'messages'"),
    (earlier(function={"name": "now", "arguments": "{"}), "arguments of a call are not JSON"),
    (earlier(function={"name": "now", "arguments": "[1]"}), "are a JSON object"),
    (earlier(function={"name": "", "arguments": "{}"}), "needs the name of a function"),
    (earlier(function={"arguments": "{}"}), "tool_calls"),
]  # fmt: skip


@pytest.mark.parametrize(("changes", "message"), REFUSED, ids=lambda value: str(value)[:60])
def test_what_cannot_be_called_is_a_clear_error(client, changes, message):
    request = {name: value for name, value in request_with(**changes).items() if value is not None}
    with pytest.raises(openai.BadRequestError, match=message):
        client.chat.completions.create(**request)
