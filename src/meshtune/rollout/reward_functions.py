"""Reward functions: loading them, and calling them as TRL does.

A reward function is called with keywords: prompts, completions, completion_ids, trainer_state, log_extra, log_metric,
environments, and every column of the data, all lists with an entry for each completion. It returns a number for each,
or None where it has nothing to say about that one (https://huggingface.co/docs/trl/grpo_trainer).
"""

from __future__ import annotations

import asyncio
import dataclasses
import importlib
import importlib.util
import inspect
import linecache
import math
import sys
import traceback
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from meshtune.errors import UserError, nearest

Prompt = str | list[dict[str, Any]]
RewardFunction = Callable[..., Any]


@dataclasses.dataclass(frozen=True)
class Completions:
    """The completions of a rollout, an entry of each list for every completion.

    `prompts` and `completions` are texts, or lists of messages. `columns` are the other fields of the data's records.
    `origins` name the records, `reasons` say why each completion ended, `step` is the number of updates before this
    rollout, of `total_steps`.
    """

    prompts: Sequence[Prompt]
    completions: Sequence[Prompt]
    completion_ids: Sequence[Sequence[int]]
    columns: Mapping[str, Sequence[Any]]
    origins: Sequence[object]
    step: int = 0
    reasons: Sequence[str] = ()
    environments: Sequence[Any] | None = None
    total_steps: int | None = None

    def __post_init__(self):
        lists = (self.completions, self.completion_ids, self.origins, *self.columns.values())
        assert all(len(entries) == len(self.prompts) for entries in lists), "a completion needs an entry in every list"

    def __len__(self) -> int:
        return len(self.prompts)


@dataclasses.dataclass(frozen=True)
class TrainerState:
    """The fields of transformers' TrainerState that a run knows when it scores completions."""

    global_step: int
    max_steps: int | None


@dataclasses.dataclass
class RewardLog:
    """Collects what reward functions log: columns of the table of completions, and metrics."""

    columns: dict[str, list[Any]] = dataclasses.field(default_factory=dict)
    metrics: dict[str, float] = dataclasses.field(default_factory=dict)

    count: int = 0

    def log_extra(self, column: str, values: Sequence[Any]) -> None:
        """Adds a column with a value for each completion. Raises ValueError for another number of values."""
        entries = list(values)
        if len(entries) != self.count:
            raise ValueError(f"log_extra('{column}') has {len(entries)} values for {self.count} completions")
        self.columns[column] = [
            entry if isinstance(entry, str | int | float | None) else str(entry) for entry in entries
        ]

    def log_metric(self, name: str, value: float) -> None:
        """Adds a number."""
        self.metrics[name] = float(value)


