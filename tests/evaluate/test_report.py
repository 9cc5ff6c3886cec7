"""The report of a comparison: verdicts in words and tables, folded parts, and the contents of the pictures."""

from __future__ import annotations

import re

import pytest

from meshtune.evaluate import report
from meshtune.evaluate.compare import Outcome
from meshtune.evaluate.predict import Predictions
from meshtune.evaluate.report import LINES, sentences, write_report
from meshtune.evaluate.statistics import ENOUGH, TOO_FEW, difference

LOOP = "I am a baker and I bake. " * 60


def outcomes(count: int) -> dict[str, Outcome]:
    """A model before and after, on `count` records: one metric better, one worse, one that does not change."""
    sides = {}
    for name, after in (("base", 0.0), ("tuned", 1.0)):
        rows = [
            {
                "prompt": "Who are you?",
                "reference": "Bruno",
                "answer": LOOP if name == "base" else "Bruno",
                "loss": 3.0 - after - number / 100,
                "loss_tokens": 10,
                "metrics": {"f1": 10.0 + 5 * after + number, "rouge1": 30.0 - 9 * after - number, "exact_match": 0.0},
            }
            for number in range(count)
        ]
        sides[name] = Outcome(Predictions(rows, {}), [])
    return sides


@pytest.fixture(scope="module")
def reports(tmp_path_factory):
    folders = {count: tmp_path_factory.mktemp("report") for count in (ENOUGH - 1, ENOUGH)}
    return {
        count: (folder, write_report(folder, "x", outcomes(count), protocol="none"))
        for count, folder in folders.items()
    }


def test_no_place_of_the_report_has_a_verdict_of_a_handful_of_records(reports):
    count = ENOUGH - 1
    folder, report = reports[count]
    page, text = ((folder / name).read_text() for name in ("report.html", "report.md"))
    for place in (page, text, *report.findings):
        assert (
            re.search(
                "gained|lost|No loss|Professional",
                re.sub("<style>.*</style>", "", place, flags=re.DOTALL),
                re.IGNORECASE,
            )
            is None
        )
    assert [row[1] for row in report.tables[0].rows] == [TOO_FEW] * 4
    assert page.count(f"<td>{TOO_FEW}</td>") == 4
    assert (
        report.findings[0] == f"Too few to say: no metric has more than {count} samples, and a verdict needs {ENOUGH}."
    )


def test_the_verdict_stands_second_and_numbers_are_short(reports):
    folder, report = reports[ENOUGH]
    for name in ("report.html", "report.md"):
        assert (folder / name).read_text().count("Intervals of 98%") == 1
    table = report.tables[0]
    assert (table.title, table.head[:2]) == ("Your records", ("metric", "verdict"))
    assert [row[:2] for row in table.rows] == [
        ("loss ↓", "gained"),
        ("f1 ↑", "gained"),
        ("rouge1 ↑", "lost"),
        ("exact_match ↑", "same"),
    ]
    assert max(len(text) for row in table.rows for text in row) <= 20
    assert [text.split(":")[0] for text in report.findings[:3]] == ["Gained", "Gained", "LOST"]


def test_a_summary_without_losses_counts_verdicts_and_calls_no_metric_a_loss():
    ones = [(1.0, 1.0)] * ENOUGH
    items = [
        difference("loss", ones, [(0.5, 1.0)] * ENOUGH, higher_is_better=False),
        difference("f1", ones, ones, higher_is_better=True),
    ]
    assert sentences(items, {})[1:] == ["No metric is shown to be worse than before. Of 2: 1 gained, 1 same."]
    few = difference("acc", ones[:2], ones[:2], higher_is_better=True)
    assert sentences(items[:1], {"arc": [few]})[1].endswith("Of 2: 1 gained, 1 too few to say.")


def test_a_looping_answer_is_folded_after_ten_lines(reports):
    page = (reports[ENOUGH - 1][0] / "report.html").read_text()
    folded = re.findall(
        r'<div class="long"><details><summary>whole text</summary></details><div>([^<]*)</div></div>', page
    )
    assert folded == [LOOP] * 12
    assert f"-webkit-line-clamp:{LINES}" in page
    assert "<td>Bruno</td>" in page


def test_the_axis_of_differences_ends_at_a_hundred_per_cent(tmp_path, monkeypatch):
    """Where an interval is longer than the larger of the two values, as from 0.1 to 0 in a few of many records."""
    drawn = []
    monkeypatch.setattr(report, "_write", lambda figure, path: drawn.append(figure))
    wide = difference("f1", [(0.0, 1.0)] * 30, [(0.0, 1.0)] * 29 + [(3.0, 1.0)], higher_is_better=True)
    assert wide.high > wide.after
    report.draw_differences(tmp_path / "x.png", [wide], {})
    (axes,) = drawn[0].axes
    low, high = axes.get_xlim()
    assert low >= -110
    assert high <= 110
    assert [text.get_text() for text in axes.get_legend().get_texts()] == ["unclear"]
