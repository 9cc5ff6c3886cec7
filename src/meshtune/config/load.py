"""Loads a recipe from a file, a mapping and overrides of the command line."""

from __future__ import annotations

import pathlib
import stat
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from pydantic import ValidationError

from meshtune.config import yaml_text
from meshtune.config.problems import Locate, as_user_error
from meshtune.config.recipe import Recipe
from meshtune.config.section import beside_recipe
from meshtune.config.sections import written_out
from meshtune.config.yaml_text import Path
from meshtune.errors import UNREADABLE, UserError, nearest

# Old key -> new key of the same section. Remove an entry one release after the one that adds it.
RENAMED: dict[Path, str] = {("optimizer", "fused"): "in_backward"}
# Keys that are gone, with the value under which they are still read in recipes of earlier runs.
REMOVED: dict[Path, object] = {("evaluate", "protocol"): "lm-eval"}


def current_path(path: Path) -> Path:
    """`path` with the current name of a renamed key."""
    return (*path[:-1], RENAMED[path]) if path in RENAMED else path


def with_current_names(raw: Mapping[str, object], notify: Callable[[str], None] | None = None) -> dict[str, object]:
    """A recipe's raw mapping with renamed keys under their current names; `notify` receives a sentence for each.

    Raises UserError where both names are given.
    """
    raw = dict(raw)
    for (name, old), value in REMOVED.items():
        section = raw.get(str(name))
        if isinstance(section, dict) and section.get(old) == value:
            raw[str(name)] = {key: entry for key, entry in section.items() if key != old}
    for (name, old), new in RENAMED.items():
        section = raw.get(str(name))
        if not isinstance(section, dict) or old not in section:
            continue
        if new in section:
            raise UserError(
                f"{name}.{old} is the former name of {name}.{new}, and both are given",
                where=f"{name}.{old}",
                fix=f"remove {name}.{old}",
            )
        raw[str(name)] = {new if key == old else key: value for key, value in section.items()}
        if notify is not None:
            notify(renaming(name, old))
    return raw


def renaming(section: str | int, old: str | int) -> str:
    """The notice for a key under its old name."""
    return (
        f"{section}.{old} is now called {section}.{RENAMED[section, old]}; "
        "the old name works in this release and will be refused by the next"
    )


MAX_BYTES = 4 * yaml_text.MAX_CHARACTERS
Notify = Callable[[str], None]


# Keys that say one thing in two ways, of which a recipe has one.
ALTERNATIVES: tuple[tuple[yaml_text.Path, yaml_text.Path], ...] = (
    (("resume",), ("overwrite",)),
    (("train", "epochs"), ("train", "steps")),
    (("optimizer", "warmup_ratio"), ("optimizer", "warmup_steps")),
    (("data", "train_on_prompt"), ("data", "last_turn_only")),
)


def to_stderr(notice: str) -> None:
    """Prints a notice about a recipe where it does not mix with results."""
    print(f"note: {notice}", file=sys.stderr)


def silent(notice: str) -> None:
    """Drops a notice: for recipes that are read again."""


def load_recipe(
    source: str | pathlib.Path | dict[str, object] | Recipe | None,
    overrides: Sequence[str] = (),
    *,
    notify: Notify = to_stderr,
) -> Recipe:
    """The recipe in `source` (a YAML file, a mapping, or nothing but overrides), with `overrides` applied in order.

    Relative paths count from the current directory; those in a file that do not exist there are looked for next to the
    file. `~` is the home directory, `${NAME}` an environment variable. `notify` receives notices that are no mistakes:
    a path that was found next to the recipe, a key that has a new name.

    Raises UserError: a file that cannot be read or is not YAML, an override that is none, and every unknown key and
    unfit value at once, each with its line.
    """
    if isinstance(source, Recipe):
        if not overrides:
            return source
        source = source.model_dump(mode="json")
    if isinstance(source, str | pathlib.Path):
        name = str(source)
        text = yaml_text.read(recipe_file_text(pathlib.Path(source)), name)
        lines, content = {current_path(path): line for path, line in text.lines.items()}, text.value
        if content is None:
            raise UserError("the recipe is empty", where=name, fix="a recipe needs at least model, data and output")
    else:
        name = "the command line" if source is None else "the recipe"
        lines, content = {}, {} if source is None else source
    if not isinstance(content, dict):
        raise UserError(
            f"a recipe is a mapping of keys to values, and this is {_type_name(content)}",
            where=name,
            fix="start with `model: ...`",
        )
    if isinstance(source, str | pathlib.Path) and not {"data", "output"} <= set(content):
        _check_tool(content, name)
    raw, origins = apply(with_current_names(content, notify), overrides, notify)
    _settle_alternatives(raw, origins, notify)
    if isinstance(source, str | pathlib.Path):
        recipe_file = pathlib.Path(source).expanduser()
        beside_recipe(raw, recipe_file, lambda path: _written_at(path, origins) is not None, notify)

    try:
        return Recipe.model_validate(raw)
    except ValidationError as error:
        raise as_user_error(error, raw, name, locator(name, lines, origins)) from error


