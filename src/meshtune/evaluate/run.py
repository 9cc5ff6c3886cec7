"""`meshtune eval` and the `evaluate` section of a recipe: a model or a run, with or without its base."""

from __future__ import annotations

import dataclasses
import functools
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from rich.console import Console

from meshtune.config.load import load_recipe
from meshtune.data.conversation import Sample
from meshtune.data.documents import load_documents, open_documents
from meshtune.errors import UserError
from meshtune.evaluate.compare import Evaluation, Outcome, evaluate
from meshtune.evaluate.folder import results_folder
from meshtune.evaluate.harness import Suite
from meshtune.evaluate.identity import identity
from meshtune.evaluate.overlap import Overlap, overlap
from meshtune.evaluate.predict import PredictOptions
from meshtune.evaluate.records import Record, digest, record_of
from meshtune.evaluate.report import write_report
from meshtune.generate.api import Model, load_variants
from meshtune.generate.driver import run_on_all
from meshtune.mesh.config import MeshConfig
from meshtune.mesh.processes import SINGLE_PROCESS, Job
from meshtune.runs.sources import Source, find, is_run
from meshtune.runs.states import split_state
from meshtune.weights.hub import locate

BASE = "base"


class Loader(Protocol):
    """Loads a model; `beside` are those that the processes of a job share."""

    def __call__(self, beside: Sequence[Model] = ()) -> Model: ...


@dataclasses.dataclass(frozen=True)
class Subject:
    """A model, adapter or run to evaluate, and what it is compared with: "base", another path, or nothing."""

    path: str
    adapter: str | None
    compare: str | None
    loading: Mapping[str, Any]
    mesh: MeshConfig | None = None


def evaluate_model(
    subject: Subject,
    evaluation: Evaluation,
    output: pathlib.Path,
    *,
    console: Console,
    resume: bool = False,
    overwrite: bool = False,
    trained_on: Sequence[Sample] = (),
    allow_training_data: bool = False,
    job: Job = SINGLE_PROCESS,
) -> dict[str, Outcome] | None:
    """Evaluates a model, and what it is compared with before it, into `output` with a report.

    `trained_on` is looked through for the records of the evaluation. The processes of `job` share the models of the
    subject's mesh; process 0 has the outcomes and writes them, the others return None. Raises UserError for an
    evaluation set that is the training set, unless that is allowed, and for whatever is wrong with model, data and
    tasks.
    """
    if not evaluation.records and not evaluation.suite.tasks:
        raise UserError("there is nothing to evaluate", fix="give --tasks, --data, or both")
    common = None
    if evaluation.records and trained_on:
        common = overlap([record.document for record in evaluation.records], trained_on)
        check_overlap(common, evaluation.records, allow=allow_training_data)
        console.print(f"[{'bold red' if common.shared else 'default'}]{common}[/]", soft_wrap=True)
    models = variants(subject, job)
    if job.process_count == 1:
        return _evaluate_models(
            models, subject, evaluation, output, console, common, resume=resume, overwrite=overwrite
        )
    replicas: list[Model] = []
    for load in models.values():
        replicas.append(load(replicas))
    loaded = {name: functools.partial(_already, replica) for name, replica in zip(models, replicas, strict=True)}
    outcomes: dict[str, Outcome] = {}

    def main() -> None:
        options = {"resume": resume, "overwrite": overwrite}
        outcomes.update(_evaluate_models(loaded, subject, evaluation, output, console, common, **options))

    run_on_all(job, replicas, main)
    return outcomes if job.is_main_process else None


def _already(replica: Model, beside: Sequence[Model] = ()) -> Model:
    del beside
    return replica


def _evaluate_models(
    models: Mapping[str, Loader],
    subject: Subject,
    evaluation: Evaluation,
    output: pathlib.Path,
    console: Console,
    common: Overlap | None,
    *,
    resume: bool,
    overwrite: bool,
) -> dict[str, Outcome]:
    with results_folder(output, settings(subject, evaluation), resume=resume, overwrite=overwrite):
        outcomes = evaluate(models, evaluation, output, console)
        chat = "prompts in the chat template" if evaluation.suite.chat else "plain prompts"
        title = f"Evaluation of {pathlib.Path(subject.path).name}"
        report = write_report(output, title, outcomes, overlap=common, protocol=f"lm-eval's, {chat}")
    for text in (*report.warnings, *report.findings):
        console.print(text, soft_wrap=True, markup=False)
    return outcomes


