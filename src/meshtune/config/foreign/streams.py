"""Data that another tool reads as a stream, while it trains."""

from __future__ import annotations

from meshtune.config.foreign.draft import Draft

BEFORE = "data are tokenised before training here, and read from disk in another order"
BUFFER = "shuffled as a whole, not by a buffer"


def stream(draft: Draft, key: str, *related: str) -> None:
    """Translates the flag (or list of data) `key` and what goes with it, `related`, once stage, method and length of
    the run are in the draft."""
    if not draft.get(key):
        return
    if "train.steps" not in draft.settings:
        draft.refuse(key, f"{draft.tool} stops: the length of a stream is unknown without max_steps", "add max_steps")
        return
    shuffled = "data.shuffle" not in draft.settings
    obstacle = _obstacle(draft)
    if obstacle is None:
        notes = [BUFFER] * shuffled + ["documents go on in the next row"] * (draft.settings["stage.kind"].value == "pt")
        draft.put("data.streaming", True, key, *related, note="; ".join(notes), differs=shuffled)
    else:
        for name in (key, *(name for name in related if name in draft.given)):
            draft.differ(
                name, f"{BEFORE}: {obstacle}" if shuffled else f"data are tokenised before training: {obstacle}"
            )


def stops(draft: Draft, key: str, without: str) -> None:
    """Refuses a key with which the tool does not stream either."""
    draft.refuse(key, f"{draft.tool} stops where data are a stream", f"{without}, or leave streaming out")


def _obstacle(draft: Draft) -> str | None:
    """Why a stream is not possible here; None if it is."""
    values = {name: setting.value for name, setting in draft.settings.items()}
    kind, adapted = values.get("stage.kind"), values.get("method.kind") == "lora"
    if kind in ("dpo", "kto") and ("stage.reference" in values or not adapted):
        return "the reference's log-probabilities are computed before training"
    if kind == "pt" and values.get("data.packing") is False:
        return "a stream of plain text fills its rows, and packing is off"
    return None
