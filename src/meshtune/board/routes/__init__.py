"""The paths of the board: a function for each part that gives its routes, and a line for it in PARTS."""

from __future__ import annotations

from starlette.routing import BaseRoute

from meshtune.board.routes.compare import compare_routes
from meshtune.board.routes.data import data_routes
from meshtune.board.routes.events import event_routes
from meshtune.board.routes.generate import generate_routes
from meshtune.board.routes.jobs import job_routes
from meshtune.board.routes.recipe import recipe_routes
from meshtune.board.routes.results import model_routes, result_routes
from meshtune.board.routes.session import machine_routes, page_routes, session_routes
from meshtune.board.routes.talk import talk_routes
from meshtune.board.state import BoardState

# The page comes last: it takes every other path.
PARTS = (
    session_routes,
    machine_routes,
    job_routes,
    event_routes,
    compare_routes,
    talk_routes,
    recipe_routes,
    data_routes,
    generate_routes,
    result_routes,
    model_routes,
    page_routes,
)


def all_routes(state: BoardState) -> list[BaseRoute]:
    """The routes of all parts."""
    return [route for routes in PARTS for route in routes(state)]
