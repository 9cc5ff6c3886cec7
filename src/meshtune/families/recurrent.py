"""How files lay out the arrays of recurrent mixers and convolutions, as views of them."""

from __future__ import annotations

import math
from collections.abc import Sequence

from meshtune.arrays.spec import ArraySpec
from meshtune.families.tensors import TensorMap, View, with_view


def with_filters(table: Sequence[TensorMap], node: str) -> list[TensorMap]:
    """The table for files in which the filters of `node` are those of torch's Conv1d: [channels, 1, taps]."""

    def view(array: ArraySpec) -> View:
        channels, taps = array.shape[1:]
        return View.identity((channels, 1, taps)).merge(channels, taps)

    return with_view(table, f"{node}/weight", view)


def with_head_groups(table: Sequence[TensorMap], ending: str, sections: Sequence[int], groups: int) -> list[TensorMap]:
    """The table for files in which the rows of the leaves with this ending are sections of so many rows, one after the
    other, each with an equal part for every group. In memory a group's parts of all sections stand together.

    Filters are those of torch's Conv1d, as in `with_filters`.
    """
    parts = [section // groups for section in sections]
    unit = math.gcd(*parts)
    starts = [sum(sections[:n]) // unit for n in range(len(sections))]
    order = [
        start + group * (part // unit) + row
        for group in range(groups)
        for start, part in zip(starts, parts, strict=True)
        for row in range(part // unit)
    ]

    def view(array: ArraySpec) -> View:
        rows, *columns = array.shape[1:]
        in_file = [1, *columns] if array.role == "conv" else columns
        divided = View.identity((rows, *in_file)).split(len(order), unit, *in_file)
        return divided.permute(*order).merge(rows, *columns)

    return with_view(table, ending, view)
