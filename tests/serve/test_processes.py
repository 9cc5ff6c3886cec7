"""`meshtune serve` in two processes: the answers of one device, and a clean end."""

from __future__ import annotations

import concurrent.futures
import itertools
import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import peft
import pytest
import torch
from transformers import AutoModelForCausalLM

from compiling import FASTER
from meshtune.generate.api import Model, load

PROMPTS = ("Once upon a time", "The dog", "One day, a girl named Lily went to the park and saw")


def body(model: str, prompt: str, **options: object) -> dict[str, Any]:
    return {"model": model, "prompt": prompt, "max_tokens": 16, "temperature": 0, **options}


def adapter(base: Path, folder: Path) -> Path:
    torch.manual_seed(0)
    config = peft.LoraConfig(r=2, target_modules=["q_proj", "v_proj"], init_lora_weights=False)
    peft.get_peft_model(AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32), config).save_pretrained(folder)
    return folder


@pytest.fixture
def server(stories260k: Path, tmp_path: Path):
    """(the process that launched it, what it printed, its models on one device)."""
    path = adapter(stories260k, tmp_path / "lora")
    alone = {"base": load(stories260k), "lora": load(stories260k, path)}
    command = [sys.executable, "-m", "meshtune", "launch", "local", "-n", "2", "--"]
    command += ["serve", str(stories260k), "mesh.tp=2", "--name", "base", "--port", "0", "--rows", "2"]
    command += ["--adapter", f"lora={path}"]
    env = os.environ | {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": FASTER}
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=env)
    try:
        assert process.stdout is not None
        lines = list(itertools.takewhile(lambda line: not line.startswith("token"), iter(process.stdout.readline, "")))
        yield process, lines, alone
    finally:
        if process.poll() is None:
            process.terminate()
        process.wait(timeout=60)


@pytest.mark.slow
def test_two_processes_answer_as_one_device_does_and_drain_when_they_are_to_end(server):
    process, lines, alone = server
    printed = dict(line.split(maxsplit=1) for line in lines)
    assert printed["mesh"].strip() == "tp=2 in 2 processes"
    url = f"{printed['address'].strip()}/completions"
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
