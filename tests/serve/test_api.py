"""The server, asked by OpenAI's own client over a real socket; the model is a tiny one with a chat template."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import socket
import time
from collections.abc import Iterator

import httpx
import numpy as np
import openai
import pytest
import torch
from serving import TOKEN, serving
from transformers import AutoModelForCausalLM

from meshtune.generate.api import Model, load
from meshtune.serve.app import MAX_BODY
from meshtune.serve.models import Models


@pytest.fixture(scope="module")
def model(stories260k) -> Model:
    return load(stories260k, dtype="float32", chat_template="plain")


@pytest.fixture(scope="module")
def models(model) -> Models:
    return Models({"stories": model}, rows=4, queue=64)


@pytest.fixture(scope="module")
def address(models) -> Iterator[str]:
    with serving(models, token=TOKEN, hosts={"127.0.0.1"}, max_body=100_000) as url:
        yield url


@pytest.fixture(scope="module")
def client(address) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{address}/v1", api_key=TOKEN, max_retries=0)


QUESTION = [{"role": "system", "content": "Tell stories."}, {"role": "user", "content": "A dog went to the park."}]


def test_a_chat_answers_as_the_model_does(client, model):
    answer = client.chat.completions.create(model="stories", messages=QUESTION, temperature=0, max_tokens=30)
    (choice,) = answer.choices
    assert choice.message.content == model.generate(QUESTION, max_tokens=30)
    assert choice.finish_reason == "length"
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 30
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + 30


def test_a_stream_is_the_same_answer_in_pieces(client, model):
    stream = client.chat.completions.create(
        model="stories",
        messages=QUESTION,
        temperature=0,
        max_completion_tokens=30,
        stream=True,
        stream_options={"include_usage": True},
    )
    chunks = list(stream)
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert text == model.generate(QUESTION, max_tokens=30)
    assert len({chunk.id for chunk in chunks}) == 1
    assert chunks[0].choices[0].delta.role == "assistant"
    assert chunks[-2].choices[0].finish_reason == "length"
    assert chunks[-1].choices == []
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.completion_tokens == 30
    assert len(chunks) > 5


def test_several_choices_are_drawn_apart_and_again_the_same_by_seed(client):
    request = {"model": "stories", "messages": QUESTION, "n": 3, "seed": 7, "max_tokens": 20, "temperature": 1.0}
    first, again = (client.chat.completions.create(**request) for _ in range(2))
    texts = [choice.message.content for choice in first.choices]
    assert texts == [choice.message.content for choice in again.choices]
    assert len(set(texts)) == 3
    streamed = {0: "", 1: "", 2: ""}
    for chunk in client.chat.completions.create(**request, stream=True):
        streamed[chunk.choices[0].index] += chunk.choices[0].delta.content or ""
    assert list(streamed.values()) == texts


def test_a_stop_string_ends_the_text_before_it(client, model):
    full = model.generate("Once upon a time", max_tokens=40)
    stop = full[20:26]
    answer = client.completions.create(
        model="stories", prompt="Once upon a time", temperature=0, max_tokens=40, stop=[stop, "never said"]
    )
    assert answer.choices[0].text == full[: full.index(stop)]
    assert answer.choices[0].finish_reason == "stop"
    streamed = client.completions.create(
        model="stories", prompt="Once upon a time", temperature=0, max_tokens=40, stop=stop, stream=True
    )
    assert "".join(chunk.choices[0].text for chunk in streamed) == full[: full.index(stop)]


def test_likeliest_tokens_of_a_prompt_are_named_by_id_as_vllm_does(client, model, stories260k):
    prompts = [model.tokenizer(text)["input_ids"] for text in ("Once upon a time there was", "A small dog")]
    request = {"model": "stories", "prompt": prompts, "temperature": 0, "max_tokens": 1}
    answer = client.completions.create(**request, extra_body={"prompt_logprobs": 3})
    reference = AutoModelForCausalLM.from_pretrained(stories260k, dtype=torch.float32)
    for choice, ids in zip(answer.choices, prompts, strict=True):
        assert choice.logprobs is None
        with torch.no_grad():
            scores = reference(torch.tensor([ids])).logits[0].log_softmax(-1)
        assert choice.prompt_logprobs[0] is None
        assert len(choice.prompt_logprobs) == len(ids)
        for row, id_, entry in zip(scores[:-1], ids[1:], choice.prompt_logprobs[1:], strict=True):
            expected = [*row.topk(3).indices.tolist(), id_]
            assert list(entry) == list(dict.fromkeys(map(str, expected)))
            assert [fields["rank"] for fields in entry.values()][:3] == [1, 2, 3]
            for key, fields in entry.items():
                assert fields["logprob"] == pytest.approx(float(row[int(key)]), abs=1e-4)
                assert fields["decoded_token"] == model.tokenizer.decode([int(key)])
    both = client.completions.create(**request, logprobs=1, echo=True, extra_body={"prompt_logprobs": 3})
    assert [choice.prompt_logprobs for choice in both.choices] == [choice.prompt_logprobs for choice in answer.choices]
    assert all(len(entry) == 1 for choice in both.choices for entry in choice.logprobs.top_logprobs[1:])
    with pytest.raises(openai.BadRequestError, match="cannot be streamed"):
        list(client.completions.create(**request, stream=True, extra_body={"prompt_logprobs": 3}))


def test_log_probabilities_of_a_prompt_are_those_of_transformers(client, model, stories260k):
    """As lm-eval asks for them: token ids echoed with their log-probabilities, and one token more."""
    prompts = [model.tokenizer(text)["input_ids"] for text in ("Once upon a time there was", "A small dog")]
    answer = client.completions.create(
        model="stories", prompt=prompts, temperature=0, max_tokens=1, logprobs=1, echo=True, seed=1234
    )
    reference = AutoModelForCausalLM.from_pretrained(stories260k, dtype=torch.float32)
    assert [choice.index for choice in answer.choices] == [0, 1]
    for choice, ids in zip(answer.choices, prompts, strict=True):
        with torch.no_grad():
            scores = reference(torch.tensor([ids])).logits[0].log_softmax(-1)
        logprobs = choice.logprobs
        assert logprobs is not None
        assert logprobs.token_logprobs is not None
        assert logprobs.top_logprobs is not None
        assert logprobs.token_logprobs[0] is None
        expected = scores[:-1].gather(1, torch.tensor(ids[1:])[:, None])[:, 0]
        np.testing.assert_allclose(logprobs.token_logprobs[1:-1], expected, atol=1e-4)
        likeliest = [max(entry.values()) for entry in logprobs.top_logprobs[1:]]
        np.testing.assert_allclose(likeliest, scores.max(-1).values, atol=1e-4)
        greedy = scores[:-1].argmax(-1).tolist()
        for n, (token, actual) in enumerate(zip(greedy, logprobs.token_logprobs[1:-1], strict=True)):
            assert (actual == likeliest[n]) == (token == ids[n + 1])
        assert len(logprobs.tokens or []) == len(ids) + 1


def test_chat_log_probabilities(client):
    answer = client.chat.completions.create(
        model="stories", messages=QUESTION, max_tokens=6, temperature=0, logprobs=True, top_logprobs=3
    )
    logprobs = answer.choices[0].logprobs
    assert logprobs is not None
    assert logprobs.content is not None
    assert (
        "".join(entry.token for entry in logprobs.content).strip() == (answer.choices[0].message.content or "").strip()
    )
    for entry in logprobs.content:
        assert [alternative.logprob for alternative in entry.top_logprobs] == sorted(
            (alternative.logprob for alternative in entry.top_logprobs), reverse=True
        )
        assert entry.top_logprobs[0].logprob == entry.logprob
        assert len(entry.top_logprobs) == 3


def join_tokens(tokens: list[str]) -> bytes:
    """Joins the bytes of a completion's tokens."""
    named = [token.removeprefix("bytes:").encode("latin-1") if token.startswith("bytes:") else None for token in tokens]
    return b"".join(
        token.encode() if name is None else name.decode("unicode_escape").encode("latin-1")
        for token, name in zip(tokens, named, strict=True)
        if token != "<s>"
    )


