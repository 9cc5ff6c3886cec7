"""A miniature of benchmarks/serving_load: clients that ask at once, some leaving amid their answer."""

from __future__ import annotations

import asyncio
import random
import time

import httpx
from serving import serving

from meshtune.generate.api import load
from meshtune.serve.models import Models

PROMPTS = ["Once upon a time, a cat", "Tom", "One day, two birds", "The sun"]


def test_nothing_is_lost_among_clients_that_come_and_go(stories260k):
    """Every answer is the one that its prompt gets by itself, no row stays taken, and the queue is empty."""
    model = load(stories260k, dtype="float32", chat_template="plain")
    models = Models({"stories": model}, rows=4, queue=200)
    expected = {prompt: model.generate(prompt, max_tokens=24) for prompt in PROMPTS}

    async def visit(client: httpx.AsyncClient, draw: random.Random) -> str:
        prompt = draw.choice(PROMPTS)
        body = {"model": "stories", "prompt": prompt, "temperature": 0, "max_tokens": 24}
        match draw.randrange(3):
            case 0:
                async with client.stream(
                    "POST", "/v1/completions", json=body | {"max_tokens": 300, "stream": True}
                ) as answer:
                    await anext(answer.aiter_lines())
                return "gone"
            case 1:
                try:
                    await client.post("/v1/completions", json=body | {"max_tokens": 300}, timeout=0.05)
                except httpx.TimeoutException:
                    return "gone"
                return "too fast"
            case _:
                answer = await client.post("/v1/completions", json=body)
                return "right" if answer.json()["choices"][0]["text"] == expected[prompt] else "wrong"

    async def ask(url: str) -> list[str]:
        async with httpx.AsyncClient(base_url=url, timeout=120) as client:
            draws = [random.Random(n) for n in range(24)]
            rounds = [await asyncio.gather(*(visit(client, draw) for draw in draws)) for _ in range(2)]
        return [outcome for outcomes in rounds for outcome in outcomes]

    with serving(models) as url:
        outcomes = asyncio.run(ask(url))
        worker, deadline = models["stories"].worker, time.monotonic() + 20
        while (worker.busy or not worker.scheduler.idle) and time.monotonic() < deadline:
            time.sleep(0.01)
        assert not worker.busy
        assert worker.scheduler.running == worker.scheduler.waiting == 0
    assert "wrong" not in outcomes
    assert outcomes.count("right") > 8
    assert outcomes.count("gone") > 8
