"""A batch of long prompts: all read before anything is decoded, beside a part of them in every step, as a server reads.

    python benchmarks/gpu_decode/offline.py MODEL [--rows 32] [--length 256] [--decode 64]

Alternates both, and prints the median seconds, wall and of the processor.
"""

from __future__ import annotations

import argparse
import statistics
import time

import numpy as np

import meshtune


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("model")
    parser.add_argument("--rows", type=int, default=32)
    parser.add_argument("--length", type=int, default=256)
    parser.add_argument("--decode", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    engine = meshtune.load(options.model).engine
    draw = np.random.default_rng(0)
    seconds: dict[bool, list[tuple[float, float]]] = {True: [], False: []}
    answers = {}
    for number in range(options.rounds + 1):
        prompts = draw.integers(3, engine.spec.vocab, (options.rows, options.length)).tolist()
        for interactive in (True, False):
            scheduler = engine.scheduler(rows=options.rows, interactive=interactive)
            requests = [engine.request(prompt, max_tokens=options.decode, stop_ids=[]) for prompt in prompts]
            start, processor = time.perf_counter(), time.process_time()
            running = [scheduler.submit(request) for request in requests]
            while not scheduler.idle:
                scheduler.step()
            answers[interactive] = [generation.ids for generation in running]
            if number:  # the first round compiles
                seconds[interactive].append((time.perf_counter() - start, time.process_time() - processor))
        print("the same tokens:", answers[True] == answers[False], flush=True)
    for interactive, name in ((True, "a part in every step"), (False, "all first")):
        wall, processor = (statistics.median(column) for column in zip(*seconds[interactive], strict=True))
        print(f"{name}: {wall:.1f} s, {processor:.1f} processor seconds")


if __name__ == "__main__":
    main()
