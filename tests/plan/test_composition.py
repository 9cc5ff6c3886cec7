"""The page that says what goes with what is what the product says."""

from __future__ import annotations

import pathlib

from meshtune.plan.composition import METHODS, page, refusal


def test_the_page_is_current():
    found = (pathlib.Path(__file__).resolve().parents[2] / "docs/composition.md").read_text(encoding="utf-8")
    assert found == page(), "python -m meshtune.plan.composition > docs/composition.md"


def test_what_cannot_be_is_refused_with_its_reason_and_what_can_is_not():
    galore = {"optimizer": {"name": "galore", "rank": 4}}
    assert "low rank already" in (refusal(METHODS["lora"], galore) or "")
    assert refusal(METHODS["full"], galore) is None
