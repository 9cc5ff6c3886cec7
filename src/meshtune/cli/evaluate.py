"""`meshtune eval` and `meshtune predict`: benchmarks, held-out records and answers to data."""

from __future__ import annotations

import dataclasses
import os
import pathlib
from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated

import typer

from meshtune.cli.expand import expand_options
from meshtune.cli.model_options import Limits, Loading, MeshSizes, ModelPath, check_source, parse_mesh, use_model
from meshtune.cli.replicas import Sharing, replica_devices, run_shared
from meshtune.errors import UserError
from meshtune.generate.request import Sampling
from meshtune.options import option, parse_shard, required

if TYPE_CHECKING:
    from meshtune.config.sections import SourceSection
    from meshtune.evaluate.compare import Outcome
    from meshtune.generate.api import Model


@dataclasses.dataclass(frozen=True)
class DataOptions:
    """Which data are answered."""

    data: str = required("A file, a folder of files or a hub data set, in any format that training reads.")
    format: str = option("auto", "Format of the records, as in a recipe; auto: detected.")
    split: str = option("train", "Split of a hub data set.")
    columns: str | None = option(None, "Names of the record's fields, such as prompt=question,completion=answer.")
    system: str | None = option(None, "System prompt for conversations that have none.")
    limit: int | None = option(None, "Only the first records, at most this many.", ge=1)


@dataclasses.dataclass(frozen=True)
class Writing:
    """Where results are written."""

    output: str | None = option(None, "Folder of the results; default: named after model and data.")
    resume: bool = option(False, "Go on with results that are in the folder.", flags=("--resume",))
    overwrite: bool = option(False, "Move results that are in the folder aside.", flags=("--overwrite",))


def check_data(path: str) -> None:
    """Raises UserError for data that are neither here nor perhaps on a hub: before JAX is imported."""
    from meshtune.data.sources import check_source_path

    check_source_path(path)


def source_section(path: str, **fields: str | None) -> SourceSection:
    """A source of records from the command line's words. Raises UserError for those that make none."""
    from pydantic import ValidationError

    from meshtune.config.sections import SourceSection

    columns = fields.pop("columns", None)
    try:
        return SourceSection.model_validate({"path": path, "columns": _pairs(columns), **fields})
    except ValidationError as problem:
        first = problem.errors()[0]
        name = ".".join(map(str, first["loc"]))
        raise UserError(str(first["msg"]), where=f"--{name}", fix="see `meshtune predict --help`") from problem


def _pairs(text: str | None) -> dict[str, str]:
    pairs: dict[str, str] = {}
    for part in (text or "").split(","):
        name, equals, column = (word.strip() for word in part.partition("="))
        if part and not (equals and name and column):
            raise UserError(f"'{part}' is not FIELD=COLUMN", where="--columns", fix="write prompt=question")
        if part:
            pairs[name] = column
    return pairs


Tasks = Annotated[
    list[str] | None,
    typer.Option(
        "--tasks",
        "-t",
        help="NAME or NAME=PATH, separated by commas or repeated. From files: mmlu, ceval, cmmlu (a folder), arc_easy, "
        "arc_challenge, hellaswag, gsm8k, ifeval, perplexity; any other of lm-eval's from its hub or cache.",
    ),
]


@dataclasses.dataclass(frozen=True)
class SuiteOptions:
    """How tasks are run."""

    num_fewshot: int | None = option(None, "Examples shown before each question; default: the task's own.", ge=0)
    chat: bool = option(False, "Prompts in the chat template, examples as turns.", flags=("--chat/--no-chat",))
    system: str | None = option(None, "System prompt; of records, for those that have none.")
    limit: int | None = option(None, "Only the first examples of a task, and records, at most this many.", ge=1)
    gen_kwargs: str | None = option(
        None, "Of generating tasks, such as max_gen_toks=512,temperature=0.7,do_sample=true."
    )
    max_tokens: int | None = option(None, "New tokens of an answer to a record, at most; default 512.", ge=1)
    metrics: str = option("exact_match,f1,chrf,rouge", "Of the answers to records; see meshtune predict.")
    rows: int = option(16, "Prompts computed at once.", ge=1)
    seed: int = option(1234, "Of few-shot examples and sampling.", ge=0)


