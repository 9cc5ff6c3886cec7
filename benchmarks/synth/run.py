"""Records of a local teacher by `meshtune data generate` beside the same prompts sent to `meshtune serve` one by one.

    python benchmarks/synth/run.py MODEL_DIR [--prompts 16] [--new 48] [--rounds 2] [--json FILE]

Both get the same requests with the same seeds: summaries of made passages, `new` tokens at most. The engine has all at
once, 16 rows; the server gets one, waits for its answer, and gets the next. A first round of other seeds warms both up
and is not counted. Seconds are wall clock, and processor time of the process that computes.
"""

from __future__ import annotations

import argparse
import json
import os
import pathlib
import platform
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from typing import Any

import jax
import psutil

import meshtune
from meshtune.config.data_recipe import DataRecipe, load_data_recipe
from meshtune.evaluate.folder import Report
from meshtune.synth.asking import run_tasks
from meshtune.synth.maker import Maker
from meshtune.synth.plan import make_plan
from meshtune.synth.teachers import Teacher, open_teacher

WORDS = (
    "mill ferry orchard bridge library tower river granite bell harvest sluice wheel spelt rye maps fog noon".split()
)


def write_passages(folder: pathlib.Path, count: int) -> None:
    """Passages of about 90 words, each of its own."""
    folder.mkdir()
    for number in range(count):
        words = [WORDS[(number * 7 + n * (number % 5 + 1)) % len(WORDS)] for n in range(90)]
        (folder / f"{number:03}.md").write_text(f"# Page {number}\n\nThe " + " of the ".join(words) + ".\n")


def recipe_of(folder: pathlib.Path, path: str, at_once: int, seed: int, new: int) -> DataRecipe:
    """The recipe of one round."""
    teacher: dict[str, Any] = {"path": path, "at_once": at_once, "max_tokens": new}
    if path.startswith("http"):
        teacher["timeout"] = 600
    raw = {"kinds": ["summary"], "documents": str(folder / "docs"), "output": str(folder / "out"), "seed": seed}
    return load_data_recipe({**raw, "teacher": teacher, "passage_words": 400, "attempts": 1})


def silent(done: int, total: int) -> None:
    """Reports nothing."""


def measure(recipe: DataRecipe, teacher: Teacher, process: psutil.Process, folder: pathlib.Path) -> dict[str, float]:
    """Wall-clock and processor seconds, and tokens of answers, of one round."""
    report: Report = silent
    plan = make_plan(recipe)
    maker, journals = Maker(recipe, teacher, None), folder / f"journal-{time.monotonic_ns()}"
    start, before = time.monotonic(), sum(process.cpu_times()[:2])
    outcome = run_tasks(plan, maker, [teacher], journals, report, deliver=lambda results: None)
    seconds, used = time.monotonic() - start, sum(process.cpu_times()[:2]) - before
    assert not outcome.failed, outcome.failed
    return {"seconds": seconds, "processor_seconds": used, "answer_tokens": outcome.spent.answer}


def main() -> None:
    """Measures, prints, and writes the result."""
    parser = argparse.ArgumentParser()
    parser.add_argument("model")
    parser.add_argument("--prompts", type=int, default=16)
    parser.add_argument("--new", type=int, default=48)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--json")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        folder = pathlib.Path(directory)
        write_passages(folder / "docs", arguments.prompts)
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        command = [sys.executable, "-m", "meshtune", "serve", arguments.model, "--port", str(port)]
        server = subprocess.Popen(command, stdout=subprocess.DEVNULL)
        address = f"http://127.0.0.1:{port}/v1"
        try:
            rounds = {"engine": [], "one by one": []}
            local = open_teacher(recipe_of(folder, arguments.model, 16, 0, arguments.new).teacher)
            remote = wait_for(address, recipe_of(folder, address, 1, 0, arguments.new), server)
            processes = {"engine": psutil.Process(), "one by one": psutil.Process(server.pid)}
            for seed in range(arguments.rounds + 1):
                for name, path, at_once, teacher in (
                    ("one by one", address, 1, remote), ("engine", arguments.model, 16, local),
                ):  # fmt: skip
                    recipe = recipe_of(folder, path, at_once, seed, arguments.new)
                    result = measure(recipe, teacher, processes[name], folder)
                    print(seed, name, result, flush=True)
                    if seed:
                        rounds[name].append(result)
        finally:
            server.terminate()
            server.wait()
    means = {
        name: {key: statistics.fmean(entry[key] for entry in entries) for key in entries[0]}
        for name, entries in rounds.items()
    }
    rate = {name: entry["answer_tokens"] / entry["seconds"] for name, entry in means.items()}
    used = {name: entry["answer_tokens"] / entry["processor_seconds"] for name, entry in means.items()}
    summary = {
        "versions": {"meshtune": meshtune.__version__, "jax": jax.__version__, "python": platform.python_version()},
        "cores": os.cpu_count(),
        "prompts": arguments.prompts,
        "new": arguments.new,
        "rounds": rounds,
        "tokens_per_second": rate,
        "tokens_per_processor_second": used,
        "times_as_fast": rate["engine"] / rate["one by one"],
        "times_as_fast_in_processor_time": used["engine"] / used["one by one"],
    }
    print(json.dumps(summary, indent=2))
    if arguments.json:
        pathlib.Path(arguments.json).write_text(json.dumps(summary, indent=2) + "\n")


def wait_for(address: str, recipe: DataRecipe, server: subprocess.Popen[bytes]) -> Teacher:
    """The server as a teacher, once it answers."""
    from meshtune.errors import UserError

    while server.poll() is None:
        try:
            return open_teacher(recipe.teacher)
        except UserError:
            time.sleep(1)
    raise RuntimeError("the server did not start")


if __name__ == "__main__":
    main()
