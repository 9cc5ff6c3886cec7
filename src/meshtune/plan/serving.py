"""Plans a server: memory, the rows it holds at once and its expected speed.

Nothing is compiled. A decode step reads every weight once, of experts those that some row is sent to, and every row's
cache, and multiplies each row by the weights: no program is faster than the memory's bandwidth and the arithmetic of
the data sheet allow. The expected speed assumes the shares of both that costs.roofline assumes, and that a GPU with no
room for a copy of the layers' weights (generate.weights) writes each layer out before it reads it. Messages between
devices are not counted.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

from rich.console import Console, Group
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from meshtune import terminal
from meshtune.config.recipe import Recipe
from meshtune.costs.decoding import COPYING, cache_bytes, decode_bytes, decode_operations, fits_copy
from meshtune.costs.hardware import Target
from meshtune.costs.roofline import EFFICIENCY
from meshtune.costs.workload import PersistentArray, Workload, bytes_per_element, layout_on
from meshtune.errors import UserError
from meshtune.mesh.config import MeshConfig
from meshtune.mesh.layout import Layout
from meshtune.model.model_cache import check_cache, describe_cache
from meshtune.setup.memory import size_in_words
from meshtune.setup.search import workload_of

ROLES = ("frozen", "full", "adapter")  # what of a training run is there to serve
DTYPE = "bfloat16"  # of the cache, and of weights that training holds wider


@dataclasses.dataclass(frozen=True)
class DecodeStep:
    """A decode step of `rows` rows that hold `length` tokens each: bytes that it must read on each device, bytes of
    weights that it also writes out and reads again, its operations there, and its time in seconds by either limit."""

    rows: int
    length: int
    weight_bytes: float
    cache_bytes: float
    again_bytes: float
    operations: float
    memory_seconds: float
    compute_seconds: float
    fits: bool

    @property
    def bound(self) -> float:
        """Tokens a second of all rows that no program exceeds."""
        return self.rows / max(self.memory_seconds, self.compute_seconds)

    @property
    def expected(self) -> float:
        """Tokens a second of all rows at the shares of the rates that programs reach."""
        passes = 1 + self.again_bytes / (self.weight_bytes + self.cache_bytes)
        memory = passes * self.memory_seconds / EFFICIENCY["memory"]
        return self.rows / max(memory, self.compute_seconds / EFFICIENCY["compute"])


@dataclasses.dataclass(frozen=True)
class ServePlan:
    """Bytes on each device of a target whose devices all split the model (`tp`): its weights, the cache of a row of
    `length` tokens, held in `cache`, and the memory of a decode step for each row; `most_rows` rows fit in the
    remaining memory."""

    target: Target
    tp: int
    length: int
    cache: str
    weights: float
    cache_row: float
    step_row: float
    most_rows: int
    steps: tuple[DecodeStep, ...]


def serve_plan(
    recipe: Recipe, target: Target, *, rows: Sequence[int], length: int, reserve: float, cache: str | None = None
) -> ServePlan:
    """Plans a server of the recipe's model on a target, with `reserve` of each device's memory left free.

    The quantised base, the adapters and the whole context are those of the recipe's model; `cache` "int8" holds keys
    and values in 8 bits. Raises UserError for numbers out of range, a length beyond the context, a device of unknown
    speed, more devices than can split the model, and an int8 cache of a model that has no keys and values in it.
    """
    device = target.device
    workload = workload_of(recipe, device.backend, device.arch)
    spec = workload.spec
    if min(rows, default=0) < 1 or length < 1:
        raise UserError(f"rows {list(rows)} of {length} tokens", where="--rows, --length", fix="give numbers above 0")
    if length > spec.max_length:
        fix = f"give {spec.max_length} at most"
        raise UserError(f"{length} tokens are beyond the model's context", where="--length", fix=fix)
    if device.bandwidth is None or device.flops_bf16 is None:
        fix = "add bandwidth and flops_bf16 to its description (MESHTUNE_HARDWARE)"
        raise UserError(f"the speed of {device.name} is not described", where="--target", fix=fix)
    codes = check_cache(spec, cache)
    layout = layout_on(MeshConfig(tp=target.devices), spec)
    weights = sum(_bytes(array, layout) for array in workload.persistent if array.role in ROLES)
    row = cache_bytes(spec, layout, 1, length, DTYPE, codes)
    working = decode_bytes(spec, layout, 1, length, DTYPE, codes)
    memory, on_gpu = device.memory * (1 - reserve), device.backend == "gpu"
    layers = sum(_bytes(array, layout) for array in workload.persistent if array.role in ROLES and array.is_stacked)
    room = memory - weights
    steps = []
    for count in rows:
        read, caches = _weights_read(workload, layout, count), count * row
        apart = target.devices == 1 and fits_copy(layers, room - caches)
        again = (COPYING - 1) * layers if on_gpu and not apart else 0.0
        operations = count * decode_operations(workload, length) / target.devices
        steps.append(
            DecodeStep(
                count,
                length,
                read,
                caches,
                again,
                operations,
                (read + caches) / device.bandwidth,
                operations / device.flops_bf16,
                caches + count * working <= room,
            )
        )
    max_rows = max(0, math.floor(room / (row + working)))
    described = describe_cache(spec, codes, DTYPE)
    return ServePlan(target, target.devices, length, described, weights, row, working, max_rows, tuple(steps))


def _bytes(array: PersistentArray, layout: Layout) -> float:
    """Bytes on each device to serve an array: trained weights and adapters are held in DTYPE."""
    size = array.local_bytes(layout)
    return size if array.role == "frozen" else size * bytes_per_element(DTYPE) / array.itemsize


def _weights_read(workload: Workload, layout: Layout, rows: int) -> float:
    """Bytes of weights that a step reads on each device.

    Routing is taken to be even, and independent from row to row.
    """
    spec, total = workload.spec, 0.0
    for array in workload.persistent:
        if array.role not in ROLES or (array.path.startswith("embed/") and not spec.tied):
            continue  # of an embedding alone, only the rows of the tokens
        total += _bytes(array, layout) * _share_read(workload, array, rows)
    return total


def _share_read(workload: Workload, array: PersistentArray, rows: int) -> float:
    """The share of an array that some row is multiplied by: of experts, those that are chosen."""
    if "experts" not in array.axes:
        return 1.0
    count = array.shape[array.axes.index("experts")]
    block = next(b for layer in workload.layers for b in layer.blocks if array.path.startswith(b.prefix))
    return 1 - (1 - block.cost.chosen / count) ** rows


def print_serve_plan(plan: ServePlan, console: Console | None = None) -> None:
    """Prints a plan."""
    split = "" if plan.tp == 1 else f" on each of {plan.tp} devices"
    row, working = size_in_words(plan.cache_row), size_in_words(plan.step_row)
    memory = Text(
        f"weights {size_in_words(plan.weights)}, cache of a row of {plan.length:,} tokens {row}, and {working} "
        f"for its step{split}; {plan.most_rows:,} rows fit"
    )
    table = Table("rows", "fits", "read a step", "tokens/s at most", "expected", "limited by", box=None)
    for step in plan.steps:
        limit = "memory" if step.memory_seconds >= step.compute_seconds else "arithmetic"
        read = size_in_words(step.weight_bytes + step.cache_bytes)
        speeds = f"{step.bound:,.0f}", f"{step.expected:,.0f}"
        table.add_row(str(step.rows), "yes" if step.fits else "no", read, *speeds, limit)
    shares = f"{EFFICIENCY['memory']:.0%} of the bandwidth and {EFFICIENCY['compute']:.0%} of the arithmetic"
    note = f"cache: {plan.cache}; expected: {shares} that data sheets give; messages between devices are not counted"
    parts = Group(memory, Text(""), table, Text(""), Text(note, style="dim"))
    title = f"[bold]serving on {plan.target}[/]"
    (console or terminal.console()).print(Panel(parts, title=title, title_align="left", padding=(1, 2)))
