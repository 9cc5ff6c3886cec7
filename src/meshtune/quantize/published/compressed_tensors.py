"""Reads compressed-tensors, the format of llm-compressor's checkpoints (https://github.com/vllm-project/compressed-
tensors). Its packed integers and its fp8 are read; a config group's `format` says which of them it is.

Its packed integers and its fp8 are read; which of them a config group is, its `format` says.

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
from meshtune.errors import UserError
from meshtune.quantize.published.block_fp8 import BlockFp8
from meshtune.quantize.published.integers import (
    FULL_PRECISION,
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
from meshtune.quantize.published.scheme import Box, Form, Parts, Shape, check_known, is_skipped, skip_list

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


@dataclasses.dataclass(frozen=True)
class FloatQuantized:
    """Reads `float-quantized`: e4m3 codes in `weight`, with a scale for the tensor, for each row (channel) or for each
    block in `weight_scale`. Codes and scales are those of `fp8`, under other names; `targets` and `ignored_modules` are
    those of PackQuantized."""

    fp8: BlockFp8
    targets: tuple[str, ...] = ("Linear",)
    ignored_modules: tuple[str, ...] = ()
    skip: tuple[str, ...] = ()
    method: ClassVar[str] = "compressed-tensors"
    ending: ClassVar[str] = ".weight"
    endings: ClassVar[Mapping[str, str]] = {"codes": ".weight", "scales": ".weight_scale"}
    required: ClassVar[tuple[str, ...]] = ("codes", "scales")
    ignored: ClassVar[tuple[str, ...]] = (".input_scale", ".output_scale", ".k_scale", ".v_scale")
    largest_error: ClassVar[float] = BlockFp8.largest_error

    def converts(self, module: str, array: ArraySpec) -> bool:
        if is_skipped(module, self.skip):
            return False
        return matches(module, self.targets) and not matches(module, self.ignored_modules)

    def shape(self, parts: Parts) -> Shape:
        return self.fp8.shape(parts)

    def decode(self, parts: Parts, box: Box) -> np.ndarray:
        return self.fp8.decode(parts, box)

    def form(self, weight: ArraySpec) -> Form | None:
        return self.fp8.form(weight)

    def codes(self, parts: Parts, box: Box) -> np.ndarray:
        return self.fp8.codes(parts, box)

    def scales(self, parts: Parts, box: Box) -> np.ndarray:
        return self.fp8.scales(parts, box)

    def encode(self, numbers: np.ndarray, dtypes: Mapping[str, np.dtype]) -> dict[str, np.ndarray]:
        return self.fp8.encode(numbers, dtypes)


def read_floats(group: Mapping[str, Any], ignored: tuple[str, ...], where: str) -> FloatQuantized:
    """The scheme of a config group of fp8 weights. Raises UserError for unsupported fields."""
    weights = group.get("weights") or {}
    for field, values in (("num_bits", (8,)), ("type", ("float",)), ("symmetric", (True,))):
        only(f"weights.{field}", weights.get(field), values, where)
    strategy = weights.get("strategy")
    only("weights.strategy", strategy, ("tensor", "channel", "block"), where)
    high, wide = weights.get("block_structure") or (128, 128)
    blocks: dict[str, tuple[int, int | None] | None] = {"tensor": None, "channel": (1, None), "block": (high, wide)}
    return FloatQuantized(BlockFp8(blocks[str(strategy)]), tuple(group.get("targets") or ("Linear",)), ignored)


KNOWN = """config_groups format quantization_status ignore global_compression_ratio version kv_cache_scheme
sparsity_config transform_config run_compressed dequantize use_optimized_inference""".split()


def read(fields: dict[str, Any], where: str) -> PackQuantized | FloatQuantized:
    """The scheme of a quantization_config. Raises UserError for formats, and several groups that differ."""
    check_known(fields, KNOWN, where)
    only("quantization_status", fields.get("quantization_status") or "compressed", ("compressed", "frozen"), where)
    for field in ("sparsity_config", "transform_config", "kv_cache_scheme"):
        if fields.get(field):
            only(field, fields[field], ("null",), where)
    ignore = skip_list(fields, where, "ignore")
    groups = fields.get("config_groups")
    if not isinstance(groups, Mapping) or not all(isinstance(group, Mapping) for group in groups.values()):
        raise UserError(f"config_groups is {groups!r}, not a mapping of groups", where=where, fix=FULL_PRECISION)
    schemes: list[PackQuantized | FloatQuantized] = []
    for name, group in groups.items():
        place = f"{where}, config_groups.{name}"
        format = group.get("format") or fields.get("format")
        only("format", format, ("pack-quantized", "float-quantized"), place)
        for activations in ("input_activations", "output_activations"):
            if group.get(activations) and format != "float-quantized":  # inputs are not rounded, as with fp8
                raise UserError(
                    f"{activations} are quantised too, which is not implemented", where=place, fix=FULL_PRECISION
                )
        schemes.append((read_group if format == "pack-quantized" else read_floats)(group, ignore, place))
    alike = [dataclasses.replace(scheme, targets=()) for scheme in schemes]
    if not schemes or any(scheme != alike[0] for scheme in alike):
        raise UserError(
            "its config_groups differ in bits, group sizes or symmetry" if schemes else "it has no config_groups",
            where=where,
            fix=f"use a checkpoint with one group, or {FULL_PRECISION}",
        )
    return dataclasses.replace(alike[0], targets=tuple(target for scheme in schemes for target in scheme.targets))
