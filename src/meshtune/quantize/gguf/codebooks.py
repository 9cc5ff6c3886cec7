"""Types that Meshtune reads but does not write, decoded by the package gguf, which has their codebooks."""

from __future__ import annotations

import numpy as np
from jaxtyping import Float, UInt8

from meshtune.errors import UserError, pip_install


def decode(name: str, blocks: UInt8[np.ndarray, "n bytes"]) -> Float[np.ndarray, "n numbers"]:
    """The numbers of blocks. Raises UserError without the package."""
    try:
        from gguf import GGMLQuantizationType, quants
    except ImportError as error:
        raise UserError(
            f"tensors of type {name} are decoded by the package gguf, which is not installed",
            fix=pip_install("gguf"),
        ) from error
    return quants.dequantize(blocks, GGMLQuantizationType[name])
