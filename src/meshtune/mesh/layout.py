"""The axes of a mesh, and where an array lies on it."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Protocol

import jax
import numpy as np
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec

from meshtune.kernels.attention import AttentionSharding
from meshtune.mesh.config import AXES, MeshConfig, resolve_mesh, slice_factors

# The axes that shard weights in addition to tp. ep shards experts; for arrays without experts it is one more axis of
# fsdp, so that rows and dense weights are sharded over it too.
SHARDS = ("fsdp", "cp", "ep")
# Logical axis -> the mesh axes that shard it, alternatives in order of preference. Applied from the top: a logical axis
# gets the first alternative that no axis above it uses. So a batch uses fsdp, and the embed axis of activations is not
# sharded, while in a weight, which has no batch, fsdp shards embed. An adapter's rank uses tp, so that the other
# dimension of A [rank, in] and B [out, rank] is sharded over fsdp. Weights [.., out, embed] are an exception: see
# OUTPUT_AXES.
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
    ("inner", (("tp",), SHARDS)),
    ("latent", (SHARDS,)),
    ("embed", (SHARDS,)),
    ("head_dim", ()),
    ("score", ()),
    ("slots", ()),
    ("units", ()),
    ("segments", ()),
    ("patches", ()),
    ("pixels", ()),
    ("grid", ()),
    ("axes", ()),
    ("named", ()),
    ("layers", ()),
    ("whole", ()),
)
# In a weight [.., one of these, embed] the axes of SHARDS shard the former dimension, within the shards of tp, if they
# divide it. To gather a weight along its last dimension, XLA for GPUs makes a transposed copy of its whole stack: 60
# GiB on each of eight devices for 405B.
OUTPUT_AXES = ("heads", "kv_heads", "packed_heads", "ffn", "inner")
_PRIORITY = {name: index for index, (name, _) in enumerate(RULES)}


class Shardable(Protocol):
    """An array with a logical axis for each dimension, and its shape in units that may not be split further (see
    ArraySpec)."""

    @property
    def units(self) -> tuple[int, ...]: ...

    @property
    def axes(self) -> tuple[str, ...]: ...


@dataclasses.dataclass(frozen=True)
class Layout:
    """The sharding of arrays on a mesh. `tp_replicated` names logical axes that tp does not shard in this model, in
    spite of RULES.

    A dimension that its mesh axes do not divide is replicated. model.sharding.layout_for rejects meshes for which this
    would replicate a large parameter; the batch of a generation may have any size.
    """

    mesh: Mesh | AbstractMesh
    tp_replicated: frozenset[str] = frozenset()

    def size(self, *axes: str) -> int:
        """The product of the sizes of some mesh axes."""
        return math.prod(self.mesh.shape[axis] for axis in axes)

    def spec(self, axes: tuple[str, ...], shape: tuple[int, ...]) -> PartitionSpec:
        """The mesh axes of each dimension of an array. Raises: KeyError for a logical axis that has no rule."""
        assert len(axes) == len(shape), (axes, shape)
        if axes in (("embed",), ("layers", "embed")):  # norms and biases: too small to be worth a message
            return PartitionSpec()
        if len(axes) > 1 and axes[-1] == "embed" and axes[-2] in OUTPUT_AXES:
            output_spec = self._output_weight_spec(axes, shape)
            if output_spec is not None:
                return output_spec
        entries: list[tuple[str, ...]] = [()] * len(axes)
        used: set[str] = set()
        for dimension in sorted(range(len(axes)), key=lambda dimension: _PRIORITY[axes[dimension]]):
            logical_axis = axes[dimension]
            for alternative in RULES[_PRIORITY[logical_axis]][1]:
                alternative = tuple(axis for axis in alternative if axis != "ep" or "ep" not in used)
                if alternative and used.isdisjoint(alternative):
                    used |= set(alternative)
                    if not (logical_axis in self.tp_replicated and "tp" in alternative):
                        entries[dimension] = self._if_divides(alternative, shape[dimension])
                    break
        while entries and not entries[-1]:
            entries.pop()
        return PartitionSpec(*map(_entry, entries))

    def _output_weight_spec(self, axes: tuple[str, ...], shape: tuple[int, ...]) -> PartitionSpec | None:
        """The spec of a weight [.., out, embed] by OUTPUT_AXES; None if the mesh does not divide `out`."""
        leading = [
            self._if_divides(("ep",), size) if axis == "experts" else ()
            for axis, size in zip(axes[:-2], shape[:-2], strict=True)
        ]
        mesh_axes = () if axes[-2] in self.tp_replicated else ("tp",)
        mesh_axes += tuple(axis for axis in SHARDS if (axis,) not in leading)
        output_entry = self._if_divides(mesh_axes, shape[-2])
        return PartitionSpec(*(_entry(entry) for entry in (*leading, output_entry))) if output_entry else None

    def _if_divides(self, axes: tuple[str, ...], size: int) -> tuple[str, ...]:
        """Those of `axes` with more than one device, if their product divides `size`; none otherwise."""
        larger = tuple(axis for axis in axes if self.mesh.shape[axis] > 1)
        return larger if size % self.size(*larger) == 0 else ()

    def sharding(self, axes: tuple[str, ...], shape: tuple[int, ...]) -> NamedSharding:
        return NamedSharding(self.mesh, self.spec(axes, shape))

    def of(self, array: Shardable) -> NamedSharding:
        """The sharding of a parameter at rest."""
        return self.sharding(array.axes, array.units)

    def in_use(self, axes: tuple[str, ...], shape: tuple[int, ...]) -> NamedSharding:
        """The sharding of a parameter during computation: gathered over all axes but tp, and ep for experts; the rank
        of an adapter is gathered too."""
        axes = tuple("whole" if axis == "rank" else axis for axis in axes)
        entries = [(entry,) if isinstance(entry, str) else entry or () for entry in self.spec(axes, shape)]
        mesh_axes = ["ep" if axis == "experts" else "tp" for axis in axes]
        gathered = [axis if axis in entry else None for axis, entry in zip(mesh_axes, entries, strict=False)]
        return NamedSharding(self.mesh, PartitionSpec(*gathered))

    def attention_sharding(self) -> AttentionSharding:
        """The mesh axes that shard attention's rows, heads and tokens."""
        kv_heads = None if "kv_heads" in self.tp_replicated else "tp"
        return AttentionSharding(self.mesh, batch=("dp", "fsdp", "ep"), heads="tp", kv_heads=kv_heads, length="cp")

    @property
    def replicated(self) -> NamedSharding:
        return NamedSharding(self.mesh, PartitionSpec())


