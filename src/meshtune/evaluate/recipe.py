"""The `evaluate` section of a recipe: checked before a run begins, done when it has ended."""

from __future__ import annotations

import pathlib
import tempfile

from rich.console import Console

from meshtune import terminal
from meshtune.config.recipe import Recipe
from meshtune.errors import UserError
from meshtune.evaluate.compare import Evaluation
from meshtune.evaluate.harness import prepare
from meshtune.evaluate.identity import default_output
from meshtune.evaluate.metrics import check_metrics
from meshtune.evaluate.predict import PredictOptions
from meshtune.evaluate.records import Record
from meshtune.evaluate.report import HTML, MARKDOWN
from meshtune.evaluate.run import BASE, Subject, evaluate_model, make_evaluation, run_data
from meshtune.mesh.collective_errors import raise_collectively
from meshtune.mesh.processes import SINGLE_PROCESS, Job
from meshtune.runs.run_mesh import run_mesh
from meshtune.setup.shortage import explain_shortage


def check_evaluation(recipe: Recipe, job: Job = SINGLE_PROCESS) -> None:
    """Raises UserError, on every process, for what would stop the evaluation at the end of a run: tasks, files,
    packages, metrics."""
    with raise_collectively(job, "evaluation: check"):
        _check(recipe)


def _check(recipe: Recipe) -> None:
    section = recipe.evaluate
    if section is None:
        return
    if not section.tasks and not (section.held_out and recipe.data.validation is not None):
        raise UserError("there is nothing to evaluate", where="evaluate", fix="give evaluate.tasks, or data.validation")
    if section.held_out and recipe.data.validation is not None:
        check_metrics(section.metrics)
    evaluation = _evaluation(recipe, [])
    if evaluation.suite.tasks:
        with tempfile.TemporaryDirectory() as folder:
            prepare(evaluation.suite, pathlib.Path(folder))


def evaluate_run(recipe: Recipe, console: Console, job: Job = SINGLE_PROCESS) -> pathlib.Path | None:
    """Evaluates the result of a run and its base, on the run's mesh and by its processes; returns the folder of the
    report, or None if the recipe has no `evaluate` section."""
    if recipe.evaluate is None:
        return None
    again = terminal.command("eval", str(pathlib.Path(recipe.output).expanduser()), "--compare", "base")
    with explain_shortage(lambda: f"the result is written; measure it with {again} --rows 4"):
        return _evaluate(recipe, console, job)


def _evaluate(recipe: Recipe, console: Console, job: Job) -> pathlib.Path:
    assert recipe.evaluate is not None
    records, trained_on = run_data(recipe.output)
    evaluation = _evaluation(recipe, records if recipe.evaluate.held_out else [])
    output = default_output(recipe.output, "evaluation", BASE)
    loading = {"revision": None, "chat_template": None, "dtype": None, "quantize": "auto"}
    subject = Subject(recipe.output, None, BASE, loading, run_mesh(recipe.output))
    evaluate_model(
        subject, evaluation, output, console=console, overwrite=output.exists(), trained_on=trained_on, job=job
    )
    console.print(f"[bold]report[/] {output / MARKDOWN} and {output / HTML}", soft_wrap=True)
    return output


def _evaluation(recipe: Recipe, records: list[Record]) -> Evaluation:
    section = recipe.evaluate
    assert section is not None
    files = {name: pathlib.Path(path) for name, path in section.tasks.items() if path is not None}
    return make_evaluation(
        records[: section.most_samples],
        tuple(section.tasks),
        files,
        predicting=PredictOptions(metrics=tuple(section.metrics), max_tokens=section.new_tokens),
        shots=section.num_fewshot,
        chat=section.prompts == "chat",
        limit=section.most_samples,
    )
