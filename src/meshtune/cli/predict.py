"""`meshtune predict`: answers to a data set, compared with its own."""

from __future__ import annotations

import pathlib
from typing import TYPE_CHECKING, Annotated

import typer

from meshtune.cli.evaluation_options import DataOptions, Writing, check_data, source_section
from meshtune.cli.expand import expand_options
from meshtune.cli.model_options import Limits, Loading, MeshSizes, ModelPath, check_source, use_model
from meshtune.generate.config import Sampling

if TYPE_CHECKING:
    from meshtune.generate.api import Model


@expand_options()
def predict(
    model: ModelPath,
    mesh: MeshSizes = None,
    *,
    data: DataOptions,
    writing: Writing,
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
    from meshtune.evaluate import predict as evaluation
    from meshtune.evaluate.identity import default_output, identity
    from meshtune.evaluate.metrics import check_metrics
    from meshtune.evaluate.records import read_records

    names = check_metrics([name.strip() for name in metrics.split(",") if name.strip()])
    source = source_section(data.data, format=data.format, split=data.split, columns=data.columns)
    output = pathlib.Path(writing.output or default_output(model, "predictions", data.data)).expanduser()
    records = read_records(source, system=data.system, limit=data.limit)
    options = evaluation.PredictOptions(
        metrics=names,
        loss=loss,
        max_tokens=limits.max_tokens,
        stop=limits.stop,
        sampling=sampling,
        rows=rows,
    )

    def answer(loaded: Model) -> None:
        result = evaluation.predict(
            loaded,
            records,
            output,
            options,
            identity=identity(model, loading.adapter, loading.revision),
            resume=writing.resume,
            overwrite=writing.overwrite,
            console=terminal.console(stderr=True),
        )
        for name, value in result.totals.items():
            typer.echo(f"{name:24} {value:.4f}" if isinstance(value, float) else f"{name:24} {value}")
        typer.echo(f"{'answers':24} {output / evaluation.PREDICTIONS}")

    use_model(answer, model, loading, mesh=mesh)
