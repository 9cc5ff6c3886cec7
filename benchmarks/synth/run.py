"""Records of a local teacher by `meshtune data generate` beside the same prompts sent to `meshtune serve` one by one.

    python benchmarks/synth/run.py MODEL_DIR [--kind qa] [--prompts 32] [--new 128] [--rounds 2] [--json FILE]

Both get the same requests with the same seeds, with answers of `new` tokens at most: questions and answers (JSON) of
passages of docs/, other ones in every round, or summaries of made passages. The engine has 16 at once; the server gets
one, waits for its answer, and gets the next. A first round warms both up and is not counted; rounds alternate. Seconds
are wall clock, and processor time of the process that computes; `prompt_tokens_read` are those that the engine
computed, of `prompt_tokens`.
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
from meshtune.generate.weights import BatchCaches
from meshtune.synth.asking import run_tasks
from meshtune.synth.maker import Maker
from meshtune.synth.plan import make_plan
from meshtune.synth.teachers import Teacher, open_teacher

DOCS = pathlib.Path(__file__).parents[2] / "docs"
PAGES = (
    "choosing data evaluate faq generate-data internals launch quantize rl scale serve starts tutorial vision".split()
)  # of text, written by hand
WARM_UP = {"engine": 16, "one by one": 4}  # prompts of the first round
WORDS = (
    "mill ferry orchard bridge library tower river granite bell harvest sluice wheel spelt rye maps fog noon".split()
)


def write_passages(folder: pathlib.Path, count: int) -> None:
    """Passages of about 90 words, each of its own."""
    folder.mkdir()
    for number in range(count):
        words = [WORDS[(number * 7 + n * (number % 5 + 1)) % len(WORDS)] for n in range(90)]
        (folder / f"{number:03}.md").write_text(f"# Page {number}\n\nThe " + " of the ".join(words) + ".\n")


def recipe_of(
    folder: pathlib.Path, path: str, at_once: int, options: argparse.Namespace, seed: int = 0, limit: int | None = None
) -> DataRecipe:
    """The recipe of one round."""
    new = options.new
    teacher: dict[str, Any] = {"path": path, "at_once": at_once, "max_tokens": new}
    if path.startswith("http"):
        teacher["timeout"] = 600
    raw: dict[str, Any] = {"output": str(folder / "out"), "seed": seed, "limit": limit, "attempts": 1}
    if options.kind == "qa":
        kinds = [{"template": "qa", "options": {"count": options.count}}]
        raw |= {"kinds": kinds, "documents": str(folder / "pages"), "passage_words": options.passage_words}
    else:
        raw |= {"kinds": ["summary"], "documents": str(folder / "docs"), "passage_words": 400}
    return load_data_recipe({**raw, "teacher": teacher})


class ReadTokens:
    """Counts the tokens of prompts that the engine of this process computes."""

    def __init__(self) -> None:
        self.count, read = 0, BatchCaches.read

        def counting_read(caches: BatchCaches, **arrays: Any) -> None:
            self.count += int(arrays["count"].sum())
            return read(caches, **arrays)

        BatchCaches.read = counting_read


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
    spent = outcome.spent
    counts = {"prompts": len(plan.tasks), "prompt_tokens": spent.prompt, "answer_tokens": spent.answer}
    return {"seconds": seconds, "processor_seconds": used, **counts}


def main() -> None:
    """Measures, prints, and writes the result."""
    parser = argparse.ArgumentParser()
    parser.add_argument("model")
    parser.add_argument("--kind", choices=["qa", "summary"], default="qa")
    parser.add_argument("--count", type=int, default=3, help="questions of a passage")
    parser.add_argument("--passage-words", type=int, default=80)
    parser.add_argument("--prompts", type=int, default=32)
    parser.add_argument("--new", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--json")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        folder = pathlib.Path(directory)
        write_passages(folder / "docs", arguments.prompts)
        (folder / "pages").mkdir()
        for page in PAGES:
            (folder / "pages" / f"{page}.md").write_text((DOCS / f"{page}.md").read_text())
        read_tokens = ReadTokens()
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        command = [sys.executable, "-m", "meshtune", "serve", arguments.model, "--port", str(port)]
        server = subprocess.Popen(command, stdout=subprocess.DEVNULL)
        address = f"http://127.0.0.1:{port}/v1"
        try:
            rounds = {"engine": [], "one by one": []}
            local = open_teacher(recipe_of(folder, arguments.model, 16, arguments).teacher)
            remote = wait_for(address, recipe_of(folder, address, 1, arguments), server)
            processes = {"engine": psutil.Process(), "one by one": psutil.Process(server.pid)}
            for seed in range(arguments.rounds + 1):
                for name, path, at_once, teacher in (
                    ("one by one", address, 1, remote), ("engine", arguments.model, 16, local),
                ):  # fmt: skip
                    limit = arguments.prompts if seed else WARM_UP[name]
                    recipe = recipe_of(folder, path, at_once, arguments, seed, limit)
                    before = read_tokens.count
                    result = measure(recipe, teacher, processes[name], folder)
                    if name == "engine":
                        result["prompt_tokens_read"] = read_tokens.count - before
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
        "options": {name: value for name, value in vars(arguments).items() if name not in ("model", "json")},
        "load_average": os.getloadavg(),
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
