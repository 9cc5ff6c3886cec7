"""What a recipe leaves to be found (`mesh: auto`, `train.micro_batch: auto`, `compute.remat: auto`), found and said."""

from __future__ import annotations

import dataclasses
import functools
import time
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
import psutil

from meshtune.config.recipe import Recipe
from meshtune.errors import UserError
from meshtune.mesh.processes import SINGLE_PROCESS, Job
from meshtune.plan.hardware import Device, Target, known_devices
from meshtune.plan.search import MESH, MICRO, REMAT, Option, applied, open_keys, options
from meshtune.setup.choices import Choice
from meshtune.setup.machine import Machine
from meshtune.setup.memory import size_in_words

NAMES = {MESH: "mesh", MICRO: "micro_batch", REMAT: "remat"}


def settled_autos(recipe: Recipe, target: Target, job: Job = SINGLE_PROCESS) -> tuple[Recipe, list[Choice]]:
    """The recipe with nothing left open, and what was found with its reason, for the banner.

    The search is plan's, by its cheap models; the step is then compiled in any case. Every process of `job` gets what
    the first one found. Raises: UserError if no mesh of these devices is possible for the model and the batch.
    """
    keys = open_keys(recipe)
    if not keys:
        return recipe, []
    try:
        ranked = options(recipe, target, keys)
    except UserError:
        if MESH in keys:
            raise
        return recipe, []  # what was asked for cannot be: whoever checks that says it best
    best = ranked[0]
    mine = [(NAMES[key], _value(key, best), _reason(key, best, ranked)) for key in NAMES if key in keys]
    overrides, choices = job.exchange("what was left open", [best.overrides, mine])[0]
    return applied(recipe, overrides), [Choice(*words) for words in choices]


def merged(found: Sequence[Choice], choices: Sequence[Choice]) -> list[Choice]:
    """`choices`, with the reasons of those that were found: all others were asked for."""
    reasons = {choice.name: choice.reason for choice in found}
    rest = [choice for choice in found if choice.name not in {one.name for one in choices}]
    return [dataclasses.replace(one, reason=reasons.get(one.name, one.reason)) for one in choices] + rest


def target_here(machine: Machine, hosts: int = 1) -> Target:
    """The devices of this job as a target, with the memory they say they have; `hosts` share them evenly."""
    device = device_here(machine)
    return Target(hosts, max(1, len(machine.devices) // hosts), device)


def device_here(machine: Machine) -> Device:
    """The kind of device this machine has: as hardware.toml describes it, with its own memory; CPUs are measured."""
    first: Any = machine.devices[0]
    known = list(known_devices().values())
    named = next((one for one in known if one.kind.lower() == str(first.device_kind).lower()), None)
    if machine.platform == "cpu":
        named = next(one for one in known if one.platform == "cpu")
        local = max(1, jax.local_device_count())
        flops, bandwidth = (speed / local for speed in cpu_speeds())
        return dataclasses.replace(
            named,
            memory=psutil.virtual_memory().total // local,
            flops_bf16=flops,
            flops_f32=flops,
            bandwidth=bandwidth,
            link=bandwidth,
        )
    stats = first.memory_stats() or {}
    memory = int(stats.get("bytes_limit", named.memory if named else 16 * 2**30))
    if named is not None:
        return dataclasses.replace(named, memory=memory)
    # A kind that is not described: the ratios of the nearest one of its platform are what the ranking needs.
    like = min((one for one in known if one.platform == machine.platform), key=lambda one: abs(one.memory - memory))
    return dataclasses.replace(like, name=str(first.device_kind), memory=memory)


@functools.cache
def cpu_speeds() -> tuple[float, float]:
    """(operations a second of float32 products, bytes a second that memory takes) of all cores here, in a tenth of a
    second or so."""
    side, rounds = 768, 4
    with jax.default_device(jax.local_devices(backend="cpu")[0]):
        a = jax.numpy.ones((side, side), "float32")
        product = jax.jit(lambda x: x @ x)
        product(a).block_until_ready()
        took = []
        for _ in range(rounds):
            began = time.perf_counter()
            product(a).block_until_ready()
            took.append(time.perf_counter() - began)
    x = np.ones(4 * 2**20, np.float32)
    copied = []
    for _ in range(rounds):
        began = time.perf_counter()
        x.copy()
        copied.append(time.perf_counter() - began)
    return 2 * side**3 / min(took), 2 * x.nbytes / min(copied)


def _value(key: str, best: Option) -> str:
    return {MESH: str(best.mesh), MICRO: f"{best.case.rows} rows", REMAT: best.case.remat}[key]


def _reason(key: str, best: Option, ranked: list[Option]) -> str:
    if key == MESH and best.mesh.devices == 1:
        return "auto: one device"
    need = f"about {size_in_words(best.estimate.device_bytes)} a device"
    if not best.fits:
        return f"auto: nothing is expected to fit {best.case.target.device.name}; this needs least, {need}"
    others = len(ranked) - 1
    among = f"the fastest expected of {others + 1} that are possible" if others else "the only one possible"
    return f"auto: {among}, {need}"
