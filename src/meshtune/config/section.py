"""The base of all sections of a recipe, and the paths in them."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import pathlib
import re
import typing
from collections.abc import Callable, Mapping, Sequence
from typing import Annotated, Any, TypeAlias, get_args

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    ValidationError,
    model_validator,
)
from pydantic.fields import FieldInfo
from pydantic_core import InitErrorDetails, PydanticCustomError

from meshtune.config.yaml_text import Path, value_at

# The keys that name what is read. `output` is written, always below the current directory.
MODEL_KEYS = ("path", "tokenizer", "chat_template", "adapter", "merge_adapters")
REWARD_KEYS = ("function", "model", "json_schema")
ENVIRONMENT: Path = ("rollout", "environment")
OTHER_KEYS: tuple[Path, ...] = (
    ("data", "registry"),
    ("vision", "media_dir"),
    ("stage", "reference"),
    ("teacher", "path"),
)
VARIABLE = re.compile(r"\$(?:\{([^{}]*)\}|([A-Za-z_]\w*))")


def expand_path(text: str) -> str:
    """`text` with the home directory for `~`, and environment variables for `${NAME}` and `$NAME`.

    A path that exists as written is not changed. Raises ValueError for a variable that is not set.
    """
    if not VARIABLE.search(text) or _exists(pathlib.Path(text)):
        return os.path.expanduser(text)
    unset = [match[1] or match[2] or "" for match in VARIABLE.finditer(text)]
    unset = [name for name in unset if not os.environ.get(name)]
    if unset:
        raise ValueError(
            f"{text} names the environment variable {unset[0] or '{}'}, which is not set: set it, or write the path out"
        )
    return os.path.expanduser(VARIABLE.sub(lambda match: os.environ[match[1] or match[2]], text))


def beside_recipe(
    raw: Mapping[str, object],
    recipe: pathlib.Path,
    overridden: Callable[[Path], bool],
    notify: Callable[[str], None],
    paths: Sequence[Path] | None = None,
) -> None:
    """Replaces, in place, each relative path of `raw` that exists only next to `recipe`.

    Paths for which `overridden` is true came from the command line and count only from the current directory. `notify`
    receives one sentence that names all the paths that were replaced. `paths` are their keys in `raw`; None: those of a
    recipe of training.
    """
    replaced: list[str] = []
    for path in _paths(raw) if paths is None else paths:
        container = value_at(raw, path[:-1])
        value = container[path[-1]]
        if not isinstance(value, str) or not value.strip() or value.startswith("~") or overridden(path):
            continue
        with contextlib.suppress(ValueError):  # of a variable that is not set: the check of the recipe names it
            value = expand_path(value)
        names_function = path[-1] == "function" or path[:2] == ENVIRONMENT
        file, _, function = value.rpartition(":") if names_function else (value, "", "")
        candidate = recipe.parent / file
        if not pathlib.Path(file).is_absolute() and not _exists(pathlib.Path(file)) and _exists(candidate):
            container[path[-1]] = f"{candidate}:{function}" if function else str(candidate)
            replaced.append(f"{'.'.join(map(str, path))} is {candidate}")
    if replaced:
        notify(f"not found from the current directory, so taken from beside the recipe: {', '.join(replaced)}")


def _paths(raw: Mapping[str, object]) -> list[Path]:
    """Every path of `raw` at which a path is written; of a list, each entry's."""
    paths: list[Path] = [("model", key) for key in MODEL_KEYS]
    for part in ("train", "validation"):
        sources = value_at(raw, ("data", part))
        paths += [("data", part, n, "path") for n in range(len(sources))] if isinstance(sources, list) else []
    rewards = value_at(raw, ("rewards",))
    for number in range(len(rewards) if isinstance(rewards, list) else 0):
        paths += [("rewards", number, key) for key in REWARD_KEYS]
    environment = value_at(raw, ENVIRONMENT)
    paths += [(*ENVIRONMENT, name) for name in environment] if isinstance(environment, dict) else [ENVIRONMENT]
    tasks = value_at(raw, ("evaluate", "tasks"))
    paths += [("evaluate", "tasks", name) for name in tasks] if isinstance(tasks, dict) else []
    present: list[Path] = []
    for path in (*paths, *OTHER_KEYS):
        value = value_at(raw, path)
        if isinstance(value, list):
            present += [(*path, number) for number in range(len(value))]
        elif value is not None:
            present.append(path)
    return present


