"""Bodies that no honest client sends: a sentence in the API's own form, never a 500, and the server answers on."""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
import threading
import time
from collections.abc import Iterator
from typing import Any

import httpx
import openai
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from serving import serving

from meshtune.generate.api import load
from meshtune.serve.models import Models
from meshtune.serve.schema import ChatRequest, CompletionRequest, DetokenizeRequest, ScoreRequest, TokenizeRequest

TOKENIZED = 10_000_000  # characters that take seconds to cut into tokens


@pytest.fixture(scope="module")
def models(stories260k) -> Models:
    return Models({"m": load(stories260k, dtype="float32", chat_template="chatml")}, rows=2, queue=6)


@pytest.fixture(scope="module")
def url(models) -> Iterator[str]:
    with serving(models) as address:
        yield address


@pytest.fixture(scope="module")
def http(url) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=url, timeout=60) as client:
        yield client


CHAT = {"model": "m", "messages": [{"role": "user", "content": "A dog"}], "max_tokens": 1}
ENDPOINTS: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": CHAT,
    "/v1/completions": {"model": "m", "prompt": "A dog", "max_tokens": 1},
    "/v1/score/evaluation": {"model": "m", "messages": ["A dog"]},
    "/tokenize": {"prompt": "A dog"},
    "/detokenize": {"tokens": [5]},
}


def nested_schema(depth: int) -> Any:
    value: Any = {"type": "string"}
    for _ in range(depth):
        value = {"type": "object", "properties": {"a": value}, "required": ["a"]}
    return value


