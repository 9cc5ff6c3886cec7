"""The step that `train` runs, with abstract arguments, and checks of it on described devices.

Every pair of stage, method, optimizer, weight format and offload is built abstractly, so the page cannot go stale.
`python -m meshtune.plan.program` prints it.
"""

from __future__ import annotations

import atexit
import dataclasses
import functools
import json
import math
import pathlib
import shutil
import sys
import tempfile
from collections.abc import Mapping, Sequence
from typing import get_args

import jax
import numpy as np
from jax.sharding import SingleDeviceSharding
from jax.stages import Lowered, Wrapped

from meshtune import quickstart
from meshtune.adapters.registry import ADAPTERS
from meshtune.arrays.tree import Tree
from meshtune.config.load import load_recipe
from meshtune.config.recipe import Recipe
from meshtune.costs.hardware import Target
from meshtune.errors import UserError
from meshtune.mesh.config import MeshConfig
from meshtune.mesh.layout import Layout
from meshtune.mesh.placement import is_offloaded
from meshtune.model.compute import Compute, OffloadName
from meshtune.model.gather import check_batch
from meshtune.objectives.config import ONLINE_STAGES, PAIR_STAGES
from meshtune.objectives.stages import STAGES
from meshtune.optim.build import OPTIMIZERS
from meshtune.quantize.formats import FORMATS
from meshtune.setup.choices import Decision, compute_of
from meshtune.setup.machine import Machine, local_target, this_machine
from meshtune.setup.run import Run, resolve_run
from meshtune.setup.search import autotune, merge_decisions
from meshtune.setup.stage import row_length
from meshtune.train.assemble import batch_like, frozen_like, optimizer_for, state_like, step_for
from meshtune.train.step.state import TrainState

DEFAULT_STEPS = 1000  # for a recipe in epochs; only a constant of the learning-rate schedule depends on it


@dataclasses.dataclass(frozen=True)
class Program:
    """A step and its abstract arguments.

    `step` is the function that `train` jits; `arguments` are its state, frozen weights, batch and seed. `rows` and
    `length` are those of one micro-batch over all devices, `accumulation` the number of micro-batches of a step.
    """

    step: Wrapped
    arguments: tuple[TrainState, Tree, Tree, jax.ShapeDtypeStruct]
    run: Run
    compute: Compute
    decisions: list[Decision]
    rows: int
    length: int
    accumulation: int
    steps: int

    @property
    def layout(self) -> Layout | None:
        return self.run.layout

    @property
    def mesh(self) -> dict[str, int]:
        """The number of devices along each mesh axis."""
        return MeshConfig().sizes if self.layout is None else dict(self.layout.mesh.shape)

    def lower(self) -> Lowered:
        """Traces and lowers the step; the result has `.compile()`."""
        return self.step.lower(*self.arguments)

    def breakdown(self) -> dict[str, dict[str, int]]:
        """Bytes of the arguments by role, on one device and in host memory for that device."""
        state, frozen, batch, _ = self.arguments
        parts = {
            "frozen": (frozen, state.buffers),
            "trained": state.trainable,
            "optimizer": state.opt_state,
            "batch": batch,
        }
        return {role: _bytes_by_memory(tree) for role, tree in parts.items()}


