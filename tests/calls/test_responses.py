"""Calls and reasoning are read back from what families' own chat templates write, and grammars allow the same text."""

from __future__ import annotations

import json
from pathlib import Path

import jinja2
import llguidance.hf
import pytest
from transformers import AutoTokenizer

import meshtune.data
from meshtune.calls import formats
from meshtune.calls.formats import THINK, CallFormat, Tool, ToolCall, call_format
from meshtune.calls.grammar import Lark
from meshtune.calls.reader import Delta, HarmonyReader, Reader, TaggedReader

WEATHER = {
    "type": "object",
    "properties": {
        "city": {"type": "string"},
        "days": {"type": "integer"},
        "units": {"type": "string", "enum": ["metric", "imperial"]},
        "parts": {"type": "array", "items": {"type": "string"}},
        "exact": {"type": "boolean"},
    },
    "required": ["city", "days"],
    "additionalProperties": False,
}
TOOLS = {
    name: Tool(name, schema, {"type": "function", "function": {"name": name, "description": "", "parameters": schema}})
    for name, schema in {"weather": WEATHER, "now": {"type": "object", "properties": {}}}.items()
}
BERLIN = {"city": 'Zürich "West" <b>', "days": 7, "units": "metric", "parts": ["a", "b, c"], "exact": True}


def read(reader: Reader, text: str, size: int) -> tuple[str, str, list[ToolCall]]:
    """(content, reasoning, calls) of a text that comes in pieces."""
    deltas: list[Delta] = []
    for start in range(0, len(text), size):
        deltas += reader.push(text[start : start + size])
    deltas += reader.finish()
    calls = [delta.call for delta in deltas if delta.call is not None]
    return "".join(delta.content for delta in deltas), "".join(delta.reasoning for delta in deltas), calls


def names_and_arguments(calls: list[ToolCall]) -> list[tuple[str, object]]:
    return [(call.name, json.loads(call.arguments)) for call in calls]


