"""Keys of earlier releases: the old name works for one release, with a notice."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from meshtune.config.yaml_text import Path
from meshtune.errors import UserError

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
