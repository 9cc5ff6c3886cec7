"""The base of a result as other people can find it: its id on the hub, and its licence."""

from __future__ import annotations

import contextlib
import dataclasses
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

from meshtune.config import yaml_text
from meshtune.errors import UserError
from meshtune.json_text import read_bytes, read_json
from meshtune.weights.hub import HUB_ID
from meshtune.weights.modelscope import modelscope_id

if TYPE_CHECKING:
    from huggingface_hub import HfApi

SNAPSHOT = re.compile(r"models--([^/]+)--([^/]+)/snapshots/([0-9a-f]{40})")
LICENCES = (
    ("apache-2.0", ("Apache License", "Version 2.0")),
    ("mit", ("MIT License", "Permission is hereby granted")),
    ("gpl-3.0", ("GNU GENERAL PUBLIC LICENSE", "Version 3")),
)


@dataclasses.dataclass(frozen=True)
class Licence:
    """A licence by the hub's name for it; `title` and `link` belong to "other", `file` is its text."""

    id: str
    title: str | None = None
    link: str | None = None
    file: Path | None = None


@dataclasses.dataclass(frozen=True)
class Base:
    """What a result was tuned from.

    `path` is as the run spells it, `name` what it is called elsewhere; `hub_id` is its id on the hub, if known.
    """

    path: str
    name: str
    hub_id: str | None
    revision: str | None = None
    hash: str | None = None
    licence: Licence | None = None


def public_base(
    path: str, *, hub_id: str | None, revision: str | None, hash: str | None, directory: Path | None
) -> Base:
    """Describes the base at `path` for others; `hub_id` overrides what its folder and config say."""
    local = directory or Path(path).expanduser()
    cached = SNAPSHOT.search(local.as_posix())
    if hub_id is None and HUB_ID.match(path) and modelscope_id(path) is None and not Path(path).expanduser().is_dir():
        hub_id = path
    if hub_id is None and cached:
        hub_id, revision = f"{cached[1]}/{cached[2]}", revision or cached[3]
    if hub_id is None:
        hub_id = _named_by_config(local)
    name = hub_id or modelscope_id(path) or Path(path).expanduser().absolute().name
    return Base(path, name, hub_id, revision if hub_id else None, hash, licence_of(local))


def with_hub_licence(base: Base, api: HfApi) -> Base:
    """The base with the licence that its page on the hub states, where its folder states none."""
    from huggingface_hub.errors import HfHubHTTPError, HTTPError

    if base.licence is not None or base.hub_id is None:
        return base
    with contextlib.suppress(HfHubHTTPError, HTTPError, OSError):
        card = api.model_info(base.hub_id, revision=base.revision).card_data
        return dataclasses.replace(base, licence=_stated(card.to_dict() if card is not None else {}, None))
    return base


def licence_of(directory: Path) -> Licence | None:
    """The licence that the README.md, config.json or LICENSE file of a model's folder states; None where none does."""
    file = next((path for path in sorted(directory.glob("LICENSE*")) if path.is_file()), None)
    for fields in (front_matter(directory / "README.md"), _json(directory / "config.json")):
        if (stated := _stated(fields, file)) is not None:
            return stated
    if file is None:
        return None
    text = file.read_text(encoding="utf-8", errors="replace")[:4000]
    known = next((id for id, marks in LICENCES if all(mark in text for mark in marks)), None)
    return Licence(known, file=file) if known else Licence("other", title=file.name, file=file)


def front_matter(card: Path) -> dict[str, Any]:
    """The YAML in front of a model card; {} where there is none."""
    try:
        text = read_bytes(card).decode()
        fields = yaml_text.read(text.split("---", 2)[1], str(card)).value if text.startswith("---") else {}
    except (ValueError, IndexError):
        return {}
    return fields if isinstance(fields, dict) else {}


def _stated(fields: dict[str, Any], file: Path | None) -> Licence | None:
    licence = fields.get("license")
    if isinstance(licence, list) and licence:
        licence = licence[0]
    if not isinstance(licence, str) or not licence:
        return None
    name, link = (fields.get(key) if isinstance(fields.get(key), str) else None for key in _NAME_AND_LINK)
    return Licence(licence, name, link if link and link.startswith("http") else None, file)


_NAME_AND_LINK = ("license_name", "license_link")


def _named_by_config(directory: Path) -> str | None:
    named = _json(directory / "config.json").get("_name_or_path")
    return named if isinstance(named, str) and HUB_ID.match(named) and not Path(named).is_dir() else None


def _json(path: Path) -> dict[str, Any]:
    try:
        return read_json(path)
    except UserError:
        return {}
