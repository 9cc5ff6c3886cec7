"""Describes the quantisation of a run's base for the banner."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable

import jax

from meshtune.adapters.method import PreparedModel
from meshtune.arrays.tree import flatten, layer_site
from meshtune.families import tensors
from meshtune.families.quantised import is_quantised
from meshtune.mesh.layout import Layout
from meshtune.quantize.config import QuantizeConfig
from meshtune.quantize.weight import QuantisedWeight
from meshtune.setup.choices import Decision


def quantize_decisions(arrays: PreparedModel, layout: Layout | None, quantize: QuantizeConfig | None) -> list[Decision]:
    """Describes the format of the quantised weights, their bits, and which of them a mesh cannot split; of a checkpoint
    that is published quantised also the weights that are read wide."""
    weights = {path: x for path, x in flatten(arrays.frozen).items() if isinstance(x, QuantisedWeight)}
    decisions = _read_wide(arrays, set(weights), quantize)
    if not weights:
        return decisions
    for format in dict.fromkeys(weight.format for weight in weights.values()):
        of_format = {path: weight for path, weight in weights.items() if weight.format == format}
        stored_bytes = sum(array.nbytes for weight in of_format.values() for array in jax.tree.leaves(weight))
        numbers = sum(weight.size for weight in of_format.values())
        first = next(iter(of_format.values()))
        published = f"as published ({arrays.spec.published.method})" if arrays.spec.published else ""
        why = f"{published if first.is_published else 'asked for'}: {8 * stored_bytes / numbers:.2f} bits a weight"
        where = "" if len(of_format) == len(weights) else f", in {_sites(of_format)}"
        chosen = f"{format}, blocks of {first.block_size}" if first.is_published else str(first.config)
        decisions.append(Decision("quantize", chosen, f"{why} of {numbers:,}{where}"))
    uneven = [] if layout is None else [path for path, weight in weights.items() if _cut_short(weight, layout)]
    if uneven:
        blocks = f"blocks of {weights[uneven[0]].block_size} cannot be dealt out evenly in {_sites(uneven)}"
        why = f"{blocks}: whole rows are on each device"
        decisions.append(Decision("quantize", "whole", why))
    return decisions


def _read_wide(arrays: PreparedModel, coded: set[str], quantize: QuantizeConfig | None) -> list[Decision]:
    """Says which weights of a quantised checkpoint are read as unquantised numbers, and why."""
    scheme, spec = arrays.spec.published, arrays.spec
    if scheme is None or (quantize is not None and quantize.quantises):
        return []
    wide = [
        entry.path
        for entry in tensors(spec)
        if entry.path not in coded
        and is_quantised(entry.path, entry.array)
        and scheme.converts(entry.name.removesuffix(".weight"), entry.array)
    ]
    if not wide:
        return []
    why = f"published in {scheme.method}, "
    why += "and asked for wide" if quantize is not None else f"whose codes have no product here: {_sites(wide)}"
    return [Decision("quantize", spec.dtype, why)]


def _sites(paths: Iterable[str]) -> str:
    return ", ".join(dict.fromkeys(layer_site(path.removesuffix("/weight")) for path in paths))


def _cut_short(weight: QuantisedWeight, layout: Layout) -> bool:
    """Whether whole blocks keep a weight from being split as it would be were blocks of one number."""
    freely = dataclasses.replace(weight.codes, unit=1, shape=(*weight.codes.shape[:-1], weight.shape[-1]))
    free, bound = layout.of(freely), layout.of(weight.codes)
    share = math.prod(free.shard_shape(freely.shape)) / freely.size
    return math.prod(bound.shard_shape(weight.codes.shape)) / weight.codes.size > share
