"""`meshtune chat`: talk to a model, an adapter or a run."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

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

if TYPE_CHECKING:
    from rich.console import Console

    from meshtune.generate.chat import ChatSession

COMMANDS = "/reset forgets the conversation, /exit or Ctrl-D leaves, Ctrl-C stops an answer"


def chat(
    model: ModelPath,
    system: Annotated[str | None, typer.Option("--system", help="System prompt.")] = None,
    adapter: Adapter = None,
    max_tokens: MaxTokens = None,
    temperature: Temperature = 0.7,
    top_k: TopK = 0,
    top_p: TopP = 0.95,
    min_p: MinP = 0.0,
    repetition_penalty: Penalty = 1.0,
    seed: Seed = 0,
    stop: Stop = None,
    revision: Revision = None,
    chat_template: Template = None,
    dtype: Dtype = None,
    quantize: Quantize = "auto",
) -> None:
    """Chat with a model: it remembers the conversation and answers word by word."""
    from rich.console import Console

    from meshtune.generate.api import load

    console = Console(highlight=False)
    loaded = load(
        model,
        adapter,
        dtype=dtype,  # pyright: ignore[reportArgumentType]
        quantize=quantize,
        revision=revision,
        chat_template=chat_template,
    )
    session = loaded.chat(
        system,
        max_tokens=max_tokens,
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        min_p=min_p,
        repetition_penalty=repetition_penalty,
        seed=seed,
        stop=tuple(stop or ()),
        overflow="drop_oldest",
        notify=lambda notice: console.print(notice, style="yellow", markup=False),
    )
    console.print(COMMANDS, style="dim", markup=False)
    _converse(session, console)


def _converse(session: ChatSession, console: Console) -> None:
    while True:
        try:
            words = console.input("[bold cyan]you:[/] ").strip()
        except (EOFError, KeyboardInterrupt):
            console.print()
            return
        if words in ("/exit", "/quit"):
            return
        if words == "/reset":
            session.reset()
        elif words.startswith("/"):
            console.print(COMMANDS, style="dim", markup=False)
        elif words:
            try:
                for piece in session.stream(words):
                    console.print(piece, end="", markup=False, soft_wrap=True)
            except KeyboardInterrupt:
                console.print(" [stopped]", style="dim", markup=False, end="")
            console.print()
