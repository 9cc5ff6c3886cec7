"""Meshes over devices, and the errors for those that are impossible."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from meshtune.errors import UserError
from meshtune.mesh.config import AXES, MeshConfig, resolve_mesh
from meshtune.mesh.layout import make_mesh


@dataclasses.dataclass(frozen=True, order=True)
class Device:
    """The attributes of a jax.Device that the mesh reads."""

    process_index: int
    id: int
    platform: str = "gpu"


@dataclasses.dataclass(frozen=True)
class Chip:
    """The attributes of a TPU's jax.Device: two by two in each slice."""

    id: int
    slice_index: int
    platform: str = "tpu"
    device_kind: str = "TPU v5"
    core_on_chip: int = 0

    @property
    def coords(self) -> tuple[int, int, int]:
        return (self.id % 2, self.id % 4 // 2, 0)

    @property
    def process_index(self) -> int:
        return self.id // 4


CHIPS = [Chip(number, number // 4) for number in range(8)]


def test_an_open_axis_takes_the_remaining_devices():
    assert resolve_mesh(MeshConfig(dp=2, fsdp=-1, tp=2), 16) == MeshConfig(dp=2, fsdp=4, tp=2)
    assert resolve_mesh(MeshConfig(fsdp=-1), 1) == MeshConfig()


@pytest.mark.parametrize(
    ("config", "devices", "message"),
    [
        (MeshConfig(fsdp=3, tp=2), 8, "the mesh fsdp=3 x tp=2 is for 6 devices, and there are 8"),
        (MeshConfig(fsdp=2), 1, "the mesh fsdp=2 is for 2 devices, and there is 1"),
        (MeshConfig(dp=-1, tp=3), 8, "its fixed axes take 3 devices"),
    ],
)
def test_axes_that_do_not_multiply_to_the_devices_are_an_error_with_sizes_that_do(config, devices, message):
    with pytest.raises(UserError, match="mesh") as caught:
        resolve_mesh(config, devices)
    assert message in caught.value.what
    assert caught.value.fix
    assert "8 (fsdp=8" in caught.value.fix or devices == 1 or "multiple" in caught.value.what


@pytest.mark.parametrize("size", [0, -2, True, 1.5])
def test_an_impossible_size_is_refused(size):
    with pytest.raises(UserError, match="along tp"):
        MeshConfig(tp=size)


def test_two_open_axes_are_refused():
    with pytest.raises(UserError, match="both -1"):
        MeshConfig(dp=-1, fsdp=-1)


def test_dp_crosses_hosts_and_the_inner_axes_stay_within_one():
    devices = [Device(host, 4 * host + n) for host in (1, 0) for n in (3, 1, 0, 2)]
    mesh = make_mesh(MeshConfig(dp=2, fsdp=2, tp=2), devices)
    assert mesh.axis_names == AXES
    hosts = np.vectorize(lambda device: device.process_index)(mesh.devices)
    assert [set(hosts[n].flat) for n in (0, 1)] == [{0}, {1}]
    tp = mesh.devices[0, 0, 0, 0]
    assert [device.id for device in tp] == [0, 1], "neighbours along tp are neighbours on their host"


@pytest.mark.parametrize(
    ("config", "axis"),
    [(MeshConfig(dp=2, fsdp=4), 0), (MeshConfig(dp=4, tp=2), 0), (MeshConfig(fsdp=8, dcn="fsdp"), 1)],
)
def test_only_the_named_axis_crosses_slices(config: MeshConfig, axis: int):
    devices = np.asarray(make_mesh(config, CHIPS).devices)
    slices = np.vectorize(lambda chip: chip.slice_index)(devices)
    halves = np.split(slices, 2, axis=axis)
    assert [set(half.flat) for half in halves] == [{0}, {1}]


@pytest.mark.parametrize(
    "config", [MeshConfig(fsdp=8), MeshConfig(fsdp=4, tp=2), MeshConfig(dp=2, fsdp=1, tp=4, dcn="fsdp")]
)
def test_a_mesh_that_would_cross_slices_unnoticed_is_refused_with_one_that_does_not(config: MeshConfig):
    with pytest.raises(UserError, match="does not divide by 2") as caught:
        make_mesh(config, CHIPS)
    assert "mesh.dp=2 mesh.fsdp=-1" in (caught.value.fix or "")
    assert make_mesh(MeshConfig(dp=2, fsdp=-1), CHIPS).shape["fsdp"] == 4


def test_no_other_axis_may_be_named_to_cross_slices():
    with pytest.raises(UserError, match="'tp' cannot cross slices"):
        MeshConfig(dcn="tp")
