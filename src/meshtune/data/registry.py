"""LLaMA-Factory's dataset_info.json, read as it is (its data/README.md; llamafactory/data/parser.py).

An entry with `columns` has only the columns it names; one without has its format's own. Unlike LLaMA-Factory, an entry
without `columns` also gets its records' `system`, `history` and `tools` where they have them, and tags that an entry
leaves out keep their defaults.
"""

from __future__ import annotations

import dataclasses
import json
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

from meshtune.config.data import SourceSection
from meshtune.data.formats import KINDS, STAGES
from meshtune.data.formats.sharegpt import TAGS
from meshtune.data.readers.jsonfile import parse
from meshtune.data.readers.mapped import MappedFile
from meshtune.data.sources import Source, missing
from meshtune.errors import UserError, nearest

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
COLUMNS = (
    *("prompt", "query", "response", "history", "system", "tools", "messages"),
    *("images", "videos", "audios", "chosen", "rejected", "kto_tag"),
)
MEDIA = ("images", "videos", "audios")
PREFERENCE = ("chosen", "rejected", "kto_tag")
FORMATTINGS = {"alpaca": "alpaca", "sharegpt": "sharegpt", "openai": "messages"}
UNREACHABLE = {
    "script_url": "a loading script: that would run code of the data set's author",
    "ms_hub_url": "ModelScope, which is not supported",
    "om_hub_url": "OpenMind, which is not supported",
    "cloud_file_name": "cloud storage, which is not supported",
}


@dataclasses.dataclass(frozen=True)
class Registry:
    """The entries of a dataset_info.json; `path` is the file, `name` what the user called it."""

    path: pathlib.Path
    name: str
    entries: Mapping[str, Any]

    @classmethod
    def load(cls, name: str) -> Registry:
        """Reads the file, or the one in the folder `name`. UserError where there is none or it is malformed."""
        path = pathlib.Path(name).expanduser()
        if path.is_dir():
            path, name = path / FILE, f"{name.rstrip('/')}/{FILE}"
        if not path.is_file():
            raise missing(path, name)
        file = MappedFile(path, name)
        entries = parse(file, file.start, len(file.view))
        if not isinstance(entries, dict):
            fix = 'write {"name": {"file_name": ...}, ...}'
            raise UserError("a registry is an object of named entries", where=name, fix=fix)
        return cls(path, name, entries)

    def source(self, section: SourceSection, learns: str = "documents") -> Source:
        """The source of the entry `section.name`; what the recipe says besides goes over the entry.

        Raises UserError for an unknown entry or key (with the nearest), a value of the wrong type, an entry of images,
        video or audio, or of records that hold something else than what `learns` says (see formats.KINDS), and one to
        be had only from elsewhere than a file or the Hugging Face hub.
        """
        name = section.name or ""
        if name not in self.entries:
            listed = ", ".join(list(self.entries)[:12]) + (", …" if len(self.entries) > 12 else "")
            raise UserError(
                f"the registry has no entry '{name}'",
                where=self.name,
                fix=f"{nearest(name, self.entries)}it has: {listed}",
            )
        where, entry = f"{self.name}, entry '{name}'", self.entries[name]
        _check_entry(entry, where, learns)
        form, columns, tags = _reading(entry, where, learns)
        if section.format != "auto":
            form = section.format
        if section.format != "auto" or section.columns:
            columns = {key: value for key, value in columns.items() if KINDS[learns][form].knows(key)} | section.columns
        chosen = section.model_fields_set
        common: dict[str, Any] = {
            "format": form,
            "columns": columns,
            "tags": {**tags, **section.tags} if form == "sharegpt" else section.tags,
            "split": section.split if "split" in chosen else entry.get("split", "train"),
            "subset": section.subset or entry.get("subset"),
            "revision": section.revision,
            "folder": entry.get("folder"),
            "weight": section.weight,
            "cap": section.cap,
            "sample": entry.get("num_samples"),
        }
        if "hf_hub_url" in entry:
            return Source(path=entry["hf_hub_url"], hub=True, **common)
        if "file_name" in entry:
            file = self.path.parent / entry["file_name"]
            if not file.exists():
                raise missing(file, f"{file} ({where})")
            return Source(path=str(file), **common)
        for key, place in UNREACHABLE.items():
            if key in entry:
                fix = "download it, and give the file's path in the recipe or as file_name in the entry"
                raise UserError(f"the entry is to be had only from {place}", where=f"{where}, key '{key}'", fix=fix)
        raise UserError("the entry names no data", where=where, fix="add file_name or hf_hub_url")


