"""Runs side by side: the keys in which their recipes differ, and their figures."""

from __future__ import annotations

import json
import pathlib
from typing import Any

from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Route

from meshtune.board import follow, queue
from meshtune.board.answers import Answer
from meshtune.board.job import RECIPE, Job
from meshtune.board.recipe_text import content_of
from meshtune.board.state import BoardState
from meshtune.config.sections import SourceSection
from meshtune.errors import UserError
from meshtune.train.report.metrics_log import METRICS

MAX_RUNS = 8
UNINTERESTING = ("output",)
SOURCES = ("data.train", "data.validation")


def compare_routes(state: BoardState) -> list[BaseRoute]:
    """GET /api/compare?job=...&job=..."""

    def compared(names: list[str]) -> dict[str, Any]:
        if not 1 <= len(names) <= MAX_RUNS:
            raise UserError(f"{len(names)} runs cannot be compared", where="job", fix=f"choose 1 to {MAX_RUNS}")
        jobs = [queue.find(state.workspace, name) for name in names]
        recipes = [_recipe(job) for job in jobs]
        keys = sorted({key for recipe in recipes for key in recipe} - set(UNINTERESTING))
        differing = [
            {"key": key, "values": [_without_defaults(key, recipe.get(key)) for recipe in recipes]}
            for key in keys
            if len({json.dumps(recipe.get(key), sort_keys=True, default=str) for recipe in recipes}) > 1
        ]
        runs = [{**state.describe(job), "figures": _figures(job)} for job in jobs]
        return {"runs": runs, "keys": differing}

    async def compare(request: Request) -> Response:
        names = request.query_params.getlist("job")
        return Answer(await run_in_threadpool(compared, names))

    return [Route("/api/compare", compare)]


def _recipe(job: Job) -> dict[str, Any]:
    """Every key of a job's recipe, as `optimizer.learning_rate`: resolved by the run, or else as it was sent."""
    places = [*([job.output / RECIPE] if job.output is not None else []), job.folder / RECIPE]
    for path in places:
        try:
            return dict(_flat(content_of(path.read_text(encoding="utf-8"))))
        except (OSError, UnicodeDecodeError, UserError):
            continue
    return {}


def _flat(value: Any, prefix: str = "") -> list[tuple[str, Any]]:
    if isinstance(value, dict) and value:
        return [pair for key, inner in value.items() for pair in _flat(inner, f"{prefix}.{key}".strip("."))]
    return [(prefix, value)]


def _without_defaults(key: str, value: Any) -> Any:
    """A source of records by its path and the keys that are not at their defaults; other values unchanged."""
    if key not in SOURCES or not isinstance(value, list):
        return value
    try:
        sources = [SourceSection.model_validate(entry).model_dump(exclude_defaults=True) for entry in value]
    except ValueError:  # of pydantic
        return value
    return [source["path"] if set(source) == {"path"} else source for source in sources]


def _figures(job: Job) -> dict[str, Any]:
    """A run's losses, updates and seconds; absent where there are none yet."""
    if job.output is None:
        return {}
    with follow.reading_run(job.output):
        return _figures_of(job.output, job.exit.get("seconds"))


def _figures_of(output: pathlib.Path, seconds: Any) -> dict[str, Any]:
    run = follow.run_json(output)
    best, measured = run.get("best"), (run.get("prediction") or {}).get("measured") or {}
    rows = _evaluations(output)
    return {
        "step": run.get("step"),
        "loss": run.get("smoothed_loss", run.get("loss")),
        "validation": rows[-1].get("loss") if rows else None,
        "first_validation": rows[0].get("loss") if rows else None,
        "best": best.get("loss") if isinstance(best, dict) else None,
        "trained_tokens": (run.get("trained_on") or {}).get("trained_tokens"),
        "device_bytes": measured.get("device_bytes"),
        "step_seconds": measured.get("step_seconds"),
        "seconds": seconds,
    }


def _evaluations(output: pathlib.Path) -> list[dict[str, Any]]:
    return [row for row in follow.all_rows(output, METRICS)["rows"] if row.get("kind") == "eval"]
