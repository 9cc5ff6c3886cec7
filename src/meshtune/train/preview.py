"""Generates and scores a few groups of completions, and trains nothing: `meshtune rewards`."""

from __future__ import annotations

import pathlib
import time

import numpy as np
from rich.console import Console
from rich.table import Table
from rich.text import Text

from meshtune import terminal
from meshtune.arrays.tree import merge
from meshtune.config.recipe import Recipe
from meshtune.config.rules import require_online
from meshtune.data.prompts import PromptLoader
from meshtune.errors import amount
from meshtune.mesh.processes import Job
from meshtune.mesh.rendezvous import ProcessInfo
from meshtune.rollout.saved import Rollout
from meshtune.runs.rollouts import print_rollouts
from meshtune.train.assemble import load_run
from meshtune.train.report.progress import log_console
from meshtune.train.run_setup import set_up_run
from meshtune.train.task import rollout_source


def preview_rewards(recipe: Recipe, *, groups: int = 4, console: Console | None = None) -> Rollout:
    """Prints completions of the first `groups` prompts with their rewards, and how far those tell them apart.

    Writes nothing to the run's output. Raises: UserError as a run does, and for a stage without rewards.
    """
    require_online(recipe, "has no rewards to look at")
    console = console or terminal.console()
    rollout = recipe.rollout.model_copy(update={"prompts": groups, "updates": 1}) if recipe.rollout else None
    train = recipe.train.model_copy(
        update={"batch_size": groups * (rollout.samples if rollout else 1), "micro_batch": 1}
    )
    recipe = recipe.model_copy(update={"rollout": rollout, "train": train, "resume": False, "overwrite": True})
    with log_console(console) as log:
        run = set_up_run(recipe, pathlib.Path(recipe.output).expanduser(), console, log, Job(ProcessInfo()))
        loaded, state = load_run(run)
    loader = run.data.train
    assert isinstance(loader, PromptLoader)
    source = rollout_source(loaded, loader, dict, None)
    started = time.perf_counter()
    try:
        with console.status("generating"):
            made = source.generate(0, merge(merge(state.trainable, loaded.model.frozen), state.buffers))
        rows = source.rows_of(made)
    finally:
        source.close()
    seconds = time.perf_counter() - started
    print_rollouts(rows, len(rows), console)
    console.print(_table(made, source.rewards.names))
    without = made.metrics["frac_reward_zero_std"] * groups
    lines = [f"{amount(len(rows), 'completion')} of {amount(groups, 'prompt')} in {seconds:.1f} s"]
    if without:
        lines.append(f"{round(without)} of {groups} groups have equal rewards: an update learns nothing from them")
    if made.metrics["completions/clipped_ratio"] > 0.5:
        lines.append(
            f"{made.metrics['completions/clipped_ratio']:.0%} of the completions end at rollout.max_tokens, not by "
            "themselves: raise it, or reward short answers"
        )
    for line in lines:
        console.print(Text(line))
    return made


def _table(made: Rollout, names: list[str]) -> Table:
    table = Table(title="rewards", title_justify="left", box=None, pad_edge=False)
    for column in ("", "mean", "deviation", "least", "most", "not applicable"):
        table.add_column(column, justify="left" if not column else "right")
    for name, values in zip(names, made.rewards.T, strict=True):
        valid = values[~np.isnan(values)]
        figures = (valid.mean(), valid.std(), valid.min(), valid.max()) if len(valid) else ()
        cells = [f"{figure:.3g}" for figure in figures] or ["-"] * 4
        table.add_row(name, *cells, str(len(values) - len(valid)))
    return table
