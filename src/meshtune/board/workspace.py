"""The folders that a board may read and write, and the paths of requests and recipes in them."""

from __future__ import annotations

import dataclasses
import os
import pathlib
import re
import unicodedata
from collections.abc import Iterator, Sequence

from meshtune.board.job import RECIPE, Job, read_json
from meshtune.board.recipe_text import content_of
from meshtune.config.data_recipe import DataRecipe, Template, load_data_recipe, parse_template, template_text
from meshtune.config.data_recipe import template_names as kind_names
from meshtune.config.foreign.detect import is_foreign
from meshtune.config.load import load_recipe, silent
from meshtune.config.recipe import Recipe
from meshtune.config.rewards import CodeReward, FunctionReward, JsonSchemaReward, ModelReward, Reward
from meshtune.data.chat_templates import template_names
from meshtune.data.registry import FILE, load_registry
from meshtune.errors import UserError
from meshtune.generate.pictures import picture_paths
from meshtune.runs.sources import MARK, START
from meshtune.synth.kinds import Kind

FOLDER = "meshtune-board"  # below the root
MAX_PATH, MAX_NAME = 4000, 255  # characters; bytes of one name in a path
MAX_ID = 200  # characters of an id on the hub
HUB_ID = re.compile(r"(modelscope:)?[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?", re.ASCII)


@dataclasses.dataclass(frozen=True)
class Workspace:
    """`root` is the directory that commands are run in and written below; `readable` are others that may be read.
    `runs_code`: recipes may run code of theirs, with the rights of the board.

    All are absolute and without symbolic links (`workspace_at`).
    """

    root: pathlib.Path
    readable: tuple[pathlib.Path, ...] = ()
    runs_code: bool = False

    @property
    def folder(self) -> pathlib.Path:
        """The board's own files."""
        return self.root / FOLDER

    @property
    def jobs(self) -> pathlib.Path:
        """A folder for each job (board.job)."""
        return self.folder / "jobs"

    @property
    def uploads(self) -> pathlib.Path:
        """Files that came through the page."""
        return self.folder / "uploads"

    def to_read(self, text: object, where: str | None = None) -> pathlib.Path:
        """The absolute path of `text`, relative to the root, without symbolic links. The path need not exist.

        It is resolved once: open the path that this returns. Raises: UserError for anything but a plain
        path (`..`, `~`, a variable, an address, spaces around it, control characters), and for a path that leads
        outside of the root and the readable folders.
        """
        return self._resolve(text, (self.root, *self.readable), where)

    def to_write(self, text: object, where: str | None = None) -> pathlib.Path:
        """As `to_read`, for a path to write: only below the root, and not one of the board's own."""
        path = self._resolve(text, (self.root,), where)
        if path == self.root or path.is_relative_to(self.folder):
            raise UserError(
                "this folder is the board's own", where=where, fix="give a folder of its own, as runs/first"
            )
        return path

    def source(self, text: object, where: str | None = None) -> str:
        """A model or data set as commands take it: a path as `to_read` resolves it, shown as people write it, or an id
        of the hub that no local path hides. Raises: UserError."""
        if (
            isinstance(text, str)
            and len(text) <= MAX_ID
            and HUB_ID.fullmatch(text)
            and not os.path.lexists(self.root / text)
        ):
            return text
        path = self.to_read(text, where)
        shown = self.shown(path)
        return str(path) if shown.startswith("-") else shown

    def shown(self, path: pathlib.Path) -> str:
        """A path as people write it: relative to the root where it is below it."""
        return path.relative_to(self.root).as_posix() if path.is_relative_to(self.root) else str(path)

    def _resolve(self, text: object, folders: tuple[pathlib.Path, ...], where: str | None) -> pathlib.Path:
        if not isinstance(text, str) or (problem := _oddity(text)):
            problem = "it is not a text" if not isinstance(text, str) else _oddity(text)
            fix = f"give a plain path, relative to {self.root} or absolute"
            raise UserError(f"{_brief(text)} is not a path that the board takes: {problem}", where=where, fix=fix)
        try:
            path = pathlib.Path(os.path.realpath(self.root / text))
        except (ValueError, OSError) as error:  # a loop of links
            raise UserError(f"{_brief(text)} is not a path: {error}", where=where, fix="give another path") from error
        if any(path.is_relative_to(folder) for folder in folders):
            return path
        allowed = ", ".join(map(str, folders))
        raise UserError(
            f"the path leads to {path}, outside of {allowed}",
            where=where or text,
            fix="give a path inside, or start the board with another --root (to write) or --read (to read)",
        )