@pytest.mark.parametrize("text", ["a 😀 b", "Once upon a time", " two  spaces", "語😀é", "\n\nx"])
def test_tokens_of_a_completion_stand_in_its_text(client, text):
    """Parts of characters, spaces, and the token that begins a text, which the text does not show."""
    request = {"model": "stories", "prompt": text, "temperature": 0, "max_tokens": 6, "logprobs": 5}
    (choice,) = client.completions.create(**request, echo=True).choices
    assert choice.text.lstrip(" ").startswith(text.lstrip(" "))
    tokens, offsets = choice.logprobs.tokens, choice.logprobs.text_offset
    assert join_tokens(tokens) == choice.text.encode()
    for token, offset in zip(tokens, offsets, strict=True):
        assert token.startswith("bytes:") or token == "<s>" or choice.text[offset:].startswith(token)
    assert all(len(top) == 5 for top in choice.logprobs.top_logprobs[1:])
    unstreamed = client.completions.create(**request).choices[0]
    assert join_tokens(unstreamed.logprobs.tokens) == unstreamed.text.encode()
    streamed = [chunk.choices[0] for chunk in client.completions.create(**request, stream=True)]
    for name in ("tokens", "token_logprobs", "top_logprobs", "text_offset"):
        pieces = [getattr(chunk.logprobs, name) for chunk in streamed if chunk.logprobs is not None]
        assert list(itertools.chain(*pieces)) == getattr(unstreamed.logprobs, name)