def _exists(path: pathlib.Path) -> bool:
    try:
        return path.exists()
    except (OSError, ValueError):  # too long, or a null character: nothing is there
        return False


# A section is a pydantic model, or a frozen dataclass of the core that pydantic reads (meshtune.options).
SectionType: TypeAlias = type


def is_section(annotation: object) -> bool:
    """Whether an annotation is a section of the recipe."""
    return isinstance(annotation, type) and (issubclass(annotation, BaseModel) or dataclasses.is_dataclass(annotation))


def section_fields(section: SectionType) -> dict[str, FieldInfo]:
    """The fields of a section by name, in order."""
    if issubclass(section, BaseModel):
        return section.model_fields
    hints = typing.get_type_hints(section, include_extras=True)
    return {
        field.name: FieldInfo.from_annotated_attribute(hints[field.name], field)  # pyright: ignore[reportArgumentType]
        for field in dataclasses.fields(section)
    }


def declared(options: type, name: str) -> Any:
    """The field of a section that takes the default, description and bounds of an option of a dataclass of the core.

    For sections that are pydantic models; where all options of a dataclass form a section, it is a section itself.
    """
    field = next(field for field in dataclasses.fields(options) if field.name == name)
    if field.default_factory is not dataclasses.MISSING:
        return Field(default_factory=field.default_factory, **field.metadata)
    return Field(default=field.default, **field.metadata)


def refuse_truth_values(section: SectionType) -> BeforeValidator:
    """A validator that raises ValidationError for true and false where the field takes neither: pydantic reads
    `rank: true` as rank 1."""
    return BeforeValidator(_truth_values_refused(section))


def _truth_values_refused(section: SectionType) -> Callable[[object], object]:

    def check(value: object) -> object:
        fields = section_fields(section)
        unfit = [
            InitErrorDetails(
                type=PydanticCustomError("truth_value", "must not be true or false"), loc=(key,), input=entry
            )
            for key, entry in (value.items() if isinstance(value, dict) else ())
            if isinstance(entry, bool) and key in fields and not _mentions(fields[key], bool)
        ]
        if unfit:
            raise ValidationError.from_exception_data(section.__name__, unfit)
        return value

    return check


class Section(BaseModel):
    """A part of a recipe: unknown keys are errors, values never change after validation."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    @model_validator(mode="before")
    @classmethod
    def _refuse_truth_values(cls, value: object) -> object:
        return _truth_values_refused(cls)(value)


def _mentions(field: FieldInfo, member: type) -> bool:
    pending = [field.annotation]
    while pending:
        annotation = pending.pop()
        if annotation is member or annotation is Any:
            return True
        pending.extend(get_args(annotation))
    return False


def _path(text: str) -> str:
    if not text.strip():
        raise PydanticCustomError("empty_text", "must not be empty")
    if "\0" in text:
        raise PydanticCustomError("empty_text", "must not hold a null character")
    return expand_path(text)


DURATION = re.compile(r"(\d+(?:\.\d+)?)([smhd])")
UNITS = {"s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}


def seconds_of(duration: str) -> float:
    """Seconds of a time such as 90s, 10m, 1.5h or 2d. Raises: ValueError for other text, and for 0."""
    match = DURATION.fullmatch(duration.strip())
    if match is None or not float(match[1]):
        raise ValueError(f"{duration!r} is not a time above 0 with a unit, such as 90s, 10m, 1.5h or 2d")
    return float(match[1]) * UNITS[match[2]]


def check_duration(value: object) -> object:
    """Raises ValueError for a number without a unit, and for text that is not a time."""
    seconds_of(str(value))
    return value


# A time with its unit, which `seconds_of` reads.
Duration = Annotated[str, BeforeValidator(check_duration)]

# A file, a directory or a hub id. Relative paths stay as written: they count from the current directory.
PathText = Annotated[str, AfterValidator(_path)]