def _oddity(text: str) -> str | None:
    """Why a text is no plain path; None for one that is. Two readers could take such a text for two paths."""
    parts = re.split(r"[/\\]", text)
    if not text.strip():
        return "it is empty"
    if text != text.strip():
        return "there is a space before or behind it"
    if any(unicodedata.category(letter) in ("Cc", "Cs") for letter in text):
        return "it holds a control character"
    if ".." in (part.strip() for part in parts):
        return "it holds `..`"
    if text.startswith("~"):
        return "`~` is not expanded"
    if re.search(r"\$\{|\$\(|^\$|/\$", text):
        return "variables are not expanded"
    if re.match(r"[A-Za-z][\w+.-]*:/", text):
        return "it is an address"
    if len(text) > MAX_PATH or any(len(part.encode()) > MAX_NAME for part in parts):
        return "it is too long"
    return None


def _brief(text: object) -> str:
    shown = ascii(text)
    return shown if len(shown) <= 100 else f"{shown[:100]}..."


def workspace_at(root: pathlib.Path, readable: tuple[pathlib.Path, ...] = (), *, runs_code: bool = False) -> Workspace:
    """The workspace at `root`, whose folders are created. Raises: UserError where that is impossible."""
    for folder in readable:
        if not folder.expanduser().is_dir():
            raise UserError("there is no such directory", where=f"--read {folder}", fix="give one that exists")
    base, folders = _absolute(root), dict.fromkeys(map(_absolute, readable))
    # What lies in another of them is listed there.
    outermost = [
        folder for folder in folders if not any(folder.is_relative_to(parent) for parent in {base, *folders} - {folder})
    ]
    workspace = Workspace(base, tuple(outermost), runs_code)
    try:
        for folder in (workspace.jobs, workspace.uploads):
            folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(
            f"the board's folder cannot be made: {error.strerror}",
            where=str(workspace.folder),
            fix="give a --root that can be written",
        ) from error
    return workspace


def _absolute(path: pathlib.Path) -> pathlib.Path:
    return pathlib.Path(os.path.realpath(path.expanduser()))


ADAPTER_CONFIG = "adapter_config.json"
OVERRIDE = re.compile(r"[\w.]+=")


def checked_recipe(workspace: Workspace, text: str, overrides: Sequence[str] = ()) -> Recipe:
    """The recipe in a YAML text, whose local paths lie inside the workspace. Raises: UserError."""
    content = content_of(text)
    if (tool := is_foreign(content)) is not None:
        raise UserError(f"this is a recipe of {tool}", where=RECIPE, fix="import it")
    recipe = load_recipe(content, overrides, notify=silent)
    check_paths(workspace, recipe)
    return recipe


def check_paths(workspace: Workspace, recipe: Recipe) -> None:
    """Raises: UserError for a path of a recipe, or in what its paths lead to, that lies outside the workspace."""
    workspace.to_write(recipe.output, "output")
    for where, path in _models(recipe):
        check_references(workspace, workspace.source(path, where), where)
    for where, path in _data(recipe):
        _check_folder(workspace, workspace.source(path, where), where)
    if recipe.model.chat_template and recipe.model.chat_template not in template_names():
        workspace.to_read(recipe.model.chat_template, "model.chat_template")
    for where, path in _registry_paths(workspace, recipe):
        _check_folder(workspace, workspace.source(path, where), where)
    for number, reward in enumerate(recipe.rewards):
        _check_reward(workspace, reward, f"rewards.{number}")
    folder = "" if recipe.vision is None else recipe.vision.media_dir or ""
    for prompt in recipe.sample.prompts:
        for picture in [] if isinstance(prompt, str) else picture_paths(prompt):
            workspace.to_read(os.path.join(folder, picture), "sample.prompts")
    for where, address in (("checkpoint.copy_to", recipe.checkpoint.copy_to), ("data.prepared", recipe.data.prepared)):
        if address is not None and not workspace.runs_code:
            problem = "this writes with the rights of the board, which was started without leave to"
            raise UserError(problem, where=where, fix="start it as meshtune board --run-code, or leave it out")
    environment = None if recipe.rollout is None else recipe.rollout.environment
    for place in [environment] if isinstance(environment, str) else (environment or {}).values():
        _check_code(workspace, place, "rollout.environment", "an environment")


