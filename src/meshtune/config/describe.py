"""A recipe in a few lines, and what differs between two: for banners and for resuming."""

from __future__ import annotations

import dataclasses
from typing import Any

from meshtune.config.recipe import FreezeMethod, LoraMethod, Recipe


@dataclasses.dataclass(frozen=True)
class Change:
    """A key whose value differs; None stands for a key that is not there, as for null."""

    key: str
    old: Any
    new: Any

    def __str__(self) -> str:
        return f"{self.key}: {_words(self.old)} -> {_words(self.new)}"


def changed(old: dict[str, Any], new: dict[str, Any]) -> list[Change]:
    """What differs between two recipes (`Recipe.model_dump(mode="json")`), by dotted key in alphabetical order."""
    before, after = _flat(old), _flat(new)
    return [
        Change(key, before.get(key), after.get(key))
        for key in sorted({*before, *after})
        if before.get(key) != after.get(key)
    ]


def banner(recipe: Recipe) -> list[tuple[str, str]]:
    """(label, words) pairs that say what a run is."""
    train = recipe.train
    length = f"{train.steps} steps" if train.steps is not None else f"{train.epochs or 3:g} epochs"
    sources = ", ".join(str(source.path or source.name) for source in recipe.data.train)
    rows = "packed rows" if recipe.data.packing else "padded rows"
    return [
        ("model", recipe.model.path),
        ("method", method_words(recipe)),
        ("data", f"{sources} in {rows} of {recipe.data.max_length} tokens"),
        ("training", f"{length} of {train.batch_size} rows, {train.accumulation} micro-batch(es) each"),
        ("output", recipe.output),
    ]


def method_words(recipe: Recipe) -> str:
    """`lora, rank 8, alpha 16, all-linear`."""
    method = recipe.method
    if isinstance(method, LoraMethod):
        targets = method.targets if isinstance(method.targets, str) else ", ".join(method.targets)
        return f"lora, rank {method.rank}, alpha {method.alpha:g}, {targets}"
    if isinstance(method, FreezeMethod):
        layers = f"last {method.last_layers}" if method.last_layers else f"first {method.first_layers}"
        parts = [f"{layers} layers"] if method.last_layers or method.first_layers else []
        return f"freeze, training {', '.join([*parts, *method.modules])}"
    return "full"


def _flat(value: Any, prefix: str = "") -> dict[str, Any]:
    if isinstance(value, dict) and value:
        return {name: leaf for key, entry in value.items() for name, leaf in _flat(entry, f"{prefix}{key}.").items()}
    if isinstance(value, list) and any(isinstance(entry, dict) for entry in value):
        return _flat(dict(enumerate(value)), prefix)
    return {prefix.rstrip("."): value}


def _words(value: Any) -> str:
    return (
        {None: "null", True: "true", False: "false"}.get(value, str(value))
        if value is None or isinstance(value, bool)
        else str(value)
    )
