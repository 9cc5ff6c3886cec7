"""Finds numbers that are not finite in weights to read, and numbers that a dtype cannot hold in weights to write."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np

from meshtune.errors import UserError
from meshtune.model.gather import to_device
from meshtune.weights.safetensors_files import BLOCK_BYTES, FLOATS, Part, Tensor, TensorInfo, headers
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


def check_float16(block: np.ndarray, name: str, file: Path) -> None:
    """Raises UserError, naming the tensor and its file, where a block of it has a number that float16 cannot hold."""
    if block.dtype == np.float16 or block.dtype.kind in "iub":
        return
    largest = float(np.max(np.abs(block.astype(np.float32) if block.dtype.itemsize < 4 else block), initial=0.0))
    if largest > LARGEST["float16"]:
        raise UserError(
            f"tensor '{name}' has numbers up to {largest:.4g}, beyond float16's range of {LARGEST['float16']:.4g}",
            where=str(file),
            fix="set compute.precision=float32 (mixed where the device has bfloat16)",
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


LARGEST = {"float16": 65504.0, "bfloat16": 3.3895e38, "float32": 3.4028234e38}
WIDER = {"float16": "bfloat16", "bfloat16": "float32"}


def find_overflow(tensors: Sequence[Tensor]) -> tuple[Tensor, float] | None:
    """(tensor, its largest number) of the first tensor with numbers beyond the dtype that it is to be written in, or
    with ones that are not finite. Collective where the arrays are spread over processes."""
    largest: dict[tuple[int, tuple[int, ...]], float] = {}
    for tensor in tensors:
        limit = LARGEST[tensor.dtype]
        if all(_of_layer(part, largest) <= limit for part in tensor.parts):
            continue
        magnitudes = [_magnitude(part.leaf, part.index) for part in tensor.parts]  # others may share the layer's array
        if (beyond := next((value for value in magnitudes if not value <= limit), None)) is not None:
            return tensor, beyond
    return None


def check_range(tensors: Sequence[Tensor], dtype: str) -> None:
    """Raises UserError for numbers that are not finite or beyond `dtype`, naming the tensor."""
    if (overflow := find_overflow(tensors)) is None:
        return
    tensor, largest = overflow
    if not math.isfinite(largest):
        raise UserError(
            f"tensor '{tensor.name}' has numbers that are not finite (NaN or infinity)",
            where=tensor.name,
            fix="its training diverged, or the model is damaged: export an earlier state (RUN@best, RUN@STEP), or "
            "train again with a lower rate",
        )
    raise UserError(
        f"tensor '{tensor.name}' has numbers up to {largest:.4g}, beyond {dtype}'s range of {LARGEST[dtype]:.4g}",
        where=tensor.name,
        fix=f"write it with --dtype {WIDER.get(dtype, 'float32')}",
    )


def _of_layer(part: Part, largest: dict[tuple[int, tuple[int, ...]], float]) -> float:
    """The largest magnitude in the layer that a part lies in, computed once; NaN or infinity if it has one."""
    row = part.index[:1]
    key = (id(part.leaf), row)
    if key not in largest:
        largest[key] = _magnitude(part.leaf, row)
    return largest[key]


def _magnitude(leaf: jax.Array | np.ndarray, index: tuple[int, ...]) -> float:
    if isinstance(leaf, jax.Array):
        return float(np.asarray(_program(leaf, index).addressable_data(0)))
    return float(np.max(np.abs(np.asarray(leaf[index], np.float32)), initial=0.0))


@jax.jit
def _program(leaf: jax.Array, index: tuple[int, ...]) -> jax.Array:
    for number in index:
        leaf = jax.lax.dynamic_index_in_dim(leaf, number, keepdims=False)
    return jnp.max(jnp.abs(to_device(leaf)).astype(jnp.float32), initial=0.0)
