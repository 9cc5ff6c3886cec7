"""Many clients at once, some of which go away: nothing may be lost, no row leaked, and the memory must stay flat.

    python benchmarks/serving_load/run.py MODEL_DIRECTORY --seconds 120 --clients 200

Starts `meshtune serve` and asks it from this process. Every client asks again as soon as it has its answer. A part of
its requests is broken off (a stream after a few pieces, a whole answer by a short timeout), a part must follow a JSON
schema, and a part is malformed. What is answered is compared with what the same request was answered before the load.
The same load goes before for `--warm` seconds, in which the programs of all sizes of the batch are compiled.
"""

from __future__ import annotations

import argparse
import asyncio
import collections
import dataclasses
import datetime
import json
import os
import platform
import random
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import httpx
import psutil

PROMPTS = [
    f"Once upon a time, {name}" for name in ("a cat", "Tom", "two birds", "the sun", "a car", "Mia", "an old man")
]
SCHEMA = {
    "type": "object",
    "properties": {"age": {"type": "integer", "minimum": 0, "maximum": 99}, "kind": {"enum": ["big", "small"]}},
    "required": ["age", "kind"],
    "additionalProperties": False,
}
HERE = Path(__file__).parent


@dataclasses.dataclass
class Count:
    """What became of the requests."""

    outcomes: collections.Counter[str] = dataclasses.field(default_factory=collections.Counter)
    waited: list[float] = dataclasses.field(default_factory=list)
    tokens: int = 0


def text_request(prompt: str, tokens: int, **more: object) -> dict:
    return {"model": "model", "prompt": prompt, "max_tokens": tokens, "temperature": 0, **more}


async def whole(client: httpx.AsyncClient, body: dict, timeout: float) -> dict:
    answer = await client.post("/v1/completions", json=body, timeout=timeout)
    answer.raise_for_status()
    return answer.json()


async def streamed(client: httpx.AsyncClient, body: dict, pieces: int | None) -> str | None:
    """The text of a stream; None where it is broken off after so many pieces."""
    text = []
    async with client.stream("POST", "/v1/completions", json=body | {"stream": True}, timeout=300) as answer:
        answer.raise_for_status()
        async for line in answer.aiter_lines():
            if line == "data: [DONE]":
                return "".join(text)
            if line.startswith("data: "):
                text.append(json.loads(line[6:])["choices"][0]["text"])
                if pieces is not None and len(text) >= pieces:
                    return None
    raise RuntimeError("the stream ended without [DONE]")


async def one_request(client: httpx.AsyncClient, draw: random.Random, expected: dict, count: Count) -> str:
    """Asks once; what became of it."""
    prompt, tokens = draw.choice(PROMPTS), draw.choice((8, 24, 64))
    body, kind = text_request(prompt, tokens), draw.random()
    if kind < 0.25:
        same = await streamed(client, body, None) == expected[prompt, tokens]
        count.tokens += tokens
        return "streamed" if same else "streamed, and another text than alone"
    if kind < 0.5:
        answer = await whole(client, body, 300)
        count.tokens += answer["usage"]["completion_tokens"]
        same = answer["choices"][0]["text"] == expected[prompt, tokens]
        return "whole" if same else "whole, and another text than alone"
    if kind < 0.65:
        await streamed(client, body | {"max_tokens": 300}, draw.randint(1, 4))
        return "broken off in a stream"
    if kind < 0.8:
        try:
            await whole(client, body | {"max_tokens": 300}, draw.uniform(0.01, 0.5))
        except httpx.TimeoutException:
            return "broken off while waiting"
        return "whole, before it was broken off"
    if kind < 0.95:
        chat = [{"role": "user", "content": prompt}]
        form = {"type": "json_schema", "json_schema": {"name": "animal", "schema": SCHEMA}}
        asked = {
            "model": "model",
            "messages": chat,
            "max_tokens": 120,
            "seed": draw.randrange(99),
            "response_format": form,
        }
        answer = await client.post("/v1/chat/completions", json=asked, timeout=300)
        answer.raise_for_status()
        (choice,) = answer.json()["choices"]
        if choice["finish_reason"] == "stop":
            json.loads(choice["message"]["content"])
        return f"of a form, ended by {choice['finish_reason']}"
    answer = await client.post("/v1/completions", json=body | {"max_tokens": 0}, timeout=300)
    return "malformed, refused" if answer.status_code == 400 else f"malformed, answered {answer.status_code}"


