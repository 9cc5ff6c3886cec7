"""What `test_weights.py` runs in two processes: python replacement_cases.py MODEL EXPECTED."""

from __future__ import annotations

import json
import sys
from typing import Any

import jax
import numpy as np

from meshtune.generate.api import Model, load_variants
from meshtune.generate.driver import run_on_all
from meshtune.mesh.processes import start
from meshtune.runs.sources import find

PROMPT = list(range(5, 30))


def answers(model: Model) -> list[list[int]]:
    scheduler = model.engine.scheduler(rows=2)
    requests = [model.engine.request(PROMPT[n:], max_tokens=12, stop_ids=[]) for n in (0, 3)]
    generations = [scheduler.submit(request) for request in requests]
    while not scheduler.idle:
        scheduler.step()
    return [generation.ids for generation in generations]


def scale_params(model: Model) -> Any:
    """The parameters times 1.2, in host memory."""
    return jax.tree.map(lambda leaf: np.asarray(leaf) * np.float32(1.2), model.params)


def main(path: str, expected: list[list[list[int]]], parameters: str) -> None:
    """Answers before and after a replacement by process 0; `parameters` is a file with the new arrays."""
    with start() as job:
        model = load_variants({"": find(path)}, dtype="float32", mesh={"tp": 2}, job=job)[""]

        def body() -> None:
            before = answers(model)
            with np.load(parameters) as arrays:
                leaves = [arrays[name] for name in arrays.files]
            model.replace_params(jax.tree.unflatten(jax.tree.structure(model.params), leaves))
            assert [before, answers(model)] == expected

        run_on_all(job, [model], body)
        assert model.engine.weights.version == 1


if __name__ == "__main__":
    main(sys.argv[1], json.loads(sys.argv[2]), sys.argv[3])