def tool(**function: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": "now", **function}}


def form(schema: Any) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": "s", "schema": schema}}


# What fields must not be, or seldom.
WRONG: list[Any] = [
    None, True, -1, 0, 2**31, 2**63, 10**400, 1e308, -3.5, float("nan"), float("inf"), "", "5", "x" * 5_000, [], [None],
    [[]], {}, {"": {}}, [[[[5]]]], ["a", 5], [-1], [10**30], [True], nested_schema(60),
]  # fmt: skip
FIELDS = {
    "/v1/chat/completions": ChatRequest.model_fields,
    "/v1/completions": CompletionRequest.model_fields,
    "/v1/score/evaluation": ScoreRequest.model_fields,
    "/tokenize": TokenizeRequest.model_fields,
    "/detokenize": DetokenizeRequest.model_fields,
}


def error_message(answer: httpx.Response) -> str:
    """The message of an error of the client."""
    assert 400 <= answer.status_code < 500, answer.text[:300]
    error = answer.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert len(answer.content) < 3_000
    return error["message"]


SLOW = ("/v1/chat/completions", "/v1/completions")  # have the most fields


@pytest.mark.parametrize(
    "path", [pytest.param(path, marks=pytest.mark.slow if path in SLOW else ()) for path in ENDPOINTS]
)
def test_no_value_of_a_field_is_a_failure_of_the_server(http, path):
    for field in FIELDS[path]:
        for value in WRONG:
            content = json.dumps(ENDPOINTS[path] | {field: value})
            answer = http.post(path, content=content)
            assert answer.status_code < 500, (field, value, answer.text[:300])
            if answer.status_code != 200:
                assert error_message(answer)
    assert http.get("/health").json()["status"] == "ok"


BODIES: list[tuple[bytes, str]] = [
    (b"", "not JSON"),
    (b"null", "must be a JSON object"),
    (b"[" * 500 + b"]" * 500, "nested too deeply"),
    (b'{"a":' * 5_000 + b"1" + b"}" * 5_000, "nested too deeply"),
    (b'{"model": "m", "model": "n"}', "'model' is there twice"),
    (b'{"model": "m", "x": {"a": 1, "a": 2}}', "'a' is there twice"),
    (b'{"model": ' + b"1" * 5_000 + b"}", "not JSON"),
    (json.dumps(CHAT).encode("utf-16"), "not UTF-8"),
    (b"\xef\xbb\xbf" + json.dumps(CHAT).encode(), "BOM"),
    (b"--x\r\ncontent-disposition: form-data; name=a\r\n\r\n1\r\n--x--", "not JSON"),
    (b"\x1f\x8b\x08\x00\x00\x00\x00\x00", "not UTF-8"),
    (b'{"model": "\\udc00"}', "surrogate"),
]


@pytest.mark.parametrize("path", ENDPOINTS)
@pytest.mark.parametrize(("content", "message"), BODIES, ids=lambda value: str(value)[:30])
def test_what_is_no_body(http, path, content, message):
    assert message in error_message(http.post(path, content=content, headers={"content-type": "text/plain"}))


CONVERSATIONS: list[tuple[dict[str, Any], str]] = [
    ({"messages": [{"role": "user", "content": "x"}] * 10_001}, "at most 10000"),
    ({"messages": [{"role": "user", "content": [{"type": "text", "text": "a"}] * 1_001}]}, "messages.0.content"),
    ({"messages": [{"role": "user", "content": "a" * 100_000}]}, "characters is longer than the model's context"),
    ({"messages": [{"role": "user", "content": "é " * 1_500}]}, "context of 512"),
    ({"tools": [tool(name=f"f{n}") for n in range(129)]}, "at most 128"),
    ({"tools": [tool(parameters={"type": "object", "required": 5})]}, "required of a schema is a list"),
    ({"tools": [tool(parameters={"type": "object", "required": [[]]})]}, "required of a schema is a list of names"),
    ({"tools": [tool(parameters={"properties": [1]})]}, "properties of a schema is an object"),
    ({"tools": [tool(parameters={"properties": {"a": {"enum": 5}}})]}, "enum of a schema is a list"),
    ({"tools": [tool(name="x" * 200)]}, "is no name for a tool"),
    ({"tools": [tool()], "tool_choice": {"type": "function", "function": {"name": [5]}}}, "tool_choice"),
    ({"tools": [tool()], "tool_choice": {"type": "function", "function": {"name": "x" * 9_000}}}, "no tool is called"),
    ({"messages": [{"role": "assistant", "tool_calls": [tool(arguments="[" * 5_000)]}]}, "nested too deeply"),
    ({"messages": [{"role": "assistant", "tool_calls": [tool(arguments='{"a":1,"a":2}')]}]}, "is there twice"),
    ({"response_format": form(nested_schema(49))}, "nested too deeply"),
    ({"response_format": form({"anyOf": [{"not": {"not": {"not": {}}}}]})}, "cannot be compiled"),
    ({"response_format": form({"type": 5})}, "type must be"),
    ({"response_format": form({"type": "string", "pattern": "("})}, "unclosed group"),
    ({"response_format": form({"$ref": "#"})}, "no text fits it"),
    ({"response_format": form({"$ref": "file:///etc/passwd"})}, "cannot be compiled"),
    ({"response_format": form({"type": "integer", "maximum": 10**4_000})}, "out of range"),
    ({"response_format": form({"type": "number", "minimum": float("nan")})}, "cannot be"),
    (
        {"response_format": form({"properties": {f"p{n}": {} for n in range(2_500)}})},
        "2502 objects in the schema; give at most 2000",
    ),
    ({"chat_template_kwargs": {"x" * 5_000: 1}}, "has no option"),
    ({"chat_template_kwargs": {"messages": []}}, "has no option"),
]


@pytest.mark.parametrize(("changes", "message"), CONVERSATIONS, ids=lambda value: str(value)[:50])
def test_conversations_that_cannot_be_answered(http, changes, message):
    answer = http.post("/v1/chat/completions", content=json.dumps(CHAT | changes))
    assert message in error_message(answer)


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "string", "minLength": 10**9},
        {"type": "array", "items": {"type": "integer"}, "minItems": 10**9},
        {"type": "string", "pattern": "(x+x+)+y"},
        {"type": "string", "pattern": "(.*a.{2000}){30}"},
        {"anyOf": [{"type": "string", "pattern": f"^a{n}.*b$"} for n in range(8)]},
    ],
    ids=str,
)
def test_schemas_that_are_large_are_followed_or_refused(http, schema):
    answer = http.post("/v1/chat/completions", json=CHAT | {"response_format": form(schema), "max_tokens": 4})
    assert answer.status_code == 200 or error_message(answer)


