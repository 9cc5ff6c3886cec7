"""compressed-tensors' `float-quantized`: e4m3 codes in `weight`, with a scale for the tensor, for each row (channel) or
for each block in `weight_scale` (https://github.com/vllm-project/compressed-tensors)."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, ClassVar

import numpy as np

from meshtune.arrays.spec import ArraySpec
from meshtune.quantize.published.block_fp8 import BlockFp8
from meshtune.quantize.published.integers import only
from meshtune.quantize.published.pack_quantized import matches
from meshtune.quantize.published.scheme import Box, Form, Parts, Shape, is_skipped


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
