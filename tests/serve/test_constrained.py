"""Answers of a given form: tokens that llguidance allows are drawn, and forms it refuses are errors of the request."""

from __future__ import annotations

import concurrent.futures
import json

import numpy as np
import openai
import pytest
from pydantic import BaseModel
from serving import TOKEN, serving
from transformers import AutoTokenizer

from meshtune.calls.grammar import Grammars
from meshtune.errors import UserError
from meshtune.generate.api import load
from meshtune.serve.models import Models

ASK = [{"role": "user", "content": "Tell of a dog, as JSON."}]
DOG = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "age": {"type": "integer", "minimum": 0, "maximum": 20},
        "kind": {"enum": ["big", "small"]},
        "friends": {"type": "array", "items": {"type": "string", "maxLength": 6}, "maxItems": 2},
    },
    "required": ["name", "age", "kind", "friends"],
    "additionalProperties": False,
}


class Dog(BaseModel):
    name: str
    age: int
    good: bool


@pytest.fixture(scope="module")
def model(stories260k):
    return load(stories260k, dtype="float32", chat_template="plain")


@pytest.fixture(scope="module")
def client(model):
    with serving(Models({"stories": model}, rows=4, queue=64), token=TOKEN) as url:
        yield openai.OpenAI(base_url=f"{url}/v1", api_key=TOKEN, max_retries=0)


def schema(form: object, name: str = "dog") -> dict:
    return {"type": "json_schema", "json_schema": {"name": name, "schema": form, "strict": True}}


@pytest.mark.parametrize("temperature", [pytest.param(0, marks=pytest.mark.slow), 1.5])
def test_an_answer_follows_its_schema(client, temperature):
    answer = client.chat.completions.create(
        model="stories", messages=ASK, response_format=schema(DOG), temperature=temperature, n=3, max_tokens=350, seed=5
    )
    for choice in answer.choices:
        assert choice.finish_reason == "stop"
        dog = json.loads(choice.message.content or "")
        assert set(dog) == {"name", "age", "kind", "friends"}
        assert dog["kind"] in ("big", "small")
        assert 0 <= dog["age"] <= 20
        assert len(dog["friends"]) <= 2


def test_a_json_object_without_a_schema(client):
    answer = client.chat.completions.create(
        model="stories", messages=ASK, response_format={"type": "json_object"}, temperature=0, max_tokens=300
    )
    text = answer.choices[0].message.content or ""
    assert text.startswith("{")
    if answer.choices[0].finish_reason == "stop":
        json.loads(text)


def test_the_client_parses_into_its_own_class(client):
    answer = client.chat.completions.parse(
        model="stories", messages=ASK, response_format=Dog, temperature=1, seed=3, max_tokens=300, logit_bias={}
    )
    assert isinstance(answer.choices[0].message.parsed, Dog)


def test_rows_without_a_form_are_what_they_are_alone(client, model):
    """In one batch: two that are constrained, two that are not."""
    plain = {"model": "stories", "messages": ASK, "temperature": 0, "max_tokens": 40}
    formed = plain | {"response_format": schema(DOG), "max_tokens": 100}
    with concurrent.futures.ThreadPoolExecutor() as pool:
        answers = list(pool.map(lambda body: client.chat.completions.create(**body), [formed, plain, formed, plain]))
    texts = [answer.choices[0].message.content for answer in answers]
    assert texts[1] == texts[3] == model.generate(ASK, max_tokens=40)
    assert texts[0] == texts[2]
    json.loads(texts[0] or "")


def test_a_stream_of_a_form_is_the_same_text(client):
    request = {"model": "stories", "messages": ASK, "response_format": schema(DOG), "temperature": 0, "max_tokens": 150}
    expected = client.chat.completions.create(**request).choices[0].message.content
    streamed = client.chat.completions.create(**request, stream=True)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in streamed) == expected


REFUSED = [
    (schema({"type": "objekt"}), "cannot be compiled.*objekt"),
    (schema({"$ref": "#/nowhere"}), "cannot be compiled"),
    (schema({"type": "string", "pattern": "("}), "cannot be compiled"),
    ({"type": "json_schema"}, "needs a schema"),
    ({"type": "json_schema", "json_schema": {"schema": {}}}, "name"),
    ({"type": "yaml"}, "response_format"),
]


@pytest.mark.parametrize(("form", "message"), REFUSED, ids=lambda value: str(value)[:40])
def test_a_form_that_cannot_be_had_is_a_clear_error(client, form, message):
    with pytest.raises(openai.BadRequestError, match=message) as refused:
        client.chat.completions.create(model="stories", messages=ASK, response_format=form)
    assert (refused.value.param or "").startswith("response_format")


@pytest.mark.parametrize("name", ["models/stories260K", "tokenizers/smollm2"])
def test_what_is_allowed_is_what_the_text_spells(shared, name):
    """Sentencepiece and byte-level BPE, spaces and characters of several bytes: every token that is needed to write a
    text is allowed at its place, and nothing outside of the vocabulary is."""
    tokenizer = AutoTokenizer.from_pretrained(shared / "assets" / name)
    (end,) = ends = frozenset({tokenizer.eos_token_id})
    grammars = Grammars(tokenizer, len(tokenizer) + 7, ends)  # a model's vocabulary may be padded
    text = "The naïve 世界 cat\tsaid:  “hello”\n\n42"
    grammar = grammars.lark(f"start: {json.dumps(text, ensure_ascii=False)}", "test")
    ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    if tokenizer.decode(ids[:1]).strip() == "" or tokenizer.convert_ids_to_tokens(ids[0]).startswith("▁"):
        ids = tokenizer("\n" + text, add_special_tokens=False)["input_ids"]
        ids = ids[ids.index(tokenizer.convert_tokens_to_ids("<0x0A>")) + 1 :]  # without the space of a text's beginning
    constraint = grammar.start()
    for id_ in ids:
        assert not constraint.finished
        allowed = np.unpackbits(constraint.mask().view(np.uint8), bitorder="little")[: len(tokenizer) + 7]
        assert allowed[id_]
        assert not allowed[end]
        assert not allowed[len(tokenizer) :].any()
        constraint.accept(id_)
    assert constraint.finished
    with pytest.raises(UserError, match="cannot be followed"):
        grammar.start().accept(ids[1])
