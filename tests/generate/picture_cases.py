"""Cases that `test_pictures.py` runs on four simulated devices: python picture_cases.py MODEL ADAPTERS."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import jax

from meshtune.generate.api import Model, load_variants
from meshtune.generate.text import chat_prompt
from meshtune.runs.sources import find
from seeing_model import picture

NEW = 8


def question() -> list[dict[str, Any]]:
    image = {"type": "image", "image": picture(1, 60)}
    return [{"role": "user", "content": [image, {"type": "text", "text": "What is it?"}]}]


def answers(models: dict[str, Model]) -> dict[str, list[int]]:
    """The answers of all models to the same question, over one batch where they share it."""
    first = next(iter(models.values()))
    schedulers = {id(first.engine.weights): first.engine.scheduler(rows=2)}
    generations = {}
    for name, model in models.items():
        scheduler = schedulers.setdefault(id(model.engine.weights), model.engine.scheduler(rows=2))
        prompt = chat_prompt(model.tokenizer, question(), model.picture_reader)
        request = model.engine.request(prompt.ids, max_tokens=NEW, stop_ids=[], pictures=prompt.pictures)
        generations[name] = scheduler.submit(request)
    for scheduler in schedulers.values():
        while not scheduler.idle:
            scheduler.step(3)
    return {name: generation.ids for name, generation in generations.items()}


def main(base: str, adapters: dict[str, str]) -> None:
    """A mesh gives what one device gives, and adapters that share a batch what each gives alone."""
    paths: dict[str, str | None] = {"base": None, **adapters}
    alone = {}
    for name, path in paths.items():
        alone |= answers(load_variants({name: find(base, path)}, dtype="float32"))
    assert len(set(map(str, alone.values()))) == len(alone), alone
    for name, path in adapters.items():
        merged = load_variants({name: find(base, path)}, dtype="float32", merge=True)
        assert answers(merged) == {name: alone[name]}, f"{name}, merged"
    sources = {name: find(base, path) for name, path in paths.items()}
    for mesh in (None, {"fsdp": 2, "tp": 2}):
        models = load_variants(sources, dtype="float32", share_batch=True, mesh=mesh)
        assert answers(models) == alone, mesh


if __name__ == "__main__":
    assert jax.device_count() == 4
    folders = sorted(Path(sys.argv[2]).iterdir())
    main(sys.argv[1], {path.name: str(path) for path in folders})
