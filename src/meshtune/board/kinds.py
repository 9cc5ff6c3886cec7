"""Kinds of jobs: each turns the body of a request into a command, and has a line in KINDS."""

from __future__ import annotations

import dataclasses
import pathlib
import re
from collections.abc import Callable, Mapping
from typing import Any

from meshtune.board import follow
from meshtune.board.job import RECIPE, SCHEDULERS
from meshtune.board.workspace import HUB_ID, Workspace, check_references, checked_data_recipe, checked_recipe
from meshtune.data.chat_templates import template_names
from meshtune.errors import UserError
from meshtune.runs.output import MODEL, check_output
from meshtune.runs.sources import BEST, MARK


@dataclasses.dataclass(frozen=True)
class Prepared:
    """`arguments` are those of `meshtune`; in them `{job}` stands for the job's folder, where `recipe` is written to
    recipe.yaml. `output` is the absolute path of the folder that the command writes, if it has one. `secrets` are
    variables of the command's environment that no file holds. `computes`: it needs the devices of this machine."""

    name: str
    arguments: tuple[str, ...]
    output: str | None = None
    recipe: str | None = None
    secrets: Mapping[str, str] = dataclasses.field(default_factory=dict, repr=False)
    computes: bool = True


OWN_FOLDER = "give a folder of its own, as evaluations/first"


def output_of(workspace: Workspace, body: dict[str, Any], default: str) -> pathlib.Path:
    """The folder `body["output"]`, or else `default` with a number behind it where that exists. Raises: UserError."""
    given = body.get("output")
    if given not in (None, ""):
        if not isinstance(given, str) or given.startswith("-") or "{job}" in given:
            raise UserError(f"{given!r} is not a folder", where="output", fix=OWN_FOLDER)
        return workspace.to_write(given, "output")
    number = 1
    while (path := workspace.to_write(default if number == 1 else f"{default}-{number}", "output")).exists():
        number += 1
    return path


def slug(model: str) -> str:
    """The end of a model's path or id, as a name of a folder."""
    return re.sub(r"[^\w.-]+", "-", pathlib.PurePosixPath(model).name).strip("-.") or "model"


def check_free(path: pathlib.Path, *, overwrite: bool) -> None:
    """Raises UserError for a folder that holds something, unless it may be replaced."""
    if path.exists() and not overwrite and (path.is_file() or any(path.iterdir())):
        raise UserError("the output is not empty", where="output", fix="give another one, or tick that it is replaced")


MODEL_FIX = "give a folder below the root, or an id on the hub"


def checked_model(workspace: Workspace, body: dict[str, Any], key: str) -> str:
    """The model, adapter or run that `body[key]` names, as an argument of a command. Raises: UserError.

    It never begins with a dash, which would be an option, and never holds `{job}`, which the queue replaces.
    """
    text = body.get(key)
    if not isinstance(text, str) or not text.strip():
        raise UserError("no model is given", where=key, fix=MODEL_FIX)
    if text.startswith("-") or "{job}" in text:
        raise UserError(f"{text!r} is not a model", where=key, fix=MODEL_FIX)
    run, mark, state = text.rpartition(MARK)
    is_state = bool(mark) and (state == BEST or (state.isascii() and state.isdecimal()))
    source = check_references(workspace, workspace.source(run if is_state else text, key), key)
    if not (workspace.root / source).exists() and (is_state or not HUB_ID.fullmatch(source)):
        raise UserError(f"there is nothing at {source!r}, and it is no id on the hub", where=key, fix=MODEL_FIX)
    return f"{source}{MARK}{state}" if is_state else source


def choice_of(body: dict[str, Any], key: str, options: tuple[str, ...]) -> str | None:
    """`body[key]`, one of `options`; None where it is absent or empty. Raises: UserError."""
    value = body.get(key)
    if value in (None, ""):
        return None
    if not isinstance(value, str) or value not in options:
        raise UserError(f"{value!r} is none of {', '.join(options)}", where=key, fix="give one of these")
    return value


