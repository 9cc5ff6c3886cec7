"""report.html: axes that can be read, the words of the board, and the keys of a recipe that were set."""

from __future__ import annotations

import html
import json
import re
import zlib

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from meshtune.config.load import load_recipe, silent
from meshtune.train.report import page
from meshtune.train.report.events import Sampled
from meshtune.train.report.metrics_log import MetricsLog
from meshtune.train.report.page import Curve, axis, svg_plot

NUMBERS = st.floats(-1e12, 1e12, allow_nan=False).map(lambda value: value if abs(value) > 1e-12 else 0.0)
# A range is of numbers that are far apart, or of ones that nearly are the same.
RANGES = st.one_of(
    st.tuples(NUMBERS, NUMBERS),
    st.tuples(NUMBERS, st.floats(0, 1e-3)).map(lambda pair: (pair[0], pair[0] * (1 + pair[1]))),
).map(sorted)


def parse_number(text: str) -> float:
    return float(text.replace(",", ""))


@settings(deadline=None)
@given(RANGES, st.integers(2, 12))
def test_every_tick_has_another_text_and_no_value_lies_beyond_them(pair, count):
    low, high = pair
    start, end, ticks = axis(low, high, count)
    values, texts = [tick.value for tick in ticks], [tick.text for tick in ticks]
    assert len(set(texts)) == len(texts) >= 2, texts
    assert (values[0], values[-1]) == (start, end)
    margin = 1e-6 * (end - start)
    assert start <= low + margin
    assert high - margin <= end
    assert len(ticks) <= count + 3
    for tick in ticks:
        assert parse_number(tick.text) == pytest.approx(tick.value, abs=1e-9 * max(abs(start), abs(end)))


@settings(deadline=None)
@given(st.integers(0, 10**9), st.integers(0, 10**7), st.integers(2, 20))
def test_updates_are_whole_and_the_last_can_be_read(first, span, count):
    _, _, ticks = axis(first, first + span, count, integer=True, end=True)
    texts = [tick.text for tick in ticks]
    assert len(set(texts)) == len(texts)
    assert all(tick.value == int(tick.value) and first <= tick.value for tick in ticks)
    assert ticks[-1].value == first + max(1, span)
    assert parse_number(texts[-1]) == pytest.approx(ticks[-1].value, rel=1e-6)


def test_a_nearly_constant_loss_and_a_falling_one_have_ticks_around_them():
    assert [tick.text for tick in axis(0.693142, 0.693147, 4)[2]] == [
        "0.693142", "0.693144", "0.693146", "0.693148"
    ]  # fmt: skip
    assert [tick.text for tick in axis(2.3, 5.0, 4)[2]] == ["2", "3", "4", "5"]
    assert [tick.text for tick in axis(1, 10, 6, integer=True, end=True)[2]] == ["2", "4", "6", "8", "10"]


def test_a_plot_names_its_axes_and_marks_the_last_value():
    plot = svg_plot(
        "Loss", [Curve("", range(1, 101), [5 / step for step in range(1, 101)], "training")], unit="nats per token"
    )
    texts = re.findall(r"<text[^>]*>([^<]*)</text>", plot)
    assert texts[0] == "nats per token"
    assert texts[-1] == "update"
    assert "100" in texts
    assert plot.count("<circle") == 1


ROWS = [
    {
        "kind": "train",
        "step": step,
        "loss": 0.7,
        "rewards/margins": 0.1 * step,
        "grad_norm": 1.0,
        "memory": 3 * 2**30,
        "seconds": 1.0,
    }
    for step in range(1, 31)
]


def test_figures_have_the_boards_words_units_and_no_legend_of_what_is_not_there():
    text = "".join(page._curves(ROWS, 30))
    assert re.findall("<h3>([^<]*)</h3>", text) == ["Loss", "Reward margin", "Gradient norm", "Memory"]
    assert "validation</i>" not in text
    assert ">per pair<" in text
    assert ">GiB<" in text
    assert "3 GiB" in text
    assert "e+0" not in text
    both = "".join(page._curves([*ROWS, {"kind": "eval", "step": 30, "loss": 0.6}], 30))
    assert both.count("validation</i>") == 1


RECIPE = {
    "model": {"path": "models/x"},
    "data": {"train": [{"path": "data/a.jsonl"}]},
    "output": "runs/x",
    "stage": {"kind": "dpo"},
    "method": {"kind": "lora", "rank": 16},
    "optimizer": {"learning_rate": 0.001},
    "train": {"steps": 5},
}


def test_a_report_shows_the_keys_that_were_set_and_folds_the_rest():
    text = yaml.safe_dump(load_recipe(RECIPE, notify=silent).model_dump(mode="json"), sort_keys=False)
    heading, short, folded = page._recipe(text)
    assert yaml.safe_load(html.unescape(re.sub("</?pre>", "", short))) == RECIPE
    assert folded.startswith("<details>")
    assert html.escape(text) in folded
    broken = page._recipe("model: [unclosed")
    assert broken == [heading, "<pre>model: [unclosed</pre>"]


def test_a_report_shows_pictures_of_the_runs_own_prompts_only(tmp_path):
    """What prompts, answers, rewards and completions write stays text, and no picture is asked for elsewhere."""
    own, hostile = "data:image/jpeg;base64,AAAA", "<img src=http://x.org/a.png>"
    log = MetricsLog(tmp_path)
    log.receive(Sampled(0, f"<image>{hostile}", hostile, (own, "http://x.org/b.png", "../c.png", '"><img src=d.png>')))
    log.close()
    row = {"kind": "train", "step": 1, "loss": 0.1}
    (tmp_path / "metrics.jsonl").write_text(json.dumps(row) + "\n")
    parts = [{"type": "image", "image": "http://x.org/e.png"}, {"type": "text", "text": hostile}]
    body = json.dumps(
        {"step": 1, "group": 0, "prompt": [{"role": "user", "content": parts}], "completion": hostile}
        | {"rewards": {"r": 1.0}, "advantage": 1.0, "tokens": 3, "reason": "stop", "origin": "a"}
    )[:-1]
    (tmp_path / "rollouts.jsonl").write_text(f'{body}, "crc32": {zlib.crc32(body.encode())}}}\n')
    text = page.report_html(tmp_path)
    assert re.findall(r'<img[^>]* src="([^"]*)"', text) == [own]
    assert text.count("<img") == 1
    assert f"&lt;image&gt;{html.escape(hostile)}" in text
    assert not re.search(r"<(?:script|iframe|object|embed|link)[^>]+(?:src|href|data)=", text)
    assert "e.png" not in text
