"""bitsandbytes: NF4 and FP4 in blocks over the flattened weight (https://arxiv.org/abs/2305.14314), and LLM.int8's rows
(https://arxiv.org/abs/2208.07339).

4 bits: `weight` [n / 2, 1] bytes, each first number in the upper half, in rows; `weight.absmax` of each block, in
float32 or, quantised twice, as codes of `weight.nested_quant_map` with `weight.nested_absmax`; `weight.quant_map`, the
16 values; `weight.quant_state.bitsandbytes__nf4` or `__fp4`, the rest as JSON. 8 bits: `weight` int8 [out, in] and
`SCB` float32 [out], the largest magnitude of each row.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Mapping
from typing import Any, ClassVar

import numpy as np
from jaxtyping import Float, UInt8

from meshtune.arrays.spec import ArraySpec
from meshtune.errors import UserError
from meshtune.json_text import parse_json
from meshtune.quantize.published.integers import (
    FULL_PRECISION,
    ROW_BLOCK,
    SCALES,
    check_dtype,
    check_shape,
    largest_block,
    only,
    pairs,
)
from meshtune.quantize.published.scheme import Box, Form, Parts, Shape, check_known, is_skipped, skip_list

KNOWN = """load_in_4bit _load_in_4bit load_in_8bit _load_in_8bit bnb_4bit_quant_type bnb_4bit_use_double_quant
bnb_4bit_compute_dtype bnb_4bit_quant_storage llm_int8_skip_modules llm_int8_threshold llm_int8_has_fp16_weight
llm_int8_enable_fp32_cpu_offload""".split()
BLOCK = 64  # the smallest blocks that are read
KINDS = ("nf4", "fp4")
INT8_STEP = np.float32(7.874015718698502e-3)  # 1 / 127, as bitsandbytes writes it
STORAGES = ("U8", "I8", "F16", "BF16", "F32")  # a packed weight may be stored as any numbers: its bytes count


@dataclasses.dataclass(frozen=True)
class QuantState:
    """The `quant_state` of one weight: `nested` scales share a nested scale (0: none), around the mean `offset`."""

    block: int
    shape: Shape
    nested: int
    offset: float


@functools.lru_cache(maxsize=4096)
def quant_state(content: bytes, kind: str) -> QuantState:
    """From the JSON in a tensor's bytes. Raises ValueError where it is malformed or of another kind."""
    try:
        fields = parse_json(content, "quant_state")
        nested = int(fields.get("nested_blocksize") or 0)
        offset = float(fields["nested_offset"]) if nested else 0.0
        state = QuantState(int(fields["blocksize"]), tuple(int(size) for size in fields["shape"]), nested, offset)
        named = fields["quant_type"]
    except (ValueError, KeyError, TypeError, AttributeError, OverflowError) as error:
        raise ValueError(f"its quant_state is malformed ({error!r})") from error
    if named != kind or len(state.shape) != 2 or state.block < BLOCK or state.block % BLOCK or nested < 0:
        raise ValueError(f"its quant_state describes no {kind} matrix in blocks of {BLOCK} or a multiple: {fields}")
    return state