def test_likeliest_tokens_that_read_alike_are_all_there(client, model):
    """A space is a token and a byte; neither overwrites the other."""
    ids = [model.tokenizer.convert_tokens_to_ids(token) for token in ("<0x20>", "▁")]
    bias = {str(id_): 100 for id_ in ids}
    request = {"model": "stories", "prompt": "Once", "max_tokens": 1, "temperature": 0, "logit_bias": bias}
    (choice,) = client.completions.create(**request, logprobs=20).choices
    assert len(choice.logprobs.top_logprobs[0]) == 20
    assert choice.text == " "


def test_the_tokens_of_a_stop_string_are_not_listed(client, model):
    full = model.generate("Once upon a time", max_tokens=40)
    stop = full[20:26]
    request = {"model": "stories", "prompt": "Once upon a time", "temperature": 0, "max_tokens": 40, "stop": stop}
    (choice,) = client.completions.create(**request, logprobs=0).choices
    streamed = [chunk.choices[0] for chunk in client.completions.create(**request, logprobs=0, stream=True)]
    assert choice.text == full[: full.index(stop)]
    for tokens in (choice.logprobs.tokens, [token for chunk in streamed for token in chunk.logprobs.tokens]):
        assert "".join(tokens).startswith(choice.text)
        assert "".join(tokens[:-1]) != choice.text  # the last token ends in it, or begins before the stop string


@pytest.mark.parametrize("stream", [False, True])
def test_the_bytes_of_a_chat_join_to_its_text(client, model, stream):
    """Bytes of split characters, as the model is made to write them."""
    ids = model.tokenizer("語😀é", add_special_tokens=False)["input_ids"]
    bias = {str(id_): 100 for id_ in ids if model.tokenizer.convert_ids_to_tokens(id_).startswith("<0x")}
    request = {"model": "stories", "messages": QUESTION, "logit_bias": bias, "max_tokens": 40, "seed": 3}
    request |= {"logprobs": True, "top_logprobs": 4}
    answer = client.chat.completions.create(**request, stream=stream)
    if stream:
        chunks = [chunk.choices[0] for chunk in answer]
        text = "".join(chunk.delta.content or "" for chunk in chunks)
        entries = [entry for chunk in chunks if chunk.logprobs for entry in chunk.logprobs.content]
    else:
        text, entries = answer.choices[0].message.content, answer.choices[0].logprobs.content
    content = b"".join(bytes(entry.bytes) for entry in entries)
    assert len(entries) == 40
    assert any(entry.token.startswith("\\x") for entry in entries)
    assert content.decode("utf-8", "replace").replace("�", "").strip() == text.replace("�", "").strip()
    for entry in entries:
        for alternative in entry.top_logprobs:
            assert (
                alternative.bytes is None
                or alternative.token.startswith("\\x")
                or bytes(alternative.bytes).decode() == alternative.token
            )


def test_a_biased_token_is_all_there_is(client, model):
    (token,) = model.tokenizer("dog", add_special_tokens=False)["input_ids"][:1]
    answer = client.completions.create(
        model="stories", prompt="Once", max_tokens=5, temperature=0, logit_bias={str(token): 100}, logprobs=0
    )
    assert answer.choices[0].logprobs is not None
    assert answer.choices[0].logprobs.tokens == [" do"] * 5
    assert answer.choices[0].text == " do" * 5


