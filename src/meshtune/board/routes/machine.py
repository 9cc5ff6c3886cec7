"""What this machine is: its devices, folders, and the version."""

from __future__ import annotations

import dataclasses
import importlib.metadata
import platform
import shutil

from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Route

from meshtune.board import slurm
from meshtune.board.answers import Answer
from meshtune.board.devices import devices
from meshtune.board.state import BoardState


def machine_routes(state: BoardState) -> list[BaseRoute]:
    """GET /api/machine."""

    async def machine(_: Request) -> Response:
        usage = shutil.disk_usage(state.workspace.root)
        return Answer(
            {
                "version": importlib.metadata.version("meshtune"),
                "host": platform.node(),
                "root": str(state.workspace.root),
                "readable": [str(path) for path in state.workspace.readable],
                "devices": [dataclasses.asdict(device) for device in await run_in_threadpool(devices)],
                "slurm": slurm.available(),
                "free_bytes": usage.free,
            }
        )

    return [Route("/api/machine", machine)]
