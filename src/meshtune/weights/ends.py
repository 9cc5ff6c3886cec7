"""The tokens at which a model's texts end, as generation_config.json and config.json name them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from meshtune.families.composite import text_config, with_text_fields
from meshtune.json_text import read_json, token_ids

GENERATION, CONFIG, KEY = "generation_config.json", "config.json", "eos_token_id"
OF_CONFIG = ("bos_token_id", KEY, "pad_token_id")  # what transformers reads there where there is no GENERATION


def read_ends(*directories: Path | None) -> tuple[int, ...]:
    """The ids that end a text by each directory's generation_config.json, else by its config.json, each id once."""
    sources = [directory for directory in directories if directory is not None]
    return _union(*(_ids(_fields(directory).get(KEY), f"{directory}, field {KEY}") for directory in sources))


def generation_with_ends(source: Path, ends: Iterable[int]) -> dict[str, Any] | None:
    """The generation_config.json of the model in `source` with further ends; None where it has them all."""
    ends = tuple(ends)
    if not ends:
        return None
    fields = _fields(source)
    read = read_json(source / GENERATION) if (source / GENERATION).is_file() else fields  # by other programs
    return None if set(ends) <= set(_ids(read.get(KEY))) else fields | {KEY: list(_union(_ids(fields.get(KEY)), ends))}


def config_with_ends(config: Mapping[str, Any], ends: Iterable[int]) -> dict[str, Any]:
    """A config.json with further ends, in the field where it names its own; a config that names none is unchanged."""
    ends, text = tuple(ends), text_config(config)
    changed = dict(config)
    if text is not config and KEY in text:
        changed = with_text_fields(changed, {KEY: _value(text[KEY], ends)})
    if KEY in config:
        changed[KEY] = _value(config[KEY], ends)
    return changed


def _fields(directory: Path) -> dict[str, Any]:
    """The fields of generation_config.json, with the ends of config.json where it names none."""
    config = read_json(directory / CONFIG) if (directory / CONFIG).is_file() else {}
    known = {**text_config(config), **config} if config else {}
    if not (directory / GENERATION).is_file():
        return {name: known[name] for name in OF_CONFIG if known.get(name) is not None}
    fields = read_json(directory / GENERATION)
    return fields if fields.get(KEY) is not None or known.get(KEY) is None else fields | {KEY: known[KEY]}


def _ids(value: Any, where: str = KEY) -> tuple[int, ...]:
    return tuple(token_ids(value, where))


def _union(*ids: Iterable[int]) -> tuple[int, ...]:
    return tuple(dict.fromkeys(id_ for part in ids for id_ in part))


def _value(before: Any, ends: tuple[int, ...]) -> Any:
    return before if set(ends) <= set(_ids(before)) else list(_union(_ids(before), ends))
