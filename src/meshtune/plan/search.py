"""The configuration of a run that is left open, found: every mesh, micro-batch and way to save memory, ranked by time.

A candidate is a recipe with its open keys filled in. The cheap models (estimate, roofline) rank thousands of them in
seconds; `confirmed` compiles the leaders. `mesh: auto`, `train.micro_batch: auto` and `compute.remat: auto` mean this.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Iterator
from typing import Any

from meshtune.config.quantize import QuantizeSection
from meshtune.config.recipe import LoraMethod, MeshSection, Recipe
from meshtune.errors import UserError
from meshtune.mesh.axes import MeshConfig, resolve_mesh
from meshtune.model.sharding import check_batch
from meshtune.plan.case import Base, Case, base_of, layout_on
from meshtune.plan.estimate import Estimate, estimate, exchanges
from meshtune.plan.hardware import Target
from meshtune.plan.roofline import Roofline, roofline
from meshtune.plan.work import work_of
from meshtune.setup.choices import compute_of
from meshtune.setup.machine import Machine
from meshtune.setup.stage import row_length

RESERVE = 0.06  # share of a device's memory that is left to the driver, libraries' workspaces and fragments
MESH, MICRO, REMAT, OFFLOAD, QUANTIZE = "mesh", "train.micro_batch", "compute.remat", "compute.offload", "quantize"
SAME = 1.03  # times that differ by less are the same: the simpler configuration comes first
REMATS = ("selective", "full")  # none keeps what is cheaper made again than stored and loaded
OFFLOADS = ((), ("residual",), ("optimizer",), ("residual", "optimizer"), ("residual", "optimizer", "weights"))
FORMATS = (None, "nf4")


@dataclasses.dataclass(frozen=True)
class Option:
    """One candidate: a recipe with nothing open, what it changes, and what the cheap models say of it."""

    recipe: Recipe
    overrides: dict[str, Any]
    case: Case
    estimate: Estimate
    roofline: Roofline

    @property
    def limit(self) -> int:
        """Bytes of a device that a run may use."""
        return limit(self.case.target)

    @property
    def fits(self) -> bool:
        return self.estimate.device_bytes <= self.limit

    @property
    def mesh(self) -> MeshConfig:
        return self.case.mesh

    @property
    def said(self) -> dict[str, Any]:
        """`overrides` without what need not be said: the mesh of one device."""
        return {key: value for key, value in self.overrides.items() if key != MESH or self.mesh.devices > 1}


def limit(target: Target, reserve: float = RESERVE) -> int:
    """Bytes of a device's memory without the reserve."""
    return int(target.device.memory * (1 - reserve))


def open_keys(recipe: Recipe, *, search: bool = False) -> frozenset[str]:
    """Keys that are to be found: those that say auto; in a search also those the recipe does not set."""
    walks = recipe.optimizer.layerwise  # remat is settled then, and what waits where
    found = {
        MESH: recipe.mesh == "auto",
        MICRO: not recipe.optimizer.in_backward
        and (recipe.train.micro_batch == "auto" or (search and "micro_batch" not in recipe.train.model_fields_set)),
        REMAT: recipe.compute.remat == "auto" and not walks,
        OFFLOAD: search and not walks and "offload" not in recipe.compute.model_fields_set,
        QUANTIZE: search and "quantize" not in recipe.model_fields_set and isinstance(recipe.method, LoraMethod),
    }
    return frozenset(key for key, is_open in found.items() if is_open)


def options(recipe: Recipe, target: Target, keys: frozenset[str], *, length: int | None = None) -> list[Option]:
    """Every candidate that the model and the batch allow, best first: those that fit by time, then the rest by bytes.

    Quantised bases are tried only if the plain one fits in no way: they change what is computed. Rows are
    `length` tokens, data.max_length unless given.
    Raises: UserError, that of the first candidate, if none is possible.
    """
    found: list[Option] = []
    refused: list[UserError] = []
    for quantised in FORMATS if QUANTIZE in keys else (None,):
        here = applied(recipe, {QUANTIZE: quantised}) if quantised else recipe
        base = base_of(here, target.device.backend)
        for overrides, candidate in _candidates(here, target, keys):
            if quantised:
                overrides = {**overrides, QUANTIZE: quantised}
            try:
                found.append(option(candidate, target, base, overrides, length=length))
            except UserError as error:
                refused.append(error)
        if any(one.fits for one in found):
            break
    if not found:
        raise _none(recipe, target, keys, refused)
    return sorted(found, key=_rank)


