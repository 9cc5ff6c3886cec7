"""The caches of all layers of a model."""

from __future__ import annotations

from meshtune.arrays.tree import Tree, map_leaves
from meshtune.mesh.layout import Layout
from meshtune.model.cache import Cache, empty
from meshtune.model.spec import ModelSpec


def cache_specs(spec: ModelSpec, batch: int, slots: int, dtype: str) -> dict[str, Tree]:
    """The ArraySpecs of the caches of all layers, by key of params["layers"], for rows of up to `slots` tokens."""
    return {
        key: map_leaves(
            lambda leaf, repeats=repeats: leaf.stacked(repeats),
            {} if kind.mixer is None else kind.mixer.cache(batch, slots, dtype),
        )
        for key, repeats, kind, _ in spec.positions()
    }


def init_cache(spec: ModelSpec, batch: int, slots: int, dtype: str, layout: Layout | None = None) -> Cache:
    """An empty cache for rows of up to `slots` tokens."""
    return empty(cache_specs(spec, batch, slots, dtype), batch, layout)
