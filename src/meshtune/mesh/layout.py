"""From logical axes to mesh axes: one table says how every array of a run lies on the devices."""

from __future__ import annotations

import dataclasses
from typing import Protocol

import jax
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec

from meshtune.kernels.attention import AttentionSplit

# Logical axis -> the mesh axes that split it, alternatives in order of preference. Read from the top: an array's axis
# gets the first alternative that no axis above it has taken. So a batch takes fsdp and leaves the embed axis of
# activations whole, while in a weight, which has no batch, fsdp splits embed; and an adapter's rank takes tp, so that
# the other side of A [rank, in] and B [out, rank] goes to fsdp. A weight [out, embed] is the exception: see OUT. ep
# splits experts; for whatever has none it is one more axis of fsdp, so rows and dense weights are split over it too.
SHARDS = ("fsdp", "cp", "ep")  # the axes that split weights beside tp
RULES: tuple[tuple[str, tuple[tuple[str, ...], ...]], ...] = (
    ("batch", (("dp", "fsdp", "ep"),)),
    ("length", (("cp",),)),
    ("experts", (("ep",),)),
    ("rank", (("tp",),)),
    ("vocab", (("tp",), SHARDS)),
    ("heads", (("tp",), SHARDS)),
    ("kv_heads", (("tp",), SHARDS)),
    ("packed_heads", (("tp",), SHARDS)),
    ("ffn", (("tp",), SHARDS)),
    ("embed", (SHARDS,)),
    ("head_dim", ()),
    ("score", ()),
    ("slots", ()),
    ("layers", ()),
    ("whole", ()),
)
# Of a weight [.., one of these, embed] fsdp and cp split the first, within tp's part, where they divide it. To gather
# a weight along its last dimension XLA for GPUs makes a transposed copy of its whole stack: 60 GiB on each of eight
# devices for 405B.
OUT = ("heads", "kv_heads", "packed_heads", "ffn")
_ORDER = {name: place for place, (name, _) in enumerate(RULES)}


class Shaped(Protocol):
    """Anything with a shape, counted in what may be split, and a logical axis a dimension, as model.spec.ArraySpec."""

    @property
    def units(self) -> tuple[int, ...]: ...

    @property
    def axes(self) -> tuple[str, ...]: ...


@dataclasses.dataclass(frozen=True)
class Layout:
    """How arrays lie on a mesh. `whole` names logical axes that tp does not split in this model, though RULES would.

    A dimension that its mesh axes do not divide is left whole too: `mesh.fit.layout_for` has made sure that this
    befalls no parameter it should not, and a batch of generation may be of any size.
    """

    mesh: Mesh | AbstractMesh
    whole: frozenset[str] = frozenset()

    def size(self, *axes: str) -> int:
        """Devices along some mesh axes together."""
        total = 1
        for axis in axes:
            total *= self.mesh.shape[axis]
        return total

    def spec(self, axes: tuple[str, ...], shape: tuple[int, ...]) -> PartitionSpec:
        """The mesh axes of each dimension of an array. Raises KeyError for a logical axis that no rule names."""
        assert len(axes) == len(shape), (axes, shape)
        if axes in (("embed",), ("layers", "embed")):  # norms and biases: not worth a message
            return PartitionSpec()
        if len(axes) > 1 and axes[-1] == "embed" and axes[-2] in OUT:
            leading = [
                self._dividing(("ep",), size) if axis == "experts" else ()
                for axis, size in zip(axes[:-2], shape[:-2], strict=True)
            ]
            ways = () if axes[-2] in self.whole else ("tp",)
            ways += tuple(axis for axis in SHARDS if (axis,) not in leading)
            fitting = self._dividing(ways, shape[-2])
            if len(fitting) > 0:
                return PartitionSpec(*(_entry(part) for part in (*leading, fitting)))
        parts: list[tuple[str, ...]] = [()] * len(axes)
        taken: set[str] = set()
        for place in sorted(range(len(axes)), key=lambda place: _ORDER[axes[place]]):
            axis, size = axes[place], shape[place]
            for alternative in RULES[_ORDER[axis]][1]:
                alternative = tuple(axis for axis in alternative if axis != "ep" or "ep" not in taken)
                if alternative and taken.isdisjoint(alternative):
                    taken |= set(alternative)
                    if not (axis in self.whole and "tp" in alternative):
                        parts[place] = self._dividing(alternative, size)
                    break
        while parts and not parts[-1]:
            parts.pop()
        return PartitionSpec(*map(_entry, parts))

    def _dividing(self, axes: tuple[str, ...], size: int) -> tuple[str, ...]:
        used = tuple(axis for axis in axes if self.mesh.shape[axis] > 1)
        return used if size % self.size(*used) == 0 else ()

    def sharding(self, axes: tuple[str, ...], shape: tuple[int, ...]) -> NamedSharding:
        """`spec` on this mesh."""
        return NamedSharding(self.mesh, self.spec(axes, shape))

    def of(self, array: Shaped) -> NamedSharding:
        """The sharding of a parameter."""
        return self.sharding(array.axes, array.units)

    def in_use(self, axes: tuple[str, ...], shape: tuple[int, ...]) -> NamedSharding:
        """How a parameter lies while it is computed with: split over tp, experts over ep too, an adapter's rank not."""
        axes = tuple("whole" if axis == "rank" else axis for axis in axes)
        parts = [(part,) if isinstance(part, str) else part or () for part in self.spec(axes, shape)]
        names = ["ep" if axis == "experts" else "tp" for axis in axes]
        used = [name if name in part else None for name, part in zip(names, parts, strict=False)]
        return NamedSharding(self.mesh, PartitionSpec(*used))

    def attention_split(self) -> AttentionSplit:
        """The axes that split attention's rows, heads and tokens."""
        kv_heads = None if "kv_heads" in self.whole else "tp"
        return AttentionSplit(self.mesh, batch=("dp", "fsdp", "ep"), heads="tp", kv_heads=kv_heads, length="cp")

    @property
    def replicated(self) -> NamedSharding:
        """The same on every device."""
        return NamedSharding(self.mesh, PartitionSpec())


def _entry(axes: tuple[str, ...]) -> str | tuple[str, ...] | None:
    return axes[0] if len(axes) == 1 else axes or None


def constrain(x: jax.Array, layout: Layout | None, *axes: str) -> jax.Array:
    """x laid out by its logical axes, inside a jitted function; as it is where there is no layout."""
    return x if layout is None else jax.lax.with_sharding_constraint(x, layout.sharding(axes, x.shape))
