"""compressed-tensors' `pack-quantized` integers of 4 or 8 bits (https://github.com/vllm-project/compressed-tensors).

`weight_packed` int32 [out, in / per], `per` = 32 / bits neighbours of a row in a word, lowest bits first;
`weight_scale` [out, groups]; `weight_zero_point` int32 [out / per, groups], packed along outputs, where they are not
symmetric; `weight_shape` [2]; `weight_g_idx` [in], the group of each input, in older files with act-order.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping
from typing import Any, ClassVar

import numpy as np

from meshtune.arrays.spec import ArraySpec
from meshtune.quantize.published.integers import (
    SCALES,
    Integers,
    PackedScheme,
    Parameters,
    Range,
    check_divides,
    check_dtype,
    check_shape,
    integer_field,
    only,
    packed_range,
    unpack_words,
)
from meshtune.quantize.published.scheme import Box, Parts, Shape, is_skipped

REGEX = "re:"


@dataclasses.dataclass(frozen=True, kw_only=True)
class PackQuantized(PackedScheme):
    """Packs integers of 4 or 8 bits, as `pack-quantized` says of a config group.

    `weight_packed` int32 [out, in / per], `per` = 32 / bits neighbours of a row in a word, lowest bits first;
    `weight_scale` [out, groups]; `weight_zero_point` int32 [out / per, groups], packed along outputs, where they are
    not symmetric; `weight_shape` [2]; `weight_g_idx` [in], the group of each input, in older files with act-order.
    `targets` and `ignored_modules` are names of modules, classes (Linear) or, after "re:", regular expressions.
    """

    symmetric: bool
    targets: tuple[str, ...] = ("Linear",)
    ignored_modules: tuple[str, ...] = ()
    method: ClassVar[str] = "compressed-tensors"
    ending: ClassVar[str] = ".weight"
    endings: ClassVar[Mapping[str, str]] = {
        "codes": ".weight_packed",
        "scales": ".weight_scale",
        "zeros": ".weight_zero_point",
        "shape": ".weight_shape",
        "groups": ".weight_g_idx",
    }
    ignored: ClassVar[tuple[str, ...]] = (".input_scale", ".output_scale", ".k_scale", ".v_scale")

    @property
    def required(self) -> tuple[str, ...]:
        return ("codes", "scales", "shape") if self.symmetric else ("codes", "scales", "shape", "zeros")

    def converts(self, module: str, array: ArraySpec) -> bool:
        if is_skipped(module, self.skip):
            return False
        return matches(module, self.targets) and not matches(module, self.ignored_modules)

    def shape(self, parts: Parts) -> Shape:
        check_shape(parts.shape("shape"), (2,), "its weight_shape")
        out, into = (int(size) for size in parts.whole("shape"))
        size = self.size(into)
        check_divides(size, into)
        groups = into // size
        check_dtype(parts.dtype("codes"), ("I32",), "its codes")
        check_dtype(parts.dtype("scales"), SCALES, "its scales")
        check_shape(parts.shape("codes"), (out, -(-into // self.per)), "its codes")
        check_shape(parts.shape("scales"), (out, groups), "its scales")
        if not self.symmetric:
            check_dtype(parts.dtype("zeros"), ("I32",), "its zero points")
            check_shape(parts.shape("zeros"), (-(-out // self.per), groups), "its zero points")
        if "groups" in parts:
            check_shape(parts.shape("groups"), (into,), "its groups")
            indices = parts.whole("groups")
            if indices.min(initial=0) < 0 or indices.max(initial=0) >= groups:
                raise ValueError(f"weight_g_idx names group {indices.max(initial=0)}, and there are {groups}")
            if not self.act_order and (indices != np.arange(into) // size).any():
                raise ValueError("weight_g_idx is out of order, which config.json denies: set actorder to group")
        return out, into

    def integers(self, parts: Parts, box: Box) -> Integers:
        (top, bottom), (left, right) = box
        size = self.size(self.row(parts))
        groups = np.arange(left, right) // size
        if self.act_order and "groups" in parts:
            groups = parts.box("groups", ((left, right),))
        first, last = (int(groups.min()), int(groups.max()) + 1) if right > left else (0, 0)
        within = left % self.per
        packed = parts.box("codes", ((top, bottom), packed_range(left, right, self.per)))
        codes = unpack_words(packed, self.bits)[:, within : within + right - left]
        zeros, scales = self.parameters(parts, (top, bottom), (first, last))
        return Integers(codes, zeros, scales, (groups - first).astype(np.int32))

    def parameters(self, parts: Parts, rows: Range, groups: Range) -> Parameters:
        scales = parts.box("scales", (rows, groups))
        if self.symmetric:
            return np.full(scales.shape, 1 << (self.bits - 1), np.uint8), scales
        top, bottom = rows
        within = top % self.per
        packed = parts.box("zeros", (packed_range(top, bottom, self.per), groups))
        return unpack_words(packed.T, self.bits)[:, within : within + bottom - top].T, scales

    def row(self, parts: Parts) -> int:
        return int(parts.whole("shape")[1])


def matches(module: str, patterns: tuple[str, ...]) -> bool:
    """Whether a linear module is among some, as compressed-tensors matches its name."""
    return any(
        re.match(pattern.removeprefix(REGEX), module) if pattern.startswith(REGEX) else pattern in (module, "Linear")
        for pattern in patterns
    )


def read_group(group: Mapping[str, Any], ignore: tuple[str, ...], where: str) -> PackQuantized:
    """The scheme of one config group. Raises UserError for bits, types and strategies that are not read."""
    weights = group.get("weights") or {}
    only("type", str(weights.get("type", "int")).lower(), ("int",), where)
    bits = integer_field(weights, "num_bits", where, 8)
    only("num_bits", bits, (4, 8), where)
    strategy = weights.get("strategy") or ("group" if weights.get("group_size") else "tensor")
    only("strategy", strategy, ("group", "channel"), where)
    size = integer_field(weights, "group_size", where) if strategy == "group" else -1
    act_order = weights.get("actorder") in (True, "group", "dynamic")
    targets = tuple(group.get("targets") or ("Linear",))
    symmetric = bool(weights.get("symmetric", True))
    return PackQuantized(bits, size, act_order, symmetric=symmetric, targets=targets, ignored_modules=ignore)
