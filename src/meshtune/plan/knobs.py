"""What would make a run fit, from what costs least to what costs most: each knob tried on top of the ones before."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

from meshtune.config.recipe import LoraMethod, Recipe
from meshtune.errors import UserError
from meshtune.mesh.axes import MeshConfig
from meshtune.plan.case import Case, base_of, layout_on
from meshtune.plan.hardware import Target, known_devices
from meshtune.plan.search import MESH, MICRO, OFFLOAD, QUANTIZE, REMAT, Option, applied, limit, open_keys, option

# Hosts x devices, smallest first, in which machines are commonly had.
SIZES = ((1, 1), (1, 2), (1, 4), (1, 8), (2, 8), (4, 8), (8, 8), (16, 8), (32, 8), (64, 8))


@dataclasses.dataclass(frozen=True)
class Tried:
    """A knob: what it is called and costs, the option with it (None: why it could not be tried).

    `overrides` are those of the option, `own` what this knob changes; `superfluous` if a later one does without it.
    """

    name: str
    cost: str
    overrides: dict[str, Any]
    option: Option | None
    refusal: str = ""
    own: dict[str, Any] = dataclasses.field(default_factory=dict)
    superfluous: bool = False

    @property
    def fits(self) -> bool:
        return self.option is not None and self.option.fits


def tried(start: Option, asked: Recipe) -> list[Tried]:
    """Knobs on top of each other until the run is estimated to fit. What `asked` sets is left as it is."""
    found: list[Tried] = []
    best = start
    for name, cost, changes, pinned in _knobs(asked, start.case):
        if pinned:
            found.append(Tried(name, cost, {}, None, f"the recipe sets {pinned}"))
            continue
        better = _least(best, changes)
        if isinstance(better, str):
            found.append(Tried(name, cost, {}, None, better))
            continue
        if better.estimate.device_bytes >= best.estimate.device_bytes:
            found.append(Tried(name, cost, {}, None, "it saves nothing here"))
            continue
        own = {key: value for key, value in better.overrides.items() if best.overrides.get(key) != value}
        found.append(Tried(name, cost, better.overrides, better, own=own))
        best = better
        if better.fits:
            return _needed(found, start)
    return found


def _needed(found: list[Tried], start: Option) -> list[Tried]:
    """The knobs without those that the last one made superfluous."""
    last = found[-1]
    assert last.option is not None
    best, kept = last.option, list(found)
    for one in found[:-1]:
        fewer = {key: value for key, value in best.overrides.items() if one.own.get(key) != value}
        if one.option is None or len(fewer) == len(best.overrides):
            continue
        back = {key: start.overrides[key] for key in one.own if key in start.overrides}
        made = _least(start, [{**fewer, **back}])
        if not isinstance(made, str) and made.fits:
            best = made
    kept[-1] = dataclasses.replace(last, overrides=best.overrides, option=best)
    return [dataclasses.replace(one, superfluous=not set(one.own) <= set(best.overrides)) for one in kept]


def smallest(recipe: Recipe, target: Target) -> Target | None:
    """The machine with the least memory on which some configuration is estimated to fit, weights on the devices.

    Of two with the same memory that with fewer devices; None if not even hundreds of the largest do.
    """
    sold = [device for device in known_devices().values() if device.platform != "cpu"]
    if target.device.name not in {device.name for device in sold}:
        sold.append(target.device)
    machines = [Target(hosts, each, device) for device in sold for hosts, each in SIZES]
    for machine in sorted(machines, key=lambda one: (one.devices * one.device.memory, one.devices)):
        if _could(recipe, machine):
            return machine
    return None


def _could(recipe: Recipe, machine: Target) -> bool:
    """Whether the leanest configurations fit: layers recomputed, few rows at once, what may go to the host there."""
    keys = open_keys(recipe, search=True)
    lora = isinstance(recipe.method, LoraMethod)
    base = base_of(applied(recipe, {QUANTIZE: "nf4"}) if QUANTIZE in keys and lora else recipe, machine.device.backend)
    layout = layout_on(MeshConfig(fsdp=1), base.spec)
    roles = ("frozen", "full", "adapter") if OFFLOAD in keys else ("frozen", "full", "adapter", "optimizer")
    if sum(one.local(layout) for one in base.kept if one.role in roles) > limit(machine) * machine.devices:
        return False
    change: dict[str, Any] = {REMAT: "full"} if REMAT in keys else {}
    if QUANTIZE in keys and lora:
        change[QUANTIZE] = "nf4"
    if OFFLOAD in keys:
        change[OFFLOAD] = ["residual", "optimizer"]
    micro = recipe.train.batch_size // recipe.train.accumulation
    rows = [n for n in range(1, micro + 1) if micro % n == 0] if MICRO in keys else [micro]
    for mesh in _meshes(machine):
        for few in rows:
            more = {MICRO: few} if MICRO in keys else {}
            try:
                if option(applied(recipe, {**change, MESH: mesh, **more}), machine, base).fits:
                    return True
            except UserError:
                continue
    return False


def _least(start: Option, changes: list[dict[str, Any]]) -> Option | str:
    """Of some ways to turn a knob the first that fits, else the one that needs least; or why none is possible."""
    possible: list[Option] = []
    reason = "there is nothing to turn"
    for change in changes:
        recipe = applied(start.recipe, change)
        try:
            base = base_of(recipe, start.case.target.device.backend) if QUANTIZE in change else start.case.base
            made = option(recipe, start.case.target, base, {**start.overrides, **change})
        except UserError as error:
            reason = error.what
            continue
        if made.fits:
            return made
        possible.append(made)
    return min(possible, key=lambda one: one.estimate.device_bytes) if possible else reason


def _knobs(recipe: Recipe, case: Case) -> Iterator[tuple[str, str, list[dict[str, Any]], str | None]]:
    """(name, cost, changes to choose from, the key by which the recipe pins it or None)."""
    target, micro = case.target, case.rows
    smaller = [{MICRO: n} for n in range(micro - 1, 0, -1) if micro % n == 0]
    openly, offloaded = open_keys(recipe, search=True), list(case.offload)
    pinned = OFFLOAD if "offload" in recipe.compute.model_fields_set else None

    def closed(key: str) -> str | None:
        return None if key in openly else key

    yield "recompute layers", "a third more arithmetic", [{REMAT: "full"}], closed(REMAT)
    yield "another mesh", "other messages", [{MESH: mesh} for mesh in _meshes(target)], closed(MESH)
    yield "smaller micro-batches", "more messages an update", smaller, closed(MICRO)
    chunk, tokens = recipe.compute, (4096, 1024)
    tiled = [{"compute.mlp_chunk": n} for n in tokens]
    yield "tile feed-forward and norm", "a little arithmetic", tiled, "compute.mlp_chunk" if chunk.mlp_chunk else None
    tiled = [{"compute.attention_chunk": n} for n in tokens]
    yield (
        "tile attention's queries",
        "a little arithmetic",
        tiled,
        "compute.attention_chunk" if chunk.attention_chunk else None,
    )
    for more, name, cost in (
        (["residual"], "residual stream on the host", "PCIe traffic beside the computation"),
        (["optimizer"], "optimizer state on the host", "PCIe traffic at the end of an update"),
    ):
        yield name, cost, [{OFFLOAD: list(dict.fromkeys([*offloaded, *more]))}], pinned
        offloaded = [*offloaded, *more]
    lora = isinstance(recipe.method, LoraMethod)
    yield "nf4 base", "rounded frozen weights", [{QUANTIZE: "nf4"}] if lora else [], closed(QUANTIZE) if lora else None
    yield "weights on the host", "all weights cross PCIe", [{OFFLOAD: [*offloaded, "weights"]}], pinned


def _meshes(target: Target) -> list[dict[str, int]]:
    n = target.devices
    found = [{"fsdp": n}] + [
        {"fsdp": n // ways, axis: ways} for ways in (2, 4, 8) if n % ways == 0 for axis in ("tp", "cp")
    ]
    return [{axis: size for axis, size in mesh.items() if size > 1} or {"fsdp": 1} for mesh in found]
