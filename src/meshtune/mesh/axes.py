"""The mesh: which devices form which axis.

dp replicates parameters and splits the batch; fsdp splits the batch and the parameters; cp splits the sequence; ep
splits experts; tp splits heads, ffn and vocabulary.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

import jax
import numpy as np
from jax.sharding import AbstractMesh, Mesh

from meshtune.errors import UserError

# Outermost first: tp exchanges the most and gets neighbouring devices, dp the least and goes across hosts.
AXES = ("dp", "fsdp", "cp", "ep", "tp")


@dataclasses.dataclass(frozen=True)
class MeshConfig:
    """The number of devices along each axis; one axis may be -1, which takes the devices that remain.

    Raises: UserError for sizes that no number of devices can satisfy.
    """

    dp: int = 1
    fsdp: int = 1
    tp: int = 1
    cp: int = 1
    ep: int = 1

    def __post_init__(self):
        for axis, size in self.sizes.items():
            if isinstance(size, bool) or not isinstance(size, int) or (size < 1 and size != -1):
                raise UserError(
                    f"a mesh cannot have {size!r} devices along {axis}",
                    where=f"mesh.{axis}",
                    fix="give a whole number from 1 up, or -1 for all remaining devices",
                )
        open_axes = [axis for axis, size in self.sizes.items() if size == -1]
        if len(open_axes) > 1:
            raise UserError(f"{' and '.join(open_axes)} are both -1", where="mesh", fix="set at most one axis to -1")

    @property
    def sizes(self) -> dict[str, int]:
        """Devices along each of AXES, in their order."""
        return {axis: getattr(self, axis) for axis in AXES}

    @property
    def devices(self) -> int:
        """The total number of devices; only for a mesh without an open axis."""
        assert -1 not in self.sizes.values(), self
        return math.prod(self.sizes.values())

    def __str__(self) -> str:
        return " x ".join(f"{axis}={size}" for axis, size in self.sizes.items() if size != 1) or "1 device"


def resolve_mesh(config: MeshConfig, devices: int) -> MeshConfig:
    """The mesh with its open axis, if it has one, set to the devices that remain of `devices`.

    Raises: UserError if the axes do not multiply to the number of devices, with sizes that do.
    """
    fixed = math.prod(size for size in config.sizes.values() if size != -1)
    open_axis = next((axis for axis, size in config.sizes.items() if size == -1), None)
    if open_axis is None:
        if fixed != devices:
            raise _wrong_count(config, fixed, devices)
        return config
    if devices % fixed:
        raise UserError(
            f"the mesh {config} cannot be filled: its fixed axes take {fixed} devices, and {_count(devices)} "
            f"{'is' if devices == 1 else 'are'} not a multiple of that",
            where="mesh",
            fix=f"give fixed axes whose product divides {devices}, or start the job with a multiple of {fixed} devices",
        )
    return dataclasses.replace(config, **{open_axis: devices // fixed})


def make_mesh(config: MeshConfig, devices: Sequence[jax.Device] | None = None) -> Mesh:
    """The mesh over `devices` (default: all devices of the job), with all of AXES, including those of size 1.

    Devices are taken host by host, so that the outermost axes (dp first) cross hosts and the inner ones stay within a
    host wherever the sizes allow. Raises: UserError as `resolve_mesh` does.
    """
    devices = list(jax.devices() if devices is None else devices)
    config = resolve_mesh(config, len(devices))
    return Mesh(_device_array(devices, tuple(config.sizes.values())), AXES)


def abstract_mesh(config: MeshConfig) -> AbstractMesh:
    """The mesh without devices, which is enough to shard abstract arrays for machines that are not attached."""
    return AbstractMesh(tuple(config.sizes.values()), AXES)


def _device_array(devices: list[jax.Device], shape: tuple[int, ...]) -> np.ndarray:
    """The devices in the mesh's shape: TPUs by their torus, all others by process and id."""
    if devices[0].platform == "tpu" and len(devices) > 1:
        from jax.experimental import mesh_utils  # only TPUs need it

        slices = len({getattr(device, "slice_index", 0) for device in devices})
        if slices > 1 and shape[0] % slices == 0:
            shape_in_slice = (shape[0] // slices, *shape[1:])
            return mesh_utils.create_hybrid_device_mesh(shape_in_slice, (slices, *(1,) * (len(shape) - 1)), devices)
        return mesh_utils.create_device_mesh(shape, devices)
    ordered = np.empty(len(devices), object)
    ordered[:] = sorted(devices, key=lambda device: (device.process_index, device.id))
    return ordered.reshape(shape)


def _wrong_count(config: MeshConfig, expected: int, devices: int) -> UserError:
    return UserError(
        f"the mesh {config} is for {_count(expected)}, and there {'is' if devices == 1 else 'are'} {devices}",
        where="mesh",
        fix=f"give axes that multiply to {devices} ({_factorings(devices)}), set one axis to -1, "
        f"or start the job with {_count(expected)}",
    )


def _count(devices: int) -> str:
    return f"{devices} device{'' if devices == 1 else 's'}"


def _factorings(devices: int) -> str:
    pairs = [(devices // tp, tp) for tp in range(1, devices + 1) if devices % tp == 0][:4]
    return ", ".join(f"fsdp={fsdp} tp={tp}" if tp > 1 else f"fsdp={fsdp}" for fsdp, tp in pairs)