def locator(name: str, lines: Mapping[Path, int], origins: Mapping[Path, str]) -> Locate:
    """A function that says where the value at a path was written: the override or the line that set it, or the section
    it is in."""

    def locate(path: Path) -> tuple[str, int]:
        for depth in range(len(path), -1, -1):
            if path[:depth] in origins:
                return origins[path[:depth]], depth
            if path[:depth] in lines:
                return f"{name}, line {lines[path[:depth]]}", depth
            if depth == len(path) and (inside := [path_ for path_ in origins if path_[:depth] == path]):
                return origins[inside[0]], depth
        return name, 0

    return locate


def _check_tool(content: Mapping[str, Any], name: str) -> None:
    """Raises UserError for a recipe of another tool. Its tables are imported only for a file that may be one."""
    from meshtune.config.foreign.detect import import_fix, is_foreign

    if (tool := is_foreign(content)) is not None:
        raise UserError(
            f"this is a recipe of {tool}",
            where=name,
            fix=import_fix(content, name),
        )


def _settle_alternatives(raw: dict[str, object], origins: dict[yaml_text.Path, str], notify: Notify) -> None:
    """Lets a key on the command line win over the key of the file that says the same in another way, which goes back to
    its default."""
    for path, alternative in (*ALTERNATIVES, *((alternative, path) for path, alternative in ALTERNATIVES)):
        override, section = _written_at(path, origins), yaml_text.value_at(raw, alternative[:-1])
        if override is None or _written_at(alternative, origins) is not None or not isinstance(section, dict):
            continue
        if yaml_text.value_at(raw, path) in (None, False) or section.get(alternative[-1]) in (None, False):
            continue
        value = section.pop(alternative[-1])
        shown = str(value).lower() if isinstance(value, bool) else value
        notify(f"{override}: {'.'.join(map(str, alternative))}: {shown} in the recipe has no effect")


def _written_at(path: yaml_text.Path, origins: dict[yaml_text.Path, str]) -> str | None:
    """The override that set the value at `path` or a section above it."""
    return next((origins[path[:depth]] for depth in range(len(path), 0, -1) if path[:depth] in origins), None)


def recipe_file_text(path: pathlib.Path) -> str:
    """The text of a recipe file. Raises UserError, with a fix for each way in which it cannot be read: for a pipe or a
    device, which may have no end, too."""
    path = path.expanduser()
    try:
        if path.is_dir():
            raise UserError("the recipe is a directory, not a file", where=str(path), fix=_offer(path))
        if not stat.S_ISREG(path.stat().st_mode):
            fix = "write the recipe to a file, and name that"
            raise UserError("the recipe is a pipe or a device, not a file", where=str(path), fix=fix)
        with path.open("rb") as file:
            content = file.read(MAX_BYTES + 1)
        if len(content) > MAX_BYTES:
            raise UserError(
                f"the file has {path.stat().st_size:,} bytes: that is no recipe",
                where=str(path),
                fix="name the YAML file",
            )
        return content.decode("utf-8-sig").replace("\r\n", "\n").replace("\r", "\n")
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
            f"the recipe cannot be read: {error.strerror}",
            where=str(path),
            fix=UNREADABLE.get(error.errno or 0, "give another path, or look at the disk"),
        ) from error


