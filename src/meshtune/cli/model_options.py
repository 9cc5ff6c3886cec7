"""Options that `generate` and `chat` share."""

from __future__ import annotations

from typing import Annotated

import typer

ModelPath = Annotated[
    str, typer.Argument(metavar="MODEL", help="A model directory, a hub id, an adapter, or a run.", show_default=False)
]
Adapter = Annotated[str | None, typer.Option("--adapter", help="A PEFT adapter, or a run, to put on MODEL.")]
Revision = Annotated[str | None, typer.Option("--revision", help="Branch, tag or commit on the hub.")]
Template = Annotated[
    str | None, typer.Option("--chat-template", help="A Jinja file, or a template that ships with Meshtune.")
]
Dtype = Annotated[str | None, typer.Option("--dtype", help="float32 or bfloat16; default: by device.")]
Quantize = Annotated[
    str, typer.Option("--quantize", help="Of the base: nf4, int8, fp8, int4 or none; auto: as the adapter was trained.")
]
MaxTokens = Annotated[int | None, typer.Option("--max-tokens", "-n", min=1, help="New tokens at most; default 256.")]
Stop = Annotated[list[str] | None, typer.Option("--stop", help="Text that ends the answer; may be repeated.")]
Temperature = Annotated[float, typer.Option("--temperature", "-t", help="0 takes the likeliest token.")]
TopK = Annotated[int, typer.Option("--top-k", help="Only the k likeliest tokens; 0 is off.")]
TopP = Annotated[float, typer.Option("--top-p", help="Only the likeliest tokens up to this probability; 1 is off.")]
MinP = Annotated[float, typer.Option("--min-p", help="Only tokens this likely, relative to the likeliest; 0 is off.")]
Penalty = Annotated[float, typer.Option("--repetition-penalty", help="Above 1 repeats less; 1 is off.")]
Seed = Annotated[int, typer.Option("--seed", help="The same seed gives the same text.")]
