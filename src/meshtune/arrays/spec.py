"""An array before it exists: its shape, dtype, logical axes, initialiser and role."""

from __future__ import annotations

import dataclasses
from typing import Literal, get_args

import jax.numpy as jnp

from meshtune.errors import UserError

# What an array is to a model, which decides how it is optimised, quantised, adapted, gathered and counted:
#   matrix   the weight of a linear layer: [out, in]
#   experts  the weights of all experts of one linear layer: [experts, out, in]
#   router   what scores the experts: [experts, in]
#   vector   a norm's weight, a bias, a scale, a sink: [n]
#   table    rows looked up by token, an embedding: [vocab, embed]
#   head     rows that score the last hidden state, an output head or a reward head: [vocab, embed] or [1, embed]
#   conv     the filters of a short convolution: [channels, width]
#   buffer   numbers of the model that no gradient trains, such as a router's correction of its choices: [n], float32
#   state    no parameter: optimizer state, statistics, counts
# The factors of a low-rank adapter have the role of the weight they adapt. Whoever does not know a role refuses it by
# name. A stacked array has the axis `layers` in front of these.
Role = Literal["matrix", "experts", "router", "vector", "table", "head", "conv", "buffer", "state"]
LAYERS = "layers"


@dataclasses.dataclass(frozen=True)
class ArraySpec:
    """An array before it exists: its shape, dtype name, logical axes (one name per dimension), initialiser and role.

    `unit` neighbours along the last axis belong together: the array is split over devices only between them.
    `head_rows` neighbouring rows of a matrix compute one attention head's queries or keys; 1 where that has no meaning.
    """

    shape: tuple[int, ...]
    dtype: str
    axes: tuple[str, ...]
    init: Literal["normal", "ones", "zeros"] = "normal"
    unit: int = 1
    role: Role = "state"
    head_rows: int = 1

    def __post_init__(self):
        assert len(self.shape) == len(self.axes), (self.shape, self.axes)

    @property
    def units(self) -> tuple[int, ...]:
        """The shape, counting units along the last axis: what splitting over devices must divide."""
        return self.shape if self.unit == 1 else (*self.shape[:-1], self.shape[-1] // self.unit)

    @property
    def is_stacked(self) -> bool:
        """Whether the first dimension counts layers."""
        return self.axes[:1] == (LAYERS,)

    @property
    def layer(self) -> ArraySpec:
        """One layer's part of a stacked array; an array that is not stacked unchanged."""
        if not self.is_stacked:
            return self
        return dataclasses.replace(self, shape=self.shape[1:], axes=self.axes[1:])

    def stacked(self, layers: int) -> ArraySpec:
        """This array of every layer in a stack of `layers` layers."""
        return dataclasses.replace(self, shape=(layers, *self.shape), axes=(LAYERS, *self.axes))

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


# Roles of parameters: all but optimizer state, statistics and counts.
PARAMETER_ROLES: frozenset[Role] = frozenset(get_args(Role)) - {"state"}


def unknown_role(consumer: str, path: str, array: ArraySpec, *, where: str, fix: str) -> UserError:
    """The error of a consumer ("muon", "quantize") that has no rule for the role of the array at `path`."""
    return UserError(f"{consumer} has no rule for arrays of role '{array.role}', such as {path}", where=where, fix=fix)
