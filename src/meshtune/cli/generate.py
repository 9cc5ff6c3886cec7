"""`meshtune generate` and `meshtune chat`."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Annotated, Any

import typer

from meshtune.cli.expand import expand_options
from meshtune.cli.model_options import Caching, Limits, Loading, MeshSizes, ModelPath, use_model
from meshtune.errors import UserError
from meshtune.generate.request import Sampling

if TYPE_CHECKING:
    from PIL.Image import Image
    from rich.console import Console

    from meshtune.generate.api import Model
    from meshtune.generate.chat import ChatSession


@expand_options()
def generate(
    model: ModelPath,
    mesh: MeshSizes = None,
    *,
    prompt: Annotated[
        list[str] | None, typer.Option("--prompt", "-p", help="May be repeated; - or none: read from standard input.")
    ] = None,
    chat: Annotated[
        bool | None,
        typer.Option(
            "--chat/--no-chat",
            help="Whether the prompt is a user's message, rendered by the chat template, or text to continue. "
            "Default: a message for a model that has a chat template.",
            show_default=False,
        ),
    ] = None,
    system: Annotated[str | None, typer.Option("--system", help="System prompt; implies --chat.")] = None,
    image: Annotated[
        list[str] | None,
        typer.Option("--image", metavar="FILE", help="A picture before the message; implies --chat; may be repeated."),
    ] = None,
    limits: Limits,
    sampling: Sampling,
    loading: Loading,
    caching: Caching,
) -> None:
    """Answer a message, or continue a text, and print only what the model says."""
    if image and chat is False:
        raise UserError("a picture goes into a message", where="--no-chat", fix="leave --no-chat out")
    pictures = [_read_picture(path) for path in image or []]
    prompts = [sys.stdin.read() if text == "-" else text for text in prompt or ["-"]]

    def answer(loaded: Model) -> None:
        _answer(loaded, prompts, chat, system, pictures, **vars(limits), **vars(sampling))

    use_model(answer, model, loading, caching, mesh)


def _read_picture(path: str) -> Image:
    """The picture of a file. Raises UserError where it cannot be read: before a model is loaded."""
    from meshtune.data.pictures.files import decode_picture, read_size
    from meshtune.generate.pictures import picture_file

    where = f"--image {path}"
    content = picture_file(path, where)
    read_size(content, where)
    return decode_picture(content, where)


def _answer(
    loaded: Model, prompts: list[str], chat: bool | None, system: str | None, pictures: list[Image], **options: Any
) -> None:
    is_message = bool(system or pictures) or (_has_chat_template(loaded) if chat is None else chat)
    if is_message and chat is None and not system and not pictures:
        print("note: the prompt is a message in the model's chat template; --no-chat continues it", file=sys.stderr)
    for text in prompts:
        request = _conversation(text, system, pictures) if is_message else text
        for piece in loaded.stream(request, **options):
            print(piece, end="", flush=True)
        print()


def _has_chat_template(model: Model) -> bool:
    return bool(model.tokenizer.chat_template)


def _conversation(text: str, system: str | None, pictures: list[Image]) -> list[dict[str, Any]]:
    messages = [{"role": "system", "content": system}] if system else []
    parts = [{"type": "image", "image": picture} for picture in pictures]
    return [*messages, {"role": "user", "content": [*parts, {"type": "text", "text": text}] if parts else text}]


IMAGE = "/image "
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
        sees = "" if loaded.picture_reader is None else f"{IMAGE}FILE adds a picture to the next message, "
        terminal.print(f"{sees}{COMMANDS}", style="dim", markup=False, soft_wrap=True)
        _converse(session, terminal)

    use_model(talk, model, loading, caching, mesh)


def _converse(session: ChatSession, terminal: Console) -> None:
    pictures = []
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
            pictures = []
        elif message.startswith(IMAGE):
            try:
                pictures.append(session.load(message.removeprefix(IMAGE).strip()))
            except UserError as problem:
                terminal.print(str(problem), style="yellow", markup=False, soft_wrap=True)
        elif message.startswith("/"):
            terminal.print(COMMANDS, style="dim", markup=False, soft_wrap=True)
        elif message:
            shown, pictures = pictures, []
            try:
                for piece in session.stream(message, shown):
                    terminal.print(piece, end="", markup=False, soft_wrap=True)
            except KeyboardInterrupt:
                terminal.print(" [stopped]", style="dim", markup=False, end="")
            terminal.print()
