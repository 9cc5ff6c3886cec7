"""Evaluates a model or a run, and compares it with the model before tuning."""

from __future__ import annotations

import dataclasses
import functools
import pathlib
import tempfile
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from rich.console import Console

from meshtune import terminal
from meshtune.cache import cache_folder
from meshtune.config.load import load_recipe
from meshtune.config.recipe import Recipe
from meshtune.data.conversation import Sample
from meshtune.data.documents import load_documents, open_documents
from meshtune.data.pictures.files import PictureFiles
from meshtune.digests import digest_files
from meshtune.errors import UserError
from meshtune.evaluate.compare import Evaluation, Outcome, evaluate
from meshtune.evaluate.folder import results_folder
from meshtune.evaluate.harness import Suite, prepare
from meshtune.evaluate.metrics import check_metrics
from meshtune.evaluate.predict import PredictOptions, Record, Records
from meshtune.evaluate.report import HTML, MARKDOWN, write_report
from meshtune.evaluate.statistics import Overlap, overlap
from meshtune.generate.api import Model, load_variants
from meshtune.generate.driver import run_on_all
from meshtune.mesh.config import MeshConfig
from meshtune.mesh.processes import SINGLE_PROCESS, Job, raise_collectively
from meshtune.options import Shard
from meshtune.runs.output import weights_digests
from meshtune.runs.sources import Source, find, is_run, run_mesh, split_state
from meshtune.setup.shortage import explain_shortage
from meshtune.weights.hub import locate
from meshtune.weights.inspect import base_hash


def identity(path: str, adapter: str | None = None, revision: str | None = None) -> str:
    """A hash of a model's mathematics and of all its weights, and of its adapter's if it has one."""
    source = find(path, adapter, revision=revision)
    weights_identity = " ".join([base_hash(source.base), *weights_digests(source.base)])
    return weights_identity if source.adapter is None else f"{weights_identity} + {adapter_hash(source.adapter)}"


def adapter_hash(adapter: pathlib.Path) -> str:
    """A hash of the files of an adapter."""
    names = ["adapter_config.json", "adapter_model.safetensors"]
    digests = digest_files(adapter, names)
    return " ".join(digests[name].digest for name in names)


def default_output(model: str, kind: str, subject: str) -> pathlib.Path:
    """In a run: its own folder `kind`; else a folder `kind` here. Both are named after the model."""
    name = pathlib.Path(subject).stem or "data"
    directory, state = split_state(model)
    if is_run(directory):
        return directory / kind / (name if state is None else f"{name}-{state}")
    return pathlib.Path(kind) / f"{directory.resolve().name if directory.exists() else directory.name}-{name}"


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
    shard: Shard = Shard(),
) -> dict[str, Outcome] | None:
    """Evaluates a model, and what it is compared with before it, into `output` with a report.

    `trained_on` is looked through for the records of the evaluation. The processes of `job` share the models of the
    subject's mesh; process 0 has the outcomes and writes them, the others return None. Of the shards of an evaluation
    the process that finds none missing has the outcomes, all others return None.

    Raises UserError for an evaluation set that is the training set, unless that is allowed, and for whatever is wrong
    with model, data and tasks.
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
            models, subject, evaluation, output, console, common, shard, resume=resume, overwrite=overwrite
        )
    replicas: list[Model] = []
    for load in models.values():
        replicas.append(load(replicas))
    loaded = {name: functools.partial(_already, replica) for name, replica in zip(models, replicas, strict=True)}
    outcomes: dict[str, Outcome] = {}

    def main() -> None:
        options = {"resume": resume, "overwrite": overwrite}
        outcomes.update(_evaluate_models(loaded, subject, evaluation, output, console, common, shard, **options) or {})

    run_on_all(job, replicas, main)
    return outcomes or None


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
    shard: Shard,
    *,
    resume: bool,
    overwrite: bool,
) -> dict[str, Outcome] | None:
    with results_folder(output, settings(subject, evaluation), resume=resume, overwrite=overwrite, shard=shard):
        outcomes = evaluate(models, evaluation, output, console, shard)
        if outcomes is None:
            return None
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
        "records": len(evaluation.records),
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


def run_data(path: str) -> tuple[Records, Sequence[Sample]]:
    """(held-out records, training samples) of a run; empty if it has none, or is no run. The samples of a
    stream, which may be larger than memory, are left out."""
    directory, _ = split_state(path)
    if not is_run(directory) or not (directory / "recipe.yaml").is_file():
        return Records(()), ()
    recipe = load_recipe(str(directory / "recipe.yaml"))
    if recipe.stage.kind not in ("sft", "pt"):
        return Records(()), ()
    if recipe.data.streaming:
        documents = open_documents(recipe.data, seed=recipe.seed)
    else:
        vision, cache = recipe.vision, str(cache_folder() / "pictures")
        files = None if vision is None else PictureFiles(cache, vision.media_dir)
        documents = load_documents(recipe.data, seed=recipe.seed, pictures=files)
    trained_on: Sequence[Sample] = () if recipe.data.streaming else documents.train
    if documents.validation is None:
        return Records(()), trained_on
    held_out = documents.validation.with_system(recipe.data.system)
    return Records(held_out), trained_on


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


def _evaluation(recipe: Recipe, records: Sequence[Record]) -> Evaluation:
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
