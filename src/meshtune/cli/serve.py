"""`meshtune serve` and `meshtune board`: servers on an address of this machine."""

from __future__ import annotations

import dataclasses
import logging
import os
import pathlib
import secrets
import socket
import sys
from typing import TYPE_CHECKING, Annotated

import typer

from meshtune.cli.expand import expand_options
from meshtune.cli.model_options import BaseLoading, Caching, MeshSizes, ModelPath, check_source, parse_mesh
from meshtune.errors import UserError, pip_install
from meshtune.options import option

if TYPE_CHECKING:
    from meshtune.generate.api import Model

LOOPBACK = ("127.0.0.1", "localhost", "::1")
LOOPBACK_HOSTS = frozenset({"127.0.0.1", "localhost", "[::1]"})  # in the Host header
KEEP_ALIVE = 75  # seconds that an idle connection stays open


def url(host: str, listener: socket.socket) -> str:
    """The address of a server that listens."""
    return f"http://{f'[{host}]' if ':' in host else host}:{listener.getsockname()[1]}"


def listener_at(host: str, port: int) -> socket.socket:
    """A socket that listens, before anything is loaded. Raises UserError where the address cannot be used."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host, port))
        listener.listen(2048)
    except (OSError, OverflowError) as problem:
        listener.close()
        reason = problem.strerror if isinstance(problem, OSError) and problem.strerror else str(problem)
        raise UserError(
            f"{host}:{port} cannot be listened on: {reason}",
            where="--host, --port",
            fix="stop what uses the port, or give another one (--port 0 takes any that is free)",
        ) from problem
    return listener


EXTRA = pip_install("serve")


@dataclasses.dataclass(frozen=True)
class ServerOptions:
    """Where a server listens, who may call it, and how many requests it takes."""

    name: str | None = option(None, "The id of MODEL; default: its path.")
    host: str = option("127.0.0.1", "The address; any but this machine's own needs a token.")
    port: int = option(8000, "0: any that is free.", ge=0, le=65535)
    token: str | None = option(None, "What clients must send as bearer token.")
    token_file: pathlib.Path | None = option(
        None, "A file with the token; if it does not exist, it is written with a new one."
    )
    cors_origin: tuple[str, ...] = option((), "A site whose pages may call; may be repeated.")
    rows: int = option(8, "Requests computed at once, of each batch.", ge=1)
    queue: int = option(256, "Requests that may wait, for each batch.", ge=0)
    merge: bool | None = option(
        None,
        "Whether a single adapter is merged into a copy of its weights; default: if the base is not quantised and "
        "memory allows it.",
        flags=("--merge/--no-merge",),
    )
    log_requests: bool = option(False, "Write a line for each request.")


@expand_options()
def serve(
    model: ModelPath,
    mesh: MeshSizes = None,
    *,
    adapters: Annotated[
        list[str] | None,
        typer.Option("--adapter", metavar="NAME=PATH", help="An adapter or a run over MODEL; may be repeated."),
    ] = None,
    server: ServerOptions,
    loading: BaseLoading,
    caching: Caching,
) -> None:
    """Answer requests of OpenAI's API: chat and text completions, streamed or in one piece."""
    try:
        import uvicorn  # noqa: F401 - before a model is loaded
    except ImportError as problem:
        raise UserError("serving needs starlette and uvicorn", fix=EXTRA) from problem
    adapter_paths = _parse_adapters(adapters or [])
    check_source(model, *adapter_paths.values())
    from meshtune.generate.driver import run_on_all
    from meshtune.mesh.processes import start
    from meshtune.serve.guard import parse_site
    from meshtune.serve.models import load_served
    from meshtune.setup.program_cache import keep_programs

    token = _token(server)
    for origin in server.cors_origin:
        parse_site(origin)
    sizes = parse_mesh(mesh, model)
    with start() as job:
        keep_programs(job.process_count)
        # Only in process 0: clients talk to it.
        listener = listener_at(server.host, server.port) if job.is_main_process else None
        options = {**vars(loading), **vars(caching), "mesh": sizes, "merge": server.merge, "job": job}
        served = load_served(model, server.name, adapter_paths, **options)

        def answer() -> None:
            assert listener is not None
            _answer_requests(served, server, token, listener)

        run_on_all(job, list(served.values()), answer)


