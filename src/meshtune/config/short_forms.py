"""Short ways to write a recipe, and their long forms. Everything else sees the long form only."""

from __future__ import annotations

from collections.abc import Mapping


def written_out(raw: Mapping[str, object]) -> dict[str, object]:
    """A copy of a recipe's raw mapping with its short forms written out.

    `model: PATH` is `model: {path: PATH}`; `method: full` is `method: {kind: full}`, and a method without a kind is
    lora; `stage: dpo` is `stage: {kind: dpo}`, and a stage without a kind is sft; `quantize: nf4` is
    `quantize: {format: nf4}`; `data: PATH` is `data: {train: PATH}`; a path or a single source becomes a list of
    mappings.
    """
    raw = {key: _copy(value) for key, value in raw.items()}
    if isinstance(raw.get("model"), str):
        raw["model"] = {"path": raw["model"]}
    for key, default in (("method", "lora"), ("stage", "sft")):
        value = raw.get(key)
        if isinstance(value, str):
            raw[key] = {"kind": value}
        elif isinstance(value, dict) and "kind" not in value:
            raw[key] = {"kind": default, **value}
    if isinstance(raw.get("quantize"), str):
        raw["quantize"] = {"format": raw["quantize"]}
    if isinstance(raw.get("data"), str | list):
        raw["data"] = {"train": raw["data"]}
    if isinstance(data := raw.get("data"), dict):
        for key in ("train", "validation"):
            if key in data:
                data[key] = sources(data[key])
    return raw


def sources(value: object) -> object:
    """A path, a mapping, or a list of either, as a list of mappings; anything else unchanged."""
    if isinstance(value, str | dict):
        value = [value]
    if isinstance(value, list):
        return [{"path": entry} if isinstance(entry, str) else entry for entry in value]
    return value


def _copy(value: object) -> object:
    """Fresh containers, so that an override never writes into what the caller gave."""
    if isinstance(value, dict):
        return {key: _copy(entry) for key, entry in value.items()}
    if isinstance(value, list | tuple):
        return [_copy(entry) for entry in value]
    return value
