"""The paths of the board: a module for each part, and a line for it in MODULES."""

from __future__ import annotations

from starlette.routing import BaseRoute

from meshtune.board.routes import compare, data, events, jobs, machine, models, page, recipe, results, session, talk
from meshtune.board.state import BoardState

# Each has `routes(state)`, which gives its routes. The page comes last: it takes every other path.
MODULES = (
    session,
    machine,
    jobs,
    events,
    compare,
    talk,
    recipe,
    data,
    results,
    models,
    page,
)


def all_routes(state: BoardState) -> list[BaseRoute]:
    """The routes of all modules."""
    return [route for module in MODULES for route in module.routes(state)]