def number_of(body: dict[str, Any], key: str, low: int, high: int = 10**9) -> int | None:
    """`body[key]`, a whole number from `low` to `high`; None where it is absent. Raises: UserError."""
    value = body.get(key)
    if value in (None, ""):
        return None
    if type(value) is not int or not low <= value <= high:
        raise UserError(f"{value!r} is not a whole number from {low} to {high}", where=key, fix="correct it")
    return value


NONE = "none"
TASK = re.compile(r"[A-Za-z0-9_][\w.+-]*(=.+)?")


def prepare_eval(workspace: Workspace, body: dict[str, Any]) -> Prepared:
    """The command that measures a model on tasks and held-out records. Raises: UserError."""
    model = checked_model(workspace, body, "model")
    output = output_of(workspace, body, f"evaluations/{slug(model)}")
    arguments = ["eval", model, "--output", str(output)]
    tasks = body.get("tasks") or []
    if not isinstance(tasks, list):
        raise UserError("the tasks must be a list of names", where="tasks", fix='write ["arc_easy"]')
    for task in tasks:
        if not isinstance(task, str) or not TASK.fullmatch(task) or "{job}" in task or "," in task:
            raise UserError(f"{task!r} is not a task", where="tasks", fix="write NAME or NAME=PATH, one a line")
        name, equals, path = task.partition("=")
        if equals:
            source = workspace.to_read(path, "tasks")
            if not source.exists():
                raise UserError(f"there is nothing at {path}", where="tasks", fix="give a file below the root")
            task = f"{name}={workspace.shown(source)}"
        arguments += ["--tasks", task]
    data = body.get("data")
    if data not in (None, ""):
        arguments += ["--data", NONE if data == NONE else checked_model(workspace, body, "data")]
    if (compare := body.get("compare")) not in (None, ""):
        arguments += ["--compare", "base" if compare == "base" else checked_model(workspace, body, "compare")]
    for key, flag, low in (("limit", "--limit", 1), ("num_fewshot", "--num-fewshot", 0), ("rows", "--rows", 1)):
        if (value := number_of(body, key, low)) is not None:
            arguments += [flag, str(value)]
    if (tokens := number_of(body, "max_tokens", 1)) is not None:
        arguments += ["--max-tokens", str(tokens)]
    return _with_output(arguments, output, body)


def prepare_predict(workspace: Workspace, body: dict[str, Any]) -> Prepared:
    """The command that answers the records of a data set. Raises: UserError."""
    model = checked_model(workspace, body, "model")
    data = checked_model(workspace, body, "data")
    output = output_of(workspace, body, f"predictions/{slug(model)}")
    arguments = ["predict", model, "--data", data, "--output", str(output)]
    for key, flag in (("limit", "--limit"), ("max_tokens", "--max-tokens"), ("rows", "--rows")):
        if (value := number_of(body, key, 1)) is not None:
            arguments += [flag, str(value)]
    return _with_output(arguments, output, body)


def _with_output(arguments: list[str], output: Any, body: dict[str, Any]) -> Prepared:
    overwrite = bool(body.get("overwrite"))
    check_free(output, overwrite=overwrite)
    return Prepared(output.name, (*arguments, *["--overwrite"] * overwrite), output=str(output))


FORMS = ("adapter", "merged", "gguf", "codes")
GGUF = ("F32", "F16", "BF16", "Q8_0", "Q6_K", "Q5_K_M", "Q4_K_M", "Q4_0")
CODES = ("bitsandbytes", "compressed-tensors", "published")
TOKEN_NAME = re.compile(r"[A-Za-z0-9_.-]{1,200}")
REPOSITORY = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")


def prepare_export(workspace: Workspace, body: dict[str, Any]) -> Prepared:
    """The command that writes an adapter, a whole model or a GGUF file. Raises: UserError."""
    model = checked_model(workspace, body, "model")
    form, options, suffix = _form(workspace, model, body)
    output = output_of(workspace, body, f"exports/{slug(model)}-{suffix}")
    overwrite = bool(body.get("overwrite"))
    check_free(output, overwrite=overwrite)
    # A GGUF file is written into a folder of its own, beside its Modelfile.
    to = output / f"{output.name.removesuffix('.gguf')}.gguf" if form == "gguf" else output
    arguments = ["export", model, "--to", str(to), *options, *["--overwrite"] * overwrite]
    return Prepared(output.name, tuple(arguments), output=str(output))