def checked_data_recipe(workspace: Workspace, text: str) -> DataRecipe:
    """The recipe of data in a YAML text, whose paths lie inside the workspace. Raises: UserError, also for a server as
    teacher where the board was not started with leave to run code: it would be asked with this machine's keys."""
    recipe = load_data_recipe(content_of(text))
    workspace.to_write(recipe.output, "output")
    for role, model in (("teacher", recipe.teacher), ("judge", recipe.judge)):
        if model is None:
            continue
        if not model.is_server:
            check_references(workspace, workspace.source(model.path, f"{role}.path"), f"{role}.path")
        elif not workspace.runs_code:
            problem = "this asks a server from the board's machine, and the board was started without leave to"
            fix = "start it as meshtune board --run-code, or give a model folder"
            raise UserError(problem, where=f"{role}.path", fix=fix)
        elif model.key is not None and not os.environ.get(model.key):  # perhaps the key itself: it is not repeated
            problem = "the board's environment has no variable of this name"
            fix = "give the name of the variable, and not the key; set it where the board is started"
            raise UserError(problem, where=f"{role}.key", fix=fix)
    sources = {"examples": recipe.examples, "filters.evaluation": recipe.filters.evaluation}
    sources |= {"mix.data": recipe.mix.data} if recipe.mix is not None else {}
    paths = [(key, source.path) for key, entries in sources.items() for source in entries if source.path]
    for where, path in paths:
        _check_folder(workspace, workspace.source(path, where), where)
    paths = [("documents", path) for path in recipe.documents] + [("pictures", path) for path in recipe.pictures]
    for where, path in paths:
        _check_folder(workspace, workspace.source(path, where), where, depth=None)
    rubrics = [("filters", section.rubric) for section in (recipe.filters.grounded, recipe.filters.quality) if section]
    for where, path in (*rubrics, ("tools", recipe.tools)):
        if path is not None:
            workspace.to_read(path, where)
    for section in recipe.kinds:
        Kind(section, template_of_kind(workspace, section.template))
    return recipe


def template_of_kind(workspace: Workspace, name: str) -> Template:
    """The template that ships under a name, or in a file inside the workspace. Raises: UserError."""
    path = name if name in kind_names() else str(workspace.to_read(name, "kinds"))
    return parse_template(template_text(path), name)


def _check_code(workspace: Workspace, place: str, where: str, kind: str) -> None:
    """Raises: UserError for code at `file.py:name` where the board was not started with leave to run it, and for a
    file outside."""
    if not workspace.runs_code:
        raise UserError(
            f"this runs {kind} with the rights of the board, which was started without leave to",
            where=where,
            fix="start it as meshtune board --run-code, if whoever uses it may run code here; or leave it out",
        )
    file = place.rpartition(":")[0]
    if file.endswith(".py"):
        workspace.to_read(file, where)


def _check_reward(workspace: Workspace, reward: Reward, where: str) -> None:
    """Raises: UserError for a reward that runs code where the board was not started with leave to, and for paths."""
    if isinstance(reward, CodeReward):
        _check_code(workspace, "", where, "tests of code")
    elif isinstance(reward, FunctionReward):
        _check_code(workspace, "", where, "a function")
        _check_code(workspace, reward.function, f"{where}.function", "a function")
    elif isinstance(reward, ModelReward):
        check_references(workspace, workspace.source(reward.model, f"{where}.model"), f"{where}.model")
    elif isinstance(reward, JsonSchemaReward) and isinstance(reward.json_schema, str):
        workspace.to_read(reward.json_schema, f"{where}.json_schema")


def check_references(workspace: Workspace, source: str, where: str) -> str:
    """`source`, a model, adapter or run that was resolved, if what its files refer to lies inside the workspace too:
    the base of an adapter, the model of a run. Raises: UserError."""
    folder = workspace.root / source
    if (folder / START).exists():  # the model that a run made itself and began with
        _check_resolved(workspace, folder / START, f"{where}: {START}")
    for place in (folder, folder / "adapter"):
        base = read_json(place / ADAPTER_CONFIG).get("base_model_name_or_path")
        if isinstance(base, str) and base.strip():
            expanded = pathlib.Path(os.path.expanduser(base))
            # As meshtune.runs.sources looks for it.
            nearby = (place / expanded, place.parent / expanded, place.parent / expanded.name)
            for path in (workspace.root / expanded, *nearby):
                if path.exists():
                    _check_resolved(workspace, path, f"{where}: base_model_name_or_path")
    if (folder / RECIPE).is_file():
        try:
            recipe = load_recipe(content_of((folder / RECIPE).read_text(encoding="utf-8")), notify=silent)
        except (OSError, UnicodeDecodeError, UserError):
            return source  # its reader says what is wrong
        for key, path in _models(recipe):
            if (workspace.root / path).exists():  # it hides an id of the hub
                _check_resolved(workspace, workspace.root / path, f"{where}: {key}")
    return source


