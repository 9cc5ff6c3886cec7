"""Greedy generation on a CPU: Meshtune's engine, transformers' generate and llama.cpp, alternated, all in float32.

    pip install xllamacpp gguf
    python benchmarks/cpu_serving/run.py MODEL_DIR [--rounds 3] [--requests 1 8 32] [--new 64] [--json result.json]

A system gets all requests at once, each a prompt of 128 random tokens, and makes `new` tokens of each; a second,
shorter generation of one token is the time of reading. Wall clock, and the processor time of the process. The prompts
of every round are new, so that no system has read them before. The first round warms up and is not counted.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import json
import os
import pathlib
import platform
import statistics
import tempfile
import time
from collections.abc import Callable
from typing import Any

import gguf_file
import jax
import numpy as np
import torch
import transformers
import xllamacpp
from transformers import AutoModelForCausalLM, AutoTokenizer

import meshtune

PROMPT = 128
Runner = Callable[[list[list[int]], int], list[str]]  # (prompts, new tokens) -> the answer to each


def meshtune_runner(directory: str) -> Runner:
    model = meshtune.load(directory, dtype="float32")

    def run(prompts: list[list[int]], new: int) -> list[str]:
        tokens = model.engine.generate(prompts, max_tokens=new, stop_ids=[])
        assert all(len(row) == new for row in tokens)
        return model.tokenizer.batch_decode(tokens, skip_special_tokens=False)

    return run


def transformers_runner(directory: str) -> Runner:
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()
    tokenizer = AutoTokenizer.from_pretrained(directory)

    def run(prompts: list[list[int]], new: int) -> list[str]:
        rows = torch.tensor(prompts)
        options = {"max_new_tokens": new, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
        tokens = model.generate(rows, attention_mask=torch.ones_like(rows), **options)  # pyright: ignore
        return tokenizer.batch_decode(tokens[:, PROMPT:], skip_special_tokens=False)

    return run


def llama_runner(file: pathlib.Path, requests: int, new: int, threads: int) -> Runner:
    params = xllamacpp.CommonParams()  # pyright: ignore[reportAttributeAccessIssue]
    params.model.path = str(file)
    params.n_parallel, params.n_ctx = requests, requests * (PROMPT + new + 8)
    params.cpuparams.n_threads = params.cpuparams_batch.n_threads = threads
    params.warmup, params.verbosity = False, -1
    server = xllamacpp.Server(params)  # pyright: ignore[reportAttributeAccessIssue]

    def answer(prompt: list[int], new: int) -> str:
        fields = {"prompt": prompt, "n_predict": new, "temperature": 0, "ignore_eos": True}
        reply = server.handle_completions(fields | {"cache_prompt": False})
        assert reply["usage"]["completion_tokens"] == new
        return reply["choices"][0]["text"]

    def run(prompts: list[list[int]], new: int) -> list[str]:
        with concurrent.futures.ThreadPoolExecutor(len(prompts)) as pool:
            return list(pool.map(lambda prompt: answer(prompt, new), prompts))

    return run


def timed(run: Runner, prompts: list[list[int]], new: int) -> tuple[float, float, list[str]]:
    """(wall seconds, processor seconds, the answers)."""
    start, cpu = time.perf_counter(), time.process_time()
    answers = run(prompts, new)
    return time.perf_counter() - start, time.process_time() - cpu, answers


def write(path: str, threads: int, new: int, results: dict[str, Any]) -> None:
    """Writes what has been measured so far."""
    about = {
        "versions": {
            "meshtune": meshtune.__version__,
            "jax": jax.__version__,
            "torch": torch.__version__,
            "transformers": transformers.__version__,
            "xllamacpp": xllamacpp.__version__,
            "python": platform.python_version(),
        },
        "cores": os.cpu_count(),
        "threads": threads,
        "prompt": PROMPT,
        "new": new,
        "date": time.strftime("%Y-%m-%d"),
        "results": results,
    }
    pathlib.Path(path).write_text(json.dumps(about, indent=1) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--new", type=int, default=64)
    parser.add_argument("--requests", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--json")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    rng = np.random.default_rng(0)
    results: dict[str, dict[str, dict[str, list[float]]]] = {}
    with tempfile.TemporaryDirectory() as folder:
        file = pathlib.Path(folder) / "model.gguf"
        gguf_file.write(pathlib.Path(options.model), file)
        runners = {"meshtune": meshtune_runner(options.model), "transformers": transformers_runner(options.model)}
        for requests in options.requests:
            runners["llama.cpp"] = llama_runner(file, requests, options.new, options.threads)
            table = results[str(requests)] = {
                name: {key: [] for key in ("wall", "cpu", "reading", "load", "agreement")} for name in runners
            }
            for number in range(options.rounds + 1):
                prompts = rng.integers(100, 49000, (2, requests, PROMPT)).tolist()
                answers: list[str] = []
                for name, run in runners.items():
                    reading, _, _ = timed(run, prompts[0], 1)
                    wall, cpu, texts = timed(run, prompts[1], options.new)
                    answers = answers or texts
                    same = sum(a == b for a, b in zip(answers, texts, strict=True)) / requests
                    if number:
                        for key, value in zip(table[name], (wall, cpu, reading, os.getloadavg()[0], same), strict=True):
                            table[name][key].append(value)
            for name, numbers in table.items():
                medians = {key: statistics.median(values) for key, values in numbers.items()}
                decode = statistics.median(
                    requests * (options.new - 1) / max(wall - reading, 1e-9)
                    for wall, reading in zip(numbers["wall"], numbers["reading"], strict=True)
                )
                print(
                    f"{requests:3} requests, {name:12}: {requests * options.new / medians['wall']:6.1f} tokens/s over "
                    f"all, {decode:6.1f} decoding; processor {medians['cpu']:6.2f} s; same answers as the first "
                    f"{medians['agreement']:.0%}; load {medians['load']:.1f}",
                    flush=True,
                )
            if options.json:
                write(options.json, options.threads, options.new, results)


if __name__ == "__main__":
    main()
