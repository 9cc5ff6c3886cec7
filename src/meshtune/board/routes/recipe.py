"""The Recipe page: the schema behind its form, YAML both ways, presets, recipes of other tools, and the plan."""

from __future__ import annotations

import pathlib
import tempfile
from typing import Any

from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Route

from meshtune.board import recipe_text
from meshtune.board.answers import Answer, body_of, problems_of
from meshtune.board.catalogue import propose_output
from meshtune.board.kinds import choice_of
from meshtune.board.planning import LOCAL
from meshtune.board.presets import SECTIONS, presets
from meshtune.board.recipe_text import NAME, Change, change_of, change_recipe, content_of, dump_recipe
from meshtune.board.state import BoardState
from meshtune.board.workspace import check_foreign, checked_recipe
from meshtune.config.fields import json_schema
from meshtune.config.foreign.detect import is_foreign
from meshtune.config.foreign.importer import translate
from meshtune.config.foreign.trl import OTHER_TRAINERS, TRAINERS
from meshtune.config.load import load_recipe, silent, with_current_names
from meshtune.config.recipe import DEFAULT_EPOCHS
from meshtune.config.sections import written_out
from meshtune.costs.hardware import known_devices
from meshtune.errors import UserError
from meshtune.setup.choices import learning_rate_of

RECIPE_FILES = 200  # shown of the root
MAX_CHANGES = 200
MAX_PRICE = 10**6
MAX_TEXT = 2**20  # characters of a recipe


def recipe_routes(state: BoardState) -> list[BaseRoute]:
    """Routes of /api/recipe and below, and of /api/plan."""
    workspace, planner = state.workspace, state.planner

    async def form(_: Request) -> Response:
        devices = {name: device.memory for name, device in known_devices().items()}
        return Answer({"schema": json_schema(), "presets": presets(), "devices": devices})

    def parsed(body: dict[str, Any]) -> dict[str, Any]:
        text = text_of(body, "recipe")
        try:
            if preset := body.get("preset"):
                text = with_preset(text, str(preset))
            changes = body.get("changes") or []
            if not isinstance(changes, list) or len(changes) > MAX_CHANGES:
                problem = f"the changes are not a list of at most {MAX_CHANGES}"
                raise UserError(problem, where="changes", fix='send [{"path": "seed", "value": 1}]')
            text = change_recipe(text, list(map(change_of, changes)))
            content = content_of(text)
            values = written_out(with_current_names(content, silent))
            if body.get("name_output") and "output" not in content and not is_foreign(content):
                model = values.get("model")
                output = propose_output(workspace, model if isinstance(model, dict) else {})
                text, values["output"] = change_recipe(text, [Change(("output",), output)]), output
        except UserError as error:
            return {"recipe": text, "values": None, "problems": problems_of(error)}
        answer: dict[str, Any] = {"recipe": text, "values": values, "problems": [], "foreign": is_foreign(content)}
        answer["defaults"] = _defaults(content)
        try:
            if content and not answer["foreign"]:
                checked_recipe(workspace, text)
        except UserError as error:
            answer["problems"] = problems_of(error)
        return answer

    async def edit(request: Request) -> Response:
        return Answer(await run_in_threadpool(parsed, await body_of(request)))

    def imported(body: dict[str, Any]) -> dict[str, Any]:
        devices = body.get("devices", 1)
        if type(devices) is not int:
            raise UserError("the number of devices is not a whole number", where="devices", fix="give 1 or more")
        with tempfile.TemporaryDirectory() as folder:
            path = pathlib.Path(folder) / NAME
            path.write_text(text_of(body, "text"), encoding="utf-8")
            translation = translate(
                str(path),
                devices=devices,
                is_trl=bool(body.get("trl")),
                trainer=choice_of(body, "trainer", (*TRAINERS, *OTHER_TRAINERS)),
                check=lambda content: check_foreign(workspace, "", content),
            )
            findings = [
                {"key": item.key, "verdict": item.verdict, "to": item.to, "note": item.note, "fix": item.fix}
                for item in translation.findings
            ]
            refused = bool(translation.refused)
            answer = {"tool": translation.tool, "findings": findings, "refused": refused}
            if refused:
                return answer | {"recipe": None}
            target = _new_folder(workspace.uploads, "imported") / NAME if translation.draft.files else None
            (_recipe_path, text), *beside = translation.written_files(target).items()
            for file, content in beside:
                file.write_text(content, encoding="utf-8")
                relative = workspace.shown(file)
                text = (
                    change_recipe(text, [Change(("model", "chat_template"), relative)]) if file.name in text else text
                )
            return answer | {"recipe": text}

    async def import_(request: Request) -> Response:
        return Answer(await run_in_threadpool(imported, await body_of(request)))

    def listed() -> list[str]:
        files = [path for pattern in ("*.yaml", "*.yml", "*/*.yaml") for path in workspace.root.glob(pattern)]
        recipes = [path for path in files if path.is_file() and not path.is_relative_to(workspace.folder)]
        return sorted(workspace.shown(path) for path in recipes)[:RECIPE_FILES]

    async def files(_: Request) -> Response:
        return Answer({"files": await run_in_threadpool(listed)})

    def opened(name: str) -> dict[str, Any]:
        path = workspace.to_read(name, "file")
        try:
            if path.stat().st_size > MAX_TEXT:
                raise UserError("the file is too large for a recipe", where=name, fix="name a recipe")
            return {"recipe": path.read_text(encoding="utf-8")}
        except (OSError, UnicodeDecodeError) as error:
            raise UserError(f"the file cannot be read: {error}", where=name, fix="name a recipe in YAML") from error

    async def open_(request: Request) -> Response:
        return Answer(await run_in_threadpool(opened, request.query_params.get("name", "")))

    async def plan(request: Request) -> Response:
        body = await body_of(request)
        text = text_of(body, "recipe")
        await run_in_threadpool(checked_recipe, workspace, text)
        fields = {
            "work": "plan",
            "recipe": text,
            "target": str(body.get("target") or LOCAL),
            "compile": bool(body.get("compile")),
            "count": bool(body.get("count")),
            "price": price_of(body),
        }
        answer = await planner.ask(fields, str(body.get("page") or "")[:100])
        return Answer(answer, 400 if answer.get("problems") else 200)

    return [
        Route("/api/recipe", edit, methods=["POST"]),
        Route("/api/recipe/form", form),
        Route("/api/recipe/files", files),
        Route("/api/recipe/file", open_),
        Route("/api/recipe/import", import_, methods=["POST"]),
        Route("/api/plan", plan, methods=["POST"]),
    ]


