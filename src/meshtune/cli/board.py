"""`meshtune board`: a page for tuning, watching and trying models, over the files of the runs."""

from __future__ import annotations

import logging
import os
import pathlib
import secrets
import sys
from typing import Annotated

import typer

from meshtune.cli.listen import KEEP_ALIVE, LOOPBACK, LOOPBACK_HOSTS, listener_at, url
from meshtune.errors import UserError, pip_install

BOARD_EXTRA = pip_install("serve")
TOKEN = "token"  # the file of a token that was drawn, so that browsers stay signed in over a restart


def board(
    root: Annotated[
        pathlib.Path,
        typer.Option("--root", help="The directory that recipes count their paths from; runs go below it."),
    ] = pathlib.Path(),
    host: Annotated[str, typer.Option("--host", help="The address; any but this machine's own needs a token.")] = (
        "127.0.0.1"
    ),
    port: Annotated[int, typer.Option("--port", min=0, max=65535, help="0: any that is free.")] = 7860,
    token: Annotated[
        str | None, typer.Option("--token", help="What browsers must know; default: drawn once where one is needed.")
    ] = None,
    read: Annotated[
        list[pathlib.Path] | None,
        typer.Option("--read", metavar="DIR", help="Another directory of models or data; may be repeated."),
    ] = None,
) -> None:
    """Tune in the browser: start runs, watch them, compare them, talk to them.

    Runs are processes of their own: they go on when the page or the board is closed.
    """
    try:
        import uvicorn
    except ImportError as problem:
        raise UserError("the board needs starlette and uvicorn", fix=BOARD_EXTRA) from problem
    from meshtune import quickstart
    from meshtune.board.app import create_app
    from meshtune.board.queue import start_next
    from meshtune.board.workspace import workspace_at
    from meshtune.serve.gate import Gate
    from meshtune.serve.server import Server

    workspace = workspace_at(root, (quickstart.DIRECTORY, *(read or [])))
    os.chdir(workspace.root)  # relative paths of a request are those that were checked
    local = host in LOOPBACK
    if token is None and not local:
        token = _kept_token(workspace.folder / TOKEN)
    listener = listener_at(host, port)
    gate = Gate()
    cookie = f"meshtune-{listener.getsockname()[1]}"  # cookies of one host are shared by all its ports
    app = create_app(workspace, token=token, hosts=LOOPBACK_HOSTS if local else set(), gate=gate, cookie=cookie)
    start_next(workspace)

    def ready() -> None:
        address = url(host, listener)
        typer.echo(f"board    {address}{f'/sign-in?token={token}' if token else ''}")
        typer.echo(f"root     {workspace.root}")
        sys.stdout.flush()

    config = uvicorn.Config(
        app, timeout_graceful_shutdown=2, timeout_keep_alive=KEEP_ALIVE, log_level=logging.WARNING, access_log=False
    )
    Server(config, gate, ready).run(sockets=[listener])


def _kept_token(path: pathlib.Path) -> str:
    """The token in a file that only this user can read, which is drawn the first time."""
    try:
        token = path.read_text(encoding="ascii").strip()
        if token:
            return token
    except FileNotFoundError:
        pass
    token = secrets.token_urlsafe(24)
    with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w", encoding="ascii") as file:
        file.write(token)
    return token
