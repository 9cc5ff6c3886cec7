"""lm-eval's tasks over Meshtune's engine and over lm-eval's own transformers backend, in turns, on one machine.

    python benchmarks/evaluate/run.py MODEL --tasks arc_easy=arc_easy.jsonl --limit 40 --rounds 3 --json result.json

Both run the same tasks with the same prompts in float32, and the answers are compared. The first round of each compiles
or warms up and is reported by itself; the others by their median.
"""

from __future__ import annotations

import argparse
import json
import os
import pathlib
import platform
import statistics
import tempfile
import time

os.environ.setdefault("TQDM_DISABLE", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help="a Hugging Face directory")
    parser.add_argument("--tasks", action="append", required=True, help="NAME=PATH")
    parser.add_argument("--num-fewshot", type=int)
    parser.add_argument("--limit", type=int)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument(
        "--batch-size", type=int, default=1, help="of the transformers backend (1 is lm-eval's default)"
    )
    parser.add_argument("--json", type=pathlib.Path)
    options = parser.parse_args()

    import lm_eval
    import torch
    import transformers
    from lm_eval.evaluator import simple_evaluate
    from lm_eval.models.huggingface import HFLM

    import meshtune
    from meshtune.evaluate.harness import Suite, parse_tasks, prepare, run_tasks
    from meshtune.terminal import console

    names, files = parse_tasks(options.tasks)
    suite = Suite(names, files, shots=options.num_fewshot, limit=options.limit)
    tasks = prepare(suite, pathlib.Path(tempfile.mkdtemp()))
    ours = meshtune.load(options.model, dtype="float32")
    network = transformers.AutoModelForCausalLM.from_pretrained(options.model, dtype=torch.float32)
    tokenizer = transformers.AutoTokenizer.from_pretrained(options.model)
    theirs = HFLM(network, tokenizer=tokenizer, device="cpu", batch_size=options.batch_size)

    seconds: dict[str, list[float]] = {"meshtune": [], "transformers": []}
    processor: dict[str, list[float]] = {"meshtune": [], "transformers": []}
    numbers: dict[str, dict[str, float]] = {}
    for number in range(options.rounds + 1):
        start, cpu = time.perf_counter(), time.process_time()
        results, _ = run_tasks(ours, suite, tasks, console=console(quiet=True))
        seconds["meshtune"].append(time.perf_counter() - start)
        processor["meshtune"].append(time.process_time() - cpu)
        start, cpu = time.perf_counter(), time.process_time()
        reference = simple_evaluate(
            model=theirs,
            tasks=list(tasks.names),
            num_fewshot=suite.shots,
            task_manager=tasks.manager,
            limit=suite.limit,
            bootstrap_iters=1000,
        )
        seconds["transformers"].append(time.perf_counter() - start)
        processor["transformers"].append(time.process_time() - cpu)
        numbers = {
            f"{result.name} {name}": {"meshtune": value, "transformers": reference["results"][result.name][name]}
            for result in results
            for name, value in result.metrics.items()
        }
        print(
            f"round {number}: " + ", ".join(f"{name} {values[-1]:.1f} s" for name, values in seconds.items()),
            flush=True,
        )
    medians = {name: statistics.median(values[1:] or values) for name, values in seconds.items()}
    result = {
        "model": pathlib.Path(options.model).name,
        "tasks": {name: len(tasks.manager.load([name])["tasks"][name].eval_docs) for name in tasks.names},
        "num_fewshot": options.num_fewshot,
        "limit": options.limit,
        "batch_size": options.batch_size,
        "first_round_seconds": {name: values[0] for name, values in seconds.items()},
        "median_seconds": medians,
        "processor_seconds": {name: statistics.median(values[1:] or values) for name, values in processor.items()},
        "times_faster": medians["transformers"] / medians["meshtune"],
        "numbers": numbers,
        "machine": {"processor": platform.processor() or platform.machine(), "cores": os.cpu_count()},
        "date": time.strftime("%Y-%m-%d"),
        "load_average": os.getloadavg(),
        "versions": {
            "lm_eval": lm_eval.__version__,
            "transformers": transformers.__version__,
            "torch": torch.__version__,
            "meshtune": meshtune.__version__,
        },
    }
    print(json.dumps(result, indent=2))
    if options.json:
        options.json.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
