"""`meshtune serve`: a model, and adapters over it, behind an API that OpenAI's clients speak."""

from __future__ import annotations

import logging
import os
import pathlib
import secrets
import sys
from typing import Annotated

import typer

from meshtune.cli.expand import expanded
from meshtune.cli.listen import KEEP_ALIVE, LOOPBACK, LOOPBACK_HOSTS, listener_at, url
from meshtune.cli.model_options import BaseLoading, Caching, MeshSizes, ModelPath, check_source, parse_mesh
from meshtune.errors import UserError, pip_install

EXTRA = pip_install("serve")


@expanded()
def serve(
    model: ModelPath,
    mesh: MeshSizes = None,
    *,
    adapters: Annotated[
        list[str] | None,
        typer.Option("--adapter", metavar="NAME=PATH", help="An adapter or a run over MODEL; may be repeated."),
    ] = None,
    name: Annotated[str | None, typer.Option("--name", help="The id of MODEL; default: its path.")] = None,
    host: Annotated[str, typer.Option("--host", help="The address; any but this machine's own needs a token.")] = (
        "127.0.0.1"
    ),
    port: Annotated[int, typer.Option("--port", min=0, max=65535, help="0: any that is free.")] = 8000,
    token: Annotated[str | None, typer.Option("--token", help="What clients must send as bearer token.")] = None,
    token_file: Annotated[
        pathlib.Path | None,
        typer.Option("--token-file", help="A file with the token; where there is none, it is written with a new one."),
    ] = None,
    cors_origin: Annotated[
        list[str] | None, typer.Option("--cors-origin", help="A site whose pages may call; may be repeated.")
    ] = None,
    rows: Annotated[int, typer.Option("--rows", min=1, help="Requests computed at once, of each batch.")] = 8,
    queue: Annotated[int, typer.Option("--queue", min=0, help="Requests that may wait, for each batch.")] = 256,
    merge: Annotated[
        bool | None,
        typer.Option(
            "--merge/--no-merge",
            help="Whether an adapter that is alone is merged into a copy of its weights; default: if the base is not "
            "quantised and memory allows it.",
            show_default=False,
        ),
    ] = None,
    log_requests: Annotated[bool, typer.Option("--log-requests", help="Write a line for each request.")] = False,
    loading: BaseLoading,
    caching: Caching,
) -> None:
    """Answer requests of OpenAI's API: chat and text completions, streamed or whole."""
    try:
        import uvicorn
    except ImportError as problem:
        raise UserError("serving needs starlette and uvicorn", fix=EXTRA) from problem
    named = _named(adapters or [])
    check_source(model, *named.values())
    from meshtune.generate.driver import run_on_all
    from meshtune.generate.program_cache import keep_programs
    from meshtune.mesh.processes import start
    from meshtune.serve.app import create_app
    from meshtune.serve.connection import Limits
    from meshtune.serve.gate import DRAIN_SECONDS, Gate
    from meshtune.serve.guard import parse_site
    from meshtune.serve.models import Models, load_served
    from meshtune.serve.server import Server

    local = host in LOOPBACK
    if token_file is not None:
        if token is not None:
            raise UserError("the token is given twice", where="--token, --token-file", fix="give one of the two")
        token = _token_in(token_file.expanduser())
    elif token is None and not local:
        token = secrets.token_urlsafe(24)
    origins = set(cors_origin or [])
    for origin in origins:
        parse_site(origin)
    sizes = parse_mesh(mesh, model)
    options = {"log_level": logging.INFO if log_requests else logging.WARNING, "access_log": log_requests}

    with start() as job:
        keep_programs()
        # Not in the processes that follow: clients talk to process 0.
        listener = listener_at(host, port) if job.is_main_process else None
        served = load_served(model, name, named, mesh=sizes, merge=merge, job=job, **vars(loading), **vars(caching))

        def answer() -> None:
            assert listener is not None
            models = Models(served, rows=rows, queue=queue)
            hosts = LOOPBACK_HOSTS if local else set()
            gate = Gate()
            app = create_app(models, token=token, hosts=hosts, origins=origins, gate=gate)
            address = f"{url(host, listener)}/v1"

            def ready() -> None:
                typer.echo(f"address  {address}")
                for line in models.banner():
                    typer.echo(line)
                typer.echo(
                    f"token    {token or 'none is needed'}" if token_file is None else f"token    in {token_file}"
                )
                sys.stdout.flush()

            models.warm_up()
            config = uvicorn.Config(
                app,
                timeout_graceful_shutdown=5,
                # Above what clients have: one that sends its next request as the server closes the connection loses it.
                timeout_keep_alive=KEEP_ALIVE,
                **options,
            )
            limits = Limits(connections=max(Limits.connections, queue + rows + 100))
            server = Server(config, gate, ready, limits)
            server.run(sockets=[listener])
            if server.unanswered:
                typer.echo(f"requests without an answer after {DRAIN_SECONDS:g} s: {server.unanswered}", err=True)

        run_on_all(job, list(served.values()), answer)


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


def _named(adapters: list[str]) -> dict[str, str]:
    """Adapters by name. Raises UserError for what is not NAME=PATH, and for a name that is given twice."""
    named: dict[str, str] = {}
    for text in adapters:
        name, equals, path = text.partition("=")
        if not (equals and name and path):
            raise UserError(f"'{text}' is not NAME=PATH", where="--adapter", fix="write --adapter polite=runs/polite")
        if name in named:
            raise UserError(f"the name '{name}' is given twice", where="--adapter", fix="give each adapter its own")
        named[name] = path
    return named
