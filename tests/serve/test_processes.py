"""`meshtune serve` in two processes: the answers of one device, a clean end, and the loss of a process."""

from __future__ import annotations

import concurrent.futures
import contextlib
import itertools
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import peft
import psutil
import pytest
import torch
from transformers import AutoModelForCausalLM

from compiling import FASTER
from meshtune.generate.api import Model, load
from meshtune.generate.driver import IDLE
from meshtune.mesh.client import EXIT_PROCESS_LOST

PROMPTS = ("Once upon a time", "The dog", "One day, a girl named Lily went to the park and saw")


def body(model: str, prompt: str, **options: object) -> dict[str, Any]:
    return {"model": model, "prompt": prompt, "max_tokens": 16, "temperature": 0, **options}


def adapter(base: Path, folder: Path) -> Path:
    torch.manual_seed(0)
    config = peft.LoraConfig(r=2, target_modules=["q_proj", "v_proj"], init_lora_weights=False)
    peft.get_peft_model(AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32), config).save_pretrained(
        str(folder)
    )
    return folder


@contextlib.contextmanager
def launch_server(
    model: Path, *arguments: str, **variables: str
) -> Iterator[tuple[subprocess.Popen[str], dict[str, str]]]:
    """(the process that launched a server in two processes, the lines that it printed by their first words)."""
    command = [sys.executable, "-m", "meshtune", "launch", "local", "-n", "2", "--"]
    command += ["serve", str(model), "mesh.tp=2", "--name", "base", "--port", "0", "--rows", "2", *arguments]
    env = os.environ | {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": FASTER} | variables
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=env)
    try:
        assert process.stdout is not None
        lines = list(itertools.takewhile(lambda line: not line.startswith("token"), iter(process.stdout.readline, "")))
        pairs = [line.strip().split(maxsplit=1) for line in lines]
        yield process, {pair[0]: pair[1] for pair in pairs if len(pair) == 2}
    finally:
        if process.poll() is None:
            process.terminate()
        process.wait(timeout=60)


@pytest.mark.slow
def test_two_processes_answer_as_one_device_does_and_drain_when_they_are_to_end(stories260k: Path, tmp_path: Path):
    path = adapter(stories260k, tmp_path / "lora")
    alone = {"base": load(stories260k), "lora": load(stories260k, path)}
    with launch_server(stories260k, "--adapter", f"lora={path}") as (process, printed):
        assert printed["mesh"] == "tp=2 in 2 processes"
        check_answers(process, f"{printed['address']}/completions", alone)


def check_answers(process: subprocess.Popen[str], url: str, alone: dict[str, Model]) -> None:
    pairs = [(name, prompt) for prompt in PROMPTS for name in alone]
    with concurrent.futures.ThreadPoolExecutor(len(pairs)) as pool:
        answers = list(pool.map(lambda pair: httpx.post(url, json=body(*pair), timeout=300), pairs))
    for (name, prompt), answer in zip(pairs, answers, strict=True):
        assert answer.status_code == 200, answer.text
        assert answer.json()["choices"][0]["text"] == expected_text(alone[name], prompt), (name, prompt)
    scored = httpx.post(url, json=body("lora", PROMPTS[2], max_tokens=1, echo=True, logprobs=0), timeout=300).json()
    ids = alone["lora"].tokenizer.encode(PROMPTS[2])
    reference = [token.log_probability for token in alone["lora"].token_log_probabilities(ids)]
    actual = scored["choices"][0]["logprobs"]["token_logprobs"][1 : len(ids)]
    np.testing.assert_allclose(np.asarray(actual, float), np.asarray(reference, float), atol=1e-4)

    stream = body("lora", PROMPTS[0], max_tokens=60, stream=True, logit_bias={"2": -100})
    with httpx.stream("POST", url, json=stream, timeout=300) as response:
        events = response.iter_lines()
        assert next(events).startswith("data: ")
        process.send_signal(signal.SIGTERM)  # the launcher passes it on to both
        data = [line.removeprefix("data: ") for line in events if line]
    assert data[-1] == "[DONE]"
    assert json.loads(data[-2])["choices"][0]["finish_reason"] == "length"
    assert process.wait(timeout=60) == 0