@dataclasses.dataclass(frozen=True)
class FourBit:
    """NF4 or FP4 weights."""

    kind: str
    skip: tuple[str, ...] = ()
    method: ClassVar[str] = "bitsandbytes"
    ending: ClassVar[str] = ".weight"
    required: ClassVar[tuple[str, ...]] = ("codes", "absmax", "values", "state")
    ignored: ClassVar[tuple[str, ...]] = ()

    @property
    def endings(self) -> Mapping[str, str]:
        return {
            "codes": ".weight",
            "absmax": ".weight.absmax",
            "values": ".weight.quant_map",
            "nested_absmax": ".weight.nested_absmax",
            "nested_values": ".weight.nested_quant_map",
            "state": f".weight.quant_state.bitsandbytes__{self.kind}",
        }

    def converts(self, module: str, array: ArraySpec) -> bool:
        return not is_skipped(module, self.skip)

    def shape(self, parts: Parts) -> Shape:
        state = self._state(parts)
        size = math.prod(state.shape)
        blocks = -(-size // state.block)
        check_dtype(parts.dtype("codes"), STORAGES, "its codes")
        stored = parts.box("codes", tuple((0, min(1, n)) for n in parts.shape("codes"))).dtype.itemsize
        if math.prod(parts.shape("codes")) * stored != -(-size // 2):
            raise ValueError(f"its codes have shape {list(parts.shape('codes'))}, expected {[-(-size // 2), 1]} bytes")
        check_shape(parts.shape("absmax"), (blocks,), "its absmax")
        check_shape(parts.shape("values"), (16,), "its quant_map")
        if not state.nested:
            check_dtype(parts.dtype("absmax"), SCALES, "its absmax")
            return state.shape
        check_dtype(parts.dtype("absmax"), ("U8",), "its absmax")
        for role in ("nested_absmax", "nested_values"):
            if role not in parts:
                raise ValueError(f"its absmax is quantised too, and '{self.endings[role]}' is missing")
        check_shape(parts.shape("nested_absmax"), (-(-blocks // state.nested),), "its nested_absmax")
        check_shape(parts.shape("nested_values"), (256,), "its nested_quant_map")
        return state.shape

    def decode(self, parts: Parts, box: Box) -> np.ndarray:
        (top, bottom), (left, right) = box
        state = self._state(parts)
        into = state.shape[1]
        first, last = top * into, bottom * into
        codes = self._bytes(parts, first, last)
        numbers = parts.whole("values")[codes]
        block = np.arange(first, last) // state.block
        start = first // state.block
        numbers *= self.absmax(parts, (start, -(-last // state.block)))[block - start]
        return numbers.reshape(bottom - top, into)[:, left:right]

    def absmax(self, parts: Parts, blocks: tuple[int, int]) -> Float[np.ndarray, "n"]:
        """The scales of some blocks, float32, rounded as in bitsandbytes."""
        state = self._state(parts)
        codes = parts.box("absmax", (blocks,))
        if not state.nested:
            return codes.astype(np.float32)
        start, stop = blocks
        nested = parts.box("nested_absmax", ((start // state.nested, -(-stop // state.nested)),))
        of_scale = np.arange(start, stop) // state.nested - start // state.nested
        scales = parts.whole("nested_values")[codes] * nested[of_scale]
        return scales + np.float32(state.offset)

    def form(self, weight: ArraySpec) -> Form | None:
        block = largest_block(weight.shape[-1], BLOCK)  # a part of a block of the file, which may go across rows
        return None if block is None else Form("bnb_nf4" if self.kind == "nf4" else "bnb_fp4", block)

    def codes(self, parts: Parts, box: Box) -> np.ndarray:
        (top, bottom), (left, right) = box
        into = self._state(parts).shape[1]
        codes = self._bytes(parts, top * into, bottom * into).reshape(bottom - top, into)
        return pairs(codes[:, 2 * left : 2 * right])

    def scales(self, parts: Parts, box: Box) -> np.ndarray:
        (top, bottom), (left, right) = box
        state = self._state(parts)
        into = state.shape[1]
        size = largest_block(into, BLOCK)
        assert size is not None
        numbers = np.arange(top, bottom)[:, None] * into + np.arange(left, right) * size
        first = int(numbers[0, 0]) // state.block
        return self.absmax(parts, (first, int(numbers[-1, -1]) // state.block + 1))[numbers // state.block - first]

    def _state(self, parts: Parts) -> QuantState:
        return quant_state(parts.whole("state").tobytes(), self.kind)

    def _bytes(self, parts: Parts, first: int, last: int) -> UInt8[np.ndarray, "n"]:
        """The codes of numbers first..last of the flattened weight."""
        shape = parts.shape("codes")
        elements = math.prod(shape)
        axis = int(np.argmax(shape))
        size = -(-math.prod(self._state(parts).shape) // 2) // elements  # bytes of an element
        start, stop = first // 2 // size, -(-last // (2 * size))
        packed = parts.box("codes", tuple((start, stop) if n == axis else (0, 1) for n in range(len(shape))))
        packed = np.ascontiguousarray(packed).reshape(-1).view(np.uint8)
        codes = np.stack([packed >> 4, packed & 15], axis=-1).reshape(-1)
        return codes[first - start * 2 * size : last - start * 2 * size]


@dataclasses.dataclass(frozen=True)
class EightBit:
    """LLM.int8 weights. `transformers` computes their products with rounded inputs; here inputs are not rounded."""

    skip: tuple[str, ...] = ()
    method: ClassVar[str] = "bitsandbytes"
    ending: ClassVar[str] = ".weight"
    endings: ClassVar[Mapping[str, str]] = {"codes": ".weight", "scales": ".SCB", "layout": ".weight_format"}
    required: ClassVar[tuple[str, ...]] = ("codes", "scales")
    ignored: ClassVar[tuple[str, ...]] = ()

    def converts(self, module: str, array: ArraySpec) -> bool:
        return not is_skipped(module, self.skip)

    def shape(self, parts: Parts) -> Shape:
        out, into = parts.shape("codes")
        check_dtype(parts.dtype("codes"), ("I8",), "its codes")
        check_dtype(parts.dtype("scales"), SCALES, "its SCB")
        check_shape(parts.shape("scales"), (out,), "its SCB")
        if "layout" in parts and (layout := int(parts.whole("layout"))) != 0:
            raise ValueError(f"its weight_format is {layout}, a layout for one kind of GPU; 0, rows, is supported")
        return out, into

    def decode(self, parts: Parts, box: Box) -> np.ndarray:
        numbers = parts.box("codes", box).astype(np.float32)
        numbers *= parts.box("scales", box[:1]).astype(np.float32)[:, None]
        numbers *= INT8_STEP
        return numbers

    def form(self, weight: ArraySpec) -> Form | None:
        block = largest_block(weight.shape[-1], ROW_BLOCK)
        return None if block is None else Form("llm_int8", block)

    def codes(self, parts: Parts, box: Box) -> np.ndarray:
        return parts.box("codes", box)

    def scales(self, parts: Parts, box: Box) -> np.ndarray:
        rows, (left, right) = box
        return np.repeat(parts.box("scales", (rows,)).astype(np.float32)[:, None] * INT8_STEP, right - left, axis=1)


def read(fields: dict[str, Any], where: str) -> FourBit | EightBit:
    """The scheme of a quantization_config. Raises UserError where it says neither 4 nor 8 bits."""
    check_known(fields, KNOWN, where)
    skip = skip_list(fields, where, "llm_int8_skip_modules")
    if fields.get("load_in_4bit") or fields.get("_load_in_4bit"):
        kind = fields.get("bnb_4bit_quant_type") or "fp4"
        only("bnb_4bit_quant_type", kind, KINDS, where)
        return FourBit(kind, skip)
    if fields.get("load_in_8bit") or fields.get("_load_in_8bit"):
        only("llm_int8_has_fp16_weight", bool(fields.get("llm_int8_has_fp16_weight", False)), (False,), where)
        return EightBit(skip)
    raise UserError("neither load_in_4bit nor load_in_8bit is true", where=where, fix=FULL_PRECISION)
