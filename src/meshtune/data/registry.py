"""Reads LLaMA-Factory's registry of data sets, dataset_info.json (its data/README.md; llamafactory/data/parser.py).

An entry with `columns` has only the columns it names; one without has those of its format. Unlike LLaMA-Factory, an
entry without `columns` also uses `system`, `history` and `tools` of its records, and tags that an entry omits keep
their defaults.
"""

from __future__ import annotations

import dataclasses
import json
import pathlib
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from meshtune.config.sections import SourceSection
from meshtune.data.formats import EXAMPLE_STAGE, FORMATS_BY_TYPE
from meshtune.data.formats.messages import TAGS
from meshtune.data.readers.textfiles import MappedFile, parse
from meshtune.data.sources import DataSource, missing_path_error
from meshtune.errors import UserError, nearest
from meshtune.weights.hub import PREFIX, is_default

if TYPE_CHECKING:
    from meshtune.objectives.stages import DatasetType

FILE = "dataset_info.json"
TYPES: dict[str, type | tuple[type, ...]] = {
    "file_name": str,
    "hf_hub_url": str,
    "ms_hub_url": str,
    "om_hub_url": str,
    "script_url": str,
    "cloud_file_name": str,
    "formatting": str,
    "ranking": bool,
    "subset": str,
    "split": str,
    "folder": str,
    "num_samples": int,
    "columns": dict,
    "tags": dict,
}
TYPE_NAMES: dict[object, str] = {
    str: "text",
    bool: "true or false",
    int: "a whole number above 0",
    dict: "an object",
}
COLUMNS = (
    *("prompt", "query", "response", "history", "system", "tools", "messages"),
    *("images", "videos", "audios", "chosen", "rejected", "kto_tag"),
)
MEDIA = ("videos", "audios")
PREFERENCE = ("chosen", "rejected", "kto_tag")
FORMATTINGS = {"alpaca": "alpaca", "sharegpt": "sharegpt", "openai": "messages"}
UNREACHABLE = {
    "script_url": "a loading script: that would run code of the data set's author",
    "om_hub_url": "OpenMind, which is not supported",
    "cloud_file_name": "cloud storage, which is not supported",
}


@dataclasses.dataclass(frozen=True)
class Registry:
    """The entries of a dataset_info.json. `path` is the file, `name` what the user called it."""

    path: pathlib.Path
    name: str
    entries: Mapping[str, Any]

    def source(self, section: SourceSection, dataset_type: DatasetType = "documents") -> DataSource:
        """The source that the entry `section.name` describes; other keys of `section` take precedence over the entry.

        Raises UserError for an unknown entry or key (suggesting the nearest), a value of the wrong type, an entry with
        video or audio, an entry that does not hold `dataset_type`, and one that is neither a file nor on the
        Hugging Face hub.
        """
        name = section.name or ""
        if name not in self.entries:
            listed = ", ".join(list(self.entries)[:12]) + (", …" if len(self.entries) > 12 else "")
            raise UserError(
                f"the registry has no entry '{name}'",
                where=self.name,
                fix=f"{nearest(name, self.entries)}its entries: {listed}",
            )
        where, entry = f"{self.name}, entry '{name}'", self.entries[name]
        _check_entry(entry, where, dataset_type)
        form, columns, tags = _interpret(entry, where, dataset_type)
        if section.format != "auto":
            form = section.format
        if section.format != "auto" or section.columns:
            known = FORMATS_BY_TYPE[dataset_type][form]
            columns = {key: value for key, value in columns.items() if known.has_column(key)} | section.columns
        common: dict[str, Any] = {
            "format": form,
            "columns": columns,
            "tags": {**tags, **section.tags} if form == "sharegpt" else section.tags,
            "split": section.split if "split" in section.model_fields_set else entry.get("split", "train"),
            "subset": section.subset or entry.get("subset"),
            "revision": section.revision,
            "folder": entry.get("folder"),
            "weight": section.weight,
            "cap": section.cap,
            "sample": entry.get("num_samples"),
        }
        elsewhere = "hf_hub_url" in entry or "file_name" in entry
        if "ms_hub_url" in entry and (is_default() or not elsewhere):
            return DataSource(path=f"{PREFIX}{entry['ms_hub_url']}", **common)
        if "hf_hub_url" in entry:
            return DataSource(path=entry["hf_hub_url"], hub=True, **common)
        if "file_name" in entry:
            file = self.path.parent / entry["file_name"]
            if not file.exists():
                raise missing_path_error(file, f"{file} ({where})")
            return DataSource(path=str(file), **common)
        for key, origin in UNREACHABLE.items():
            if key in entry:
                fix = "download it, and give the file's path in the recipe or as file_name in the entry"
                raise UserError(f"the entry is available only from {origin}", where=f"{where}, key '{key}'", fix=fix)
        raise UserError("the entry names no data", where=where, fix="add file_name or hf_hub_url")