def _entry(axes: tuple[str, ...]) -> str | tuple[str, ...] | None:
    """The axes of one dimension as PartitionSpec takes them."""
    return axes[0] if len(axes) == 1 else axes or None


def constrain(x: jax.Array, layout: Layout | None, *axes: str) -> jax.Array:
    """Constrains the sharding of x by its logical axes, inside a jitted function; no effect without a layout."""
    return x if layout is None else jax.lax.with_sharding_constraint(x, layout.sharding(axes, x.shape))


def make_mesh(config: MeshConfig, devices: Sequence[jax.Device] | None = None) -> Mesh:
    """The mesh over `devices` (default: all devices of the job), with all of AXES, including those of size 1.

    Devices are taken host by host, so that the outermost axes (dp first) cross hosts and the inner ones stay within a
    host wherever the sizes allow; of the slices of a TPU, `config.dcn` names the axis that crosses them. Raises:
    UserError as `resolve_mesh` and `slice_factors` do.
    """
    devices = list(jax.devices() if devices is None else devices)
    config = resolve_mesh(config, len(devices))
    return Mesh(_device_array(devices, config), AXES)


def abstract_mesh(config: MeshConfig) -> AbstractMesh:
    """The mesh without devices, which is enough to shard abstract arrays for machines that are not attached."""
    return AbstractMesh(tuple(config.sizes.values()), AXES, (AxisType.Auto,) * len(AXES))  # JAX 0.11 makes it explicit


def count_slices(devices: Sequence[jax.Device]) -> int:
    """The number of TPU slices that the devices belong to."""
    return len({getattr(device, "slice_index", 0) for device in devices if device.platform == "tpu"}) or 1


def _device_array(devices: list[jax.Device], config: MeshConfig) -> np.ndarray:
    """The devices in the mesh's shape: TPUs by their slices and torus, all others by process and id."""
    shape = tuple(config.sizes.values())
    if devices[0].platform == "tpu" and len(devices) > 1:
        from jax.experimental import mesh_utils  # only TPUs need it

        if (slices := count_slices(devices)) > 1:
            across = tuple(slice_factors(config, slices).values())
            in_slice = tuple(size // factor for size, factor in zip(shape, across, strict=True))
            return mesh_utils.create_hybrid_device_mesh(in_slice, across, devices)
        return mesh_utils.create_device_mesh(shape, devices)
    ordered = np.empty(len(devices), object)
    ordered[:] = sorted(devices, key=lambda device: (device.process_index, device.id))
    return ordered.reshape(shape)