def _none(recipe: Recipe, target: Target, keys: frozenset[str], refused: list[UserError]) -> UserError:
    if MESH not in keys:
        return refused[0]
    rows = recipe.train.batch_size // recipe.train.accumulation
    reasons = dict.fromkeys(error.what for error in refused)
    return UserError(
        f"no mesh of {target.devices} devices fits {rows} rows a micro-batch and this model: {'; '.join(reasons)}",
        where="mesh",
        fix=f"make train.micro_batch a multiple of {target.devices}, or give mesh by hand with fewer devices",
    )


def _rank(one: Option) -> tuple[Any, ...]:
    """Those that fit by time; of equal times the one that moves less to the host and splits less."""
    sizes = one.mesh.sizes
    plain = (len(one.case.offload), sizes["cp"], sizes["tp"], one.case.accumulation)
    if one.fits:
        return 0, round(math.log(one.roofline.seconds) / math.log(SAME)), *plain
    return 1, one.estimate.device_bytes, *plain


def option(
    recipe: Recipe, target: Target, base: Base, overrides: dict[str, Any] | None = None, *, length: int | None = None
) -> Option:
    """What the cheap models say of a recipe with nothing open.

    Raises: UserError for a mesh or batch that the model does not allow.
    """
    case = case_of(recipe, target, base, length=length)
    work = work_of(case)
    times = roofline(work, exchanges(case), target, dtype=base.precision.compute)
    return Option(recipe, overrides or {}, case, estimate(case), times)


def case_of(recipe: Recipe, target: Target, base: Base, *, length: int | None = None) -> Case:
    """The case of a recipe with nothing open. Raises: UserError as `option` does."""
    assert isinstance(recipe.mesh, MeshSection)
    assert recipe.train.micro_batch != "auto"
    mesh = resolve_mesh(MeshConfig(**recipe.mesh.model_dump()), target.devices)
    rows, length = recipe.train.batch_size // recipe.train.accumulation, length or row_length(recipe)
    check_batch(mesh, rows, length)
    layout = layout_on(mesh, base.spec)
    compute, _ = compute_of(recipe, base.spec, base.precision, rows, length, layout, _machine(target))
    return Case(
        base=base,
        target=target,
        mesh=mesh,
        layout=layout,
        rows=rows,
        length=length,
        accumulation=recipe.train.accumulation,
        remat=compute.remat,
        loss_chunk=compute.loss_chunk,
        mlp_chunk=compute.mlp_chunk,
        attention_chunk=compute.attention_chunk,
        offload=compute.offload,
    )


def _machine(target: Target) -> Machine:
    """What attention must know of the target to choose; its devices are not needed for that."""
    return Machine(target.device.platform, (), target.device.arch)


def _candidates(recipe: Recipe, target: Target, keys: frozenset[str]) -> Iterator[tuple[dict[str, Any], Recipe]]:
    """(what is changed, the recipe so changed) for every choice of the open keys."""
    meshes = list(_meshes(target)) if MESH in keys else [None]
    micros = _divisors(recipe.train.batch_size) if MICRO in keys else [None]
    remats = REMATS if REMAT in keys else [None]
    offloads = OFFLOADS if OFFLOAD in keys else [None]
    for mesh, micro, remat, offload in itertools.product(meshes, micros, remats, offloads):
        overrides: dict[str, Any] = {}
        if mesh is not None:
            overrides[MESH] = {axis: size for axis, size in mesh.sizes.items() if size > 1} or {"fsdp": 1}
        if micro is not None:
            overrides[MICRO] = micro
        if remat is not None:
            overrides[REMAT] = remat
        if offload:
            overrides[OFFLOAD] = list(offload)
        yield overrides, applied(recipe, overrides)


def applied(recipe: Recipe, overrides: dict[str, Any]) -> Recipe:
    """The recipe with some of its keys (dotted, at most one dot) changed; what was open and stays unsaid is default."""
    changed: dict[str, Any] = {}
    for key, value in overrides.items():
        section, _, name = key.partition(".")
        if key == MESH:
            changed[MESH] = MeshSection(**value)
        elif key == QUANTIZE:
            changed[QUANTIZE] = QuantizeSection(format=value)
        elif not name:
            changed[section] = value
        else:
            part = changed.get(section, getattr(recipe, section))
            changed[section] = part.model_copy(update={name: value})
    return recipe.model_copy(update=changed)


def _meshes(target: Target) -> Iterator[MeshConfig]:
    """Every way to factor the devices into dp, fsdp, cp and tp, with tp inside a host."""
    devices = target.devices
    for dp in _divisors(devices):
        for tp in _divisors(devices // dp):
            if tp <= target.each:
                for cp in _divisors(devices // (dp * tp)):
                    yield MeshConfig(dp=dp, fsdp=devices // (dp * tp * cp), tp=tp, cp=cp)


def _divisors(number: int) -> list[int]:
    return [n for n in range(1, number + 1) if number % n == 0]
