"""Fields that configs of recurrent mixers share, and how files lay out their arrays, as views of them."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence

from meshtune.arrays.spec import ArraySpec
from meshtune.families.config_fields import ConfigFields
from meshtune.families.tensors import Shape, TensorMap, View, with_view
from meshtune.model.mamba2 import Mamba2Spec
from meshtune.model.parallel import ParallelSpec
from meshtune.model.spec import ModelSpec

IN_ORDER = "a state is carried through the tokens of a row in order, and cp splits rows over devices"
# The limits of families whose files have the rows of projections in another order than memory.
LIMITS = {"cp": IN_ORDER, "vera": "not on projections whose rows have another order in memory"}
# Names of layer types before transformers 5, and the letters of hybrid_override_pattern.
LAYER_TYPES = {"mamba": "linear_attention", "attention": "full_attention"}
LETTERS = {"M": "linear_attention", "*": "full_attention", "-": "mlp", "E": "moe"}


def layer_kinds(fields: ConfigFields, known: tuple[str, ...], default: str | None = None) -> list[str]:
    """The type of every layer by transformers 5's names: from layer_types, layers_block_type or, of Nemotron-H, the
    letters of hybrid_override_pattern. `default` is that of all layers where no field says."""
    blocks, letters = fields.get("layers_block_type"), fields.get("hybrid_override_pattern")
    named: object = fields.get("layer_types", blocks)
    if named is None and letters is not None:
        named = [LETTERS.get(letter, letter) for letter in str(letters)]
    if named is None and default is not None:
        named = [default] * fields.integer("num_hidden_layers")
    if not isinstance(named, list) or not named:
        raise fields.error("layer_types", f"layer_types must list one of {sorted(known)} for each layer")
    kinds = [LAYER_TYPES.get(str(name), str(name)) for name in named]
    if unknown := sorted(set(kinds) - set(known)):
        raise fields.error("layer_types", f"layers of type '{unknown[0]}' are not implemented for this family")
    count = fields.get("num_hidden_layers", len(kinds))
    if count != len(kinds):
        raise fields.error("num_hidden_layers", f"num_hidden_layers is {count}, and {len(kinds)} layers have a type")
    return kinds


def bounds(fields: ConfigFields, field: str) -> tuple[float, float]:
    """Two numbers; transformers may write infinity as {"__float__": "Infinity"}; default: zero, infinity."""
    pair = fields.get(field, (0.0, math.inf))
    try:
        low, high = (float(x["__float__"] if isinstance(x, Mapping) else x) for x in pair)
    except (TypeError, ValueError, KeyError):
        raise fields.error(field, f"{field} must be two numbers, found {pair!r}") from None
    return low, high


def with_filters(table: Sequence[TensorMap], node: str) -> list[TensorMap]:
    """The table for files in which the filters of `node` are those of torch's Conv1d: [channels, 1, taps]."""

    def view(array: ArraySpec) -> View:
        channels, taps = array.shape[1:]
        return View.identity((channels, 1, taps)).merge(channels, taps)

    return with_view(table, f"{node}/weight", view)


def with_head_groups(table: Sequence[TensorMap], ending: str, sections: Sequence[int], groups: int) -> list[TensorMap]:
    """The table for files in which the rows of the leaves with this ending are sections with these numbers of rows, one
    after the other, each with an equal part for every group. In memory a group's parts of all sections lie together.

    Filters are those of torch's Conv1d, as in `with_filters`.
    """

    def view(array: ArraySpec) -> View:
        rows, *columns = array.shape[1:]
        return grouped_rows((rows, *columns), sections, groups, [1, *columns] if array.role == "conv" else columns)

    return with_view(table, ending, view)


def grouped_rows(shape: Shape, sections: Sequence[int], groups: int, in_file: Sequence[int] | None = None) -> View:
    """Rows of this shape, group by group, of a tensor whose rows are sections; `in_file` are the tensor's columns."""
    rows, *columns = shape
    in_file = columns if in_file is None else in_file
    if groups == 1:
        return View.identity((rows, *in_file)).merge(rows, *columns)
    parts = [section // groups for section in sections]
    unit = math.gcd(*parts)
    starts = [sum(sections[:n]) // unit for n in range(len(sections))]
    order = [
        start + group * (part // unit) + row
        for group in range(groups)
        for start, part in zip(starts, parts, strict=True)
        for row in range(part // unit)
    ]
    divided = View.identity((rows, *in_file)).split(len(order), unit, *in_file)
    return divided.permute(*order).merge(rows, *columns)


def with_mamba_groups(table: Sequence[TensorMap], spec: ModelSpec) -> list[TensorMap]:
    """The table for files in which projections and filters of Mamba-2 mixers are section after section."""
    mixers = [kind.mixer for kind in spec.layer_kinds if kind.mixer is not None]
    mixers += [branch.mixer for mixer in mixers if isinstance(mixer, ParallelSpec) for branch in mixer.branches]
    mamba = next((mixer for mixer in mixers if isinstance(mixer, Mamba2Spec)), None)
    if mamba is None:
        return list(table)
    for name, sections in (("in", mamba.sections), ("filter", mamba.sections[1:4])):
        for leaf in ("weight", "bias"):
            table = with_head_groups(table, f"mamba/{name}/{leaf}", sections, mamba.groups)
    return list(table)


def rename_modules(table: Sequence[TensorMap], prefix: str, *, modules: bool) -> list[TensorMap]:
    """The table for files with `prefix` in the place of "model."; with `modules` that of modules too."""
    entries = []
    for entry in table:
        module, first = entry.module, entry.name.startswith("model.")
        name = prefix + entry.name.removeprefix("model.") if first else entry.name
        owner = prefix + module.removeprefix("model.") if first and modules else module
        entries.append(dataclasses.replace(entry, name=name, owner=owner))
    return entries