@dataclasses.dataclass(frozen=True)
class NamedFunction:
    """A reward function with the name of its reward; `place` is where it is defined."""

    name: str
    place: str
    call: RewardFunction
    timeout: float = math.inf

    @property
    def is_async(self) -> bool:
        """Whether calling it returns an awaitable."""
        return any(map(inspect.iscoroutinefunction, (self.call, type(self.call).__call__)))

    @property
    def names_environments(self) -> bool:
        """Whether it has a parameter for the environments, which do not leave the process that made them."""
        return "environments" in _parameters(self.call)

    def arguments(self, completions: Completions, log: RewardLog) -> dict[str, Any]:
        """The keywords that it is called with: all, or those it has parameters for if it takes no others.

        Raises UserError for a parameter that nothing is there for, and a column that is named like a keyword.
        """
        keywords: dict[str, Any] = {
            "prompts": list(completions.prompts),
            "completions": list(completions.completions),
            "completion_ids": [list(ids) for ids in completions.completion_ids],
            "trainer_state": TrainerState(completions.step, completions.total_steps),
            "log_extra": log.log_extra,
            "log_metric": log.log_metric,
            "environments": completions.environments,
            "finish_reasons": list(completions.reasons),
        }
        if clash := sorted(keywords.keys() & completions.columns.keys()):
            raise UserError(
                f"the data have a column '{clash[0]}', which is what reward functions call something else",
                where=f"reward {self.name}",
                fix="rename that field of the records",
            )
        keywords |= {name: list(values) for name, values in completions.columns.items()}
        parameters = _parameters(self.call)
        if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values()):
            accepted = keywords
        else:
            accepted = {name: value for name, value in keywords.items() if name in parameters}
        for name, parameter in parameters.items():
            variadic = parameter.kind in (parameter.VAR_KEYWORD, parameter.VAR_POSITIONAL)
            if name not in keywords and parameter.default is parameter.empty and not variadic:
                columns = ", ".join(completions.columns) or "none"
                raise UserError(
                    f"the reward function '{self.name}' has a parameter '{name}', and the records have no such field; "
                    f"their other fields are: {columns}",
                    where=self.place,
                    fix=f"{nearest(name, completions.columns)}give the parameter a default, or the records the field",
                )
        return accepted

    def check(self, result: Any, completions: Completions) -> list[float]:
        """The rewards that a call has returned, NaN where None. Raises UserError unless they are a number each."""
        if isinstance(result, str | Mapping) or not isinstance(result, Iterable):
            raise UserError(
                f"the reward function '{self.name}' returned {_shown(result)}, and not a list",
                where=self.place,
                fix=f"return a list with a number for each of the {len(completions)} completions",
            )
        values = list(result)
        if len(values) != len(completions):
            raise UserError(
                f"the reward function '{self.name}' returned {len(values)} rewards for {len(completions)} completions",
                where=self.place,
                fix="return one for each, and None where it does not apply",
            )
        return [self._number(value, origin) for value, origin in zip(values, completions.origins, strict=True)]

    def _number(self, value: Any, origin: object) -> float:
        if value is None:
            return math.nan
        try:
            number = float(value) if hasattr(type(value), "__float__") or hasattr(type(value), "__index__") else None
        except (TypeError, ValueError, OverflowError, RuntimeError):  # an array of several numbers, or too large a one
            number = None
        if number is None or not math.isfinite(number):
            raise UserError(
                f"the reward function '{self.name}' returned {_shown(value)} for a completion, which is no finite "
                "number",
                where=f"{origin}; {self.place}",
                fix="return a number, or None where the reward does not apply",
            )
        return number

    def error(self, problem: BaseException, completions: Completions) -> UserError:
        """The error of an exception that a call has raised, with the line that raised it."""
        if isinstance(problem, UserError):
            return problem
        frames = traceback.extract_tb(problem.__traceback__)
        file = self.place.rpartition(", ")[0] or self.place
        in_file = [frame for frame in frames if frame.filename == file]
        frame = (in_file or frames or [None])[-1]
        where = self.place if frame is None else f"{frame.filename}, line {frame.lineno}: {frame.line}"
        message = f"{type(problem).__name__}: {problem}".rstrip(": ")
        return UserError(
            f"the reward function '{self.name}' raised {message}",
            where=f"{where} (for the completions of {_origins(completions)})",
            fix="correct the function; where a completion cannot be scored, let it return a low reward, or None",
        )


def call_function(function: NamedFunction, completions: Completions, log: RewardLog) -> list[float]:
    """The rewards of a function that is not async, NaN where it has none. Raises UserError for all that goes wrong."""
    arguments = function.arguments(completions, log)
    try:
        result = function.call(**arguments)
    except (Exception, SystemExit) as problem:
        raise function.error(problem, completions) from problem
    return function.check(result, completions)


async def gather_functions(
    functions: Sequence[NamedFunction], completions: Completions, log: RewardLog
) -> list[list[float]]:
    """The rewards of async functions, which run at the same time. Raises UserError for the first that fails."""

    async def rewards(function: NamedFunction) -> list[float]:
        arguments = function.arguments(completions, log)
        try:
            async with asyncio.timeout(function.timeout) as limit:
                result = await function.call(**arguments)
        except (Exception, SystemExit) as problem:
            if isinstance(problem, TimeoutError) and limit.expired():
                raise UserError(
                    f"the reward '{function.name}' did not return within {function.timeout:g} seconds",
                    where=function.place,
                    fix="correct the function, or raise its `timeout` (seconds for all completions of a rollout)",
                ) from problem
            raise function.error(problem, completions) from problem
        return function.check(result, completions)

    return await asyncio.gather(*map(rewards, functions))