def render_turn(template: str, calls: list[tuple[str, dict]], content: str) -> str:
    """The assistant's turn that makes these calls, as a published template writes it."""
    environment = jinja2.Environment(trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"])
    environment.filters["tojson"] = lambda value, indent=None: json.dumps(value, ensure_ascii=False, indent=indent)
    ids = ["abcdefgh1", "abcdefgh2"]
    turn = {
        "role": "assistant",
        "content": content,
        "tool_calls": [
            {"id": id_, "type": "function", "function": {"name": name, "arguments": arguments}}
            for id_, (name, arguments) in zip(ids, calls, strict=False)
        ],
    }
    question = [{"role": "user", "content": "Well?"}]
    names = {"bos_token": "", "eos_token": "", "tools": [tool.definition for tool in TOOLS.values()]}
    compiled = environment.from_string(template)
    before = compiled.render(messages=question, add_generation_prompt=True, **names)
    after = compiled.render(messages=[*question, turn], add_generation_prompt=False, **names)
    assert after.startswith(before)
    return after[len(before) :]


PUBLISHED = {
    "Qwen-Qwen2.5-7B-Instruct": ("<|im_end|>", formats.HERMES, 2),
    "Qwen-Qwen3-0.6B": ("<|im_end|>", formats.HERMES, 2),
    "mistralai-Mistral-Nemo-Instruct-2407": ("", formats.MISTRAL, 2),
    "meta-llama-Llama-3.1-8B-Instruct": ("<|eot_id|>", formats.LLAMA, 1),
    "meta-llama-Llama-3.2-3B-Instruct": ("<|eot_id|>", formats.LLAMA, 1),
}


def test_the_templates_that_ship_with_meshtune_are_known():
    folder = Path(meshtune.data.__file__ or "").parent / "templates"
    names = {path.stem: call_format(path.read_text()) for path in folder.glob("*.jinja") if "tool" in path.read_text()}
    tagged = dict.fromkeys(("alpaca", "baichuan2", "chatml", "gemma", "phi3"), formats.HERMES)
    untagged = {"llama3": formats.LLAMA, "mistral": formats.MISTRAL, "plain": formats.PLAIN}
    assert names == tagged | untagged | {"deepseek": formats.DEEPSEEK_R1, "paligemma": None}


@pytest.mark.parametrize("size", [1, 5, 10_000])
@pytest.mark.parametrize("name", PUBLISHED)
def test_calls_are_those_that_a_published_template_was_given(shared: Path, name, size):
    template = (shared / f"assets/tokenizers/chat_templates/{name}.jinja").read_text()
    end, form, count = PUBLISHED[name]
    assert call_format(template) is form
    calls = [("weather", BERLIN), ("now", {})][:count]
    text = render_turn(template, calls, "")
    text = text[: text.index(end)] if end else text
    think = THINK if "</think>" in template else None
    content, reasoning, read_calls = read(TaggedReader(think, False, form, TOOLS), text, size)
    assert names_and_arguments(read_calls) == calls
    assert content == reasoning == ""


QWEN_XML = (
    "<tool_call>\n<function=weather>\n<parameter=city>\n7\n</parameter>\n<parameter=days>\n7\n</parameter>\n"
    '<parameter=parts>\n["x"]\n</parameter>\n</function>\n</tool_call>\n<tool_call>\n<function=now>\n</function>\n</tool_call>'
)
GLM = (
    "<tool_call>weather\n<arg_key>city</arg_key>\n<arg_value>7</arg_value>\n<arg_key>days</arg_key>\n"
    '<arg_value>7</arg_value>\n<arg_key>parts</arg_key>\n<arg_value>["x"]</arg_value>\n</tool_call>\n'
    "<tool_call>now\n</tool_call>"
)
MINIMAX = (
    '<minimax:tool_call>\n<invoke name="weather">\n<parameter name="city">7</parameter>\n'
    '<parameter name="days">7</parameter>\n<parameter name="parts">["x"]</parameter>\n</invoke>\n'
    '<invoke name="now">\n</invoke>\n</minimax:tool_call>'
)
JSON = '{"city": "7", "days": 7, "parts": ["x"]}'
DEEPSEEK = (
    f"<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>weather<｜tool▁sep｜>{JSON}<｜tool▁call▁end｜>"
    "<｜tool▁call▁begin｜>now<｜tool▁sep｜>{}<｜tool▁call▁end｜><｜tool▁calls▁end｜>"
)
DEEPSEEK_R1 = (
    f"<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>weather\n```json\n{JSON}\n```<｜tool▁call▁end｜>\n"
    "<｜tool▁call▁begin｜>function<｜tool▁sep｜>now\n```json\n{}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>"
)
LFM2 = '<|tool_call_start|>[weather(city="7", days=7, parts=["x"]), now()]<|tool_call_end|>'
GEMMA = (
    '<|tool_call>call:weather{city:<|"|>7<|"|>,days:7,parts:[<|"|>x<|"|>]}<tool_call|>'
    "<|tool_call>call:now{}<tool_call|>"
)
HERMES = (
    f'<tool_call>\n{{"name": "weather", "arguments": {JSON}}}\n</tool_call>\n'
    '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>'
)
MISTRAL = f'[TOOL_CALLS][{{"name": "weather", "arguments": {JSON}}}, {{"name": "now", "arguments": {{}}}}]'
MISTRAL_ARGS = f"[TOOL_CALLS]weather[ARGS]{JSON}[TOOL_CALLS]now[ARGS]{{}}"
LLAMA = f'{{"name": "weather", "parameters": {JSON}}}'
PLAIN = f'{{"name": "weather", "arguments": {JSON}}}\n{{"name": "now", "arguments": {{}}}}'
HARMONY = f"<|channel|>commentary to=functions.weather <|constrain|>json<|message|>{JSON}"
WRITTEN = {
    "HERMES": HERMES, "QWEN_XML": QWEN_XML, "GLM": GLM, "MINIMAX": MINIMAX, "DEEPSEEK": DEEPSEEK,
    "DEEPSEEK_R1": DEEPSEEK_R1, "LFM2": LFM2, "GEMMA": GEMMA, "MISTRAL": MISTRAL, "MISTRAL_ARGS": MISTRAL_ARGS,
    "LLAMA": LLAMA, "HARMONY": HARMONY, "PLAIN": PLAIN,
}  # fmt: skip


def reader_of(form: CallFormat, tools: dict[str, Tool] = TOOLS) -> Reader:
    return HarmonyReader(tools) if form is formats.HARMONY else TaggedReader(None, False, form, tools)


@pytest.mark.parametrize("size", [1, 7, 10_000])
@pytest.mark.parametrize("name", WRITTEN)
def test_every_form_is_read(name, size):
    """The forms are those of the families' model cards and templates; a city that looks like a number is a string."""
    form, text = getattr(formats, name), WRITTEN[name]
    expected = [("weather", {"city": "7", "days": 7, "parts": ["x"]}), ("now", {})]
    content, reasoning, calls = read(reader_of(form), text, size)
    assert names_and_arguments(calls) == expected[: len(calls)]
    assert len(calls) == (1 if form.between is None else 2)
    assert content == reasoning == ""


@pytest.fixture(scope="module")
def vocabulary(shared):
    tokenizer = AutoTokenizer.from_pretrained(shared / "assets/tokenizers/smollm2")
    return llguidance.hf.from_tokenizer(tokenizer, n_vocab=len(tokenizer), eos_token=[2])


@pytest.mark.parametrize("name", WRITTEN)
def test_a_grammar_allows_calls_and_nothing_else(name, vocabulary):
    form, text = getattr(formats, name), WRITTEN[name]
    lark = Lark({})
    grammar = lark.whole(form.grammar(lark, list(TOOLS.values()), several=True))
    matcher = llguidance.LLMatcher(vocabulary, llguidance.LLMatcher.grammar_from_lark(grammar), log_level=0)
    assert not matcher.is_error(), matcher.get_error()

    def accepts(candidate: str) -> bool:
        walk, ids = matcher.deep_copy(), vocabulary.tokenize_bytes(candidate.encode())
        return walk.try_consume_tokens(ids) == len(ids) and walk.is_accepting()

    assert accepts(text)
    assert not accepts(text.replace("weather", "wether"))  # another tool
    assert not accepts(text.replace("days", "dais", 1))  # another argument
    assert not accepts(f"I shall call: {text}")
    assert not accepts("Hello")


@pytest.mark.parametrize("size", [1, 4, 10_000])
@pytest.mark.parametrize(
    "text",
    [
        "Two < three, and <tool of all trades>. ",
        "<tool_call>\nnot JSON\n</tool_call>",
        '<tool_call>\n{"name": "unknown", "arguments": {}}\n</tool_call> and so on',
        '<tool_call>\n{"name": "weather", "arguments": {"city"',
        '<tool_call>\n{"arguments": {}}\n</tool_call>',
        '<tool_call>\n{"name": "weather", "arguments": [1]}\n</tool_call>',
    ],
)
def test_what_is_no_call_is_content(text, size):
    assert read(TaggedReader(None, False, formats.HERMES, TOOLS), text, size) == (text, "", [])


@pytest.mark.parametrize("size", [1, 4, 10_000])
def test_content_before_a_call_is_kept_and_the_space_between_is_not(size):
    text = f"I shall look.  It is\n\n{HERMES}\n"
    content, _, calls = read(TaggedReader(None, False, formats.HERMES, TOOLS), text, size)
    assert content == "I shall look.  It is"
    assert len(calls) == 2


@pytest.mark.parametrize("size", [1, 4, 10_000])
@pytest.mark.parametrize(
    ("thinks", "text", "expected"),
    [
        (True, "\nIt is\n\nfour.\n</think>\n\nFour.\n", ("Four.\n", "It is\n\nfour.")),
        (False, "<think>\nIt is\nfour.\n</think>\n\nFour.", ("Four.", "It is\nfour.")),
        (False, "Four.\n", ("Four.\n", "")),
        (False, "  <thin> ice", ("  <thin> ice", "")),
        (True, "It is </thin", ("", "It is </thin")),
        (False, "<think>\n\n</think>\n\nFour.", ("Four.", "")),
    ],
)
def test_reasoning_is_parted_from_the_answer(size, thinks, text, expected):
    assert read(TaggedReader(THINK, thinks, None, {}), text, size)[:2] == expected
    with_tools = TaggedReader(THINK, thinks, formats.HERMES, TOOLS)
    assert read(with_tools, text, size)[:2] == expected


@pytest.mark.parametrize("size", [1, 4, 10_000])
def test_a_call_after_reasoning(size):
    content, reasoning, calls = read(
        TaggedReader(THINK, True, formats.HERMES, TOOLS), f"Hm.\n</think>\n\n{HERMES}", size
    )
    assert (content, reasoning, len(calls)) == ("", "Hm.", 2)


@pytest.mark.parametrize("size", [1, 4, 10_000])
def test_channels_of_gpt_oss(size):
    text = "<|channel|>analysis<|message|>They ask.<|end|><|start|>assistant<|channel|>final<|message|>Four."
    assert read(HarmonyReader({}), text, size) == ("Four.", "They ask.", [])
    text = f"<|channel|>analysis<|message|>They ask.<|end|><|start|>assistant{HARMONY}"
    content, reasoning, calls = read(HarmonyReader(TOOLS), text, size)
    assert (content, reasoning, names_and_arguments(calls)) == ("", "They ask.", [("weather", json.loads(JSON))])


DEEP = "[" * 3_000
GARBAGE = [
    "now(a=b'x')", "now(a={1, 2})", "now(a=...)", "now(a=1j)", "now(a={[]: 1})", f"now(a={DEEP}", "now(" * 500,
    "[now(a=1" + "0" * 5_000 + ")]", "call:now{a:\x007\x00}", "call:now{a:" + DEEP + "}",
    '{"name": "now", "arguments": ' + DEEP, '{"name": ["now"]}', "<function=now>" * 50, "now\n<arg_key>a</arg_key>",
    *(f"<|channel|>commentary to={name}<|message|>[<|call|>" for name in (" ", "functions.now")), "\x00", "5", "",
]  # fmt: skip


@pytest.mark.parametrize("name", sorted(name for name in vars(formats) if isinstance(vars(formats)[name], CallFormat)))
def test_whatever_a_model_writes_is_read(name):
    """A client can make it write anything; everything but calls is content."""
    form = vars(formats)[name]
    for text in GARBAGE:
        wrapped = text if form is formats.HARMONY else f"{form.opens}{text}{form.closes}"
        reader = HarmonyReader(TOOLS) if form is formats.HARMONY else TaggedReader(None, False, form, TOOLS)
        _, _, calls = read(reader, wrapped, 1_000)
        assert all(call.name in TOOLS and json.loads(call.arguments) is not None for call in calls)