def test_the_way_out_of_one_of_is_taken(http):
    """The message says what to write, and that is followed; llguidance's own names an option that no request has."""
    options = [{"type": "object", "properties": {"a": {"type": "string", "pattern": f"^a{n}.*"}}} for n in range(2)]
    message = error_message(
        http.post("/v1/chat/completions", json=CHAT | {"response_format": form({"oneOf": options})})
    )
    assert "oneOf constraints are not supported; write anyOf in its place, or forms" in message
    assert "option" not in message
    apart = [{"type": "string"}, {"type": "integer"}]
    for schema in ({"anyOf": options}, {"oneOf": apart}):
        answer = http.post("/v1/chat/completions", json=CHAT | {"response_format": form(schema)})
        assert answer.status_code == 200, answer.text


@pytest.mark.parametrize(
    ("path", "wrong", "offer", "right"),
    [
        ("/v1/completions", {"max_tokens": 512}, r"give max_tokens = (\d+) at most", {"max_tokens": "FOUND"}),
        ("/v1/completions", {"max_tokens": 0}, "needs (echo: true)", {"max_tokens": 0, "echo": True}),
        ("/v1/completions", {"n": 9}, "8 at most are taken; give (fewer) at once", {"n": 8}),
        ("/v1/chat/completions", {"top_logprobs": 2}, "needs (logprobs: true)", {"top_logprobs": 2, "logprobs": True}),
        ("/v1/chat/completions", {"top_k": 2**31}, "less than or equal to (2147483647)", {"top_k": "FOUND"}),
        ("/tokenize", {"prompt": "a" * 9_000}, r"\(at most (\d+)\); shorten it", {"prompt": "FOUND"}),
        ("/v1/completions", {"stop": [""]}, "a stop string is empty; (leave it out)", {"stop": []}),
    ],
    ids=lambda value: str(value)[:30],
)
def test_what_a_message_offers_works(http, path, wrong, offer, right):
    match = re.search(offer, error_message(http.post(path, json=ENDPOINTS[path] | wrong)))
    assert match
    value = "a" * int(match[1]) if path == "/tokenize" else match[1]
    fixed = {name: value if setting == "FOUND" else setting for name, setting in right.items()}
    fixed = {name: int(setting) if name in ("max_tokens", "top_k") else setting for name, setting in fixed.items()}
    answer = http.post(path, json=ENDPOINTS[path] | fixed | ({"stop": ["."]} if path == "/v1/completions" else {}))
    assert answer.status_code == 200, answer.text


def test_prompts_times_n_are_bounded_before_anything_is_built(http, models):
    begin = time.process_time()
    body = {"model": "m", "prompt": ["a"] * 3_000, "n": 64, "max_tokens": 4}
    message = error_message(http.post("/v1/completions", json=body))
    assert message == "3000 prompts with n = 64 are 192000 answers, and 8 at most are taken; give fewer at once"
    assert time.process_time() - begin < 2
    assert "9 answers, and 8 at most" in error_message(http.post("/v1/chat/completions", json=CHAT | {"n": 9}))
    answer = http.post("/v1/completions", json=body | {"prompt": ["a"] * 2, "n": 4})
    assert len(answer.json()["choices"]) == models["m"].worker.scheduler.capacity == 8


def test_a_prompt_alone_is_scored(url, http):
    """OpenAI's max_tokens: 0 with echo; the scores are those that come with an answer."""
    client = openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)
    request = {"model": "m", "prompt": ["Once upon a time", [1, 403, 407]], "echo": True, "logprobs": 2}
    alone = client.completions.create(**request, max_tokens=0)
    continued = client.completions.create(**request, max_tokens=1, temperature=0)
    assert alone.usage is not None
    assert alone.usage.completion_tokens == 0
    for scored, longer in zip(alone.choices, continued.choices, strict=True):
        assert longer.text.startswith(scored.text)
        assert scored.finish_reason == "length"
        assert scored.logprobs is not None
        assert longer.logprobs is not None
        assert scored.logprobs.token_logprobs == (longer.logprobs.token_logprobs or [])[:-1]
        assert scored.logprobs.text_offset == (longer.logprobs.text_offset or [])[:-1]
    prompt = [5] * 512  # as long as the context
    assert len(http.post("/v1/completions", json=request | {"prompt": prompt, "max_tokens": 0}).json()["choices"]) == 1
    assert "needs echo" in error_message(http.post("/v1/completions", json=request | {"echo": False, "max_tokens": 0}))


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/tokenize", {"prompt": "a" * TOKENIZED}),
        ("/v1/completions", {"model": "m", "prompt": "a" * TOKENIZED}),
        ("/v1/chat/completions", CHAT | {"messages": [{"role": "user", "content": "a" * TOKENIZED}]}),
    ],
)
def test_a_text_longer_than_the_context_can_hold_is_never_tokenised(http, models, monkeypatch, path, body):
    def tokenise(*_: object, **__: object) -> None:
        raise AssertionError("tokenised")

    monkeypatch.setattr(type(models["m"].model.tokenizer), "__call__", tokenise)
    assert f"a text of {TOKENIZED}" in error_message(http.post(path, json=body)).replace("1000005", "1000000")[:300]


