"""The mesh: which devices form which axis.

dp replicates parameters and splits the batch; fsdp splits the batch and the parameters; cp splits the sequence; ep
splits experts; tp splits heads, ffn and vocabulary.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import AbstractMesh, Mesh

from meshtune.errors import UserError

# Outermost first: neighbours along tp exchange the most and lie nearest to each other, dp the least, across hosts.
AXES = ("dp", "fsdp", "cp", "ep", "tp")


@dataclasses.dataclass(frozen=True)
class MeshConfig:
    """Devices along each axis; one may be -1: as many as are left.

    Raises UserError for sizes that cannot be, whatever the devices are.
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
                    fix="give a whole number from 1, or -1 for as many as are left",
                )
        open_axes = [axis for axis, size in self.sizes.items() if size == -1]
        if len(open_axes) > 1:
            raise UserError(
                f"{' and '.join(open_axes)} are both -1", where="mesh", fix="leave at most one axis open with -1"
            )

    @property
    def sizes(self) -> dict[str, int]:
        """Devices along each of AXES, in their order."""
        return {axis: getattr(self, axis) for axis in AXES}

    @property
    def devices(self) -> int:
        """Devices in all; only for a mesh without an open axis."""
        assert -1 not in self.sizes.values(), self
        return math.prod(self.sizes.values())

    def __str__(self) -> str:
        return " x ".join(f"{axis}={size}" for axis, size in self.sizes.items() if size != 1) or "1 device"


def resolved(config: MeshConfig, devices: int) -> MeshConfig:
    """The mesh with its open axis, if there is one, filled up to `devices`.

    Raises UserError if the axes do not multiply to the number of devices, saying which numbers work.
    """
    known = math.prod(size for size in config.sizes.values() if size != -1)
    open_axis = next((axis for axis, size in config.sizes.items() if size == -1), None)
    if open_axis is None:
        if known != devices:
            raise _wrong_count(config, known, devices)
        return config
    if devices % known:
        raise UserError(
            f"the mesh {config} cannot be filled: its fixed axes take {known} devices, and {_count(devices)} "
            f"{'is' if devices == 1 else 'are'} no multiple of that",
            where="mesh",
            fix=f"give fixed axes whose product divides {devices}, or start the job with a multiple of {known} devices",
        )
    return dataclasses.replace(config, **{open_axis: devices // known})


def make_mesh(config: MeshConfig, devices: Sequence[Any] | None = None) -> Mesh:
    """The mesh over `devices` (default: all of the job's), with all of AXES, those of size 1 too.

    Devices are taken host by host, so that the outermost axes (dp first) go across hosts and the rest stays inside one
    wherever the sizes allow. Raises UserError as `resolved` does.
    """
    devices = list(jax.devices() if devices is None else devices)
    config = resolved(config, len(devices))
    shape = tuple(config.sizes.values())
    return Mesh(_arranged(devices, shape), AXES)


def described_mesh(config: MeshConfig) -> AbstractMesh:
    """The mesh without its devices: enough to say how arrays lie, for machines that are not here."""
    return AbstractMesh(tuple(config.sizes.values()), AXES)


def _arranged(devices: list[Any], shape: tuple[int, ...]) -> np.ndarray:
    """The devices in the mesh's shape. TPUs are arranged by their torus, all others by host and number."""
    if devices[0].platform == "tpu" and len(devices) > 1:
        from jax.experimental import mesh_utils  # only TPUs need it

        slices = len({getattr(device, "slice_index", 0) for device in devices})
        if slices > 1 and shape[0] % slices == 0:
            inner = (shape[0] // slices, *shape[1:])
            return mesh_utils.create_hybrid_device_mesh(inner, (slices, *(1,) * (len(shape) - 1)), devices)
        return mesh_utils.create_device_mesh(shape, devices)
    ordered = np.empty(len(devices), object)
    ordered[:] = sorted(devices, key=lambda device: (device.process_index, device.id))
    return ordered.reshape(shape)


def _wrong_count(config: MeshConfig, wanted: int, devices: int) -> UserError:
    return UserError(
        f"the mesh {config} is for {_count(wanted)}, and there {'is' if devices == 1 else 'are'} {devices}",
        where="mesh",
        fix=f"give axes that multiply to {devices} ({_factorings(devices)}), leave one axis open with -1, "
        f"or start the job with {_count(wanted)}",
    )


def _count(devices: int) -> str:
    return f"{devices} device{'' if devices == 1 else 's'}"


def _factorings(devices: int) -> str:
    pairs = [(devices // tp, tp) for tp in range(1, devices + 1) if devices % tp == 0][:4]
    return ", ".join(f"fsdp={fsdp} tp={tp}" if tp > 1 else f"fsdp={fsdp}" for fsdp, tp in pairs)
