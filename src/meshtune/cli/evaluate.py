"""`meshtune eval`: benchmarks and held-out records, alone or before and after."""

from __future__ import annotations

import dataclasses
import os
import pathlib
from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated

import typer

from meshtune.cli.evaluation_options import Writing, check_data, source_section
from meshtune.cli.expand import expand_options
from meshtune.cli.model_options import Loading, MeshSizes, ModelPath, check_source, parse_mesh
from meshtune.errors import UserError
from meshtune.options import option

if TYPE_CHECKING:
    from meshtune.evaluate.compare import Outcome

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
    from meshtune.evaluate.identity import default_output
    from meshtune.evaluate.metrics import check_metrics
    from meshtune.evaluate.predict import PredictOptions
    from meshtune.evaluate.records import read_records
    from meshtune.evaluate.report import HTML, MARKDOWN
    from meshtune.evaluate.run import Subject, evaluate_model, make_evaluation, run_data
    from meshtune.generate.program_cache import keep_programs
    from meshtune.mesh.processes import start

    names, files = parse_tasks(tasks or [])
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
    output = pathlib.Path(writing.output or default_output(model, "evaluation", compare or "alone")).expanduser()
    options = {k: v for k, v in vars(loading).items() if k != "adapter"}
    subject = Subject(model, loading.adapter, compare, options, parse_mesh(mesh, loading.adapter or model))
    with start() as job:
        keep_programs()
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
