"""Pairs of methods and optimizers are refused for a reason."""

from __future__ import annotations

from meshtune.plan.program import METHODS, refusal, table


def test_an_impossible_combination_is_refused_with_its_reason():
    galore = {"optimizer": {"name": "galore", "rank": 4}}
    assert "low rank already" in (refusal(METHODS["lora"], galore) or "")
    assert refusal(METHODS["full"], galore) is None


def test_rows_with_the_same_cells_are_one_row():
    rows = {"adamw": {"optimizer": {"name": "adamw"}}, "lion": {"optimizer": {"name": "lion"}}}
    notes: list[str] = []
    assert table(rows, {"lora": METHODS["lora"]}, notes) == "Every pair works: adamw, lion with lora."
    galore = {"galore": {"optimizer": {"name": "galore", "rank": 4}}}
    lines = table(rows | galore, {"lora": METHODS["lora"]}, notes).splitlines()
    assert lines[2:] == ["| adamw, lion | ● |", "| galore | 1 |"]
    assert len(notes) == 1
