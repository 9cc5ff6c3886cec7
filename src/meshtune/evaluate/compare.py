"""One suite for one model or two, one after the other in one process: what a run gained and what it lost."""

from __future__ import annotations

import contextlib
import dataclasses
import pathlib
import shutil
import tempfile
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from rich.console import Console

from meshtune.evaluate.blocks import Blocks
from meshtune.evaluate.folder import TASKS, join_complete, read_json, read_lines, write_json, write_lines
from meshtune.evaluate.harness import Suite, Tasks, prepare, run_tasks
from meshtune.evaluate.predict import Predictions, PredictOptions, Record
from meshtune.evaluate.statistics import Difference, difference
from meshtune.evaluate.tasks import Sample, TaskResult, averages
from meshtune.generate.api import Model
from meshtune.options import Shard

BENCHMARKS = "benchmarks"  # the results of those that are done, until all are
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
    models: Mapping[str, Callable[[], Model]],
    evaluation: Evaluation,
    folder: pathlib.Path,
    console: Console,
    shard: Shard = Shard(),
) -> dict[str, Outcome] | None:
    """Evaluates models by name, one after the other, with the same prompts and seeds; each in a separate folder.

    Tasks are prepared and checked before the first model is loaded. Results that a folder has are not computed again.
    A shard computes some blocks of the records and some benchmarks; the process that finds no other missing returns
    the outcomes, all others None.
    """
    parts = {name: _Parts(folder / name, evaluation, shard) for name in models}
    with contextlib.ExitStack() as stack:
        # Each process writes the tasks' files: those of a shard where no other does.
        own = stack.enter_context(tempfile.TemporaryDirectory()) if shard.count > 1 else folder / "tasks"
        tasks = prepare(evaluation.suite, pathlib.Path(own)) if evaluation.suite.tasks else None
        for name, load in models.items():
            console.print(f"[bold]{name}[/]")
            parts[name].compute(load(), tasks, console)

    def missing() -> list[object]:
        return [part for model in parts.values() for part in model.missing()]

    def join() -> dict[str, Outcome]:
        return {name: model.join() for name, model in parts.items()}

    return join_complete(folder, shard, missing, join, console)


class _Parts:
    """The parts of the evaluation of one model, in its folder: blocks of records, and benchmarks, a file each."""

    def __init__(self, folder: pathlib.Path, evaluation: Evaluation, shard: Shard):
        self._folder, self._suite, self._shard = folder, evaluation.suite, shard
        self._blocks = None
        if evaluation.records:
            self._blocks = Blocks(folder, evaluation.records, evaluation.predicting, shard)

    def compute(self, model: Model, tasks: Tasks | None, console: Console) -> None:
        self._folder.mkdir(parents=True, exist_ok=True)
        if self._blocks is not None and not (self._shard.count > 1 and self._blocks.is_joined):
            self._blocks.check(model, console, resume=True)
            self._blocks.compute(model, console)
        if self._is_joined():
            return
        for number, benchmark in enumerate(self._suite.tasks):
            if self._shard.takes(number) and not self._file(benchmark).is_file():
                assert tasks is not None
                results, facts = run_tasks(model, self._suite, tasks.of(benchmark), console=console)
                self._file(benchmark).parent.mkdir(exist_ok=True)
                fields = {"results": list(map(dataclasses.asdict, results)), "facts": facts}
                write_json(self._file(benchmark), fields)

    def missing(self) -> list[object]:
        blocks = self._blocks.missing() if self._blocks is not None else []
        benchmarks = () if self._is_joined() else self._suite.tasks
        return [*blocks, *(name for name in benchmarks if not self._file(name).is_file())]

    def join(self) -> Outcome:
        predictions = None
        if self._blocks is not None:
            predictions = self._blocks.join()
        if not self._is_joined():
            parts = [read_json(self._file(benchmark)) for benchmark in self._suite.tasks]
            results = [_task_result(fields) for part in parts for fields in part["results"]]
            facts = _join_facts([part["facts"] for part in parts])
            write_results(self._folder, results, facts)
            shutil.rmtree(self._folder / BENCHMARKS, ignore_errors=True)
        return Outcome(predictions, read_results(self._folder) or [])

    def _is_joined(self) -> bool:
        return (self._folder / TASKS).is_file()

    def _file(self, benchmark: str) -> pathlib.Path:
        return self._folder / BENCHMARKS / f"{benchmark}.json"


def _join_facts(parts: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Joins lm-eval's facts of the benchmarks: by name of the task, and the number of contexts that were cut."""
    joined: dict[str, Any] = {}
    for part in parts:
        for name, value in part.items():
            if isinstance(value, int):
                joined[name] = joined.get(name, 0) + value
            else:
                joined[name] = {**joined.get(name, {}), **(value or {})}
    return joined


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
        results.append(_task_result({**fields, "samples": read_lines(folder / "samples" / f"{fields['name']}.jsonl")}))
    return results


def _task_result(fields: dict[str, Any]) -> TaskResult:
    rows = fields["samples"]
    metrics = [{k: tuple(v) if isinstance(v, list) else v for k, v in row["metrics"].items()} for row in rows]
    samples = [Sample(**{**row, "metrics": values}) for row, values in zip(rows, metrics, strict=True)]
    return TaskResult(**{**fields, "samples": samples})


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
