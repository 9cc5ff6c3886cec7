"""The step that `plan` compiles is the step of the run, of every family that sees."""

from __future__ import annotations

import json
import pathlib

import jax
import numpy as np
import pytest
from rich.console import Console

from data.pictures import file_of, picture
from families.vision.cases import CASES
from families.vision.checkpoints import write_checkpoint
from families.vision.sights import VisionCase
from meshtune.config.load import load_recipe
from meshtune.config.recipe import Recipe
from meshtune.data.loader import Loader
from meshtune.data.prepare import prepare_data
from meshtune.data.tokenizer import load_tokenizer
from meshtune.errors import UserError
from meshtune.mesh.placement import place_batch
from meshtune.mesh.processes import Job
from meshtune.mesh.rendezvous import ProcessInfo
from meshtune.plan.program import step_of
from meshtune.plan.report import with_row_patches
from meshtune.train.assemble import load_run, step_for
from meshtune.train.report.progress import log_console
from meshtune.train.run_setup import set_up_run

FAST = ("internvl", "qwen2_vl", "gemma3", "paligemma2")  # tiles; M-RoPE; pictures, and prompts, that see themselves


def recipe_of(
    case: VisionCase, folder: pathlib.Path, *overrides: str, pairs: bool = False, records: int = 12
) -> Recipe:
    """Questions about one or two pictures of several sizes."""
    write_checkpoint(case, folder / "model")
    rows = []
    for number in range(records):
        names = [f"{number}-{n}.png" for n in range(1 + number % 2)]
        for n, name in enumerate(names):
            (folder / name).write_bytes(file_of(picture(30 + 5 * number, 40 + 20 * n)))
        question = {"role": "user", "content": "<image>" * len(names) + "what is it?"}
        answers = [{"role": "assistant", "content": f"a {word} circle"} for word in ("red", "blue")]
        sides = {"messages": [question], "chosen": answers[0], "rejected": answers[1]}
        rows.append((sides if pairs else {"messages": [question, answers[0]]}) | {"images": names})
    (folder / "data.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    fields = {"model": str(folder / "model"), "data": {"train": str(folder / "data.jsonl"), "max_length": 512}}
    fields |= {"vision": {}, "train": {"steps": 3, "batch_size": 4, "micro_batch": 2}, "output": str(folder / "run")}
    return load_recipe(fields, overrides)


def shapes(batch: dict) -> dict[str, tuple[tuple[int, ...], np.dtype]]:
    return {name: (array.shape, np.dtype(array.dtype)) for name, array in batch.items()}


@pytest.mark.parametrize("stage", ["sft", "dpo"])
@pytest.mark.parametrize(
    "case", [pytest.param(c, id=c.name, marks=() if c.name in FAST else pytest.mark.slow) for c in CASES]
)
def test_a_planned_batch_has_the_arrays_of_a_loaded_one(case: VisionCase, stage: str, tmp_path, monkeypatch):
    """Of each shape that batches have, that with the most patches; units, whose number only data tell, apart."""
    monkeypatch.setenv("MESHTUNE_CACHE", str(tmp_path / "cache"))
    recipe = recipe_of(case, tmp_path, f"stage={stage}", "method=full", pairs=stage == "dpo")
    planned = step_of(with_row_patches(recipe))
    loader = prepare_data(recipe, load_tokenizer(tmp_path / "model")).train
    assert isinstance(loader, Loader)
    assert loader.pictures is not None
    largest = next(loader.pictures.batches(loader.batch(0).arrays))
    units = {"units", "values", "reference"}
    assert planned.arguments[2].keys() | {"reference"} == largest.keys() | {"reference"}
    assert {k: v for k, v in shapes(planned.arguments[2]).items() if k not in units} == {
        k: v for k, v in shapes(largest).items() if k not in units
    }
    spec = planned.run.spec.vision
    assert spec is not None
    assert (spec.tile or 0, spec.merge, spec.pixels) == (
        loader.pictures.reader.tile_patches, loader.pictures.reader.merge, loader.pictures.reader.pixels
    )  # fmt: skip
    given = loader.pictures.sizes[0] - 1  # rounded up alike
    rounded = step_of(load_recipe(recipe.model_dump(mode="json"), [f"vision.max_patches={given}"]))
    assert shapes(rounded.arguments[2]) == shapes(planned.arguments[2])


@pytest.mark.parametrize(
    "case", [pytest.param(c, id=c.name, marks=() if c.name == "gemma3" else pytest.mark.slow) for c in CASES]
)
def test_the_planned_step_is_that_of_the_run(case: VisionCase, tmp_path, monkeypatch):
    """The same text of the program, for all arguments: state, frozen weights, batch and seed."""
    monkeypatch.setenv("MESHTUNE_CACHE", str(tmp_path / "cache"))
    recipe = recipe_of(case, tmp_path, "method.rank=4")
    console = Console(quiet=True)
    with log_console(console) as log:
        run, state = load_run(set_up_run(recipe, tmp_path / "run", console, log, Job(ProcessInfo())))
    loader = run.data.train
    assert isinstance(loader, Loader)
    assert loader.pictures is not None
    batch = place_batch(next(loader.pictures.batches(loader.batch(0).arrays)), None)
    ours = step_for(run, run.compute, run.optimizer).lower(state, run.frozen, batch, np.int32(0)).as_text()
    planned = step_of(with_row_patches(recipe), learned=run.data.report.learned_share)
    described = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), planned.arguments)
    assert planned.step.lower(*described).as_text() == ours


def test_prompts_that_see_their_end_are_refused_where_completions_are_drawn(tmp_path, monkeypatch):
    """PaliGemma: rows of an online stage would hold its prompts as causal ones, and learn another model's values."""
    monkeypatch.setenv("MESHTUNE_CACHE", str(tmp_path / "cache"))
    case = next(case for case in CASES if case.name == "paligemma2")
    changes = ("stage=grpo", 'rollout={"prompts":2,"samples":2,"max_tokens":4}', 'rewards=["equals"]')
    with pytest.raises(UserError, match="both ways") as error:
        step_of(with_row_patches(recipe_of(case, tmp_path, *changes)))
    assert error.value.where == "stage.kind"
