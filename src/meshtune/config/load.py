"""From a recipe file and `key=value` overrides to a checked Recipe."""

from __future__ import annotations

import pathlib
from collections.abc import Sequence
from typing import Any

from pydantic import ValidationError

from meshtune.config import overrides as command_line
from meshtune.config import yaml_text
from meshtune.config.problems import as_user_error
from meshtune.config.recipe import Recipe
from meshtune.errors import UserError, nearest


def load_recipe(source: str | pathlib.Path | dict[str, Any] | Recipe | None, overrides: Sequence[str] = ()) -> Recipe:
    """The recipe in `source` (a YAML file, a mapping, or nothing but overrides), with `overrides` applied in order.

    Relative paths in a recipe count from the current directory, as they do on the command line, wherever the recipe
    itself lies; `~` is the home directory. Raises UserError: a file that cannot be read or is not YAML, an
    override that is none, and every unknown key and unfit value at once, each with its line.
    """
    if isinstance(source, Recipe):
        if not overrides:
            return source
        source = source.model_dump(mode="json")
    name, lines, given = "the recipe", {}, source
    if isinstance(source, str | pathlib.Path):
        name = str(source)
        located = yaml_text.read(_text(pathlib.Path(source)), name)
        lines, given = located.lines, located.value
        if given is None:
            raise UserError("the recipe is empty", where=name, fix="a recipe needs at least model, data and output")
    elif source is None:
        name, given = "the command line", {}
    if not isinstance(given, dict):
        raise UserError(
            f"a recipe is a mapping of keys to values, and this is {_kind(given)}",
            where=name,
            fix="start with `model: ...`",
        )
    raw, origins = command_line.apply(given, overrides)

    def place(path: yaml_text.Path) -> str:
        """Where the value at `path` was written: the override or the line that set it, or the section it is in."""
        for depth in range(len(path), -1, -1):
            if path[:depth] in origins:
                return origins[path[:depth]]
            if path[:depth] in lines:
                return f"{name}, line {lines[path[:depth]]}"
        return name

    try:
        return Recipe.model_validate(raw)
    except ValidationError as error:
        raise as_user_error(error, raw, name, place) from error


def _text(path: pathlib.Path) -> str:
    path = path.expanduser()
    if path.is_dir():
        raise UserError("the recipe is a directory, not a file", where=str(path), fix=_offer(path))
    try:
        return path.read_text(encoding="utf-8-sig")
    except FileNotFoundError as error:
        raise UserError("there is no such recipe", where=str(path), fix=_near(path)) from error
    except UnicodeDecodeError as error:
        raise UserError(
            f"the recipe is not UTF-8 text (byte {error.start})",
            where=str(path),
            fix="save it as UTF-8, or name the YAML file",
        ) from error
    except OSError as error:
        raise UserError(
            f"the recipe cannot be read: {error.strerror}", where=str(path), fix="check its permissions"
        ) from error


def _offer(directory: pathlib.Path) -> str:
    found = sorted(one.name for one in directory.iterdir() if one.suffix in (".yaml", ".yml"))
    return f"name a recipe in it: {', '.join(found[:5])}" if found else "name a YAML file"


def _near(path: pathlib.Path) -> str:
    parent = path.parent
    if not parent.is_dir():
        return f"the directory {parent} does not exist either"
    recipes = sorted(one.name for one in parent.iterdir() if one.suffix in (".yaml", ".yml"))
    hint = nearest(path.name, recipes)
    return f"{hint}{_offer(parent)}" if recipes else "check the path; a recipe is a YAML file"


def _kind(value: Any) -> str:
    return {list: "a list", str: "text", bool: "a truth value"}.get(type(value), "a number")
