"""The sizes of the mesh's axes, read by recipes and by the core alike.

dp replicates parameters and splits the batch; fsdp splits the batch and the parameters; cp splits the sequence; ep
splits experts; tp splits heads, ffn and vocabulary.
"""

from __future__ import annotations

import dataclasses
import math

from meshtune.errors import UserError
from meshtune.options import option

# Outermost first: tp exchanges the most and gets neighbouring devices, dp the least and goes across hosts.
AXES = ("dp", "fsdp", "cp", "ep", "tp")
SLICE_AXES = ("dp", "fsdp")


@dataclasses.dataclass(frozen=True)
class MeshConfig:
    """Devices along each axis of the mesh; they multiply to the number of devices. One may be -1: all that are left.

    Raises: UserError for sizes that no number of devices can satisfy.
    """

    dp: int = option(1, "Replicas: rows are split, parameters are not; goes across hosts.", ge=-1)
    fsdp: int = option(1, "Rows and parameters are split.", ge=-1)
    tp: int = option(1, "Heads, ffn and vocabulary are split.", ge=-1)
    cp: int = option(1, "The sequence is split; parameters as with fsdp.", ge=-1)
    ep: int = option(1, "Experts are split.", ge=-1)
    dcn: str | None = option(None, "The axis that crosses TPU slices: dp (default) or fsdp.")

    def __post_init__(self):
        for axis, size in self.sizes.items():
            if isinstance(size, bool) or not isinstance(size, int) or (size < 1 and size != -1):
                raise UserError(
                    f"a mesh cannot have {size!r} devices along {axis}",
                    where=f"mesh.{axis}",
                    fix="give a whole number from 1 up, or -1 for all remaining devices",
                )
        if self.dcn not in (None, *SLICE_AXES):
            raise UserError(
                f"'{self.dcn}' cannot cross slices",
                where="mesh.dcn",
                fix=f"choose {' or '.join(SLICE_AXES)}: the others exchange too much for the network between slices",
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


def slice_factors(config: MeshConfig, slices: int) -> dict[str, int]:
    """The slices along each axis of a mesh without an open axis, 1 along all but one.

    Raises: UserError if the axis that crosses slices does not divide by them: others would cross them unnoticed.
    """
    axis = config.dcn or "dp"
    if config.sizes[axis] % slices:
        raise UserError(
            f"the devices are {slices} slices with a slow network between them, and the mesh {config} has "
            f"{axis}={config.sizes[axis]} across it, which does not divide by {slices}",
            where="mesh",
            fix=f"give mesh.dp={slices} mesh.fsdp=-1, or another dp that divides by {slices}; where a replica is "
            f"larger than a slice, mesh.dcn=fsdp with an fsdp that divides by {slices}",
        )
    return {name: slices if name == axis else 1 for name in AXES}


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