async def ask_on(client: httpx.AsyncClient, number: int, until: float, expected: dict, count: Count) -> None:
    draw = random.Random(number)
    while time.monotonic() < until:
        begun = time.monotonic()
        try:
            outcome = await one_request(client, draw, expected, count)
        except (httpx.HTTPError, RuntimeError, ValueError) as problem:
            outcome = f"lost: {type(problem).__name__}: {str(problem)[:80]}"
        count.outcomes[outcome] += 1
        count.waited.append(time.monotonic() - begun)


async def memory(process: psutil.Process, until: float) -> list[int]:
    """The server's resident memory every two seconds, in bytes."""
    samples = []
    while time.monotonic() < until:
        samples.append(process.memory_info().rss)
        await asyncio.sleep(2)
    return samples


async def load(url: str, process: psutil.Process, clients: int, warm: float, seconds: float) -> dict:
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=clients)
    async with httpx.AsyncClient(base_url=url, limits=limits) as client:
        expected = {}
        for prompt in PROMPTS:
            for tokens in (8, 24, 64):
                answer = await whole(client, text_request(prompt, tokens), 300)
                expected[prompt, tokens] = answer["choices"][0]["text"]
        until = time.monotonic() + warm
        await asyncio.gather(*(ask_on(client, -n, until, expected, Count()) for n in range(clients)))
        count, begun = Count(), time.monotonic()
        until = begun + seconds
        sampling = asyncio.create_task(memory(process, until))
        await asyncio.gather(*(ask_on(client, n, until, expected, count) for n in range(clients)))
        took = time.monotonic() - begun
        await asyncio.sleep(2)
        gauges = (await client.get("/metrics")).text
        idle = {name: int(re.search(rf"meshtune_{name}{{.*}} (\d+)", gauges)[1]) for name in GAUGES}  # pyright: ignore
        waited = sorted(count.waited)
        return {
            "seconds": round(took, 1),
            "requests": sum(count.outcomes.values()),
            "outcomes": dict(count.outcomes.most_common()),
            "median_wait_s": round(waited[len(waited) // 2], 2),
            "p99_wait_s": round(waited[int(len(waited) * 0.99)], 2),
            "checked_tokens": count.tokens,
            "rss_mib": [round(sample / 2**20) for sample in await sampling],
            "after": idle | {"rss_mib": round(process.memory_info().rss / 2**20)},
        }


GAUGES = ("requests_running", "requests_waiting", "generated_tokens_total")


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("model")
    parser.add_argument("--seconds", type=float, default=120)
    parser.add_argument("--warm", type=float, default=60)
    parser.add_argument("--clients", type=int, default=200)
    parser.add_argument("--rows", type=int, default=16)
    parser.add_argument("--out", default=str(HERE / "result.json"))
    options = parser.parse_args()
    command = [sys.executable, "-m", "meshtune", "serve", options.model, "--name", "model", "--port", "0"]
    command += ["--rows", str(options.rows), "--queue", "1000", "--chat-template", "plain"]
    server = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert server.stdout is not None
    try:
        url = server.stdout.readline().split()[1].removesuffix("/v1")
        result = asyncio.run(load(url, psutil.Process(server.pid), options.clients, options.warm, options.seconds))
        server.send_signal(signal.SIGTERM)
        result["exit_status"] = server.wait(timeout=60)
    finally:
        server.kill()
    about = {"date": datetime.date.today().isoformat(), "machine": f"{os.cpu_count()} cores, {platform.machine()}"}
    about |= {"clients": options.clients, "rows": options.rows, "load_average_before": round(os.getloadavg()[2], 1)}
    lines = [f" {json.dumps(name)}: {json.dumps(value)}" for name, value in (about | result).items()]
    text = "{\n" + ",\n".join(lines) + "\n}\n"
    Path(options.out).write_text(text)
    print(text)


if __name__ == "__main__":
    main()