def test_models_and_tokenizer(client, address, model):
    assert [entry.id for entry in client.models.list()] == ["stories"]
    assert client.models.retrieve("stories").owned_by == "meshtune"
    headers = {"authorization": f"Bearer {TOKEN}"}
    response = httpx.post(f"{address}/tokenize", json={"prompt": "A dog", "add_special_tokens": False}, headers=headers)
    ids = response.json()["tokens"]
    assert ids == model.tokenizer("A dog", add_special_tokens=False)["input_ids"]
    back = httpx.post(f"{address}/detokenize", json={"tokens": ids}, headers=headers).json()
    assert back["prompt"].strip() == "A dog"
    assert httpx.get(f"{address}/tokenizer_info", headers=headers).json()["eos_token"] == model.tokenizer.eos_token


def test_the_asynchronous_client_is_answered_many_times_at_once(address, model):
    async def ask() -> list[str | None]:
        async with openai.AsyncOpenAI(base_url=f"{address}/v1", api_key=TOKEN, max_retries=0) as client:
            prompts = [f"Once upon a time, {name}" for name in ("a cat", "Tom", "two birds", "the sun", "a car", "Mia")]
            requests = [
                client.completions.create(model="stories", prompt=prompt, max_tokens=12, temperature=0)
                for prompt in prompts
            ]
            return [
                (await answer).choices[0].text for answer in [asyncio.ensure_future(request) for request in requests]
            ]

    prompts = [f"Once upon a time, {name}" for name in ("a cat", "Tom", "two birds", "the sun", "a car", "Mia")]
    assert asyncio.run(ask()) == [model.generate(prompt, max_tokens=12) for prompt in prompts]


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_goes_away_frees_its_row(address, models, stream):
    headers = {"authorization": f"Bearer {TOKEN}"}
    body = {"model": "stories", "prompt": "Once", "max_tokens": 400, "stream": stream, "logit_bias": {"2": -100}}
    with contextlib.suppress(httpx.TimeoutException):
        if stream:
            with httpx.stream("POST", f"{address}/v1/completions", json=body, headers=headers) as answer:
                next(answer.iter_lines())
        else:
            httpx.post(f"{address}/v1/completions", json=body, headers=headers, timeout=0.05)
    worker = models["stories"].worker
    deadline = time.monotonic() + 20
    while (worker.busy or worker.scheduler.running) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not worker.busy
    assert worker.scheduler.running == worker.scheduler.waiting == 0


REFUSED = [
    ({"model": "gpt-4"}, openai.NotFoundError, "does not exist; there are: stories"),
    ({"messages": []}, openai.BadRequestError, "messages"),
    ({"messages": [{"role": "narrator", "content": "x"}]}, openai.BadRequestError, "role"),
    ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, openai.BadRequestError, "reads text"),
    ({"max_tokens": 0}, openai.BadRequestError, "max_tokens"),
    ({"max_tokens": -3}, openai.BadRequestError, "max_tokens"),
    ({"max_tokens": 10_000}, openai.BadRequestError, "context of 512"),
    ({"messages": [{"role": "user", "content": "dog " * 2000}]}, openai.BadRequestError, "context of 512"),
    ({"temperature": -1}, openai.BadRequestError, "temperature"),
    ({"stop": ["x"] * 17}, openai.BadRequestError, "stop"),
    ({"stop": [""]}, openai.BadRequestError, "a stop string is empty"),
    ({"logit_bias": {"99999": 5}}, openai.BadRequestError, "outside the vocabulary"),
    ({"logit_bias": {str(n): 1 for n in range(513)}}, openai.BadRequestError, "logit_bias"),
    ({"extra_body": {"beam_width": 4}}, openai.BadRequestError, "'beam_width' is not known"),
]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(("changes", "error", "message"), REFUSED, ids=lambda value: str(value)[:40])
def test_what_cannot_be_done_is_a_clear_error(client, changes, error, message, stream):
    with pytest.raises(error, match=message):
        client.chat.completions.create(**({"model": "stories", "messages": QUESTION, "stream": stream} | changes))


@pytest.mark.parametrize(
    ("content", "status", "message"),
    [
        (b"{", 400, "not JSON"),
        (b"[1]", 400, "must be a JSON object"),
        (b'{"prompt": "\xff"}', 400, "not UTF-8"),
        (b" " * 200_000, 413, "more than the 100000"),
        (b"{}", 400, "model"),
        (b"[" * 90_000, 400, "nested too deeply"),
        (b'{"model": "stories", "prompt": "\\ud800"}', 400, "surrogate"),
        (b'{"model": "stories", "prompt": "x", "temperature": NaN}', 400, "temperature"),
        (b'{"model": "stories", "prompt": []}', 400, "no prompt"),
        (b'{"model": "stories", "prompt": [99999]}', 400, "outside the model's vocabulary"),
    ],
)
def test_a_body_that_is_none(address, content, status, message):
    headers = {"authorization": f"Bearer {TOKEN}"}
    answer = httpx.post(f"{address}/v1/completions", content=content, headers=headers)
    assert answer.status_code == status
    assert message in answer.json()["error"]["message"]
    chunked = httpx.post(f"{address}/v1/completions", content=iter([content]), headers=headers)
    assert chunked.status_code == status