def step_of(
    recipe: Recipe,
    target: Target | None = None,
    devices: Sequence[jax.Device] | None = None,
    length: int | None = None,
    learned: float = 1.0,
) -> Program:
    """Builds the step of a recipe for the described `devices` of `target`, or for this process's without a target.

    `length` is that of a row, by default data.max_length: exact for packed rows, an upper bound for padded ones.
    `learned` is the share of positions with a loss, by which training chooses its loss_chunk.
    Raises: UserError for an invalid model, method or mesh, or for a forced choice that is impossible.
    """
    if target is None:
        machine = this_machine()
    else:
        machine = Machine(target.device.platform, tuple(devices or ()), target.device.arch)
    assert machine.devices, f"no devices that describe {target}"
    recipe, autotuned = autotune(recipe, target or local_target(machine))
    run = resolve_run(recipe, machine, weights=False)
    accumulation = recipe.train.accumulation
    length = length or row_length(recipe)
    if run.layout is not None:
        check_batch(MeshConfig(**run.layout.mesh.shape), run.rows, length)
    compute, decisions = compute_of(recipe, run.spec, run.precision, run.rows, length, run.layout, machine, learned)
    steps = recipe.train.steps or DEFAULT_STEPS
    optimizer, _ = optimizer_for(run, steps)
    arguments = (
        state_like(run, optimizer),
        frozen_like(run),
        batch_like(run, (accumulation, run.rows, length), shared_prompts=compute.shared_prompts),
        jax.ShapeDtypeStruct((), np.dtype("int32")),
    )
    if target is not None and run.layout is None:
        # Without a mesh, the shardings of its arguments alone tell the compiler which device the step is for.
        arguments = jax.tree.map(lambda leaf: _on(leaf, machine.devices[0]), arguments)
    step = step_for(run, compute, optimizer)
    decisions = merge_decisions(autotuned, [*run.decisions, *decisions])
    return Program(step, arguments, run, compute, decisions, run.rows, length, accumulation, steps)


def _on(leaf: jax.ShapeDtypeStruct, device: jax.Device) -> jax.ShapeDtypeStruct:
    if is_offloaded(leaf.sharding):
        return leaf
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=SingleDeviceSharding(device))


def _bytes_by_memory(tree: object) -> dict[str, int]:
    """Bytes of a tree of abstract arrays on one device, by memory: device or host."""
    sizes = {"device": 0, "host": 0}
    for leaf in jax.tree.leaves(tree):
        local = leaf.shape if leaf.sharding is None else leaf.sharding.shard_shape(leaf.shape)
        kind = getattr(leaf.sharding, "memory_kind", None) or "device"
        sizes["host" if "host" in kind else "device"] += math.prod(local) * leaf.dtype.itemsize
    return sizes


YES = "●"
Overrides = Mapping[str, object]
PARTS = get_args(OffloadName)

# Sizes that suit a small model, so that no combination is refused only because of its dimensions.
WIDTH = 128
SIZES: dict[str, dict[str, object]] = {
    "oft": {"oft_block_size": 4},
    "galore": {"rank": 4},
    "apollo": {"rank": 4},
    "schedule_free": {"schedule": "constant"},
}

METHODS: dict[str, Overrides] = {
    **{name: {"method": {"kind": "lora", "adapter": name, **SIZES.get(name, {"rank": 4})}} for name in ADAPTERS},
    "lora+": {"method": {"kind": "lora", "rank": 4}, "optimizer": {"lora_plus_ratio": 16.0}},
    "freeze": {"method": {"kind": "freeze", "last_layers": 1}},
    "llama_pro": {"method": {"kind": "llama_pro", "blocks": 1}},
    "full": {"method": {"kind": "full"}},
}
METHODS["loftq"] = {**METHODS["loftq"], "quantize": "nf4"}  # LoftQ is defined for a quantised base
BASES: dict[str, Overrides] = {"full precision": {"quantize": None}, **{name: {"quantize": name} for name in FORMATS}}
ONLINE: Overrides = {
    "rollout": {"prompts": 2, "samples": 2, "max_tokens": 16},
    "rewards": [{"kind": "function", "function": "reward.py:score"}],
}
PAIRS: Overrides = {**ONLINE, "rollout": {"prompts": 4, "samples": 2, "max_tokens": 16}}
STAGE_OF: dict[str, Overrides] = {
    name: {"stage": {"kind": name}, **(PAIRS if name in PAIR_STAGES else ONLINE if name in ONLINE_STAGES else {})}
    for name in STAGES
}
STAGE_OF["distill"] = {**STAGE_OF["distill"], "teacher": "."}  # recipe_of gives it the small model
OPTIMIZER_OF: dict[str, Overrides] = {name: {"optimizer": {"name": name, **SIZES.get(name, {})}} for name in OPTIMIZERS}
UPDATE_VARIANTS: dict[str, Overrides] = {
    "clipping": {"optimizer": {"max_grad_norm": 1.0}},
    "accumulation": {"train": {"batch_size": 4, "micro_batch": 2}, "optimizer": {"max_grad_norm": None}},
    "update in the backward pass": {"optimizer": {"in_backward": True, "max_grad_norm": None}},
    **{f"{part} on the host": {"compute": {"offload": [part]}} for part in PARTS},
    "update in the backward pass, all on the host": {
        "optimizer": {"in_backward": True, "max_grad_norm": None},
        "compute": {"offload": [part for part in PARTS if part != "tables"]},
    },
}


