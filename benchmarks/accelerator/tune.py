"""Meshtune's side of LoRA and QLoRA on one device: the step that `train` would run, on random weights made there.

Prints one JSON line: seconds of each update, the peak of device memory, and what was predicted of both.
"""

from __future__ import annotations

import argparse
import dataclasses
import pathlib
import tempfile
import time
from typing import Any

from models import MODELS, RANK, flops_per_token, print_result, write_config


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", choices=MODELS, required=True)
    parser.add_argument("--quantize", default="none")
    parser.add_argument("--rows", type=int, required=True)
    parser.add_argument("--length", type=int, required=True)
    parser.add_argument("--updates", type=int, required=True)
    parser.add_argument("--set", nargs="*", default=[], help="more of the recipe, as key=value")
    print_result(measure(parser.parse_args()))


def measure(args: argparse.Namespace) -> dict[str, Any]:
    """Makes the arguments of the step on the device, compiles it and times it."""
    import jax
    import numpy as np
    from random_weights import random_batch, random_like, zeros_like

    from meshtune.config.load import load_recipe
    from meshtune.plan.program import step_of
    from meshtune.setup.machine import local_target, this_machine
    from meshtune.train.report.banner import predict

    gpu = jax.default_backend() != "cpu"
    with tempfile.TemporaryDirectory() as folder:
        model = write_config(args.model, "bfloat16" if gpu else "float32", pathlib.Path(folder) / "model")
        overrides = [
            f"model={model}", "data.train=none.jsonl", f"data.max_length={args.length}", f"output={folder}/run",
            f"train.batch_size={args.rows}", f"train.steps={args.updates}", "method.kind=lora", f"method.rank={RANK}",
            f"method.alpha={2 * RANK}", *(() if args.quantize == "none" else [f"quantize={args.quantize}"]), *args.set,
        ]  # fmt: skip
        recipe = load_recipe(None, overrides)
        program = step_of(recipe)
        state, frozen, batch, _ = program.arguments
        frozen = random_like(frozen)
        zeros = zeros_like(dataclasses.replace(state, trainable={}))
        state = dataclasses.replace(zeros, trainable=random_like(state.trainable, seed=1))
        rows = random_batch(batch, MODELS[args.model]["vocab_size"])
        start = time.perf_counter()
        compiled = program.step.lower(state, frozen, rows, np.int32(0)).compile()  # as train does, with arrays
        compile_seconds = time.perf_counter() - start
        prediction = predict(compiled, program.run.recipe, local_target(this_machine()), program.layout, args.length)
    making = (jax.local_devices()[0].memory_stats() or {}).get("peak_bytes_in_use")
    seconds, losses = [], []
    for _ in range(args.updates):
        start = time.perf_counter()
        state, metrics = compiled(state, frozen, rows, np.int32(0))
        losses.append(float(metrics["loss"]))  # waits for the update
        seconds.append(time.perf_counter() - start)
    assert np.isfinite(losses).all(), losses
    stats = jax.local_devices()[0].memory_stats() or {}
    tokens = program.accumulation * program.rows * program.length
    return {
        "seconds": seconds,
        "tokens": tokens,
        "flops": tokens * flops_per_token(args.model, args.length),
        "losses": [losses[0], losses[-1]],
        "peak_bytes": stats.get("peak_bytes_in_use"),
        "peak_bytes_before": making,  # of making the arrays: of a step with a lower peak nothing is known
        "compile_seconds": compile_seconds,
        "predicted": dataclasses.asdict(prediction),
        "decisions": {item.name: f"{item.value} ({item.reason})" for item in program.decisions},
        "versions": {"jax": jax.__version__},
        "device": jax.local_devices()[0].device_kind,
    }


if __name__ == "__main__":
    main()