def expected_text(model: Model, prompt: str) -> str:
    return model.generate(prompt, max_tokens=16)


@contextlib.contextmanager
def lose_process(model: Path, victim: int) -> Iterator[tuple[str, psutil.Process]]:
    """(the address of a server, one of its processes): once the block has ended it, all must end with 75."""
    with launch_server(model) as (process, printed):
        workers = psutil.Process(process.pid).children()
        yield (
            f"{printed['address']}/completions",
            next(worker for worker in workers if worker.environ()["MESHTUNE_PROCESS"] == str(victim)),
        )
        output, _ = process.communicate(timeout=60)
        assert process.returncode == EXIT_PROCESS_LOST, output
        assert victim == 0 or f"process {victim} of 2" in output, output
        assert not any(worker.is_running() for worker in workers)


@pytest.mark.slow
@pytest.mark.parametrize("victim", [0, 1])
def test_clients_get_an_error_where_a_process_is_killed_while_it_answers(stories260k: Path, victim: int):
    long = body("base", PROMPTS[0], max_tokens=400, stream=True, logit_bias={"2": -100})
    with (
        lose_process(stories260k, victim) as (url, worker),
        httpx.stream("POST", url, json=long, timeout=100) as response,
    ):
        events, rest = response.iter_lines(), list[str]()
        assert next(events).startswith("data: ")
        worker.kill()
        with contextlib.suppress(httpx.TransportError):
            for line in events:
                rest.append(line)
    broken = "data: [DONE]" not in rest
    assert broken or any(line.startswith('data: {"error"') for line in rest), rest[-4:]


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP], ids=["killed", "silent"])
def test_a_server_ends_where_its_other_process_is_lost_while_nobody_asks(stories260k: Path, number: int):
    """The other process waits for the coordinator then. One that is silent, as if its host were gone, is noticed within
    a minute, also by a request that waits for it."""
    with lose_process(stories260k, 1) as (url, worker):
        assert httpx.post(url, json=body("base", PROMPTS[0]), timeout=300).status_code == 200
        time.sleep(2 * IDLE)
        worker.send_signal(number)
        if number == signal.SIGSTOP:
            with contextlib.suppress(httpx.TransportError):
                assert httpx.post(url, json=body("base", PROMPTS[0]), timeout=100).status_code >= 500


# Imported by each process as it starts; only process 0 has a scheduler, which calls what is replaced here.
FAILURE = """
from meshtune.generate import scheduler

original = scheduler.compiled_form

def compiled_form(samplings, masks):
    if any(sampling.seed == 666 for sampling in samplings):
        raise IndexError("a sampler failed")
    return original(samplings, masks)

scheduler.compiled_form = compiled_form
"""


@pytest.mark.slow
def test_a_server_ends_where_a_step_fails_in_process_0_alone(stories260k: Path, tmp_path: Path):
    (tmp_path / "sitecustomize.py").write_text(FAILURE)
    path = os.pathsep.join([str(tmp_path), *filter(None, [os.environ.get("PYTHONPATH")])])
    with launch_server(stories260k, PYTHONPATH=path) as (process, printed):
        workers, url = psutil.Process(process.pid).children(), f"{printed['address']}/completions"
        assert httpx.post(url, json=body("base", PROMPTS[0]), timeout=300).status_code == 200
        answer = httpx.post(url, json=body("base", PROMPTS[0], seed=666), timeout=100)
        assert (answer.status_code, "IndexError" in answer.text) == (500, True)
        output, _ = process.communicate(timeout=60)
        assert process.returncode == 1, output
        assert "a step failed in process 0" in output
        assert "IndexError: a sampler failed" in output
        assert not any(worker.is_running() for worker in workers)
