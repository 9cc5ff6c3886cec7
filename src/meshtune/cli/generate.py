"""`meshtune generate`: text from a model, an adapter or a run."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from meshtune.cli.model_options import (
    Adapter,
    Dtype,
    MaxTokens,
    MinP,
    ModelPath,
    Penalty,
    Quantize,
    Revision,
    Seed,
    Stop,
    Temperature,
    Template,
    TopK,
    TopP,
)


def generate(
    model: ModelPath,
    prompt: Annotated[
        list[str] | None, typer.Option("--prompt", "-p", help="May be repeated; - or none: read from standard input.")
    ] = None,
    chat: Annotated[bool, typer.Option("--chat", help="The prompt is a user's message, not text to continue.")] = False,
    system: Annotated[str | None, typer.Option("--system", help="System prompt; implies --chat.")] = None,
    adapter: Adapter = None,
    max_tokens: MaxTokens = None,
    temperature: Temperature = 0.0,
    top_k: TopK = 0,
    top_p: TopP = 1.0,
    min_p: MinP = 0.0,
    repetition_penalty: Penalty = 1.0,
    seed: Seed = 0,
    stop: Stop = None,
    revision: Revision = None,
    chat_template: Template = None,
    dtype: Dtype = None,
    quantize: Quantize = "auto",
) -> None:
    """Continue a text, or answer a message, and print only what the model says."""
    prompts = [sys.stdin.read() if one == "-" else one for one in prompt or ["-"]]
    from meshtune.generate.api import load

    options = {
        "max_tokens": max_tokens,
        "temperature": temperature,
        "top_k": top_k,
        "top_p": top_p,
        "min_p": min_p,
        "repetition_penalty": repetition_penalty,
        "seed": seed,
        "stop": tuple(stop or ()),
    }
    loaded = load(
        model,
        adapter,
        dtype=dtype,  # pyright: ignore[reportArgumentType]
        quantize=quantize,
        revision=revision,
        chat_template=chat_template,
    )
    for text in prompts:
        asked = _conversation(text, system) if chat or system else text
        for piece in loaded.stream(asked, **options):
            print(piece, end="", flush=True)
        print()


def _conversation(text: str, system: str | None) -> list[dict[str, str]]:
    before = [{"role": "system", "content": system}] if system else []
    return [*before, {"role": "user", "content": text}]
