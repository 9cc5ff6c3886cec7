"""What a checkpoint holds beside arrays."""

from __future__ import annotations

import contextlib
import dataclasses
import importlib.metadata
import platform
from typing import Any

PACKAGES = ("meshtune", "jax", "jaxlib", "optax", "orbax-checkpoint", "numpy")


@dataclasses.dataclass(frozen=True)
class Best:
    """The best evaluation so far: after `step` updates, with this validation loss."""

    step: int
    loss: float


@dataclasses.dataclass(frozen=True)
class Record:
    """What a checkpoint holds beside arrays.

    `step` updates are made and as many batches are used up: together with `seed` it is the state of the random numbers
    and of the data order. `data` fingerprints the prepared examples, `base_hash` the frozen weights; `stale` counts
    evaluations since the best one; `recipe` is the resolved recipe.
    """

    step: int
    seed: int
    recipe: dict[str, Any]
    base_path: str
    base_hash: str
    data: str
    best: Best | None = None
    stale: int = 0
    versions: dict[str, str] = dataclasses.field(default_factory=dict)

    @classmethod
    def from_json(cls, value: dict[str, Any]) -> Record:
        best = value.get("best")
        return cls(**{**value, "best": Best(**best) if best else None})


def versions() -> dict[str, str]:
    """Versions of what decides a run's numbers."""
    found = {"python": platform.python_version()}
    for name in PACKAGES:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found[name] = importlib.metadata.version(name)
    return found
