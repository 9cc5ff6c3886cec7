"""AWQ: 4 bits in groups along the input, with zero points (https://arxiv.org/abs/2306.00978).

AutoAWQ's `gemm` layout: `qweight` int32 [in, out / 8], `qzeros` int32 [groups, out / 8], `scales` [groups, out]. A word
holds eight neighbouring outputs, in the order of `PLACES`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, ClassVar

import numpy as np
from jaxtyping import Int32, UInt8

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
    groups_of,
    integer_field,
    only,
    packed_range,
    unpack_words,
)
from meshtune.quantize.published.scheme import Box, Parts, Shape, check_known, is_skipped, skip_list

BITS, PER = 4, 8
KNOWN = """bits w_bit group_size q_group_size version format checkpoint_format method pack_dtype lm_head zero_point
backend modules_to_not_convert do_fuse fuse_max_seq_len modules_to_fuse exllama_config desc_act sym static_groups
true_sequential damp_percent act_group_aware tokenizer dataset meta model_seqlen batch_size pad_token_id
max_input_length cache_block_outputs block_name_to_quantize module_name_preceding_first_block
modules_in_block_to_quantize""".split()
PLACES = (0, 4, 1, 5, 2, 6, 3, 7)  # where in a word, from its lowest bits, each of eight outputs is


@dataclasses.dataclass(frozen=True)
class Awq(PackedScheme):
    """How the weights of a checkpoint are packed."""

    method: ClassVar[str] = "awq"
    ending: ClassVar[str] = ".weight"
    endings: ClassVar[Mapping[str, str]] = {"codes": ".qweight", "zeros": ".qzeros", "scales": ".scales"}
    required: ClassVar[tuple[str, ...]] = ("codes", "zeros", "scales")
    ignored: ClassVar[tuple[str, ...]] = ()

    def converts(self, module: str, array: ArraySpec) -> bool:
        return not is_skipped(module, self.skip)

    def shape(self, parts: Parts) -> Shape:
        into, columns = parts.shape("codes")
        size = self.size(into)
        check_divides(size, into)
        for role, expected in (("codes", ("I32",)), ("zeros", ("I32",)), ("scales", SCALES)):
            check_dtype(parts.dtype(role), expected, f"its {role}")
        check_shape(parts.shape("zeros"), (into // size, columns), "its zeros")
        check_shape(parts.shape("scales"), (into // size, columns * PER), "its scales")
        return columns * PER, into

    def integers(self, parts: Parts, box: Box) -> Integers:
        (top, bottom), (left, right) = box
        size = self.size(self.row(parts))
        packed, groups = packed_range(top, bottom, PER), groups_of(left, right, size)
        rows = slice(top % PER, top % PER + bottom - top)
        codes = _outputs(parts.box("codes", ((left, right), packed)))[:, rows].T
        zeros, scales = self.parameters(parts, (top, bottom), groups)
        return Integers(codes, zeros, scales, (np.arange(left, right) // size - groups[0]).astype(np.int32))

    def parameters(self, parts: Parts, rows: Range, groups: Range) -> Parameters:
        top, bottom = rows
        zeros = _outputs(parts.box("zeros", (groups, packed_range(top, bottom, PER)))).T
        return zeros[top % PER : top % PER + bottom - top], parts.box("scales", (groups, rows)).T

    def row(self, parts: Parts) -> int:
        return parts.shape("codes")[0]


def _outputs(packed: Int32[np.ndarray, "n w"]) -> UInt8[np.ndarray, "n o"]:
    codes = unpack_words(packed, BITS).reshape(*packed.shape, PER)
    return codes[..., PLACES].reshape(packed.shape[0], -1)


def read(fields: dict[str, Any], where: str) -> Awq:
    """The scheme of a quantization_config. Raises UserError for bits and layouts that are not read."""
    check_known(fields, KNOWN, where)
    bits = "w_bit" if "w_bit" in fields else "bits"  # AutoAWQ's own files have w_bit and q_group_size
    only(bits, integer_field(fields, bits, where, BITS), (BITS,), where)
    layout = str(fields.get("version") or fields.get("format") or "gemm").lower()
    only("version", layout, ("gemm",), where)
    if fields.get("backend") == "llm-awq":
        only("backend", "llm-awq", ("auto",), where)
    group = integer_field(fields, "q_group_size" if "q_group_size" in fields else "group_size", where, 128)
    return Awq(BITS, group, skip=skip_list(fields, where, "modules_to_not_convert"))
