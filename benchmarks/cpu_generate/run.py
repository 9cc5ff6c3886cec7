"""Greedy generation on a CPU: Meshtune beside transformers' generate, alternated in one process, float32.

    python benchmarks/cpu_generate/run.py MODEL_DIR [--rounds 5] [--batches 1 4] [--new 64] [--json result.json]

Times are wall clock. A generation of `new` tokens is timed, and one of a single token (prefill and first token); what
lies between is decoding. Both produce exactly `new` tokens. transformers is measured with one and with all threads.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import time
from collections.abc import Callable

import jax
import numpy as np
import torch
import transformers
from transformers import AutoModelForCausalLM

import meshtune

PROMPT = 128
KEYS = ("first", "decode", "cpu", "load")


def timed(call: Callable[[], object]) -> tuple[float, float]:
    """(wall, CPU) seconds; the second says what the work cost on a machine that others use too."""
    start, cpu = time.perf_counter(), time.process_time()
    call()
    return time.perf_counter() - start, time.process_time() - cpu


def cpu_model() -> str:
    with open("/proc/cpuinfo") as file:
        return next((line.split(":")[1].strip() for line in file if "model name" in line), "unknown")


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("model")
    options.add_argument("--rounds", type=int, default=5)
    options.add_argument("--new", type=int, default=64)
    options.add_argument("--batches", type=int, nargs="+", default=[1, 4])
    options.add_argument("--json")
    asked = options.parse_args()

    ours = meshtune.load(asked.model, dtype="float32")
    theirs = AutoModelForCausalLM.from_pretrained(asked.model, dtype=torch.float32).eval()
    threads = torch.get_num_threads()
    rng = np.random.default_rng(0)
    found: dict[str, dict[str, list[float]]] = {}

    for batch in asked.batches:
        prompts = rng.integers(100, ours.spec.vocab, (batch, PROMPT))

        def meshtune_run(new: int, prompts: np.ndarray = prompts) -> None:
            tokens = ours.engine.generate(prompts.tolist(), max_tokens=new, stop_ids=[])
            assert all(len(row) == new for row in tokens)

        def transformers_run(new: int, prompts: np.ndarray = prompts) -> None:
            rows = torch.tensor(prompts)
            tokens = theirs.generate(
                rows,
                attention_mask=torch.ones_like(rows),
                max_new_tokens=new,
                do_sample=False,
                eos_token_id=None,
                pad_token_id=0,
            )
            assert tokens.shape[1] == PROMPT + new

        systems = {"meshtune": (meshtune_run, threads)}
        for count in sorted({1, threads}):
            systems[f"transformers, {count} threads"] = (transformers_run, count)
        compile_seconds, _ = timed(lambda run=meshtune_run: run(asked.new))
        print(f"batch {batch}: meshtune's first call, compilation included: {compile_seconds:.1f} s")
        for number in range(asked.rounds):
            for name, (run, count) in systems.items():
                torch.set_num_threads(count)
                time.sleep(0.3)  # idle threads stop spinning
                first, first_cpu = timed(lambda run=run: run(1))
                whole, whole_cpu = timed(lambda run=run: run(asked.new))
                if number or name == "meshtune":  # a first round warms transformers up
                    kept = found.setdefault(f"batch {batch}, {name}", {key: [] for key in KEYS})
                    kept["first"].append(first)
                    kept["decode"].append(batch * (asked.new - 1) / max(whole - first, 1e-9))
                    kept["cpu"].append((whole_cpu - first_cpu) / (asked.new - 1))
                    kept["load"].append(os.getloadavg()[0])

    print(f"\n{'':36} first token, s     decode, tokens/s    CPU ms a step")
    print(f"{'':36} median    best     median    best      best")
    for name, numbers in found.items():
        first, decode = numbers["first"], numbers["decode"]
        print(
            f"{name:36} {statistics.median(first):6.2f}  {min(first):6.2f}   "
            f"{statistics.median(decode):7.1f} {max(decode):7.1f}   {1000 * min(numbers['cpu']):7.0f}"
        )
    about = {
        "versions": {"meshtune": meshtune.__version__, "jax": jax.__version__, "torch": torch.__version__},
        "transformers": transformers.__version__,
        "python": platform.python_version(),
        "cpu": cpu_model(),
        "cores": os.cpu_count(),
        "prompt": PROMPT,
        "new": asked.new,
        "date": time.strftime("%Y-%m-%d"),
        "numbers": found,
    }
    if asked.json:
        with open(asked.json, "w") as file:
            json.dump(about, file, indent=1)


if __name__ == "__main__":
    main()
