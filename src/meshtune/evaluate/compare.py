"""One suite for one model or two, one after the other in one process: what a run gained and what it lost."""

from __future__ import annotations

import dataclasses
import pathlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from rich.console import Console

from meshtune.evaluate.folder import TASKS, read_json, read_lines, write_json, write_lines
from meshtune.evaluate.harness import Suite, prepare, run_tasks
from meshtune.evaluate.predict import Predictions, PredictOptions, Record, make_prompts, predict_into
from meshtune.evaluate.statistics import Difference, difference
from meshtune.evaluate.tasks import Sample, TaskResult, averages
from meshtune.generate.api import Model

LOWER_IS_BETTER = ("loss", "word_perplexity", "byte_perplexity", "bits_per_byte")


@dataclasses.dataclass(frozen=True)
class Evaluation:
    """An evaluation: the answers to `records`, and lm-eval's tasks in `suite`."""

    records: Sequence[Record]
    predicting: PredictOptions
    suite: Suite


@dataclasses.dataclass(frozen=True)
class Outcome:
    """The results of one model."""

    predictions: Predictions | None
    tasks: list[TaskResult]


def evaluate(
    models: Mapping[str, Callable[[], Model]], evaluation: Evaluation, folder: pathlib.Path, console: Console
) -> dict[str, Outcome]:
    """Evaluates models by name, one after the other, with the same prompts and seeds; each in a separate folder.

    Tasks are prepared and checked before the first model is loaded. Results that a folder has are not computed again.
    """
    tasks = prepare(evaluation.suite, folder / "tasks") if evaluation.suite.tasks else None
    outcomes = {}
    for name, load in models.items():
        console.print(f"[bold]{name}[/]")
        model, model_folder = load(), folder / name
        predictions = None
        if evaluation.records:
            prompts = make_prompts(model, evaluation.records, evaluation.predicting)
            predictions = predict_into(model, evaluation.records, prompts, model_folder, evaluation.predicting, console)
        results, facts = read_results(model_folder), {}
        if results is None:
            results = []
            if tasks is not None:
                results, facts = run_tasks(model, evaluation.suite, tasks, console=console)
            write_results(model_folder, results, facts)
        outcomes[name] = Outcome(predictions, results)
    return outcomes


def write_results(folder: pathlib.Path, results: Sequence[TaskResult], facts: Mapping[str, Any]) -> None:
    """Writes the samples of every task as JSON lines, and the metrics of all."""
    (folder / "samples").mkdir(parents=True, exist_ok=True)
    for result in results:
        write_lines(folder / "samples" / f"{result.name}.jsonl", map(dataclasses.asdict, result.samples))
    listed = [{key: value for key, value in vars(result).items() if key != "samples"} for result in results]
    write_json(folder / TASKS, {"tasks": listed, "averages": averages(results), "lm_eval": dict(facts)})


def read_results(folder: pathlib.Path) -> list[TaskResult] | None:
    """Reads the files of `write_results`; None if there are none."""
    if not (folder / TASKS).is_file():
        return None
    results = []
    for fields in read_json(folder / TASKS)["tasks"]:
        rows = read_lines(folder / "samples" / f"{fields['name']}.jsonl")
        metrics = [{k: tuple(v) if isinstance(v, list) else v for k, v in row["metrics"].items()} for row in rows]
        samples = [Sample(**{**row, "metrics": values}) for row, values in zip(rows, metrics, strict=True)]
        results.append(TaskResult(**fields, samples=samples))
    return results


def professional_differences(before: Predictions, after: Predictions, seed: int = 0) -> list[Difference]:
    """The paired differences of the metrics of records, and of their loss per token."""
    differences = []
    losses = [
        [(row["loss"] * row["loss_tokens"], row["loss_tokens"]) for row in side.rows if row.get("loss") is not None]
        for side in (before, after)
    ]
    if losses[0] and losses[1]:
        differences.append(difference("loss", *losses, higher_is_better=False, seed=seed))
    for name in before.rows[0]["metrics"]:
        first, second = ([(row["metrics"][name], 1.0) for row in side.rows] for side in (before, after))
        differences.append(difference(name, first, second, higher_is_better=True, seed=seed))
    return differences


def general_differences(
    before: Sequence[TaskResult], after: Sequence[TaskResult], seed: int = 0
) -> dict[str, list[Difference]]:
    """The paired differences of every task, the subjects of a benchmark taken together as well."""
    pooled = [(_pool_subjects(before), before), (_pool_subjects(after), after)]
    old, new = ({result.name: result for result in [*extra, *results]} for extra, results in pooled)
    table: dict[str, list[Difference]] = {}
    for name, first in old.items():
        second = {sample.id: sample for sample in new[name].samples}
        for metric in first.metrics:
            pairs = [(a.metrics[metric], second[a.id].metrics[metric]) for a in first.samples if metric in a.metrics]
            short, _, filter_ = metric.partition(",")
            if not pairs:
                continue
            higher = first.higher_is_better.get(short, short not in LOWER_IS_BETTER)
            sides = ([_with_weight(pair[side]) for pair in pairs] for side in (0, 1))
            label = short if filter_ in ("none", "") else f"{short} ({filter_})"
            paired = difference(short, *sides, higher_is_better=higher, seed=seed)
            table.setdefault(name, []).append(dataclasses.replace(paired, metric=label))
    return table


def _with_weight(value: float | tuple[float, ...]) -> tuple[float, float]:
    return (value[0], value[1]) if isinstance(value, tuple) else (value, 1.0)


def _pool_subjects(results: Sequence[TaskResult]) -> list[TaskResult]:
    """A result for each benchmark of several subjects, with the samples of all."""
    pooled = []
    for benchmark in dict.fromkeys(result.benchmark for result in results if result.category):
        subjects = [result for result in results if result.benchmark == benchmark]
        if len(subjects) < 2:
            continue
        samples = [dataclasses.replace(s, id=f"{r.name}:{s.id}") for r in subjects for s in r.samples]
        metrics = dict.fromkeys(subjects[0].metrics, 0.0)
        higher = subjects[0].higher_is_better
        pooled.append(TaskResult(f"{benchmark} (all subjects)", benchmark, "", metrics, samples, higher))
    return pooled
