"""Paths of a recipe: `~` and `${NAME}`, and relative ones, which count from the current directory or, if nothing is
there, from the recipe's folder."""

from __future__ import annotations

import contextlib
import os
import pathlib
import re
from collections.abc import Callable, Mapping

from meshtune.config.yaml_text import Path, value_at

# The keys that name what is read. `output` is written, always below the current directory.
MODEL_KEYS = ("path", "tokenizer", "chat_template", "adapter", "merge_adapters")
OTHER_KEYS: tuple[Path, ...] = (("data", "registry"), ("stage", "reference"))
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
    raw: Mapping[str, object], recipe: pathlib.Path, overridden: Callable[[Path], bool], notify: Callable[[str], None]
) -> None:
    """Replaces, in place, each relative path of `raw` that exists only next to `recipe`.

    Paths for which `overridden` is true came from the command line and count only from the current directory. `notify`
    receives one sentence that names all the paths that were replaced.
    """
    replaced: list[str] = []
    for path in _paths(raw):
        container = value_at(raw, path[:-1])
        value = container[path[-1]]
        if not isinstance(value, str) or not value.strip() or value.startswith("~") or overridden(path):
            continue
        with contextlib.suppress(ValueError):  # of a variable that is not set: the check of the recipe names it
            value = expand_path(value)
        candidate = recipe.parent / value
        if not pathlib.Path(value).is_absolute() and not _exists(pathlib.Path(value)) and _exists(candidate):
            container[path[-1]] = str(candidate)
            replaced.append(f"{'.'.join(map(str, path))} is {candidate}")
    if replaced:
        notify(f"not found from the current directory, so taken from beside the recipe: {', '.join(replaced)}")


def _paths(raw: Mapping[str, object]) -> list[Path]:
    """Every path of `raw` at which a path is written; of a list, each entry's."""
    paths: list[Path] = [("model", key) for key in MODEL_KEYS]
    for part in ("train", "validation"):
        sources = value_at(raw, ("data", part))
        paths += [("data", part, n, "path") for n in range(len(sources))] if isinstance(sources, list) else []
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
