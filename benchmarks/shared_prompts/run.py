"""A LoRA step on the completions of a few prompts, each prompt held once and repeated before every completion.

    python benchmarks/shared_prompts/run.py MODEL [--prompts 4] [--samples 8] [--rounds 7] [--json result.json]

MODEL is SmolLM2-135M-Instruct as a Hugging Face directory. Prompts have 45 tokens, completions 12, random ids: what a
step costs does not depend on them. Rank 16 on all linear layers, float32, AdamW. The forms take turns in one process:
`shared`, and `repeated`, with a completion and its prompt in each row, which has no padding here.
"""

from __future__ import annotations

import argparse
import json
import os
import pathlib
import statistics
import time

import jax
import jax.numpy as jnp
import numpy as np

from meshtune.adapters.config import LoraConfig
from meshtune.adapters.method import abstract, prepare
from meshtune.model.compute import Compute
from meshtune.objectives.sft import sft_objective
from meshtune.optim.build import make_optimizer
from meshtune.optim.config import OptimizerConfig
from meshtune.rollout.shared import fill_shared_rows, plan_shared_rows
from meshtune.train.step.build import make_train_step
from meshtune.train.step.state import init_state
from meshtune.weights.load import load_params, load_spec

PROMPT, COMPLETION = 45, 12
Batch = dict[str, np.ndarray]


def shared_batch(prompts: list[list[int]], completions: list[list[list[int]]], row_length: int) -> Batch:
    lengths = [[len(ids) for ids in group] for group in completions]
    rows = plan_shared_rows([len(prompt) for prompt in prompts], lengths, row_length)
    batch, spans = fill_shared_rows(prompts, completions, rows, row_length)
    batch["weights"] = np.zeros(batch["tokens"].shape, np.float32)
    for span in (span for group in spans for span in group):
        batch["weights"][span.row, span.start : span.stop] = 1
    return batch


def repeated_batch(prompts: list[list[int]], completions: list[list[list[int]]]) -> Batch:
    """A row for each completion, after its prompt."""
    texts = np.array([[*prompt, *ids] for prompt, group in zip(prompts, completions, strict=True) for ids in group])
    order = np.broadcast_to(np.arange(texts.shape[1] - 1), texts[:, 1:].shape).astype(np.int32)
    return {
        "tokens": texts[:, :-1].astype(np.int32),
        "targets": texts[:, 1:].astype(np.int32),
        "positions": order,
        "segment_ids": np.ones_like(order),
        "weights": (order >= PROMPT - 1).astype(np.float32),
    }


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("model", type=pathlib.Path)
    parser.add_argument("--prompts", type=int, default=4)
    parser.add_argument("--samples", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--json")
    options = parser.parse_args()
    random = np.random.default_rng(0)
    prompts = [random.integers(1000, 40000, PROMPT).tolist() for _ in range(options.prompts)]
    completions = [random.integers(1000, 40000, (options.samples, COMPLETION)).tolist() for _ in prompts]
    row_length = PROMPT - 1 + options.samples * COMPLETION
    batches = {
        "shared": shared_batch(prompts, completions, row_length),
        "repeated": repeated_batch(prompts, completions),
    }
    spec, _ = load_spec(options.model, "float32")
    lora = LoraConfig(rank=16)
    prepared = prepare(lora, spec, load_params(options.model, spec), jax.random.key(0))
    trained = abstract(lora, spec, "float32").trainable
    optimizer, _ = make_optimizer(OptimizerConfig(learning_rate=2e-4), 100, trained, spec)
    results, record = {}, {"load": os.getloadavg()[0], "jax": jax.__version__, "row_length": row_length}
    runs = {}
    for name, batch in batches.items():
        step = make_train_step(sft_objective, prepared.spec, Compute(), optimizer, max_grad_norm=1.0)
        state = init_state(jax.tree.map(jnp.copy, prepared.trainable), optimizer)
        arrays = {key: jnp.asarray(value)[None] for key, value in batch.items()}
        runs[name] = [step, state, arrays]
        results[name] = []
    for number in range(options.rounds + 1):
        for name, run in runs.items():
            step, state, arrays = run
            start, cpu = time.perf_counter(), time.process_time()
            state, metrics = jax.block_until_ready(step(state, prepared.frozen, arrays, jnp.int32(0)))
            seconds = time.perf_counter() - start, time.process_time() - cpu
            run[1] = state
            if number == 0:  # with the compilation
                size = int(np.prod(batches[name]["tokens"].shape))
                record[name] = {
                    "rows": batches[name]["tokens"].shape[0],
                    "positions": size,
                    "filled": int((batches[name]["segment_ids"] > 0).sum()),
                    "first_loss": float(metrics["loss"]),
                    "first_grad_norm": float(metrics["grad_norm"]),
                }
            else:
                results[name].append(seconds)
    for name, times in results.items():
        wall, processor = (statistics.median(x) for x in zip(*times, strict=True))
        record[name] |= {"wall_seconds": wall, "processor_seconds": processor}
    for key in ("positions", "processor_seconds"):
        record[f"{key}, shared / repeated"] = record["shared"][key] / record["repeated"][key]
    print(json.dumps(record, indent=1))
    if options.json:
        pathlib.Path(options.json).write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
