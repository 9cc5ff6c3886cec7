"""Finds numbers that are not finite in weights, while they are read."""

from __future__ import annotations

from pathlib import Path

import ml_dtypes
import numpy as np

from meshtune.errors import UserError
from meshtune.weights.safetensors_files import BLOCK_BYTES, FLOATS, TensorInfo, headers
from meshtune.weights.tensor_reader import TensorReader

# The bits of the exponent: all of them are set in infinities and NaNs, and in no finite number. Compared as integers,
# which is several times as fast as np.isfinite on the 16-bit types, and allocates one array of booleans.
EXPONENTS: dict[np.dtype, tuple[type[np.unsignedinteger], int]] = {
    np.dtype(np.float32): (np.uint32, 0x7F800000),
    np.dtype(ml_dtypes.bfloat16): (np.uint16, 0x7F80),
    np.dtype(np.float16): (np.uint16, 0x7C00),
}
FIX = "download or copy the model again; if it was saved so, the training that made it went wrong"
SHOWN = 6  # names in a message
PIECE = 1 << 18  # numbers looked at together: they stay in a core's cache


def all_finite(block: np.ndarray) -> bool:
    """Whether every number of a block is finite; integers and booleans are."""
    if block.dtype in EXPONENTS and block.flags.c_contiguous:
        integer, exponent = EXPONENTS[block.dtype]
        bits = block.reshape(-1).view(integer)
        mask = integer(exponent)
        return not any(
            bool(((bits[start : start + PIECE] & mask) == mask).any()) for start in range(0, bits.size, PIECE)
        )
    if block.dtype.kind in "iub":
        return True
    return bool(np.isfinite(block.astype(np.float32) if block.dtype.itemsize < 4 else block).all())


def check_finite(block: np.ndarray, name: str, file: Path) -> None:
    """Raises UserError, naming the tensor and its file, where a block of it has a number that is not finite."""
    if not all_finite(block):
        raise UserError(
            f"tensor '{name}' has numbers that are not finite (NaN or infinity)",
            where=str(file),
            fix=FIX,
        )


def tensors_not_finite(directory: Path) -> dict[str, Path]:
    """Reads every weight of a model directory; the tensors with numbers that are not finite, and their files.

    Raises: UserError as `headers` does, and where a file ends too early.
    """
    damaged: dict[str, Path] = {}
    with TensorReader() as reader:
        for name, info in headers(directory).items():
            if info.dtype in FLOATS and not _is_finite(info, reader):
                damaged[name] = info.file
    return damaged


def require_finite(directory: Path) -> None:
    """Raises UserError, naming the tensors of a model directory that have numbers that are not finite."""
    damaged = tensors_not_finite(directory)
    if damaged:
        listed = ", ".join(f"'{name}' in {file.name}" for name, file in list(damaged.items())[:SHOWN])
        remainder = f" and {len(damaged) - SHOWN} more" if len(damaged) > SHOWN else ""
        raise UserError(
            f"{len(damaged)} tensor(s) have numbers that are not finite (NaN or infinity): {listed}{remainder}",
            where=str(directory),
            fix=FIX,
        )


def _is_finite(info: TensorInfo, reader: TensorReader) -> bool:
    if not info.shape:
        return all_finite(reader.tensor(info))
    rows = max(1, BLOCK_BYTES // max(1, info.nbytes // max(1, info.shape[0])))
    return all(
        all_finite(reader.rows(info, start, min(info.shape[0], start + rows)))
        for start in range(0, info.shape[0], rows)
    )