def test_the_event_loop_answers_while_texts_are_read(url, models, monkeypatch):
    """Every thread that reads is busy; /health is answered, and requests cancelled meanwhile are never begun."""
    started, go_on = [], threading.Event()
    original = type(models["m"]).ids

    def slow(served: Any, text: str, special: bool) -> list[int]:
        started.append(text)
        go_on.wait(30)
        return original(served, text, special)

    monkeypatch.setattr(type(models["m"]), "ids", slow)

    async def ask() -> None:
        async with httpx.AsyncClient(base_url=url, timeout=60) as client:
            tasks = [asyncio.create_task(client.post("/tokenize", json={"prompt": f"text {n}"})) for n in range(2)]
            while len(started) < 2:
                await asyncio.sleep(0.01)
            for _ in range(3):
                with contextlib.suppress(httpx.TimeoutException):
                    await client.post("/tokenize", json={"prompt": "cancelled"}, timeout=0.2)
            assert (await client.get("/health")).status_code == 200
            go_on.set()
            assert [(await answer).status_code for answer in tasks] == [200, 200]
            assert (await client.post("/tokenize", json={"prompt": "last"})).status_code == 200

    asyncio.run(ask())
    assert sorted(started) == ["last", "text 0", "text 1"]


@pytest.mark.slow
def test_hundreds_of_streams_that_are_broken_off_leave_nothing(url, models):
    """Some while they run, most while they wait; then every row, queue and reader is free again."""

    async def break_off(client: httpx.AsyncClient, n: int) -> int:
        body = {"model": "m", "prompt": "Once", "max_tokens": 200, "stream": True, "logprobs": n % 3, "n": 1 + n % 2}
        try:
            async with client.stream("POST", "/v1/completions", json=body, timeout=0.05 + 0.01 * (n % 40)) as answer:
                if answer.status_code == 200:
                    await anext(answer.aiter_lines())
                return answer.status_code
        except httpx.HTTPError:
            return 0

    async def ask() -> list[int]:
        async with httpx.AsyncClient(base_url=url, limits=httpx.Limits(max_connections=50)) as client:
            return await asyncio.gather(*(break_off(client, n) for n in range(500)))

    statuses = asyncio.run(ask())
    assert set(statuses) <= {0, 200, 429}
    worker, deadline = models["m"].worker, time.monotonic() + 20
    while (worker.busy or not worker.scheduler.idle) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not worker.busy
    assert worker.scheduler.room == worker.scheduler.capacity
    assert httpx.post(f"{url}/v1/completions", json=ENDPOINTS["/v1/completions"], timeout=120).status_code == 200


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=10), inner, max_size=4),
    max_leaves=8,
)


@settings(max_examples=40, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(path=st.sampled_from(sorted(ENDPOINTS)), data=st.data())
def test_any_json_is_answered_or_refused(http, path, data):
    changes = data.draw(st.dictionaries(st.sampled_from(sorted(FIELDS[path])), JSON, max_size=3))
    answer = http.post(path, content=json.dumps(ENDPOINTS[path] | changes))
    assert answer.status_code < 500, answer.text[:300]


@settings(max_examples=40, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(path=st.sampled_from(sorted(ENDPOINTS)), data=st.data())
def test_any_change_of_bytes_is_answered_or_refused(http, path, data):
    content = bytearray(json.dumps(ENDPOINTS[path]).encode())
    for _ in range(data.draw(st.integers(1, 4))):
        place = data.draw(st.integers(0, len(content) - 1))
        content[place : place + data.draw(st.integers(0, 2))] = data.draw(st.binary(max_size=3))
        content = content or bytearray(b"{")
    assert http.post(path, content=bytes(content)).status_code < 500