def prepare_push(workspace: Workspace, body: dict[str, Any]) -> Prepared:
    """The command that pushes to the hub, with `token`, or else the one that this machine is logged in by.

    Raises: UserError.
    """
    model = checked_model(workspace, body, "model")
    repository = body.get("repository")
    if not isinstance(repository, str) or not REPOSITORY.fullmatch(repository):
        raise UserError(f"{repository!r} is no repository", where="repository", fix="write user/name")
    _, options, _ = _form(workspace, model, body)
    flags = ["--public"] * bool(body.get("public")) + ["--overwrite"] * bool(body.get("overwrite"))
    token = body.get("token") or ""
    if not isinstance(token, str) or (token and not TOKEN_NAME.fullmatch(token)):
        raise UserError(
            "this is no token of the hub", where="token", fix="copy it again, as hf_...; it is not shown here"
        )
    secrets = {"HF_TOKEN": token} if token else {}
    return Prepared(repository, ("push", model, repository, *options, *flags), secrets=secrets)


def _form(workspace: Workspace, model: str, body: dict[str, Any]) -> tuple[str, list[str], str]:
    """(form, options of the command, end of a folder's name). A whole model has nothing to merge into GGUF or codes."""
    form = choice_of(body, "form", FORMS) or "adapter"
    is_whole = _is_whole(workspace, model)
    if body.get("form") == "adapter" and is_whole:
        raise UserError(
            "this is a whole model, which has no adapter", where="form", fix="write the whole model, or GGUF"
        )
    wants_merge = form == "merged" or (form in ("gguf", "codes") and bool(body.get("merge")))
    merge = ["--merge"] * (wants_merge and not is_whole)
    if form not in ("gguf", "codes"):
        return form, merge, form
    allowed = GGUF if form == "gguf" else CODES
    kind = choice_of(body, "type", allowed) or allowed[3 if form == "gguf" else 0]
    return form, [*merge, "--gguf" if form == "gguf" else "--format", kind], kind.lower()


def _is_whole(workspace: Workspace, model: str) -> bool:
    """Whether a folder holds a whole model; False for an adapter, a run whose result is one, and an id on the hub."""
    path = workspace.root / model
    result = follow.run_json(path).get("result") if follow.is_run(path) else None
    return result == MODEL or ((path / "config.json").is_file() and not (path / "adapter_config.json").exists())


TOKEN_FILE = "token"
QUANTIZED = ("auto", "nf4", "int8", "fp8", "int4", "none")
DTYPES = ("float32", "bfloat16")


def prepare_serve(workspace: Workspace, body: dict[str, Any]) -> Prepared:
    """The command that serves a model on a free port, for this machine only. Raises: UserError.

    Its token lies in the job's folder; its log says the port once it answers (board.served).
    """
    model = checked_model(workspace, body, "model")
    arguments = ["serve", model, "--port", "0", "--token-file", f"{{job}}/{TOKEN_FILE}"]
    adapters = _adapters(body.get("adapters") or {})
    for name in adapters:
        if not re.fullmatch(r"[\w.-]{1,60}", name):
            raise UserError(f"{name!r} is no name for an adapter", where="adapters", fix="use letters and digits")
        arguments += ["--adapter", f"{name}={checked_model(workspace, adapters, name)}"]
    options = {"quantize": QUANTIZED, "dtype": DTYPES, "cache": ("int8",), "chat_template": template_names()}
    for key, values in options.items():
        if (value := choice_of(body, key, values)) is not None:
            arguments += [f"--{key.replace('_', '-')}", value]
    return Prepared(pathlib.PurePosixPath(model).name or model, tuple(arguments))


