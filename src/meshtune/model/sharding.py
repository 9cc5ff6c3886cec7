"""Whether a model fits a mesh: what does not divide is said before anything is allocated."""

from __future__ import annotations

import dataclasses
import math

from jax.sharding import AbstractMesh, Mesh

from meshtune.errors import UserError
from meshtune.mesh.axes import MeshConfig
from meshtune.mesh.layout import Layout
from meshtune.model.spec import ModelSpec


@dataclasses.dataclass(frozen=True)
class Note:
    """Something a layout does that a person should know: which mesh axis, what, and why."""

    axis: str
    text: str


def layout_for(mesh: Mesh | AbstractMesh, spec: ModelSpec) -> tuple[Layout, list[Note]]:
    """The layout of a model on a mesh, and what is remarkable about it.

    Key and value heads that tp does not divide stay whole on every device of tp. Any other dimension that does not
    divide raises UserError, naming the sizes that work, as does an axis that nothing in the model can be split along.
    """
    size = dict(mesh.shape)
    tp, sharded = size["tp"], size["fsdp"] * size["cp"]
    for name, count in (("attention heads", spec.heads), ("ffn width", spec.ffn), ("vocabulary", spec.vocab)):
        if count % tp:
            raise _uneven("tp", tp, name, count, math.gcd(spec.heads, spec.ffn, spec.vocab))
    if spec.embed % sharded:
        axis = "fsdp" if size["cp"] == 1 else "fsdp x cp"
        raise _uneven(axis, sharded, "embedding width", spec.embed, spec.embed)
    if size["ep"] > 1:
        raise UserError(
            f"ep={size['ep']} splits experts, and {spec.family} has none",
            where="mesh.ep",
            fix="leave ep at 1 and give its devices to fsdp or tp",
        )
    whole, notes = set[str](), []
    if spec.kv_heads % tp:
        whole.add("kv_heads")
        notes.append(
            Note(
                "tp",
                f"the {spec.kv_heads} key and value heads do not divide by tp={tp}: their projections are kept whole "
                f"on each of the {tp} devices, and each uses the heads its own queries need",
            )
        )
    return Layout(mesh, frozenset(whole)), notes


def check_batch(config: MeshConfig, rows: int, length: int) -> None:
    """Raises UserError if micro-batches of `rows` rows of `length` positions (0: any) cannot be split over the mesh."""
    ways = config.dp * config.fsdp
    if rows % ways:
        raise UserError(
            f"a micro-batch of {rows} row{'' if rows == 1 else 's'} cannot be split over dp x fsdp = {ways}",
            where="train.batch_size, train.micro_batch",
            fix=f"use a multiple of {ways} rows, such as {-(-rows // ways) * ways}, or give devices to tp or cp",
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