def _parameters(function: RewardFunction) -> Mapping[str, inspect.Parameter]:
    try:
        return inspect.signature(function).parameters
    except (TypeError, ValueError):  # some built-in functions have none: they get everything
        return inspect.signature(lambda **columns: None).parameters


def _shown(value: Any) -> str:
    text = repr(value)
    return f"{text[:60]}{'...' if len(text) > 60 else ''} ({type(value).__name__})"


def _origins(completions: Completions) -> str:
    origins = list(dict.fromkeys(map(str, completions.origins)))
    return "; ".join(origins[:3]) + (f" and {len(origins) - 3} more" if len(origins) > 3 else "")


def load_function(text: str, name: str, timeout: float = math.inf) -> tuple[NamedFunction, list[Path]]:
    """The function "file.py:name" or "package.module:name", and the files that it was made of.

    These are its own and those of modules that loading it imported from its folder or below, without installed
    packages. Modules that a call imports later are not among them.
    Raises UserError for a file, module or name that does not exist, and what importing raises.
    """
    function, place, files = load_callable(text, f"reward {name}: {text}")
    return NamedFunction(name, place, function, timeout), files


def load_callable(text: str, where: str, kind: str = "function") -> tuple[Callable[..., Any], str, list[Path]]:
    """The function or class "file.py:name" or "package.module:name", where it is defined, and files as `load_function`
    gives them. Errors say `where` it was asked for, and which `kind` it is."""
    place, _, attribute = text.rpartition(":")
    before = set(sys.modules)
    path = Path(place).expanduser()
    try:
        if place.endswith(".py"):
            if not path.is_file():
                raise UserError(f"there is no file '{place}'", where=where, fix=f"its path counts from {Path.cwd()}")
            module = _import_file(path.resolve())
        else:
            module = importlib.import_module(place)
    except UserError:
        raise
    except (Exception, SystemExit) as problem:
        raise _import_error(problem, place, where) from problem
    function = getattr(module, attribute, None)
    if not callable(function):
        names = [key for key, value in vars(module).items() if callable(value) and not key.startswith("_")]
        raise UserError(
            f"'{place}' has no {kind} '{attribute}'",
            where=where,
            fix=f"{nearest(attribute, names)}it has: {', '.join(names[:10]) or 'none'}",
        )
    source = Path(module.__file__ or place)
    try:
        line = inspect.getsourcelines(function)[1]
    except (OSError, TypeError):  # it has no Python source
        line = 1
    neighbours = {source, *_neighbours(source.parent, set(sys.modules) - before)}
    return function, f"{source}, line {line}", sorted(neighbours)


def _import_file(path: Path) -> Any:
    if str(path.parent) not in sys.path:
        sys.path.insert(0, str(path.parent))
    name = f"meshtune_rewards_{abs(hash(path)):x}"
    if name in sys.modules:
        return sys.modules[name]
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses and pickles look their module up
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module


def _import_error(problem: BaseException, place: str, where: str) -> UserError:
    frames = [frame for frame in traceback.extract_tb(problem.__traceback__) if frame.filename.endswith(".py")]
    frame = next((frame for frame in reversed(frames) if frame.filename.endswith(Path(place).name)), None)
    line = f", line {frame.lineno}: {frame.line}" if frame is not None else ""
    if isinstance(problem, SyntaxError) and problem.lineno:
        line = f", line {problem.lineno}: {linecache.getline(problem.filename or '', problem.lineno).strip()}"
    fix = "correct the file"
    if isinstance(problem, ModuleNotFoundError):
        fix = f"pip install {problem.name}, or correct the name; a module of yours is found from {Path.cwd()}"
    return UserError(
        f"'{place}' cannot be imported: {type(problem).__name__}: {problem}", where=f"{where}{line}", fix=fix
    )


def _neighbours(folder: Path, modules: Iterable[str]) -> Iterable[Path]:
    for name in modules:
        file = getattr(sys.modules.get(name), "__file__", None)
        path = Path(file) if file else None
        if path is not None and path.is_relative_to(folder) and not {"site-packages", "dist-packages"} & {*path.parts}:
            yield path