def load_registry(name: str) -> Registry:
    """Reads the file `name`, or the one in the folder `name`. Raises UserError where it is missing or malformed."""
    path = pathlib.Path(name).expanduser()
    if path.is_dir():
        path, name = path / FILE, f"{name.rstrip('/')}/{FILE}"
    if not path.is_file():
        raise missing_path_error(path, name)
    file = MappedFile(path, name)
    entries = parse(file, file.start, len(file.view))
    if not isinstance(entries, dict):
        fix = 'write {"name": {"file_name": ...}, ...}'
        raise UserError("a registry is an object of named entries", where=name, fix=fix)
    return Registry(path, name, entries)


def _check_keys(keys: Iterable[str], known: Sequence[str], problem: str, where: str) -> None:
    for key in keys:
        if key not in known:
            fix = f"{nearest(key, known)}known: {', '.join(known)}"
            raise UserError(f"unknown {problem} '{key}'", where=where, fix=fix)


def _check_entry(entry: Any, where: str, dataset_type: DatasetType) -> None:
    if not isinstance(entry, dict):
        raise UserError("the entry is not an object", where=where, fix='write {"file_name": ...}')
    _check_keys(entry, list(TYPES), "key", where)
    for key, value in entry.items():
        right = isinstance(value, TYPES[key]) and not (TYPES[key] is int and isinstance(value, bool))
        if not right or (key == "num_samples" and value < 1):
            expected = TYPE_NAMES[TYPES[key]]
            raise UserError(
                f"expected {expected}, found {json.dumps(value)[:60]}", where=f"{where}, key '{key}'", fix="correct it"
            )
    columns, tags = entry.get("columns", {}), entry.get("tags", {})
    _check_keys(columns, COLUMNS, "column", f"{where}, columns")
    _check_keys(tags, list(TAGS), "tag", f"{where}, tags")
    for section, names in (("columns", columns), ("tags", tags)):
        for key, value in names.items():
            if not isinstance(value, str):
                problem = f"expected the name of a field, found {json.dumps(value)[:60]}"
                raise UserError(problem, where=f"{where}, {section} '{key}'", fix="correct it")
    media = [key for key in MEDIA if key in columns]
    if media:
        raise UserError(
            f"the entry has {' and '.join(media)}: only text and pictures can be trained on",
            where=f"{where}, columns",
            fix="leave it out; or make pictures of frames, and list them under images",
        )
    _check_dataset_type(entry, columns, where, dataset_type)


def _check_dataset_type(
    entry: Mapping[str, Any], columns: Mapping[str, Any], where: str, dataset_type: DatasetType
) -> None:
    preference = [key for key in PREFERENCE if key in columns]
    ranking = bool(entry.get("ranking"))
    evidence = "ranking: true" if ranking else f"column {preference[0]}" if preference else "no preference columns"
    actual = "labelled" if "kto_tag" in columns else "pairs" if ranking or preference else "documents"
    if actual == dataset_type or (dataset_type == "prompts" and actual == "documents"):
        return
    if dataset_type == "documents":
        raise UserError(
            f"the entry holds preference data ({evidence}), which supervised tuning does not train on",
            where=where,
            fix=f"set stage: {EXAMPLE_STAGE[actual]}; or leave it out; or give its file as a path, with the format and "
            "columns of the answers to train on",
        )
    required = "column kto_tag" if dataset_type == "labelled" else "ranking: true"
    raise UserError(
        f"the entry holds {actual} ({evidence}), but this stage trains on {dataset_type} ({required})",
        where=where,
        fix=f"set stage: {EXAMPLE_STAGE[actual]}, or name another entry",
    )


def _interpret(
    entry: Mapping[str, Any], where: str, dataset_type: DatasetType
) -> tuple[str, dict[str, str | None], dict[str, str]]:
    """The format, columns and tags of an entry, under our names."""
    formatting = entry.get("formatting", "alpaca")
    if formatting not in FORMATTINGS:
        fix = f"{nearest(formatting, FORMATTINGS)}known: {', '.join(FORMATTINGS)}"
        raise UserError(f"unknown formatting '{formatting}'", where=f"{where}, key 'formatting'", fix=fix)
    named, tags = entry.get("columns"), dict(entry.get("tags", {}))
    form = FORMATTINGS[formatting]
    if form == "messages" and tags:
        form = "sharegpt"  # the same turns with other keys
    if named is None:
        return form, {}, tags
    if (
        dataset_type == "documents"
        and form == "alpaca"
        and "prompt" in named
        and "response" not in named
        and "query" not in named
    ):
        return "text", {"text": named["prompt"]}, {}  # LLaMA-Factory's pretraining data
    known = FORMATS_BY_TYPE[dataset_type][form]
    for key in named:
        if not known.has_column(key):
            raise UserError(
                f"column '{key}' has no meaning with formatting {formatting}",
                where=f"{where}, columns",
                fix=f"known: {', '.join(column for column in COLUMNS if known.has_column(column))}",
            )
    columns: dict[str, str | None] = dict.fromkeys(known.fields)
    if form != "alpaca":
        columns |= {key: key for key in ("conversations", "messages") if key in known.fields}
    columns |= {key: key for key in ("chosen", "rejected") if key in known.fields}
    return form, columns | {known.aliases.get(key, key): value for key, value in named.items()}, tags