def _adapters(given: object) -> dict[str, object]:
    """Paths by name. Raises: UserError."""
    if isinstance(given, dict):
        return given
    if not isinstance(given, list):
        raise UserError("the adapters must be lines of NAME=PATH", where="adapters", fix="leave them out")
    adapters: dict[str, object] = {}
    for line in given:
        name, equals, path = line.partition("=") if isinstance(line, str) else ("", "", "")
        if not (name and equals and path):
            raise UserError(f"{line!r} is not NAME=PATH", where="adapters", fix="write polite=runs/polite, one a line")
        if name in adapters:
            raise UserError(f"the name {name!r} is given twice", where="adapters", fix="give each its own")
        adapters[name] = path
    return adapters


def prepare_train(workspace: Workspace, body: dict[str, Any]) -> Prepared:
    """The command that runs a recipe. Raises: UserError (config.problems.RecipeError for keys that are wrong)."""
    text = body.get("recipe")
    if not isinstance(text, str) or not text.strip():
        raise UserError("the recipe is missing", where="recipe", fix="send a recipe as YAML text")
    resume, overwrite = bool(body.get("resume")), bool(body.get("overwrite"))
    recipe = checked_recipe(workspace, text)
    output = workspace.to_write(recipe.output, "output")
    check_output(output, resume=resume or recipe.resume, overwrite=overwrite or recipe.overwrite)
    scheduler = scheduler_of(body)
    if overwrite and scheduler is not None:
        raise UserError(
            "a run under a scheduler is restarted, and would move its own work aside",
            where="overwrite",
            fix="leave it out",
        )
    flags = ["resume=true"] * resume if scheduler else [*["--resume"] * resume, *["--overwrite"] * overwrite]
    return Prepared(output.name, train_command(workspace, body, flags), output=str(output), recipe=text)


def scheduler_of(body: dict[str, Any]) -> str | None:
    """The scheduler, of SCHEDULERS, whose options a request has. Raises: UserError for two of them."""
    names = [name for name in SCHEDULERS if body.get(name)]
    if len(names) > 1:
        raise UserError(f"a run has one of {' and '.join(names)}", where=names[1], fix="leave the others out")
    return names[0] if names else None


def train_command(workspace: Workspace, body: dict[str, Any], options: list[str]) -> tuple[str, ...]:
    """The arguments that train by the recipe of a job, where `body` says: here, in processes, or under a scheduler."""
    recipe = f"{{job}}/{RECIPE}"
    if (scheduler := scheduler_of(body)) is not None:
        if scheduler == "kubernetes" and not workspace.runs_code:
            problem = "an image runs with the rights of the board, which was started without leave to run code"
            fix = "start it as meshtune board --run-code, if whoever uses it may run code in the cluster"
            raise UserError(problem, where="kubernetes", fix=fix)
        return SCHEDULERS[scheduler].command(body[scheduler], recipe, options)
    devices = body.get("devices") or {}
    processes = devices.get("processes", 1) if isinstance(devices, dict) else 1
    verb = ["launch", "local", "-n", str(processes)] if type(processes) is int and processes > 1 else ["train"]
    return (*verb, recipe, *options)


def prepare_data(workspace: Workspace, body: dict[str, Any]) -> Prepared:
    """The command that makes records by a recipe of data. Raises: UserError."""
    text = body.get("recipe")
    if not isinstance(text, str) or not text.strip():
        raise UserError("the recipe is missing", where="recipe", fix="send a recipe of data as YAML text")
    recipe = checked_data_recipe(workspace, text)
    output, resume, overwrite = (
        workspace.to_write(recipe.output, "output"),
        bool(body.get("resume")),
        bool(body.get("overwrite")),
    )
    check_free(output, overwrite=resume or overwrite)
    flags = ["--overwrite"] * overwrite or ["--resume"] * resume
    computes = any(model is not None and not model.is_server for model in (recipe.teacher, recipe.judge))
    command = ("data", "generate", f"{{job}}/{RECIPE}", *flags)
    return Prepared(output.name, command, output=str(output), recipe=text, computes=computes)


# From the body of a request to the command. Raises: UserError for whatever is wrong with it.
KINDS: dict[str, Callable[[Workspace, dict[str, Any]], Prepared]] = {
    "train": prepare_train,
    "serve": prepare_serve,
    "eval": prepare_eval,
    "predict": prepare_predict,
    "export": prepare_export,
    "push": prepare_push,
    "data": prepare_data,
}
