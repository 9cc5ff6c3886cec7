"""Numbers that are not quantised: F32, F16, BF16 and F64."""

from __future__ import annotations

import ml_dtypes
import numpy as np
from jaxtyping import Float, UInt8

DTYPES = {"F32": np.float32, "F16": np.float16, "BF16": ml_dtypes.bfloat16, "F64": np.float64}


def decode(name: str, blocks: UInt8[np.ndarray, "n bytes"]) -> Float[np.ndarray, "n 1"]:
    """The numbers in float32."""
    return blocks.view(DTYPES[name]).astype(np.float32)


def encode(name: str, blocks: Float[np.ndarray, "n 1"]) -> UInt8[np.ndarray, "n bytes"]:
    """The numbers, rounded to the nearest."""
    with np.errstate(over="ignore"):
        return blocks.astype(DTYPES[name]).view(np.uint8)
