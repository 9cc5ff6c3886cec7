"""An array before it exists: its shape, dtype, logical axes and initialiser."""

from __future__ import annotations

import dataclasses
from typing import Literal

import jax.numpy as jnp


@dataclasses.dataclass(frozen=True)
class ArraySpec:
    """One parameter before it exists: its shape, dtype name, logical axes (one name a dimension) and initialiser.

    `unit` neighbours along the last axis belong together: the array is split over devices between them alone.
    """

    shape: tuple[int, ...]
    dtype: str
    axes: tuple[str, ...]
    init: Literal["normal", "ones", "zeros"] = "normal"
    unit: int = 1

    def __post_init__(self):
        assert len(self.shape) == len(self.axes), (self.shape, self.axes)

    @property
    def units(self) -> tuple[int, ...]:
        """The shape, counting units along the last axis: what splitting over devices must divide."""
        return self.shape if self.unit == 1 else (*self.shape[:-1], self.shape[-1] // self.unit)

    @property
    def size(self) -> int:
        """Number of elements."""
        total = 1
        for n in self.shape:
            total *= n
        return total

    @property
    def nbytes(self) -> int:
        """Bytes of the whole array."""
        return self.size * jnp.dtype(self.dtype).itemsize
