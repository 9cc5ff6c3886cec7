"""The page that makes data: documents and uploads, a recipe of data, templates, the plan, and the records."""

from __future__ import annotations

import itertools
import json
import os
import pathlib
import re
from collections.abc import Callable
from typing import Any

from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Route

from meshtune.board import queue
from meshtune.board.answers import Answer, body_of, problems_of
from meshtune.board.follow import plain
from meshtune.board.job import Job, read_jobs, read_json
from meshtune.board.recipe_text import Change, change_of, change_recipe, content_of
from meshtune.board.routes.recipe import MAX_CHANGES, MAX_TEXT, text_of
from meshtune.board.routes.results import file_below
from meshtune.board.state import BoardState
from meshtune.board.uploads import document_files, receive_document
from meshtune.board.workspace import Workspace, checked_data_recipe, template_of_kind
from meshtune.config.data_recipe import (
    DataRecipe,
    KindSection,
    Template,
    parse_template,
    template_names,
    template_text,
    written_out,
)
from meshtune.errors import UserError
from meshtune.synth.card import COUNTS, RECORD_FILES, REPORT
from meshtune.synth.documents import DOCUMENT_TYPES
from meshtune.synth.kinds import Kind

TEMPLATES = "templates"  # below the root
TEMPLATE_NAME = re.compile(r"[A-Za-z0-9][\w-]{0,60}")
MOST_TEMPLATES = 200
ROWS = 20  # of a page of records


def generate_routes(state: BoardState) -> list[BaseRoute]:
    """Routes of /api/generate and below."""
    workspace = state.workspace

    async def form(_: Request) -> Response:
        kinds = [
            {"name": name, **template_fields(parse_template(template_text(name), name))} for name in template_names()
        ]
        rights = {"runs_code": workspace.runs_code, "types": list(DOCUMENT_TYPES)}
        return Answer({"schema": DataRecipe.model_json_schema(), "kinds": kinds, **rights})

    async def files(_: Request) -> Response:
        return Answer({"files": await run_in_threadpool(document_files, workspace)})

    async def upload(request: Request) -> Response:
        path = await receive_document(workspace, request.query_params.get("name", ""), request.stream())
        return Answer({"path": workspace.shown(path), "bytes": path.stat().st_size}, 201)

    def apply_changes(body: dict[str, Any]) -> dict[str, Any]:
        text, changes = text_of(body, "recipe"), body.get("changes") or []
        if not isinstance(changes, list) or len(changes) > MAX_CHANGES:
            problem = f"the changes are not a list of at most {MAX_CHANGES}"
            raise UserError(problem, where="changes", fix='send [{"path": "seed", "value": 1}]')
        try:
            text = change_recipe(text, list(map(change_of, changes)), written_out)
            content = content_of(text)
            values = written_out(content)
            if body.get("name_output") and "output" not in content:
                values["output"] = propose_folder(workspace, values.get("documents"))
                text = change_recipe(text, [Change(("output",), values["output"])], written_out)
        except UserError as error:
            return {"recipe": text, "values": None, "problems": problems_of(error), "templates": {}}
        answer = {"recipe": text, "values": values, "problems": [], "templates": templates_of(workspace, values)}
        try:
            if content:
                checked_data_recipe(workspace, text)
        except UserError as error:
            answer["problems"] = problems_of(error)
        return answer

    async def edit(request: Request) -> Response:
        return Answer(await run_in_threadpool(apply_changes, await body_of(request)))

    async def templates(_: Request) -> Response:
        return Answer({"files": await run_in_threadpool(own_templates, workspace)})

    async def save(request: Request) -> Response:
        body = await body_of(request)
        return Answer({"path": await run_in_threadpool(save_template, workspace, body)}, 201)

    async def plan(request: Request) -> Response:
        body = await body_of(request)
        text = text_of(body, "recipe")
        await run_in_threadpool(checked_data_recipe, workspace, text)
        answer = await state.planner.ask({"work": "generate", "recipe": text}, str(body.get("page") or "")[:100])
        return Answer(answer, 400 if answer.get("problems") else 200)

    def show(job: Job, _: Request) -> Response:
        output = _output(job)
        report, counts = read_json(output / REPORT), read_json(output / COUNTS)
        return Answer({"folder": workspace.shown(output), "counts": plain(counts or report), "ended": not counts})

    def records(job: Job, request: Request) -> Response:
        name, start = request.query_params.get("file", ""), request.query_params.get("start", "0")
        if name not in RECORD_FILES or not re.fullmatch("[0-9]{1,9}", start):
            fix = f"give one of {', '.join(RECORD_FILES)}, and the number of a record"
            raise UserError("there are no such records", where="file", fix=fix)
        rows, more = read_rows(file_below(_output(job), name), int(start))
        return Answer({"rows": rows, "next": int(start) + ROWS if more else None})

    def _output(job: Job) -> pathlib.Path:
        if job.output is None or job.request.kind != "data":
            raise UserError(f"job {job.id} makes no data", fix="look at its log")
        return workspace.to_read(str(job.output), "output")

    def of_job(answer: Callable[[Job, Request], Response]) -> Callable[[Request], Any]:
        async def handle(request: Request) -> Response:
            job = await run_in_threadpool(queue.find, workspace, request.path_params["job"])
            return await run_in_threadpool(answer, job, request)

        return handle

    return [
        Route("/api/generate/form", form),
        Route("/api/generate/files", files),
        Route("/api/generate/upload", upload, methods=["POST"]),
        Route("/api/generate/recipe", edit, methods=["POST"]),
        Route("/api/generate/templates", templates),
        Route("/api/generate/templates", save, methods=["POST"]),
        Route("/api/generate/plan", plan, methods=["POST"]),
        Route("/api/generate/jobs/{job}", of_job(show)),
        Route("/api/generate/jobs/{job}/records", of_job(records)),
    ]


