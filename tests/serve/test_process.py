"""`meshtune serve` as a process: what it prints, when it answers, and how it ends."""

from __future__ import annotations

import json
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import httpx
import pytest

from meshtune.cli.serve import _parse_adapters, listener_at
from meshtune.errors import UserError
from meshtune.serve.guard import Gate


@pytest.mark.slow
def test_a_process_says_when_it_answers_and_drains_when_it_is_to_end(stories260k: Path):
    """SIGTERM amid a stream: the stream is finished, new requests get 503, and the process ends with 0."""
    command = [sys.executable, "-m", "meshtune", "serve", str(stories260k), "--port", "0", "--chat-template", "plain"]
    process = subprocess.Popen([*command, "--token", "open sesame", "--rows", "1"], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    try:
        printed = dict(process.stdout.readline().split(maxsplit=1) for _ in range(3))
        assert printed["models"].strip() == str(stories260k)
        assert printed["token"].strip() == "open sesame"
        url = printed["address"].strip()
        headers = {"authorization": "Bearer open sesame"}
        body = {"model": str(stories260k), "prompt": "Once", "max_tokens": 500, "n": 6, "stream": True}
        body |= {"logit_bias": {"2": -100}, "stream_options": {"include_usage": True}}
        with httpx.stream("POST", f"{url}/completions", json=body, headers=headers, timeout=120) as stream:
            assert stream.status_code == 200
            lines = stream.iter_lines()
            assert next(lines).startswith("data: ")
            process.send_signal(signal.SIGTERM)
            refused = later(f"{url}/models", headers)
            assert refused.status_code == 503
            assert refused.json()["error"]["code"] == "shutting_down"
            assert httpx.get(url.replace("/v1", "/health")).status_code == 503
            events = [line.removeprefix("data: ") for line in lines if line]
        assert events[-1] == "[DONE]"
        assert json.loads(events[-2])["usage"]["completion_tokens"] == 6 * 500
        assert process.wait(timeout=30) == 0
    finally:
        process.kill()
        process.wait()


def later(url: str, headers: dict[str, str]) -> httpx.Response:
    """The first answer after the signal has arrived."""
    while (answer := httpx.get(url, headers=headers)).status_code == 200:
        pass
    return answer


def test_a_port_in_use_is_said_before_anything_is_loaded():
    with socket.create_server(("127.0.0.1", 0)) as listener:
        with pytest.raises(UserError, match="cannot be listened on: Address already in use") as refused:
            listener_at("127.0.0.1", listener.getsockname()[1])
        assert "--port 0" in (refused.value.fix or "")
    with pytest.raises(UserError, match="cannot be listened on"):
        listener_at("192.0.2.1", 8000)  # an address that is not this machine's


@pytest.mark.parametrize(
    ("adapters", "message"),
    [(["polite"], "is not NAME=PATH"), (["=x"], "is not NAME=PATH"), (["a=x", "a=y"], "given twice")],
)
def test_adapters_that_are_not_named(adapters, message):
    with pytest.raises(UserError, match=message):
        _parse_adapters(adapters)


def test_a_closed_gate_waits_for_what_is_under_way():
    gate = Gate()
    assert not gate.drained
    gate.under_way = 1
    gate.close(seconds=0.05)
    assert gate.closed
    assert not gate.drained
    time.sleep(0.1)
    assert gate.drained  # the time is over
    gate = Gate()
    gate.close()
    assert gate.drained
