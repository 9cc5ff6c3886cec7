"""The page: files that ship with the package, and nothing from anywhere else."""

from __future__ import annotations

import pathlib

from starlette.routing import BaseRoute, Mount
from starlette.staticfiles import StaticFiles

from meshtune.board.state import BoardState

PAGE = pathlib.Path(__file__).parents[1] / "page"


def page_routes(_: BoardState) -> list[BaseRoute]:
    """Every path that is no other's."""
    return [Mount("/", StaticFiles(directory=PAGE, html=True))]