def _yaml_files(directory: pathlib.Path) -> list[str]:
    return sorted(path.name for path in directory.iterdir() if path.suffix in (".yaml", ".yml"))


def _offer(directory: pathlib.Path) -> str:
    names = _yaml_files(directory)
    return f"name a recipe in it: {', '.join(names[:5])}" if names else "name a YAML file"


def _near(path: pathlib.Path) -> str:
    parent = path.parent
    if not parent.is_dir():
        return f"the directory {parent} does not exist either"
    recipes = _yaml_files(parent)
    return f"{nearest(path.name, recipes)}{_offer(parent)}" if recipes else "check the path; a recipe is a YAML file"


def _type_name(value: object) -> str:
    return {list: "a list", str: "text", bool: "a truth value"}.get(type(value), "a number")


COMMAND_LINE = "command line"


def apply(
    raw: Mapping[str, object],
    overrides: Sequence[str],
    notify: Callable[[str], None],
    expand: Callable[[Mapping[str, object]], dict[str, object]] = written_out,
) -> tuple[dict[str, object], dict[yaml_text.Path, str]]:
    """`raw` with every override applied, and for each overridden path the override that set it.

    A value is YAML (`1e-4`, `true`, `null`, `[q_proj, v_proj]`) and replaces what stood at the key, the whole section
    for `method=full`. List entries go by their number: `data.train.0.cap=10`; the number after the last adds one.
    `notify` receives a notice for a key under its former name; `expand` writes short forms out.
    """
    raw = expand(raw)
    origins: dict[yaml_text.Path, str] = {}
    for override in overrides:
        key, sign, text = override.partition("=")
        if not sign or not all(key.split(".")):
            raise UserError(
                f"'{override}' is not an override",
                where=COMMAND_LINE,
                fix="write key=value or section.key=value, e.g. optimizer.learning_rate=1e-4",
            )
        where = f"{COMMAND_LINE}, {override if len(override) <= 200 else f'{override[:200]}...'}"
        if key.count(".") >= yaml_text.MAX_DEPTH:
            raise UserError(f"the key has {key.count('.') + 1} parts", where=where, fix="name a key of a recipe")
        keys = [str(step) for step in current_path(tuple(key.split(".")))]
        if ".".join(keys) != key:
            section, former = key.split(".")
            notify(renaming(section, former))
        path = _put(raw, keys, yaml_text.scalar(text, where), where)
        for stale in [known for known in origins if known[: len(path)] == path]:
            del origins[stale]
        origins[path] = where
        raw = expand(raw)
    return raw, origins


def _put(raw: Mapping[str, object], keys: list[str], value: object, where: str) -> yaml_text.Path:
    """Set the value at `keys`, making sections on the way; the path, with list indices as numbers."""
    node: Any = raw
    path: list[str | int] = []
    for depth, key in enumerate(keys):
        last = depth + 1 == len(keys)
        if isinstance(node, list):
            index = _index(key, len(node), ".".join(keys[:depth]), where)
            if index == len(node):
                node.append(None)
            path.append(index)
            if last:
                node[index] = value
            elif not isinstance(node[index], dict | list):
                node[index] = {}
            node = node[index]
        elif isinstance(node, dict):
            path.append(key)
            if last:
                node[key] = value
            elif node.get(key) in (None, "auto"):  # what was left open is now said in part
                node[key] = {}
            node = node[key]
        else:
            raise UserError(
                f"{'.'.join(keys[:depth])} is {node!r}: it has no parts to set",
                where=where,
                fix=f"write {'.'.join(keys[:depth])}=VALUE",
            )
    return tuple(path)


def _index(key: str, length: int, name: str, where: str) -> int:
    if not key.isdecimal() or len(key) > len(str(length)) or int(key) > length:
        entries = f"entries 0 to {length - 1}" if length else "no entries yet"
        raise UserError(
            f"{name} is a list with {entries}, not '{key}'",
            where=where,
            fix=f"use a number from 0 to {length}; {length} adds an entry",
        )
    return int(key)