@functools.cache
def model() -> str:
    """A folder with the config of a small model: the quickstart's, with widths that are multiples of 64."""
    folder = pathlib.Path(tempfile.mkdtemp(prefix="meshtune-composition-"))
    atexit.register(shutil.rmtree, folder)
    config = json.loads((quickstart.MODEL / "config.json").read_text())
    config |= {"hidden_size": WIDTH, "intermediate_size": 2 * WIDTH}
    (folder / "config.json").write_text(json.dumps(config))
    return str(folder)


def recipe_of(*parts: Overrides) -> Recipe:
    """A recipe for the small model with the sections of `parts`; later parts override earlier ones."""
    fields: dict[str, object] = {"model": model(), "data": {"train": str(quickstart.LESSON)}, "output": "run"}
    fields |= {"train": {"steps": 10, "batch_size": 4}}
    for part in parts:
        for section, value in part.items():
            value = model() if section == "teacher" else value
            current = fields.get(section)
            fields[section] = {**current, **value} if isinstance(current, dict) and isinstance(value, dict) else value
    return load_recipe(fields)


def refusal(*parts: Overrides) -> str | None:
    """Why a combination is refused, None if it is not."""
    try:
        step_of(recipe_of(*parts))
    except UserError as error:
        return error.what.removeprefix("the recipe: ").removeprefix("optimizer: ")
    return None


def table(rows: Mapping[str, Overrides], columns: Mapping[str, Overrides], notes: list[str], *under: Overrides) -> str:
    """A Markdown table of rows x columns, or a sentence if every pair works. Rows with the same cells are one row.

    Reasons for refusals are appended to `notes` and cited by number.
    """
    names: dict[tuple[str, ...], list[str]] = {}
    for name, row in rows.items():
        cells = []
        for column in columns.values():
            reason = refusal(*under, row, column)
            if reason is not None and reason not in notes:
                notes.append(reason)
            cells.append(YES if reason is None else str(notes.index(reason) + 1))
        names.setdefault(tuple(cells), []).append(name)
    if list(names) == [(YES,) * len(columns)]:
        return f"Every pair works: {', '.join(rows)} with {', '.join(columns)}."
    lines = [f"| | {' | '.join(columns)} |", f"| --- |{' --- |' * len(columns)}"]
    return "\n".join([*lines, *(f"| {', '.join(group)} | {' | '.join(cells)} |" for cells, group in names.items())])


def page() -> str:
    """docs/composition.md."""
    notes: list[str] = []
    parts = [
        "# What goes with what",
        f"{YES}: the pair works. A number: it is refused, for the reason with that number at the end of the page. "
        "`python -m meshtune.plan.program` prints this page: it builds the step of every pair for a small model.",
        "## Stage and method",
        table(METHODS, STAGE_OF, notes),
        "## Method and base",
        table(METHODS, BASES, notes),
        "## Optimizer and method",
        table(OPTIMIZER_OF, METHODS, notes),
        "## Optimizer and how an update is made, full tuning",
        table(OPTIMIZER_OF, UPDATE_VARIANTS, notes, METHODS["full"]),
        "## Optimizer and how an update is made, LoRA",
        table(OPTIMIZER_OF, UPDATE_VARIANTS, notes, METHODS["lora"]),
        "## Reasons",
        "\n".join(f"{number}. {reason}" for number, reason in enumerate(notes, 1)),
    ]
    return "\n\n".join(parts) + "\n"


if __name__ == "__main__":
    sys.stdout.write(page())