def test_a_body_of_100_mb_is_refused_by_its_header(address):
    """Before any of it is read: nothing of it is sent."""
    host, port = address.removeprefix("http://").split(":")
    head = f"POST /v1/completions HTTP/1.1\r\nhost: {host}:{port}\r\nauthorization: Bearer {TOKEN}\r\n"
    with socket.create_connection((host, int(port)), timeout=20) as connection:
        connection.sendall(f"{head}content-length: {100 * 2**20}\r\n\r\n".encode())
        assert connection.recv(1 << 12).startswith(b"HTTP/1.1 413 ")
    assert MAX_BODY < 100 * 2**20  # where no other limit is set


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({}, 401),
        ({"authorization": "Bearer wrong"}, 401),
        ({"authorization": f"Bearer {TOKEN}", "host": "evil.example"}, 403),
        ({"authorization": f"Bearer {TOKEN}", "origin": "https://evil.example"}, 403),
        ({"authorization": f"Bearer {TOKEN}"}, 200),
    ],
)
def test_who_may_ask(address, headers, status):
    answer = httpx.get(f"{address}/v1/models", headers=headers)
    assert answer.status_code == status
    if status != 200:
        assert set(answer.json()["error"]) == {"message", "type", "param", "code"}
        assert "access-control-allow-origin" not in answer.headers


def test_a_site_that_is_allowed_may_call_from_a_browser(models):
    app_models = Models({"stories": models["stories"].model}, rows=1, queue=1)
    with serving(app_models, origins={"https://chat.example"}) as url:
        headers = {"origin": "https://chat.example"}
        assert (
            httpx.get(f"{url}/v1/models", headers=headers).headers["access-control-allow-origin"] == headers["origin"]
        )
        before = httpx.options(f"{url}/v1/chat/completions", headers=headers)
        assert before.status_code == 200
        assert "POST" in before.headers["access-control-allow-methods"]


def test_health_and_metrics(address, client):
    assert httpx.get(f"{address}/health").json() == {"status": "ok", "failed": []}
    client.completions.create(model="stories", prompt="Once", max_tokens=3)
    text = httpx.get(f"{address}/metrics", headers={"authorization": f"Bearer {TOKEN}"}).text
    assert 'meshtune_requests_running{model="stories"} 0' in text
    (line,) = [line for line in text.splitlines() if line.startswith("meshtune_generated_tokens_total{")]
    assert float(line.split()[-1]) >= 3


@pytest.mark.parametrize(("method", "path"), [("POST", "/v1/embeddings"), ("GET", "/v1/chat/completions")])
def test_what_is_not_there_says_so_in_the_same_shape(address, method, path):
    answer = httpx.request(method, f"{address}{path}", headers={"authorization": f"Bearer {TOKEN}"})
    assert answer.status_code in (404, 405)
    assert json.loads(answer.text)["error"]["message"].startswith(f"{method} {path}")


def test_a_failure_is_logged_and_said(model, monkeypatch, caplog):
    broken = Models({"stories": model}, rows=1, queue=1)

    def out_of_memory(steps: int) -> None:
        raise MemoryError("no more memory")

    monkeypatch.setattr(broken["stories"].worker.scheduler, "step", out_of_memory)
    with serving(broken) as url:
        client = openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)
        for _ in range(3):
            with pytest.raises(openai.InternalServerError, match="MemoryError"):
                client.completions.create(model="stories", prompt="Once", max_tokens=5)
        assert httpx.get(f"{url}/health").status_code == 503
    assert "no more memory" in caplog.text


def test_a_full_queue_is_said_to_wait(model):
    with serving(Models({"stories": model}, rows=1, queue=1)) as url:
        client = openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)
        request = {"model": "stories", "prompt": "Once", "max_tokens": 400, "logit_bias": {"2": -100}, "n": 2}
        with client.completions.create(**request, stream=True) as stream:
            next(iter(stream))
            with pytest.raises(openai.RateLimitError, match="wait already"):
                client.completions.create(**request)
