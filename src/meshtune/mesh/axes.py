"""The mesh: which devices form which axis."""

from __future__ import annotations

from collections.abc import Sequence

import jax
import numpy as np
from jax.sharding import AbstractMesh, Mesh

from meshtune.mesh.config import AXES, MeshConfig, resolve_mesh


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