def _known(given: Mapping[str, Any], known: Sequence[str], what: str, where: str) -> None:
    for key in given:
        if key not in known:
            fix = f"{nearest(key, known)}known: {', '.join(known)}"
            raise UserError(f"unknown {what} '{key}'", where=where, fix=fix)


def _check_entry(entry: Any, where: str, learns: str) -> None:
    if not isinstance(entry, dict):
        raise UserError("the entry is no object", where=where, fix='write {"file_name": ...}')
    _known(entry, list(TYPES), "key", where)
    for key, value in entry.items():
        right = isinstance(value, TYPES[key]) and not (TYPES[key] is int and isinstance(value, bool))
        if not right or (key == "num_samples" and value < 1):
            wanted = {str: "text", bool: "true or false", int: "a whole number above 0", dict: "an object"}[TYPES[key]]
            raise UserError(
                f"expected {wanted}, found {json.dumps(value)[:60]}", where=f"{where}, key '{key}'", fix="mend it"
            )
    columns, tags = entry.get("columns", {}), entry.get("tags", {})
    _known(columns, COLUMNS, "column", f"{where}, columns")
    _known(tags, list(TAGS), "tag", f"{where}, tags")
    for kind, names in (("columns", columns), ("tags", tags)):
        for key, value in names.items():
            if not isinstance(value, str):
                what = f"expected the name of a field, found {json.dumps(value)[:60]}"
                raise UserError(what, where=f"{where}, {kind} '{key}'", fix="mend it")
    media = [key for key in MEDIA if key in columns]
    if media:
        raise UserError(
            f"the entry has {' and '.join(media)}: only text can be learned",
            where=f"{where}, columns",
            fix="leave it out",
        )
    _check_kind(entry, columns, where, learns)


def _check_kind(entry: Mapping[str, Any], columns: Mapping[str, Any], where: str, learns: str) -> None:
    preference = [key for key in PREFERENCE if key in columns]
    said = "ranking: true" if entry.get("ranking") else f"column {preference[0]}" if preference else "documents alone"
    holds = "labelled" if "kto_tag" in columns else "pairs" if entry.get("ranking") or preference else "documents"
    if holds == learns:
        return
    if learns == "documents":
        raise UserError(
            f"the entry holds preference data ({said}), which supervised tuning does not learn from",
            where=where,
            fix=f"set stage: {STAGES[holds]}; or leave it out; or give its file as a path, with the format and columns "
            "of the answers to learn",
        )
    needs = "column kto_tag" if learns == "labelled" else "ranking: true"
    raise UserError(
        f"the entry holds {holds} ({said}), and this stage learns from {learns} ({needs})",
        where=where,
        fix=f"set stage: {STAGES[holds]}, or name another entry",
    )


def _reading(entry: Mapping[str, Any], where: str, learns: str) -> tuple[str, dict[str, str | None], dict[str, str]]:
    """Format, columns and tags, in our words, of an entry."""
    formatting = entry.get("formatting", "alpaca")
    if formatting not in FORMATTINGS:
        fix = f"{nearest(formatting, FORMATTINGS)}known: {', '.join(FORMATTINGS)}"
        raise UserError(f"unknown formatting '{formatting}'", where=f"{where}, key 'formatting'", fix=fix)
    named, tags = entry.get("columns"), dict(entry.get("tags", {}))
    form = FORMATTINGS[formatting]
    if form == "messages" and tags:
        form = "sharegpt"  # the same turns under other names
    if named is None:
        return form, {}, tags
    if (
        learns == "documents"
        and form == "alpaca"
        and "prompt" in named
        and "response" not in named
        and "query" not in named
    ):
        return "text", {"text": named["prompt"]}, {}  # what LLaMA-Factory pretrains on
    reads = KINDS[learns][form]
    for key in named:
        if not reads.knows(key):
            raise UserError(
                f"column '{key}' has no meaning with formatting {formatting}",
                where=f"{where}, columns",
                fix=f"known: {', '.join(one for one in COLUMNS if reads.knows(one))}",
            )
    columns: dict[str, str | None] = dict.fromkeys(reads.fields)
    if form != "alpaca":
        columns |= {key: key for key in ("conversations", "messages") if key in reads.fields}
    columns |= {key: key for key in ("chosen", "rejected") if key in reads.fields}
    return form, columns | {reads.aliases.get(key, key): value for key, value in named.items()}, tags