def _answer_requests(
    served: dict[str, Model], options: ServerOptions, token: str | None, listener: socket.socket
) -> None:
    """Answers requests at `listener` until the server is stopped. Raises the error of a step that ends the server."""
    import uvicorn

    from meshtune.serve.app import create_app
    from meshtune.serve.guard import DRAIN_SECONDS, Gate
    from meshtune.serve.models import Models
    from meshtune.serve.server import Limits, Server

    models, gate = Models(served, rows=options.rows, queue=options.queue), Gate()
    hosts = LOOPBACK_HOSTS if options.host in LOOPBACK else set()
    app = create_app(models, token=token, hosts=hosts, origins=set(options.cors_origin), gate=gate)

    def ready() -> None:
        shown = f"in {options.token_file}" if options.token_file else token or "none is needed"
        for line in (f"address  {url(options.host, listener)}/v1", *models.banner(), f"token    {shown}"):
            typer.echo(line)
        sys.stdout.flush()

    models.warm_up()
    config = uvicorn.Config(
        app,
        timeout_graceful_shutdown=5,
        # Above what clients have: one that sends its next request as the server closes the connection loses it.
        timeout_keep_alive=KEEP_ALIVE,
        log_level=logging.INFO if options.log_requests else logging.WARNING,
        access_log=options.log_requests,
    )
    limits = Limits(connections=max(Limits.connections, options.queue + options.rows + 100))
    server = Server(config, gate, ready, limits, lambda: models.ended is not None)
    server.run(sockets=[listener])
    if models.ended is not None:
        typer.echo(
            "a step failed in process 0, and the other processes cannot go on without it: the server ends", err=True
        )
        raise models.ended
    if server.unanswered:
        typer.echo(f"requests without an answer after {DRAIN_SECONDS:g} s: {server.unanswered}", err=True)


def _token(options: ServerOptions) -> str | None:
    """The token that clients must send: given, of a file, or a new one for an address that others reach."""
    if options.token_file is not None:
        if options.token is not None:
            raise UserError("the token is given twice", where="--token, --token-file", fix="give one of the two")
        return _token_in(options.token_file.expanduser())
    if options.token is None and options.host not in LOOPBACK:
        return secrets.token_urlsafe(24)
    return options.token


def _token_in(path: pathlib.Path) -> str:
    """The token in a file, which is written for this user alone if it does not exist. Raises: UserError."""
    try:
        with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w", encoding="ascii") as file:
            file.write(secrets.token_urlsafe(24) + "\n")
    except FileExistsError:
        pass
    except OSError as problem:
        raise UserError(
            f"the token cannot be written: {problem.strerror}", where=f"--token-file {path}", fix="give another file"
        ) from problem
    try:
        token = path.read_text(encoding="ascii").strip()
    except (OSError, UnicodeDecodeError) as problem:
        raise UserError(
            f"the token cannot be read: {problem}", where=f"--token-file {path}", fix="give a file with a line of text"
        ) from problem
    if not token:
        raise UserError("the file is empty", where=f"--token-file {path}", fix="write the token into it, or remove it")
    return token


def _parse_adapters(adapters: list[str]) -> dict[str, str]:
    """Adapters by name. Raises UserError for text that is not NAME=PATH, and for a name that is given twice."""
    paths: dict[str, str] = {}
    for text in adapters:
        name, equals, path = text.partition("=")
        if not (equals and name and path):
            raise UserError(f"'{text}' is not NAME=PATH", where="--adapter", fix="write --adapter polite=runs/polite")
        if name in paths:
            raise UserError(f"the name '{name}' is given twice", where="--adapter", fix="give each adapter its own")
        paths[name] = path
    return paths


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
    run_code: Annotated[
        bool, typer.Option("--run-code", help="Recipes may run reward functions and tests of code, with your rights.")
    ] = False,
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
    from meshtune.serve.guard import Gate
    from meshtune.serve.server import Server

    workspace = workspace_at(root, (quickstart.DIRECTORY, *(read or [])), runs_code=run_code)
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
