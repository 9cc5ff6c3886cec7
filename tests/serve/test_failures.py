"""A step that fails ends its own requests; the server continues, and others get the answers they get by themselves."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import httpx
import numpy as np
import openai
import pytest
from serving import serving

from meshtune.calls.grammar import Grammars, LLGrammar
from meshtune.generate import scheduler as scheduling
from meshtune.generate.api import Model, load
from meshtune.serve.models import Models

PROMPT = "Once upon a time"


@pytest.fixture(scope="module")
def model(stories260k) -> Model:
    return load(stories260k, dtype="float32", chat_template="plain")


@pytest.fixture(scope="module")
def models(model) -> Models:
    return Models({"stories": model}, rows=2, queue=64)


@pytest.fixture(scope="module")
def client(models) -> Iterator[openai.OpenAI]:
    with serving(models) as url:
        yield openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)


class Panic(BaseException):
    """As a panic of a library in Rust reaches Python."""


@pytest.mark.parametrize(
    "failure", [OverflowError("out of bounds"), MemoryError("no more"), Panic("in Rust")], ids=repr
)
@pytest.mark.parametrize("place", ["before", "after"])
def test_a_sampler_that_raises_ends_the_requests_of_its_step(client, model, models, monkeypatch, failure, place):
    """Before the devices compute, and when they have used up the caches; requests that wait are answered."""
    original = scheduling.compiled_form

    def sampler(samplings, masks):
        form = original(samplings, masks)
        if any(sampling.seed == 666 for sampling in samplings):
            if place == "after":
                models["stories"].worker.scheduler._caches.layers = {}
            raise failure
        return form

    monkeypatch.setattr(scheduling, "compiled_form", sampler)
    expected = model.generate(PROMPT, max_tokens=20)
    request = {"model": "stories", "prompt": PROMPT, "temperature": 0}
    answers: list[str] = []

    def ask() -> None:
        try:
            answers.append(client.completions.create(**request, max_tokens=20).choices[0].text)
        except openai.InternalServerError:
            answers.append("failed")

    threads = [threading.Thread(target=ask) for _ in range(6)]
    for thread in threads[:3]:
        thread.start()
    errors = r"the server failed \((OverflowError|MemoryError|RuntimeError)\)"
    with pytest.raises(openai.InternalServerError, match=errors):
        client.completions.create(**request, max_tokens=60, seed=666)
    for thread in threads[3:]:
        thread.start()
    for thread in threads:
        thread.join()
    assert set(answers) <= {expected, "failed"}
    assert answers.count("failed") <= 1  # the other row of the step, if it had one
    assert client.completions.create(**request, max_tokens=20).choices[0].text == expected
    assert httpx.get(str(client.base_url).replace("/v1/", "/health")).status_code == 200
    worker = models["stories"].worker
    assert not worker.busy
    assert worker.scheduler.room == worker.scheduler.capacity == 66


@pytest.mark.parametrize("failure", [ValueError("grammar"), Panic("in Rust")], ids=repr)
def test_a_grammar_that_raises_ends_its_own_request(client, monkeypatch, failure):
    class Matcher:
        """llguidance's, failing at the fourth token."""

        tokens = 0
        is_error = is_stopped = lambda _: False

        def compute_bitmask(self) -> bytes:
            return np.full(64, 255, np.uint8).tobytes()

        def consume_token(self, token: int) -> None:
            self.tokens += 1
            if self.tokens > 3:
                raise failure

        def deep_copy(self) -> Matcher:
            return self

    def compile_broken(self, grammar, where):
        return LLGrammar(Matcher(), np.full(16, 2**32 - 1, np.uint32))  # pyright: ignore[reportArgumentType]

    monkeypatch.setattr(Grammars, "_compiled", compile_broken)
    texts: list[str] = []
    thread = threading.Thread(
        target=lambda: texts.append(
            client.completions.create(model="stories", prompt=PROMPT, temperature=0, max_tokens=60).choices[0].text
        )
    )
    thread.start()
    with pytest.raises(openai.BadRequestError, match="schema cannot be followed"):
        client.chat.completions.create(
            model="stories",
            messages=[{"role": "user", "content": "x"}],
            response_format={"type": "json_object"},
            max_tokens=50,
            temperature=0,
        )
    thread.join()
    assert len(texts[0]) > 60


def test_as_many_requests_as_rows_and_queue_hold_are_taken(model):
    scheduler = model.engine.scheduler(rows=2, queue=0)
    request = model.engine.request([1, 403], max_tokens=3)
    for _ in range(2):
        scheduler.submit(request)
    with pytest.raises(scheduling.QueueFull):
        scheduler.submit(request)
    scheduler.step(1)
    with pytest.raises(scheduling.QueueFull):
        scheduler.submit(request)
    while not scheduler.idle:
        scheduler.step()
    assert scheduler.room == 2
