"""Meshtune: one update for each line of the standard input, a JSON line for each. The step is that of a recipe."""

from __future__ import annotations

import json
import sys
import time

from model import ALPHA, ATTENTION, LENGTH, RANK, RATE, ROWS, batch

METHODS = {
    "lora": {"kind": "lora", "rank": RANK, "alpha": ALPHA, "targets": [*ATTENTION, "experts"]},
    "lora-attention": {"kind": "lora", "rank": RANK, "alpha": ALPHA, "targets": list(ATTENTION)},
    "full": {"kind": "full", "train_router": True},
}


def main(folder: str, method: str) -> None:
    import jax
    import jax.numpy as jnp

    from meshtune.adapters.method import prepare
    from meshtune.arrays.tree import flatten
    from meshtune.config.recipe import Recipe
    from meshtune.setup.choices import compute_of
    from meshtune.setup.machine import this_machine
    from meshtune.setup.run import resolve_run
    from meshtune.train.assemble import optimizer_for, step_for
    from meshtune.train.step.state import init_state
    from meshtune.weights.load import load_params

    recipe = Recipe.model_validate(
        {
            "model": {"path": folder},
            "data": {"train": [{"path": "unread.jsonl"}], "max_length": LENGTH},
            "output": "unwritten",
            "mesh": {"dp": 1},
            "method": METHODS[method],
            "train": {"batch_size": ROWS},
            "optimizer": {"learning_rate": RATE, "schedule": "constant", "warmup_steps": 0, "weight_decay": 0.0},
            "compute": {"precision": "float32"},
        }
    )
    resolved = resolve_run(recipe, this_machine())
    compute, _ = compute_of(recipe, resolved.spec, resolved.precision, ROWS, LENGTH)
    optimizer, _ = optimizer_for(resolved, 1000)
    params = load_params(resolved.source, resolved.spec)
    model = prepare(resolved.method, resolved.spec, params, jax.random.key(0), "float32")
    state = init_state(model.trainable, optimizer)
    step = step_for(resolved, compute, optimizer)
    count = sum(leaf.size for node in flatten(model.trainable).values() for leaf in jax.tree.leaves(node))
    print(json.dumps({"parameters": count}), flush=True)
    place = jnp.broadcast_to(jnp.arange(LENGTH), (1, ROWS, LENGTH))
    for number, _ in enumerate(sys.stdin):
        ids = batch(number).astype("int32")[None]
        arrays = {"tokens": ids[..., :-1], "targets": ids[..., 1:], "positions": place}
        arrays |= {"segment_ids": jnp.ones_like(place), "weights": jnp.ones(place.shape, jnp.float32)}
        began, processor = time.perf_counter(), time.process_time()
        state, metrics = step(state, model.frozen, arrays, jnp.int32(0))
        loss = float(jax.block_until_ready((state, metrics))[1]["loss"])
        seconds = {"seconds": time.perf_counter() - began, "processor": time.process_time() - processor}
        print(json.dumps(seconds | {"loss": loss}), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
