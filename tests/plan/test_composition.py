"""docs/composition.md is what the product generates."""

from __future__ import annotations

import pathlib

from meshtune.plan.composition import METHODS, page, refusal


def test_the_page_is_current():
    filed = (pathlib.Path(__file__).resolve().parents[2] / "docs/composition.md").read_text(encoding="utf-8")
    assert filed == page(), "python -m meshtune.plan.composition > docs/composition.md"


def test_an_impossible_combination_is_refused_with_its_reason():
    galore = {"optimizer": {"name": "galore", "rank": 4}}
    assert "low rank already" in (refusal(METHODS["lora"], galore) or "")
    assert refusal(METHODS["full"], galore) is None
