"""What would make a run fit, from what costs least to what costs most: each knob tried on top of the ones before."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

from meshtune.config.recipe import LoraMethod, Recipe
from meshtune.errors import UserError
from meshtune.plan.case import base_of
from meshtune.plan.hardware import Device, Target, known_devices
from meshtune.plan.search import MESH, MICRO, OFFLOAD, QUANTIZE, REMAT, Option, applied, open_keys, option, options

# Hosts x devices, smallest first, in which machines are commonly had.
SIZES = ((1, 1), (1, 2), (1, 4), (1, 8), (2, 8), (4, 8), (8, 8), (16, 8), (32, 8), (64, 8))


@dataclasses.dataclass(frozen=True)
class Tried:
    """A knob: what it is called and costs, the option with it (None: why it could not be tried)."""

    name: str
    cost: str
    overrides: dict[str, Any]
    option: Option | None
    refusal: str = ""

    @property
    def fits(self) -> bool:
        return self.option is not None and self.option.fits


def tried(start: Option) -> list[Tried]:
    """Knobs on top of each other until the run is estimated to fit. What the recipe sets is left as it is."""
    found: list[Tried] = []
    best = start
    for name, cost, changes, pinned in _knobs(start.recipe, start.case.target):
        if pinned:
            found.append(Tried(name, cost, {}, None, "the recipe sets it"))
            continue
        better = _least(best, changes)
        if isinstance(better, str):
            found.append(Tried(name, cost, {}, None, better))
            continue
        if better.estimate.device_bytes >= best.estimate.device_bytes:
            found.append(Tried(name, cost, {}, None, "it saves nothing here"))
            continue
        best = better
        found.append(Tried(name, cost, better.overrides, better))
        if better.fits:
            break
    return found


def smallest(recipe: Recipe, target: Target) -> Target | None:
    """The smallest machine on which some configuration is estimated to fit: of the same device if one does, else any.

    By bytes of all devices; None if not even hundreds of the largest do.
    """
    same = [target.device]
    for devices in (same, sorted(known_devices().values(), key=lambda device: device.memory)):
        machines = [Target(hosts, each, device) for device in devices for hosts, each in SIZES if _sold(device)]
        for machine in sorted(machines, key=lambda machine: machine.devices * machine.device.memory):
            if _could(recipe, machine):
                return machine
    return None


def _sold(device: Device) -> bool:
    return device.platform != "cpu"


def _could(recipe: Recipe, machine: Target) -> bool:
    keys = open_keys(recipe, search=True) | {MESH}
    try:
        return any(one.fits for one in options(recipe, machine, keys))
    except UserError:
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


def _knobs(recipe: Recipe, target: Target) -> Iterator[tuple[str, str, list[dict[str, Any]], bool]]:
    """(name, cost, changes to choose from, whether the recipe pins it)."""
    micro = recipe.train.batch_size // recipe.train.accumulation
    smaller = [{MICRO: n} for n in range(micro - 1, 0, -1) if micro % n == 0]
    compute, offloaded = recipe.compute.model_fields_set, list(getattr(recipe.compute, "offload", ()))
    openly = open_keys(recipe, search=True)
    yield "recompute layers", "a third more arithmetic", [{REMAT: "full"}], REMAT not in openly
    yield "another mesh", "other messages", [{MESH: mesh} for mesh in _meshes(target)], MESH not in openly
    yield "smaller micro-batches", "more messages an update", smaller, MICRO not in openly
    yield (
        "tile feed-forward and norm",
        "a little arithmetic",
        [{"compute.mlp_chunk": n} for n in (4096, 1024)],
        "mlp_chunk" in compute and recipe.compute.mlp_chunk is not None,
    )
    for more, name, cost in (
        (["residual"], "residual stream on the host", "PCIe traffic beside the computation"),
        (["optimizer"], "optimizer state on the host", "PCIe traffic at the end of an update"),
    ):
        yield name, cost, [{OFFLOAD: list(dict.fromkeys([*offloaded, *more]))}], "offload" in compute
        offloaded = [*offloaded, *more]
    lora = isinstance(recipe.method, LoraMethod)
    yield "nf4 base", "rounded frozen weights", [{QUANTIZE: "nf4"}] if lora else [], QUANTIZE not in openly and lora
    yield "weights on the host", "all weights cross PCIe", [{OFFLOAD: [*offloaded, "weights"]}], "offload" in compute


def _meshes(target: Target) -> list[dict[str, int]]:
    n = target.devices
    found = [{"fsdp": n}] + [
        {"fsdp": n // ways, axis: ways} for ways in (2, 4, 8) if n % ways == 0 for axis in ("tp", "cp")
    ]
    return [{axis: size for axis, size in mesh.items() if size > 1} or {"fsdp": 1} for mesh in found]
