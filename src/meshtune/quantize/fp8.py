"""FP8: e4m3 floating point, finite numbers only (https://arxiv.org/abs/2209.05433), relative to the largest number."""

from __future__ import annotations

import jax

from meshtune.quantize import e4m3
from meshtune.quantize.format import Format

LARGEST = 448.0


def _encode(share: jax.Array) -> jax.Array:
    return e4m3.codes(share * LARGEST)


def _decode(codes: jax.Array) -> jax.Array:
    return e4m3.numbers(codes) * (1 / LARGEST)


FP8 = Format("fp8", "uint8", 1, _encode, _decode)
