"""Generates the compatibility tables of docs/composition.md by building every combination for a small model.

Every pair of stage, method, optimizer, weight format and offload is built abstractly, so the page cannot go stale.
`python -m meshtune.plan.composition` prints it.
"""

from __future__ import annotations

import atexit
import functools
import json
import pathlib
import shutil
import sys
import tempfile
from collections.abc import Mapping
from typing import get_args

from meshtune import quickstart
from meshtune.adapters.registry import ADAPTERS
from meshtune.config.load import load_recipe
from meshtune.config.recipe import Recipe
from meshtune.errors import UserError
from meshtune.model.compute import OffloadName
from meshtune.objectives.stages import STAGES
from meshtune.optim.build import OPTIMIZERS
from meshtune.plan.program import step_of
from meshtune.quantize.formats import FORMATS

YES, NO = "●", "–"
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
STAGE_OF: dict[str, Overrides] = {name: {"stage": {"kind": name}} for name in STAGES}
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
            cells.append(YES if reason is None else f"{NO} {notes.index(reason) + 1}")
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
        f"{YES}: the pair works. {NO}: the pair is refused, for the reason with that number at the end of the page. "
        "`python -m meshtune.plan.composition` prints this page: it builds the step of every pair for a small model.",
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
