"""A part of a parameter, and the tensor, or the key, of a GGUF file that it is written as."""

from __future__ import annotations

import dataclasses

import numpy as np
from jaxtyping import Float

from meshtune.families.tensors import Shape, View

SHORTEST = 1e-12  # length of a row, as torch.nn.functional.normalize has it


@dataclasses.dataclass(frozen=True)
class GgufKey:
    """A key of the metadata that lists a number of every layer, in order: `params[path][index]` of each of `places`."""

    name: str
    places: tuple[tuple[str, tuple[int, ...]], ...]


@dataclasses.dataclass(frozen=True)
class GgufPart:
    """`params[path][index]`, or what `source` takes of it, is `view` of the tensor `name`, less `offset`.

    Where an array is written as several tensors, each has a `source`; a tensor of several arrays has a part for each,
    with views that make it up. With `exponential` the tensor holds -exp of the numbers, and numbers beyond `limit` are
    written as it. `padding` rows follow in the tensor that are equal to its first. `factors` are numbers that rows of
    the tensor are multiplied by: (how many rows, the factor), one after another. The model that is read back has
    neither padding nor factors. With `unit_rows` rows are written with a length of one, and read as they are.
    """

    name: str
    path: str
    index: tuple[int, ...]
    view: View
    offset: float = 0.0
    source: View | None = None
    exponential: bool = False
    factors: tuple[tuple[int, float], ...] = ()
    padding: int = 0
    limit: float | None = None
    unit_rows: bool = False

    def __post_init__(self):
        assert not (self.factors and self.offset), "an offset is of the numbers, factors are of the tensor"
        assert self.view.is_identity or not (self.padding or self.unit_rows), "rows are those of an array as it is"

    @property
    def is_plain(self) -> bool:
        """Whether what the tensor holds is a rearrangement of all of the array, with an offset."""
        return self.source is None and not self.exponential and not self.factors and self.limit is None

    @property
    def tensor_shape(self) -> Shape:
        """The shape of the whole tensor."""
        return (self.view.tensor[0] + self.padding, *self.view.tensor[1:])

    @property
    def array_shape(self) -> Shape:
        """The shape of `params[path][index]`."""
        return self.view.shape if self.source is None else self.source.tensor

    def to_tensor(self, array: Float[np.ndarray, "..."]) -> Float[np.ndarray, "..."]:
        """The tensor of a whole array, in float32, without padding."""
        tensor = np.empty(self.view.tensor, np.float32)
        self.into_tensor(array, tensor)
        return tensor

    def into_tensor(self, array: Float[np.ndarray, "..."], tensor: Float[np.ndarray, "..."]) -> None:
        """Writes a whole array to its place in the tensor."""
        part = array if self.source is None else self.source.read(array)
        part = -np.exp(part) if self.exponential else part
        part = part if self.limit is None else np.clip(part, -self.limit, self.limit)
        self.view.write(self.finished(part), tensor)
        start = 0
        for count, factor in self.factors:
            tensor[start : start + count] *= np.float32(factor)
            start += count

    def finished(self, rows: Float[np.ndarray, "..."]) -> Float[np.ndarray, "..."]:
        """Rows as they are written, but for factors."""
        if self.unit_rows:
            lengths = np.sqrt(np.square(rows).sum(axis=-1, keepdims=True))
            rows = rows / np.maximum(lengths, np.float32(SHORTEST))
        return rows + np.float32(self.offset)

    def into_array(self, tensor: Float[np.ndarray, "..."], array: Float[np.ndarray, "..."]) -> None:
        """Writes what a tensor holds to its place in the array."""
        part = self.view.read(tensor - np.float32(self.offset))
        part = np.log(-part) if self.exponential else part
        (self.source or View.identity(part.shape)).write(np.ascontiguousarray(part), array)
