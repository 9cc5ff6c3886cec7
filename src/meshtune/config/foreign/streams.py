"""Data that another tool reads as a stream, while it trains."""

from __future__ import annotations

from meshtune.config.foreign.draft import Draft

BEFORE = "data are tokenised before training here, and read from disk in another order"


def stream(draft: Draft, key: str) -> None:
    """Translates the flag `key`, once stage, method and length of the run are in the draft."""
    if not draft.get(key):
        return
    obstacle = _obstacle(draft)
    if obstacle is None:
        draft.put("data.streaming", True, key, note="shuffled as a whole, not by a buffer", differs=True)
    else:
        draft.differ(key, f"{BEFORE}: {obstacle}")


def _obstacle(draft: Draft) -> str | None:
    """Why a stream is not possible here; None if it is."""
    values = {name: setting.value for name, setting in draft.settings.items()}
    if "train.steps" not in values:
        return "without max_steps the length of a stream is unknown"
    kind, adapted = values.get("stage.kind"), values.get("method.kind") == "lora"
    if kind in ("dpo", "kto") and ("stage.reference" in values or not adapted):
        return "the reference's log-probabilities are computed before training"
    if kind == "pt" and values.get("data.packing") is False:
        return "a stream of plain text fills its rows, and packing is off"
    return None
