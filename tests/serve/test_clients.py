"""Clients other than OpenAI's: curl, lm-eval and LangChain."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterator

import pytest
import torch
from lm_eval.api.instance import Instance
from lm_eval.models.openai_completions import LocalChatCompletion, LocalCompletionsAPI
from random_model import save_random_model
from serving import TOKEN, serving
from transformers import AutoModelForCausalLM

from meshtune.generate.api import Model, load
from meshtune.serve.models import Models

PAIRS = [("Once upon a time", " there was a dog"), ("Tom and Mia", " went to the park"), ("The sun", " sang zyx")]


@pytest.fixture(scope="module")
def model(stories260k) -> Model:
    return load(stories260k, dtype="float32", chat_template="chatml")


@pytest.fixture(scope="module")
def address(model, shared, tmp_path_factory) -> Iterator[str]:
    path = save_random_model(tmp_path_factory.mktemp("models") / "random", shared)
    models = {"stories": model, "random": load(path, dtype="float32", chat_template="chatml")}
    with serving(Models(models, rows=4, queue=64), token=TOKEN) as url:
        yield f"{url}/v1"


@pytest.fixture
def key(monkeypatch) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", TOKEN)


def instances(kind: str, arguments: list) -> list[Instance]:
    return [Instance(kind, {}, entry, n) for n, entry in enumerate(arguments)]  # pyright: ignore[reportArgumentType]


def test_lm_eval_has_the_log_likelihoods_of_transformers(address, key, model, stories260k):
    """Through `local-completions`, whose tokenizer is the server's."""
    client = LocalCompletionsAPI(base_url=f"{address}/completions", model="stories", auth_token=TOKEN, batch_size=2)
    assert client.tokenizer_backend == "remote"
    answers = client.loglikelihood(instances("loglikelihood", PAIRS), disable_tqdm=True)
    reference = AutoModelForCausalLM.from_pretrained(stories260k, dtype=torch.float32)
    for (context, continuation), (score, greedy) in zip(PAIRS, answers, strict=True):
        head, ids = (
            model.tokenizer(text, add_special_tokens=False)["input_ids"] for text in (context, context + continuation)
        )
        with torch.no_grad():
            scores = reference(torch.tensor([ids])).logits[0].log_softmax(-1)
        tail = list(range(len(head), len(ids)))
        expected = sum(scores[n - 1, ids[n]].item() for n in tail)
        assert score == pytest.approx(expected, abs=1e-3)  # float32 sums of a handful of tokens by two programs
        assert greedy == all(int(scores[n - 1].argmax()) == ids[n] for n in tail)


def test_lm_eval_generates(address, key, model):
    client = LocalCompletionsAPI(base_url=f"{address}/completions", model="stories", auth_token=TOKEN, max_length=512)
    requests = instances("generate_until", [("Once upon a time", {"until": ["."], "max_gen_toks": 40})])
    (text,) = client.generate_until(requests, disable_tqdm=True)
    ids = model.tokenizer("Once upon a time", add_special_tokens=False)["input_ids"]
    written = model.tokenizer.decode(model.engine.generate([ids], max_tokens=40)[0])
    assert text.strip() == written.split(".")[0].strip()


def test_lm_eval_chats(address, key, model):
    client = LocalChatCompletion(base_url=f"{address}/chat/completions", model="stories", auth_token=TOKEN)
    chat = [{"role": "user", "content": "Tell me of a dog."}]
    rendered = client.apply_chat_template(chat)
    requests = instances("generate_until", [(rendered, {"until": ["never said"], "max_gen_toks": 20})])
    (text,) = client.generate_until(requests, disable_tqdm=True)
    assert text.strip() == model.generate(chat, max_tokens=20).strip()


def curl(*arguments: str) -> str:
    done = subprocess.run(["curl", "--silent", "--no-buffer", *arguments], capture_output=True, text=True, check=True)
    return done.stdout


def test_curl(address, model):
    headers = ["-H", f"Authorization: Bearer {TOKEN}", "-H", "Content-Type: application/json"]
    chat = [{"role": "user", "content": "Tell me of a dog."}]
    body = {"model": "stories", "messages": chat, "max_tokens": 15, "temperature": 0}
    answer = json.loads(curl(f"{address}/chat/completions", *headers, "-d", json.dumps(body)))
    assert answer["choices"][0]["message"]["content"] == model.generate(chat, max_tokens=15)
    events = curl(f"{address}/chat/completions", *headers, "-d", json.dumps(body | {"stream": True})).split("\n\n")
    assert events[-2:] == ["data: [DONE]", ""]
    pieces = [
        json.loads(event.removeprefix("data: "))["choices"][0]["delta"].get("content", "") for event in events[:-2]
    ]
    assert "".join(pieces) == model.generate(chat, max_tokens=15)
    assert json.loads(curl(f"{address}/models"))["error"]["code"] == "invalid_api_key"


def test_a_body_of_100_mb_is_refused_before_it_is_sent(address, tmp_path):
    """By its length, or by the bytes read where no length is declared; the server keeps running."""
    large = tmp_path / "large.json"
    with large.open("wb") as file:
        file.truncate(100 * 2**20)
    headers = ["-H", f"Authorization: Bearer {TOKEN}", "-H", "Expect:"]
    for extra in ([], ["-H", "Transfer-Encoding: chunked"]):
        written = ["-o", str(tmp_path / "answer"), "-w", "%{http_code}", "--data-binary", f"@{large}"]
        done = subprocess.run(
            ["curl", "--silent", f"{address}/chat/completions", *headers, *extra, *written],
            capture_output=True,
            text=True,
        )
        assert done.stdout == "413"
        assert "16777216" in (tmp_path / "answer").read_text()
    assert json.loads(curl(f"{address}/models", "-H", f"Authorization: Bearer {TOKEN}"))["object"] == "list"


@pytest.mark.slow
def test_langchain(address, model):
    """Whole, streamed, with a tool that must be called, and with an answer in a class of the user's."""
    reason = "langchain-openai is not installed"
    ChatOpenAI = pytest.importorskip("langchain_openai", reason=reason).ChatOpenAI
    from pydantic import BaseModel, Field

    class Weather(BaseModel):
        """The weather of a city."""

        city: str = Field(max_length=5)
        days: int = Field(ge=1, le=3)

    options = {"model": "stories", "base_url": address, "api_key": TOKEN, "temperature": 0}
    chat = ChatOpenAI(**options, max_tokens=15)
    question = [{"role": "user", "content": "Tell me of a dog."}]
    text = model.generate(question, max_tokens=15)
    answer = chat.invoke(question)
    assert answer.content == text
    assert answer.usage_metadata is not None
    assert answer.usage_metadata["output_tokens"] == 15
    assert "".join(str(chunk.content) for chunk in chat.stream(question)) == text
    forced = ChatOpenAI(**options, max_tokens=60, model_kwargs={"parallel_tool_calls": False})
    short = [{"role": "user", "content": "A"}]
    assert isinstance(forced.with_structured_output(Weather, method="json_schema").invoke(short), Weather)
    # A template that shows tools writes a long preamble, which needs a longer context.
    calls = ChatOpenAI(**options | {"model": "random", "temperature": 1, "seed": 1}, max_tokens=150)
    strict = {"tool_choice": "required", "parallel_tool_calls": False, "strict": True}
    called = calls.bind_tools([Weather], **strict).invoke(short).tool_calls
    assert [call["name"] for call in called] == ["Weather"]
    assert Weather(**called[0]["args"])
    assert isinstance(
        calls.with_structured_output(Weather, method="function_calling", strict=True).invoke(short), Weather
    )
