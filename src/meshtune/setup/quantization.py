"""Describes the quantisation of a run's base for the banner."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable

import jax

from meshtune.adapters.method import PreparedModel
from meshtune.arrays.tree import flatten
from meshtune.mesh.layout import Layout
from meshtune.quantize.weight import QuantisedWeight
from meshtune.setup.choices import Decision


def quantize_decisions(arrays: PreparedModel, layout: Layout | None) -> list[Decision]:
    """The format of the quantised weights with what it takes, and which of them a mesh cannot split."""
    weights = {path: x for path, x in flatten(arrays.frozen).items() if isinstance(x, QuantisedWeight)}
    if not weights:
        return []
    config = next(iter(weights.values())).config
    decisions: list[Decision] = []
    for format in dict.fromkeys(weight.format for weight in weights.values()):
        of_format = {path: weight for path, weight in weights.items() if weight.format == format}
        stored_bytes = sum(array.nbytes for weight in of_format.values() for array in jax.tree.leaves(weight))
        numbers = sum(weight.size for weight in of_format.values())
        why = f"asked for: {8 * stored_bytes / numbers:.2f} bits a weight of {numbers:,}"
        where = "" if len(of_format) == len(weights) else f", in {_sites(of_format)}"
        decisions.append(Decision("quantize", str(config.within(format)), why + where))
    uneven = [] if layout is None else [path for path, weight in weights.items() if _cut_short(weight, layout)]
    if uneven:
        blocks = f"blocks of {config.block_size} cannot be dealt out evenly in {_sites(uneven)}"
        why = f"{blocks}: whole rows are on each device"
        decisions.append(Decision("quantize", "whole", why))
    return decisions


def _sites(paths: Iterable[str]) -> str:
    return ", ".join(dict.fromkeys(path.removesuffix("/weight").split("/", 2)[2] for path in paths))


def _cut_short(weight: QuantisedWeight, layout: Layout) -> bool:
    """Whether whole blocks keep a weight from being split as it would be were blocks of one number."""
    freely = dataclasses.replace(weight.codes, unit=1, shape=(*weight.codes.shape[:-1], weight.shape[-1]))
    free, bound = layout.of(freely), layout.of(weight.codes)
    share = math.prod(free.shard_shape(freely.shape)) / freely.size
    return math.prod(bound.shard_shape(weight.codes.shape)) / weight.codes.size > share
