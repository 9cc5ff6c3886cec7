"""A part of a parameter, and the tensor of a GGUF file that it is written as."""

from __future__ import annotations

import dataclasses

import numpy as np
from jaxtyping import Float

from meshtune.families.tensors import Shape, View


@dataclasses.dataclass(frozen=True)
class GgufPart:
    """`params[path][index]`, or what `source` takes of it, is `view` of the tensor `name`, less `offset`.

    Where an array is written as several tensors, each has a `source`. With `exponential` the tensor holds -exp of the
    numbers. `factors` are numbers that rows of the tensor are multiplied by: (how many rows, the factor), one after
    another; such a tensor is never read back, because the model that is read has no factors.
    """

    name: str
    path: str
    index: tuple[int, ...]
    view: View
    offset: float = 0.0
    source: View | None = None
    exponential: bool = False
    factors: tuple[tuple[int, float], ...] = ()

    @property
    def is_plain(self) -> bool:
        """Whether the tensor is a rearrangement of all of the array, with an offset."""
        return self.source is None and not self.exponential and not self.factors

    @property
    def array_shape(self) -> Shape:
        """The shape of `params[path][index]`."""
        return self.view.shape if self.source is None else self.source.tensor

    def to_tensor(self, array: Float[np.ndarray, "..."]) -> Float[np.ndarray, "..."]:
        """The tensor of a whole array, in float32."""
        part = array if self.source is None else self.source.read(array)
        tensor = np.empty(self.view.tensor, np.float32)
        self.view.write(-np.exp(part) if self.exponential else part, tensor)
        start = 0
        for count, factor in self.factors:
            tensor[start : start + count] *= np.float32(factor)
            start += count
        return tensor + np.float32(self.offset)

    def into_array(self, tensor: Float[np.ndarray, "..."], array: Float[np.ndarray, "..."]) -> None:
        """Writes what a tensor holds to its place in the array."""
        part = self.view.read(tensor - np.float32(self.offset))
        part = np.log(-part) if self.exponential else part
        (self.source or View.identity(part.shape)).write(np.ascontiguousarray(part), array)