@expand_options()
def evaluate(
    context: typer.Context,
    model: ModelPath,
    mesh: MeshSizes = None,
    *,
    tasks: Tasks = None,
    data: Annotated[
        str | None,
        typer.Option("--data", help="Records to answer; default: what a run held out. none: no records."),
    ] = None,
    compare: Annotated[
        str | None, typer.Option("--compare", help="base: what MODEL was tuned from; or a model, adapter or run.")
    ] = None,
    allow_training_data: Annotated[
        bool, typer.Option("--allow-training-data", help="Go on although the records are the training data.")
    ] = False,
    suite: SuiteOptions,
    writing: Writing,
    sharing: Sharing,
    loading: Loading,
) -> None:
    """Measure a model on benchmarks and on held-out records, and what tuning gained and lost."""
    os.environ.setdefault("TQDM_DISABLE", "1")  # one bar is enough
    check_source(model, loading.adapter)
    if compare not in (None, "base"):
        check_source(compare)
    if data not in (None, "none"):
        check_data(data)
    from meshtune import terminal
    from meshtune.evaluate.harness import parse_tasks
    from meshtune.evaluate.metrics import check_metrics
    from meshtune.evaluate.predict import PredictOptions, read_records
    from meshtune.evaluate.report import HTML, MARKDOWN
    from meshtune.evaluate.run import Subject, default_output, evaluate_model, make_evaluation, run_data
    from meshtune.mesh.processes import start
    from meshtune.setup.program_cache import keep_programs

    names, files = parse_tasks(tasks or [])
    output = pathlib.Path(writing.output or default_output(model, "evaluation", compare or "alone")).expanduser()
    devices = replica_devices(mesh, loading.adapter or model)
    if run_shared(context, sharing, output, devices=devices, resume=writing.resume, overwrite=writing.overwrite):
        if sharing.executor != "slurm":
            typer.echo(f"report   {output / MARKDOWN} and {output / HTML}")
        return
    records, trained_on = run_data(model)
    if data == "none":
        records = []
    elif data is not None:
        records = read_records(source_section(data, columns=None), system=suite.system, limit=suite.limit)
    metrics = check_metrics([name.strip() for name in suite.metrics.split(",") if name.strip()]) if records else ()
    evaluation = make_evaluation(
        records[: suite.limit],
        names,
        files,
        predicting=PredictOptions(metrics=metrics, max_tokens=suite.max_tokens, rows=suite.rows),
        shots=suite.num_fewshot,
        chat=suite.chat,
        system_instruction=suite.system,
        limit=suite.limit,
        gen_kwargs=_values(suite.gen_kwargs),
        seed=suite.seed,
        rows=suite.rows,
    )
    options = {k: v for k, v in vars(loading).items() if k != "adapter"}
    subject = Subject(model, loading.adapter, compare, options, parse_mesh(mesh, loading.adapter or model))
    with start() as job:
        keep_programs(job.process_count)
        outcomes = evaluate_model(
            subject,
            evaluation,
            output,
            console=terminal.console(stderr=True, quiet=not job.is_main_process),
            resume=writing.resume,
            overwrite=writing.overwrite,
            trained_on=trained_on,
            allow_training_data=allow_training_data,
            job=job,
            shard=parse_shard(sharing.shard),
        )
    if outcomes is None:
        return
    _print_metrics(outcomes)
    typer.echo(f"report   {output / MARKDOWN} and {output / HTML}")


def _print_metrics(outcomes: Mapping[str, Outcome]) -> None:
    for name, outcome in outcomes.items():
        for result in outcome.tasks:
            for metric, value in result.metrics.items():
                typer.echo(f"{name:8} {result.name:28} {metric.replace(',none', ''):24} {value:.4f}")
        if outcome.predictions is not None:
            for metric, value in outcome.predictions.totals.items():
                if isinstance(value, float):
                    typer.echo(f"{name:8} {'records':28} {metric:24} {value:.4f}")


def _values(text: str | None) -> dict[str, object]:
    """NAME=VALUE pairs, numbers and truth values as such. Raises UserError for anything else."""
    values: dict[str, object] = {}
    for part in (text or "").split(",") if text else []:
        name, equals, value = (word.strip() for word in part.partition("="))
        if not (equals and name and value):
            raise UserError(f"'{part}' is not NAME=VALUE", where="--gen-kwargs", fix="write max_gen_toks=512")
        try:
            values[name] = int(value)
        except ValueError:
            try:
                values[name] = float(value)
            except ValueError:
                values[name] = {"true": True, "false": False}.get(value.lower(), value)
    return values


@expand_options()
def predict(
    context: typer.Context,
    model: ModelPath,
    mesh: MeshSizes = None,
    *,
    data: DataOptions,
    writing: Writing,
    sharing: Sharing,
    metrics: Annotated[
        str, typer.Option("--metrics", help="exact_match, f1, bleu, chrf, rouge; separated by commas.")
    ] = "exact_match,f1,bleu,chrf,rouge",
    loss: Annotated[bool, typer.Option("--loss/--no-loss", help="Also the loss on the data's own answers.")] = True,
    rows: Annotated[int, typer.Option("--rows", min=1, help="Records computed at once.")] = 16,
    limits: Limits,
    sampling: Sampling,
    loading: Loading,
) -> None:
    """Answer every record of a data set, and compare the answers with its own."""
    check_source(model, loading.adapter)
    check_data(data.data)

    from meshtune import terminal
    from meshtune.evaluate.blocks import predict as answer_records
    from meshtune.evaluate.folder import PREDICTIONS, TOTALS, read_json
    from meshtune.evaluate.metrics import check_metrics
    from meshtune.evaluate.predict import PredictOptions, read_records
    from meshtune.evaluate.run import default_output, identity

    names = check_metrics([name.strip() for name in metrics.split(",") if name.strip()])
    source = source_section(data.data, format=data.format, split=data.split, columns=data.columns)
    output = pathlib.Path(writing.output or default_output(model, "predictions", data.data)).expanduser()

    def show(totals: Mapping[str, object]) -> None:
        for name, value in totals.items():
            typer.echo(f"{name:24} {value:.4f}" if isinstance(value, float) else f"{name:24} {value}")
        typer.echo(f"{'answers':24} {output / PREDICTIONS}")

    devices = replica_devices(mesh, loading.adapter or model)
    if run_shared(context, sharing, output, devices=devices, resume=writing.resume, overwrite=writing.overwrite):
        if sharing.executor != "slurm":
            show(read_json(output / TOTALS))
        return
    records = read_records(source, system=data.system, limit=data.limit)
    options = PredictOptions(
        metrics=names,
        loss=loss,
        max_tokens=limits.max_tokens,
        stop=limits.stop,
        sampling=sampling,
        rows=rows,
    )

    def answer(loaded: Model) -> None:
        result = answer_records(
            loaded,
            records,
            output,
            options,
            identity=identity(model, loading.adapter, loading.revision),
            shard=parse_shard(sharing.shard),
            resume=writing.resume,
            overwrite=writing.overwrite,
            console=terminal.console(stderr=True),
        )
        if result is not None:
            show(result.totals)

    use_model(answer, model, loading, mesh=mesh)
