"""`meshtune export` and `meshtune push`: results for other tools and the hub."""

from __future__ import annotations

import re
from typing import Annotated

import typer

from meshtune.cli.model_options import check_source
from meshtune.errors import UserError

UNITS = {"B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30}


def export(
    source: Annotated[
        str,
        typer.Argument(
            metavar="RUN|ADAPTER|MODEL",
            help="What to export. RUN@best and RUN@STEP are states that a run keeps.",
            show_default=False,
        ),
    ],
    to: Annotated[
        str, typer.Option("--to", help="The directory (with --gguf: the file) to write.", show_default=False)
    ],
    merge: Annotated[
        bool, typer.Option("--merge", help="Fold an adapter into its base and write a whole model.")
    ] = False,
    into: Annotated[
        str | None,
        typer.Option(
            "--into",
            help="With --merge, of a quantised base's adapter: dequantised (what it was trained on; the default) "
            "or full (the base as published).",
        ),
    ] = None,
    format: Annotated[
        str | None,
        typer.Option(
            "--format",
            help="bitsandbytes (nf4) or compressed-tensors (int4): a checkpoint in codes, of a model, of the base that "
            "an adapter was trained over, or, with --merge, of both; published, with --merge: a base published in "
            "fp8 or mxfp4 in its format again (default: wide, in --dtype).",
        ),
    ] = None,
    gguf: Annotated[
        str | None,
        typer.Option(
            "--gguf",
            metavar="TYPE",
            help="Write --to as a GGUF file for llama.cpp and Ollama: F32, F16, BF16, Q8_0, Q6_K, Q5_K_M, Q4_K_M or "
            "Q4_0. Of an adapter without --merge: a LoRA GGUF, in F32, F16 or BF16.",
        ),
    ] = None,
    base: Annotated[str | None, typer.Option("--base", help="The adapter's base, if it lies elsewhere now.")] = None,
    max_shard_size: Annotated[str, typer.Option("--max-shard-size", help="Of a merged model's files.")] = "5GB",
    dtype: Annotated[str | None, typer.Option("--dtype", help="Of a merged model; default: its base's.")] = None,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace what --to holds.")] = False,
) -> None:
    """Write a PEFT adapter or a whole model for transformers, or a GGUF file, and verify it by reading it back."""
    size = shard_bytes(max_shard_size)
    for path in filter(None, (source, base)):
        check_source(path)
    from meshtune.runs.export import export as write
    from meshtune.runs.export_gguf import modelfile_of
    from meshtune.runs.progress import shown_progress

    if into is not None and not merge:
        raise UserError("--into says what an adapter is merged into", where="--into", fix="add --merge")
    if format == "published" and not merge:
        raise UserError("--format published is for whole models", where="--format", fix="add --merge")
    with shown_progress() as (progress, finish):
        exported = write(
            source,
            to,
            merge=merge,
            into=into,
            format=format,
            base=base,
            max_shard_bytes=size,
            dtype=dtype,
            overwrite=overwrite,
            gguf=gguf,
            progress=progress,
        )
        finish(str(exported.path))
    if gguf is not None:
        print(f"{exported.what} written to {exported.path}: {exported.verified}")
        print(f"for Ollama: ollama create NAME -f {modelfile_of(exported.path)}")
    else:
        print(f"{exported.what} written to {exported.path}, read back and compared: {exported.verified}")


def shard_bytes(text: str) -> int:
    """Bytes of `5GB`, `500 MB`, `2GiB`, or a plain number. Raises UserError for anything else."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([kmg]?i?b)?", text.strip(), re.IGNORECASE)
    unit = UNITS.get((match[2] or "B").upper()) if match else None
    size = int(float(match[1]) * unit) if match and unit else 0
    if size <= 0:
        raise UserError(f"'{text}' is not a size", where="--max-shard-size", fix="write it as 5GB or 500MB")
    return size


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