def settings(subject: Subject, evaluation: Evaluation) -> dict[str, Any]:
    """The settings that the numbers depend on."""
    suite = dataclasses.asdict(evaluation.suite) | {"files": {k: str(v) for k, v in evaluation.suite.files.items()}}
    return {
        "model": identity(subject.path, subject.adapter, subject.loading.get("revision")),
        "compare": subject.compare,
        "data": digest(evaluation.records),
        "predicting": dataclasses.asdict(evaluation.predicting),
        "suite": suite,
        "protocol": "lm-eval",
        "loading": {name: subject.loading.get(name) for name in ("dtype", "quantize", "chat_template", "tokenizer")},
    }


def check_overlap(common: Overlap, records: Sequence[Record], *, allow: bool) -> None:
    """Raises UserError for an evaluation set that is the training set, unless that is allowed."""
    if common.is_training_set and not allow:
        raise UserError(
            f"the evaluation data are training data: all {common.records} records were trained on",
            where=records[0].origin.partition(", record")[0],
            fix="give records that were held out (data.validation in the recipe), or --allow-training-data to see how "
            "well the training data were learned by heart",
        )


def variants(subject: Subject, job: Job = SINGLE_PROCESS) -> dict[str, Loader]:
    """Returns the loaders of the models by name, the one to compare with first. An adapter and its base are in memory
    once."""
    loading = dict(subject.loading)
    options: dict[str, Any] = {"dtype": loading.pop("dtype", None), "quantize": loading.pop("quantize", "auto")}
    options |= {"mesh": subject.mesh, "job": job}

    def loader_of(source: Source) -> Loader:
        return lambda beside=(): load_variants({"": source}, beside=beside, **options)[""]

    source = find(subject.path, subject.adapter, **loading)
    if subject.compare is None:
        return {"model": loader_of(source)}
    if subject.compare == BASE and source.adapter is not None:
        # The tokenizer and its chat template are the run's on both sides, so that the prompts are the same.
        plain = dataclasses.replace(source, adapter=None)
        shared = functools.cache(lambda: load_variants({"base": plain, "tuned": source}, **options))
        return {"base": lambda beside=(): shared()["base"], "tuned": lambda beside=(): shared()["tuned"]}
    if subject.compare != BASE:
        return {"before": loader_of(find(subject.compare)), "after": loader_of(source)}
    directory, _ = split_state(subject.path)
    if not is_run(directory):
        raise UserError(
            "this is a whole model, which does not say what it was made from",
            where=subject.path,
            fix="give a run or an adapter, or --compare PATH of the model to compare with",
        )
    recipe = load_recipe(str(directory / "recipe.yaml"))
    base = dataclasses.replace(source, base=locate(recipe.model.path, recipe.model.revision), adapter=None)
    return {"base": loader_of(base), "tuned": loader_of(source)}


def run_data(path: str) -> tuple[list[Record], Sequence[Sample]]:
    """(held-out records, training samples) of a run; empty if it has none, or is no run. The samples of a
    stream, which may be larger than memory, are left out."""
    directory, _ = split_state(path)
    if not is_run(directory) or not (directory / "recipe.yaml").is_file():
        return [], ()
    recipe = load_recipe(str(directory / "recipe.yaml"))
    if recipe.stage.kind not in ("sft", "pt"):
        return [], ()
    read = open_documents if recipe.data.streaming else load_documents
    documents = read(recipe.data, seed=recipe.seed)
    trained_on: Sequence[Sample] = () if recipe.data.streaming else documents.train
    if documents.validation is None:
        return [], trained_on
    held_out = documents.validation.with_system(recipe.data.system)
    return [record_of(number, document) for number, document in enumerate(held_out)], trained_on


def make_evaluation(
    records: Sequence[Record],
    tasks: tuple[str, ...],
    files: Mapping[str, pathlib.Path],
    *,
    predicting: PredictOptions = PredictOptions(),
    **suite: Any,
) -> Evaluation:
    """Makes an evaluation from options."""
    return Evaluation(records, predicting, Suite(tasks, files, **suite))
