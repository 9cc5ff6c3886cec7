"""GPTQ: 4 or 8 bits in groups along the input, with zero points (https://arxiv.org/abs/2210.17323).

The layout of AutoGPTQ and GPTQModel: `qweight` int32 [in / per, out], `per` = 32 / bits codes of one column in a word;
`qzeros` int32 [groups, out / per]; `scales` [groups, out]; `g_idx` int32 [in], the group of each input.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping
from typing import Any, ClassVar

import numpy as np
from jaxtyping import Int32

from meshtune.arrays.spec import ArraySpec
from meshtune.errors import UserError
from meshtune.quantize.published.integers import (
    FULL_PRECISION,
    SCALES,
    WORD,
    Integers,
    PackedScheme,
    Parameters,
    Range,
    check_dtype,
    check_shape,
    integer_field,
    only,
    packed_range,
    unpack_words,
)
from meshtune.quantize.published.scheme import Box, Parts, Shape, check_known, check_patterns, is_skipped

KNOWN = """bits group_size desc_act sym checkpoint_format format method is_marlin_format dynamic lm_head damp_percent
damp_auto_increment static_groups true_sequential model_name_or_path model_file_base_name meta pack_dtype
pack_impl tokenizer dataset backend use_exllama disable_exllama exllama_config max_input_length use_cuda_fp16
model_seqlen block_name_to_quantize module_name_preceding_first_block batch_size pad_token_id cache_block_outputs
modules_in_block_to_quantize act_group_aware mse quant_lm_head adapter offload_to_disk offload_to_disk_path hyb_act
rotation""".split()


@dataclasses.dataclass(frozen=True, kw_only=True)
class Gptq(PackedScheme):
    """How the weights of a checkpoint are packed.

    `offset` is added to stored zero points: one for `gptq` (to words as a whole, as GPTQModel does, which
    differs from adding it to each code only where a stored code is 15), none for `gptq_v2`. `excluded` are regular
    expressions of modules that are not quantised, `only_modules` the ends of the names of those that are (none: all).
    """

    offset: int
    excluded: tuple[str, ...] = ()
    only_modules: tuple[str, ...] = ()
    method: ClassVar[str] = "gptq"
    ending: ClassVar[str] = ".weight"
    endings: ClassVar[Mapping[str, str]] = {
        "codes": ".qweight",
        "zeros": ".qzeros",
        "scales": ".scales",
        "groups": ".g_idx",
    }
    required: ClassVar[tuple[str, ...]] = ("codes", "zeros", "scales")
    ignored: ClassVar[tuple[str, ...]] = ()

    def converts(self, module: str, array: ArraySpec) -> bool:
        if is_skipped(module, self.skip) or any(re.match(pattern, module) for pattern in self.excluded):
            return False
        return not self.only_modules or module.endswith(self.only_modules)

    def shape(self, parts: Parts) -> Shape:
        rows, out = parts.shape("codes")
        into = self.row(parts)
        groups = -(-into // self.size(into))
        for role, expected in (("codes", ("I32",)), ("zeros", ("I32",)), ("scales", SCALES)):
            check_dtype(parts.dtype(role), expected, f"its {role}")
        check_shape((rows, out), (-(-into // self.per), out), "its codes")
        check_shape(parts.shape("zeros"), (groups, -(-out // self.per)), "its zeros")
        check_shape(parts.shape("scales"), (groups, out), "its scales")
        if "groups" in parts:
            check_dtype(parts.dtype("groups"), ("I32", "I64"), "its groups")
            indices = parts.whole("groups")
            if indices.min(initial=0) < 0 or indices.max(initial=0) >= groups:
                raise ValueError(f"g_idx names group {indices.max(initial=0)}, and there are {groups}")
            if not self.act_order and (indices != np.arange(into) // self.size(into)).any():
                raise ValueError("g_idx is out of order, which desc_act in config.json denies: set desc_act to true")
        return out, into

    def integers(self, parts: Parts, box: Box) -> Integers:
        (top, bottom), (left, right) = box
        size = self.size(self.row(parts))
        groups = parts.box("groups", ((left, right),)) if self.act_order else np.arange(left, right) // size
        first, last = (int(groups.min()), int(groups.max()) + 1) if right > left else (0, 0)
        within = left % self.per
        packed = parts.box("codes", (packed_range(left, right, self.per), (top, bottom)))
        codes = unpack_words(packed.T, self.bits)[:, within : within + right - left]
        zeros, scales = self.parameters(parts, (top, bottom), (first, last))
        return Integers(codes, zeros, scales, (groups - first).astype(np.int32))

    def parameters(self, parts: Parts, rows: Range, groups: Range) -> Parameters:
        top, bottom = rows
        within = top % self.per
        packed = self._add_offset(parts.box("zeros", (groups, packed_range(top, bottom, self.per))))
        zeros = unpack_words(packed, self.bits)[:, within : within + bottom - top].T
        return zeros, parts.box("scales", (groups, rows)).T

    def row(self, parts: Parts) -> int:
        return parts.shape("groups")[0] if "groups" in parts else parts.shape("codes")[0] * self.per

    def _add_offset(self, packed: Int32[np.ndarray, "n m"]) -> Int32[np.ndarray, "n m"]:
        ones = sum(self.offset << shift for shift in range(0, WORD, self.bits))
        return (packed.view(np.uint32) + np.uint32(ones)).view(np.int32)


def read(fields: dict[str, Any], where: str) -> Gptq:
    """The scheme of a quantization_config. Raises UserError for bits, layouts and options that are not read."""
    check_known(fields, KNOWN, where)
    bits = integer_field(fields, "bits", where)
    only("bits", bits, (4, 8), where)
    layout = str(fields.get("checkpoint_format") or fields.get("format") or "gptq").lower()
    only("checkpoint_format", layout, ("gptq", "gptq_v2"), where)
    only("is_marlin_format", bool(fields.get("is_marlin_format", False)), (False,), where)
    only("pack_dtype", fields.get("pack_dtype") or "int32", ("int32",), where)
    only("rotation", fields.get("rotation"), (None,), where)
    blocks = fields.get("modules_in_block_to_quantize") or []
    names = [name for block in blocks for name in ([block] if isinstance(block, str) else block)]
    return Gptq(
        bits,
        integer_field(fields, "group_size", where, 128),
        bool(fields.get("desc_act", False)),
        offset=1 if layout == "gptq" else 0,
        excluded=_excluded_modules(fields.get("dynamic") or {}, where),
        only_modules=tuple(f".{name}" for name in names),
    )


def _excluded_modules(dynamic: Mapping[str, Any], where: str) -> tuple[str, ...]:
    """The patterns of modules that GPTQModel's rules leave out; rules that give some modules other bits are refused."""
    for rule, values in dynamic.items():
        if not rule.startswith("-") and values:
            raise UserError(
                f"modules that '{rule}' matches are quantised in a way of their own",
                where=f"{where}, dynamic",
                fix=f"use a checkpoint in which all modules have the same bits and groups, or {FULL_PRECISION}",
            )
    excluded = tuple(rule.removeprefix("-:") for rule in dynamic if rule.startswith("-:"))
    check_patterns(excluded, f"{where}, dynamic")
    return excluded
