"""Writes the base of a run whose starting point differs from the published model (new tokens, new layers, merges).

The base is written once, to base/ in the output directory, before weights are loaded. It is then loaded, sharded,
quantised and hashed like any other model, and adapters record it as their base.
"""

from __future__ import annotations

import pathlib
from collections.abc import Callable
from typing import TYPE_CHECKING

from meshtune.adapters.continued import check_continued, content_hash
from meshtune.adapters.peft_format import BaseRecord
from meshtune.config.recipe import Recipe
from meshtune.digests import damage_error, write_digests
from meshtune.errors import UserError
from meshtune.families.expansion import group_layers
from meshtune.json_text import read_json
from meshtune.mesh.collective_errors import raise_collectively
from meshtune.mesh.processes import Job
from meshtune.runs.output import BASE
from meshtune.runs.verify import find_damage_collectively
from meshtune.setup.run import Run
from meshtune.setup.start import spec_for_stage
from meshtune.setup.start_spec import Start
from meshtune.weights.export import write_json
from meshtune.weights.load import load_spec
from meshtune.weights.publish import disk_errors, publish_directory

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

RECORD = "start.json"


def materialize_start(
    start: Start,
    recipe: Recipe,
    output: pathlib.Path,
    tokenizer: PreTrainedTokenizerFast,
    hash: str,
    job: Job,
    log: Callable[[str], None],
) -> pathlib.Path:
    """Returns the directory to load the run's weights from: output/base, or the source if nothing changes.

    `hash` is the source's. Process 0 writes the base, one tensor at a time; adapters are merged like
    `meshtune export --merge` does. A resumed run reuses an existing undamaged base.

    Raises: UserError as `start_of` and `export` do.
    """
    if not start.changed:
        return start.source
    dest = (output / BASE).absolute()
    record = {
        "path": recipe.model.path,
        "hash": hash,
        "merged": list(recipe.model.merge_adapters),
        "new_tokens": recipe.model.new_tokens,
        "new_special_tokens": recipe.model.new_special_tokens,
        "vocab": start.spec.vocab,
        "new_layers": start.blocks,
    }
    is_there = all(job.exchange("start: record", _read_record(dest) == record))
    damage = find_damage_collectively(dest, job, required=True) if is_there else {}
    if damage:
        log(f"what the run starts from is damaged ({damage_error(dest, damage, '').what}) and is written again")
    if damage or not is_there:
        from meshtune.setup.start_files import write_start  # exports are imported only where an adapter may be merged

        log(f"writing what the run starts from to {dest}")
        with (
            publish_directory(dest, "config.json", job) as folder,
            raise_collectively(job, "start: files"),
            disk_errors(dest),
        ):
            if job.is_main_process:
                write_start(start, recipe, folder, record)
                tokenizer.save_pretrained(str(folder))
                write_json(folder / RECORD, record)
                write_digests(folder)
    written = spec_for_stage(load_spec(dest, start.spec.dtype)[0], recipe)
    if (group_layers(written, start.blocks) if start.blocks else written) != start.spec:
        raise UserError(
            "an adapter that is folded in makes another model of its base (its head is not the embedding any more)",
            where=str(dest),
            fix="fold it in first: meshtune export --merge, and give the result as model.path",
        )
    return dest


def resumed_adapter(run: Run, base: BaseRecord) -> str:
    """Returns the hash of the adapter that a run continues from, for its record; "" if there is none.

    Raises: UserError for an adapter of another base, unless the recipe accepts any.
    """
    source = run.method.resumes
    if source is None:
        return ""
    if not run.recipe.model.any_base:
        check_continued(source, run.spec, base)
    return f" with adapter {content_hash(source)}"


def _read_record(dest: pathlib.Path) -> dict[str, object] | None:
    """Reads the record of what the model in `dest` was made from; None if it is missing or damaged."""
    file = dest / RECORD
    try:
        return read_json(file)
    except UserError:
        return None
