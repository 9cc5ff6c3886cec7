"""The record of a checkpoint: everything but its arrays, as JSON with a digest."""

from __future__ import annotations

import contextlib
import dataclasses
import importlib.metadata
import platform
from collections.abc import Mapping
from typing import Any

from meshtune.digests import digest_json

PACKAGES = ("meshtune", "jax", "jaxlib", "optax", "orbax-checkpoint", "numpy")


@dataclasses.dataclass(frozen=True)
class Best:
    """The best evaluation so far: after `step` updates, with this validation loss."""

    step: int
    loss: float


@dataclasses.dataclass(frozen=True)
class Record:
    """The contents of a checkpoint except its arrays.

    `step` updates are made and as many batches are used up: together with `seed` this is the state of the random
    numbers and of the data order. `data` fingerprints the prepared examples, `base_hash` the frozen weights; `stale`
    counts evaluations since the best one; `recipe` is the resolved recipe. `has_digests` is false for a record read
    from a checkpoint of a version that wrote none.
    """

    step: int
    seed: int
    recipe: dict[str, object]
    base_path: str
    base_hash: str
    data: str
    best: Best | None = None
    stale: int = 0
    versions: dict[str, str] = dataclasses.field(default_factory=dict)
    has_digests: bool = True

    def to_json(self) -> dict[str, object]:
        """The record and its digest."""
        fields = dataclasses.asdict(self)
        del fields["has_digests"]
        return {"record": fields, "digest": digest_json(fields)}

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> Record:
        """The record that `to_json` gave, or an earlier version, which had no digest.

        Raises: ValueError, KeyError or TypeError where it is neither.
        """
        has_digests = "record" in value or "digest" in value
        fields = value["record"] if has_digests else value
        if has_digests and digest_json(fields) != value["digest"]:
            raise ValueError("the record does not have its digest")
        best = fields.get("best")
        return cls(**{**fields, "best": Best(**best) if best else None, "has_digests": has_digests})


def versions() -> dict[str, str]:
    """Versions of the packages that a run's numbers depend on."""
    installed = {"python": platform.python_version()}
    for name in PACKAGES:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            installed[name] = importlib.metadata.version(name)
    return installed
