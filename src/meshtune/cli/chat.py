"""`meshtune chat`: talk to a model, an adapter or a run."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from meshtune.cli.expand import expand_options
from meshtune.cli.model_options import Caching, Limits, Loading, MeshSizes, ModelPath, use_model
from meshtune.generate.config import Sampling

if TYPE_CHECKING:
    from rich.console import Console

    from meshtune.generate.api import Model
    from meshtune.generate.chat import ChatSession

COMMANDS = "/reset forgets the conversation, /exit or Ctrl-D leaves, Ctrl-C stops an answer"


@expand_options(sampling={"temperature": 0.7, "top_p": 0.95})
def chat(
    model: ModelPath,
    mesh: MeshSizes = None,
    *,
    system: Annotated[str | None, typer.Option("--system", help="System prompt.")] = None,
    limits: Limits,
    sampling: Sampling,
    loading: Loading,
    caching: Caching,
) -> None:
    """Chat with a model: it remembers the conversation and answers word by word."""
    from meshtune.terminal import console

    terminal = console()

    def talk(loaded: Model) -> None:
        session = loaded.chat(
            system,
            **vars(limits),
            **vars(sampling),
            overflow="drop_oldest",
            notify=lambda notice: terminal.print(notice, style="yellow", markup=False),
        )
        terminal.print(COMMANDS, style="dim", markup=False, soft_wrap=True)
        _converse(session, terminal)

    use_model(talk, model, loading, caching, mesh)


def _converse(session: ChatSession, terminal: Console) -> None:
    while True:
        try:
            message = terminal.input("[bold cyan]you:[/] ").strip()
        except (EOFError, KeyboardInterrupt):
            terminal.print()
            return
        if message in ("/exit", "/quit"):
            return
        if message == "/reset":
            session.reset()
        elif message.startswith("/"):
            terminal.print(COMMANDS, style="dim", markup=False, soft_wrap=True)
        elif message:
            try:
                for piece in session.stream(message):
                    terminal.print(piece, end="", markup=False, soft_wrap=True)
            except KeyboardInterrupt:
                terminal.print(" [stopped]", style="dim", markup=False, end="")
            terminal.print()