def template_fields(template: Template) -> dict[str, Any]:
    """The template as the page shows it with its text: its purpose, its subject, and its options with defaults."""
    return {"about": template.about, "of": template.of, "options": template.options}


def templates_of(workspace: Workspace, values: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """{"about", "of", "options", "text"} of the templates that a recipe names; {"problems"} of wrong ones."""
    kinds = values.get("kinds")
    names = [kind.get("template") for kind in kinds if isinstance(kind, dict)] if isinstance(kinds, list) else []
    templates: dict[str, dict[str, Any]] = {}
    for name in names:
        if not isinstance(name, str):
            continue
        try:
            template = template_of_kind(workspace, name)
            path = name if name in template_names() else str(workspace.to_read(name))
            templates[name] = {**template_fields(template), "text": template_text(path)}
        except UserError as error:
            templates[name] = {"problems": problems_of(error)}
    return templates


def own_templates(workspace: Workspace) -> list[str]:
    """The templates that were saved below the root."""
    return sorted(map(workspace.shown, (workspace.root / TEMPLATES).glob("*.yaml")))[:MOST_TEMPLATES]


def save_template(workspace: Workspace, body: dict[str, Any]) -> str:
    """Writes {"name", "text"} below ROOT/templates, over a template of that name with "replace"; returns its path.

    Raises: UserError for a text that is no template.
    """
    name, text = body.get("name"), body.get("text")
    if not isinstance(name, str) or not TEMPLATE_NAME.fullmatch(name):
        raise UserError("this is no name of a template", where="name", fix="use letters, digits, - and _")
    if not isinstance(text, str) or len(text) > MAX_TEXT:
        raise UserError(f"this is no text of at most {MAX_TEXT} characters", where="text", fix="write a template")
    path = workspace.to_write(f"{TEMPLATES}/{name}.yaml", "name")
    shown = workspace.shown(path)
    Kind(KindSection(template=shown), parse_template(text, shown))
    if path.exists() and not body.get("replace"):
        raise UserError(f"there is a template {shown}", where="name", fix="give another name")
    path.parent.mkdir(exist_ok=True)
    draft = path.with_name(f".{path.name}.{os.getpid()}.partial")
    draft.write_text(text, encoding="utf-8")
    os.replace(draft, path)
    return shown


def propose_folder(workspace: Workspace, documents: object) -> str:
    """A folder for records, named after the first document."""
    first = documents[0] if isinstance(documents, list) and documents else ""
    name = re.sub(r"[^\w.-]+", "-", pathlib.PurePosixPath(str(first)).stem).strip(".-")[:60] or "data"
    planned = {job.output for job in read_jobs(workspace.jobs)}
    for number in itertools.count(1):
        path = workspace.root / "made" / f"{name}-{number}"
        if not path.exists() and path not in planned:
            return workspace.shown(path)
    raise AssertionError


def read_rows(path: pathlib.Path, start: int) -> tuple[list[dict[str, Any]], bool]:
    """ROWS records from number `start` on, and whether there are more; broken lines are left out."""
    with path.open(encoding="utf-8", errors="replace") as file:
        lines = list(itertools.islice(file, start, start + ROWS + 1))
    rows: list[dict[str, Any]] = []
    for line in lines[:ROWS]:
        try:
            row = json.loads(line)
        except (ValueError, RecursionError):
            continue
        if isinstance(row, dict):
            rows.append(plain(row))
    return rows, len(lines) > ROWS
