"""Finds numbers that a dtype cannot hold before they are written in it."""

from __future__ import annotations

import math
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np

from meshtune.errors import UserError
from meshtune.model.gather import to_device
from meshtune.weights.file_tensors import Part, Tensor

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
