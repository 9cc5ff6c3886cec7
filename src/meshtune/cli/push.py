"""`meshtune push`: a run, adapter, model or GGUF file to the Hugging Face hub, with a model card."""

from __future__ import annotations

from typing import Annotated

import typer

from meshtune.cli.model_options import check_source
from meshtune.errors import UserError


def push(
    source: Annotated[
        str,
        typer.Argument(
            metavar="RUN|ADAPTER|MODEL|GGUF", help="What to push, RUN@best and RUN@STEP among it.", show_default=False
        ),
    ],
    repository: Annotated[str, typer.Argument(metavar="USER/NAME", help="Where to.", show_default=False)],
    public: Annotated[bool, typer.Option("--public", help="Everybody may see it (default: private).")] = False,
    merge: Annotated[bool, typer.Option("--merge", help="Merge the adapter first and push a whole model.")] = False,
    into: Annotated[str | None, typer.Option("--into", help="With --merge, as of `meshtune export`.")] = None,
    format: Annotated[str | None, typer.Option("--format", help="With --merge, as of `meshtune export`.")] = None,
    base: Annotated[str | None, typer.Option("--base", help="The adapter's base, if it lies elsewhere now.")] = None,
    gguf: Annotated[str | None, typer.Option("--gguf", help="Push GGUF of this type, as `meshtune export`.")] = None,
    base_model: Annotated[
        str | None, typer.Option("--base-model", help="The base's id on the hub, if its folder does not say it.")
    ] = None,
    run: Annotated[
        str | None, typer.Option("--run", help="The run that made a GGUF file or a model, for its card.")
    ] = None,
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="Also into a repository with other files; they stay.")
    ] = False,
) -> None:
    """Push an adapter, a model or GGUF files to the Hugging Face hub as one commit, with a model card."""
    check_source(source)

    from huggingface_hub.utils import disable_progress_bars

    from meshtune.hub.push import push as send
    from meshtune.runs.progress import shown_progress

    if not merge and (into is not None or format is not None):
        raise UserError("--into and --format are of merged models", where="--into, --format", fix="add --merge")
    if gguf is not None and format is not None:
        raise UserError("--gguf and --format are two formats", where="--gguf, --format", fix="give one of the two")
    disable_progress_bars()  # the stages have a bar of their own
    with shown_progress() as (progress, finish):
        pushed = send(
            source,
            repository,
            merge=merge,
            into=into,
            format=format,
            base=base,
            gguf=gguf,
            base_model=base_model,
            run=run,
            public=public,
            overwrite=overwrite,
            report=print,
            progress=progress,
        )
        finish(pushed.url)
    if pushed.left_out:
        print(f"not sent (no weights, no tokenizer): {', '.join(pushed.left_out)}")
    count, commit = len(pushed.files), pushed.commit[:12]
    done = f"pushed {count} files as one commit, {commit}" if pushed.changed else f"nothing has changed since {commit}"
    print(f"{done}: {pushed.url}")
