"""Checks that a mesh divides the dimensions of a model and of its batches, before anything is allocated."""

from __future__ import annotations

import dataclasses
import math

from jax.sharding import AbstractMesh, Mesh

from meshtune.errors import UserError
from meshtune.mesh.config import MeshConfig
from meshtune.mesh.layout import Layout
from meshtune.model.block import Divisor
from meshtune.model.spec import ModelSpec


@dataclasses.dataclass(frozen=True)
class Unsplit:
    """A property of a layout that the banner shows: the mesh axis, and the explanation."""

    axis: str
    text: str


def layout_for(mesh: Mesh | AbstractMesh, spec: ModelSpec) -> tuple[Layout, list[Unsplit]]:
    """The layout of a model on a mesh, and notes on it for the banner.

    Key and value heads, and channels of recurrent mixers, that tp does not divide are replicated over tp.
    Raises: UserError for any other dimension that does not divide, naming the sizes that work, and for an axis along
    which nothing in the model can be sharded.
    """
    size = dict(mesh.shape)
    divisors = [divisor for block in spec.blocks for divisor in block.divisors()]
    divisors.append(Divisor("tp", "vocabulary", spec.vocab))
    divisors += () if spec.side is None else spec.side.divisors()
    check_experts(size["ep"], spec)
    replicated, notes = set[str](), []
    for axis, name, count, replicate_axis, reason in dict.fromkeys(divisors):
        if count % size[axis] == 0:
            continue
        if reason:
            raise UserError(
                f"{axis}={size[axis]} cannot split this {spec.family} model's {name}: {reason}",
                where=f"mesh.{axis}",
                fix=f"leave mesh.{axis} out, and give its devices to fsdp or tp",
            )
        if replicate_axis is None:
            required = [divisor.size for divisor in divisors if divisor.axis == axis and divisor.replicate_axis is None]
            raise _uneven(axis, size[axis], name, count, math.gcd(*required))
        replicated.add(replicate_axis)
        computed = "the heads that its own queries need" if replicate_axis == "kv_heads" else "all of them"
        notes.append(
            Unsplit(
                axis,
                f"the {count} {name} do not divide by {axis}={size[axis]}: their projections are replicated "
                f"on all {size[axis]} devices, and each computes {computed}",
            )
        )
    sharded = size["fsdp"] * size["cp"] * size["ep"]
    if spec.embed % sharded:
        axis = " x ".join(["fsdp", *(axis for axis in ("cp", "ep") if size[axis] > 1)])
        raise _uneven(axis, sharded, "embedding width", spec.embed, spec.embed)
    return Layout(mesh, frozenset(replicated)), notes


def check_experts(ep: int, spec: ModelSpec) -> None:
    """Raises: UserError if mesh.ep is not 1 for a model without experts.

    Checked before the mesh is compared with the devices: the advice to start more of them would be wrong.
    """
    if ep != 1 and not any(divisor.axis == "ep" for block in spec.blocks for divisor in block.divisors()):
        raise UserError(
            f"ep={ep} shards experts, and this {spec.family} model is dense: it has none",
            where="mesh.ep",
            fix="leave mesh.ep out, and give its devices to mesh.fsdp or mesh.tp",
        )


def check_batch(config: MeshConfig, rows: int, length: int) -> None:
    """Raises: UserError if the mesh does not divide micro-batches of `rows` rows of `length` positions (0: any)."""
    shards = config.dp * config.fsdp * config.ep
    axes = "dp x fsdp" if config.ep == 1 else "dp x fsdp x ep"
    if rows % shards:
        raise UserError(
            f"a micro-batch of {rows} row{'' if rows == 1 else 's'} cannot be split over {axes} = {shards}",
            where="train.batch_size, train.micro_batch",
            fix=f"use a multiple of {shards} rows, such as {-(-rows // shards) * shards}, or give devices to tp or cp",
        )
    if config.cp > 1 and length % (2 * config.cp):
        per = 2 * config.cp
        raise UserError(
            f"rows of {length} positions cannot be split over cp={config.cp}: every device takes two equal pieces",
            where="data.max_length, mesh.cp",
            fix=f"use a multiple of {per}, such as {-(-length // per) * per}, or another cp",
        )


def _uneven(axis: str, size: int, name: str, count: int, divisible: int) -> UserError:
    works = [n for n in range(1, min(divisible, 4096) + 1) if divisible % n == 0]
    shown = [str(n) for n in works if n <= 4 * size][-8:]
    return UserError(
        f"{axis}={size} does not divide the model's {name} of {count}",
        where=f"mesh.{axis.split()[0]}",
        fix=f"sizes of {axis} that this model allows: {', '.join(shown)}",
    )