def check_job(workspace: Workspace, job: Job) -> None:
    """Checks the paths of a job's command again, which may lead elsewhere by now. Raises: UserError."""
    if job.output is not None:
        workspace.to_write(str(job.output), "output")
    arguments = job.request.arguments
    if job.request.kind == "train":
        file = next((argument for argument in arguments if argument.endswith(RECIPE)), None)
        overrides = [argument for argument in arguments if OVERRIDE.match(argument)]
        if file is not None:
            checked_recipe(workspace, pathlib.Path(file).read_text(encoding="utf-8"), overrides)
        return
    if job.request.kind == "data":
        file = next(argument for argument in arguments if argument.endswith(RECIPE))
        checked_data_recipe(workspace, pathlib.Path(file).read_text(encoding="utf-8"))
        return
    for argument in arguments:
        text = argument.partition("=")[2] or argument
        for path in dict.fromkeys((text, text.rpartition(MARK)[0])):  # RUN@best is a state of RUN
            if path and os.path.lexists(workspace.root / path):
                check_references(workspace, workspace.source(path), path)


def check_foreign(workspace: Workspace, key: str, value: object) -> None:
    """Raises: UserError for a path that leads outside, anywhere in `value`, the content of another tool's recipe."""
    if isinstance(value, dict):
        for name, inner in value.items():
            check_foreign(workspace, f"{key}.{name}".strip("."), inner)
    elif isinstance(value, list):
        for inner in value:
            check_foreign(workspace, key, inner)
    elif isinstance(value, str) and value.strip() and "\n" not in value:
        parts = value.strip().split("/")
        if (
            value.strip().startswith(("/", "~", "file:"))
            or ".." in parts
            or os.path.lexists(workspace.root / value[:1000])
        ):
            workspace.to_read(value, key)


def _check_resolved(workspace: Workspace, path: pathlib.Path, where: str) -> None:
    workspace.to_read(os.path.realpath(path), where)


def _check_folder(workspace: Workspace, source: str, where: str, depth: int | None = 1) -> None:
    """The files of a folder, and of the folders in it down to `depth`, are not links that lead outside; those of a
    folder of data are its splits and subjects, and None is all."""
    top = workspace.root / source
    for folder, folders, files in os.walk(top):
        for path in (os.path.join(folder, name) for name in (*folders, *files)):
            if os.path.islink(path):
                _check_resolved(workspace, pathlib.Path(path), where)
        if depth is not None and len(pathlib.Path(folder).relative_to(top).parts) >= depth:
            folders.clear()


def _models(recipe: Recipe) -> list[tuple[str, str]]:
    """(key, value) of every model, adapter and tokenizer in a recipe; of a state (RUN@best) the run as well."""
    model = recipe.model
    paths = [
        ("model.path", model.path),
        ("model.tokenizer", model.tokenizer),
        ("model.adapter", model.adapter),
        *(("model.merge_adapters", path) for path in model.merge_adapters),
        ("stage.reference", getattr(recipe.stage, "reference", None)),
        ("teacher.path", None if recipe.teacher is None or recipe.teacher.is_server else recipe.teacher.path),
    ]
    return [(where, part) for where, path in paths if path for part in (path, path.rpartition(MARK)[0]) if part]


def _data(recipe: Recipe) -> list[tuple[str, str]]:
    """(key, value) of every source of records in a recipe."""
    data = recipe.data
    paths = [("data.registry", data.registry)]
    for split, sources in (("train", data.train), ("validation", data.validation)):
        if isinstance(sources, list):
            paths += [(f"data.{split}.{index}.path", source.path) for index, source in enumerate(sources)]
    if recipe.vision is not None:
        paths.append(("vision.media_dir", recipe.vision.media_dir))
    if recipe.evaluate is not None:
        paths += [(f"evaluate.tasks.{name}", path) for name, path in recipe.evaluate.tasks.items()]
    return [(where, path) for where, path in paths if path]


def _registry_paths(workspace: Workspace, recipe: Recipe) -> Iterator[tuple[str, str]]:
    """(key, path) of the files and folders that the named entries of a registry lead to; wrong entries are refused by
    their reader."""
    data = recipe.data
    if data.registry is None:
        return
    registry = workspace.to_read(data.registry, "data.registry")
    file = registry / FILE if registry.is_dir() else registry
    workspace.to_read(os.path.realpath(file), "data.registry")
    try:
        entries = load_registry(str(file)).entries
    except UserError:
        return
    for split, sources in (("train", data.train), ("validation", data.validation)):
        for index, section in enumerate(sources if isinstance(sources, list) else []):
            entry = entries.get(section.name) if section.name is not None else None
            if isinstance(entry, dict):
                where = f"data.{split}.{index}.name"
                for key in ("hf_hub_url", "ms_hub_url"):
                    if isinstance(path := entry.get(key), str):
                        yield where, path
                        if isinstance(folder := entry.get("folder"), str):
                            yield where, os.path.join(path, folder)
                if isinstance(name := entry.get("file_name"), str):
                    yield where, os.path.join(workspace.shown(file.parent), name)