def _defaults(content: dict[str, Any]) -> dict[str, str]:
    """Defaults that depend on other keys, as a form shows them; {} for a recipe that is not right yet."""
    try:
        needed = {"model": "none", "data": {"train": "none"}, "output": "none"}
        recipe = load_recipe(written_out(needed | content), notify=silent)
    except UserError:
        return {}
    epochs = {"train.epochs": f"{DEFAULT_EPOCHS:g}"} if recipe.train.steps is None else {}
    return {"optimizer.learning_rate": f"{learning_rate_of(recipe):g}", **epochs}


def text_of(body: dict[str, Any], name: str) -> str:
    """A text of a request. Raises: UserError."""
    text = body.get(name, "")
    if not isinstance(text, str) or len(text) > MAX_TEXT:
        raise UserError(f"{name} is not a text of at most {MAX_TEXT} characters", where=name, fix="send a recipe")
    return text


def price_of(body: dict[str, Any]) -> float | None:
    """The price of a device-hour; None where it is absent. Raises: UserError for anything but an amount of money."""
    price = body.get("price")
    if price in (None, ""):
        return None
    if type(price) not in (int, float) or not 0 <= price <= MAX_PRICE:
        raise UserError("the price is not a number", where="price", fix=f"give one from 0 to {MAX_PRICE}")
    return float(price)


def with_preset(text: str, name: str) -> str:
    """A recipe with what a preset sets; model, data, output and everything else that it does not name stay."""
    if name not in presets():
        raise UserError(f"there is no preset '{name}'", where="preset", fix=f"they are {', '.join(presets())}")
    preset = presets()[name]
    changes = [Change((section,), preset.get(section, recipe_text.UNSET)) for section in SECTIONS]
    return change_recipe(text, changes) if text.strip() else dump_recipe(preset)


def _new_folder(parent: pathlib.Path, name: str) -> pathlib.Path:
    number = 1
    while (parent / f"{name}-{number}").exists():
        number += 1
    folder = parent / f"{name}-{number}"
    folder.mkdir()
    return folder
