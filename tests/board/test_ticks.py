"""The ticks of the board's charts, computed by node from the page's own file."""

from __future__ import annotations

import json
import math
import pathlib
import shutil
import subprocess

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import meshtune.board
from meshtune.train.report.page import axis

TICKS = pathlib.Path(meshtune.board.__file__).parent / "page/ticks.js"
# Answers a line of JSON, [low, high, count, options], with a line.
LOOP = """
import { axisOf } from './ticks.mjs';
import { createInterface } from 'node:readline';
for await (const line of createInterface({ input: process.stdin })) {
  console.log(JSON.stringify(axisOf(...JSON.parse(line))));
}
"""
NUMBERS = st.floats(-1e12, 1e12, allow_nan=False).map(lambda value: value if abs(value) > 1e-12 else 0.0)
RANGES = st.one_of(
    st.tuples(NUMBERS, NUMBERS),
    st.tuples(NUMBERS, st.floats(0, 1e-3)).map(lambda pair: (pair[0], pair[0] * (1 + pair[1]))),
).map(sorted)


@pytest.fixture(scope="module")
def axis_of(tmp_path_factory):
    """`axisOf` of the page, as a function."""
    node = shutil.which("node")
    if node is None:
        pytest.skip("needs node")
    folder = tmp_path_factory.mktemp("ticks")
    shutil.copy(TICKS, folder / "ticks.mjs")
    (folder / "loop.mjs").write_text(LOOP)
    with subprocess.Popen(
        [node, folder / "loop.mjs"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        stdin, stdout = process.stdin, process.stdout
        assert stdin is not None
        assert stdout is not None

        def ask(low: float, high: float, count: int, **options):
            stdin.write(json.dumps([low, high, count, options]) + "\n")
            stdin.flush()
            return json.loads(stdout.readline())

        yield ask
        stdin.close()


def texts(answer) -> list[str]:
    return [tick["text"] for tick in answer["ticks"]]


@settings(deadline=None)
@given(RANGES, st.integers(3, 12))
def test_ticks_are_those_of_the_report(axis_of, pair, count):
    answer, (low, high, ticks) = axis_of(pair[0], pair[1], count), axis(pair[0], pair[1], count)
    assert [tick["value"] for tick in answer["ticks"]] == pytest.approx([tick.value for tick in ticks])
    assert texts(answer) == [tick.text for tick in ticks]
    assert (answer["low"], answer["high"]) == pytest.approx((low, high))


@settings(deadline=None)
@given(st.integers(0, 10**9), st.integers(0, 10**7), st.integers(2, 20))
def test_updates_are_those_of_the_report(axis_of, first, span, count):
    answer = axis_of(first, first + span, count, whole=True, end=True)
    assert texts(answer) == [tick.text for tick in axis(first, first + span, count, integer=True, end=True)[2]]


@settings(deadline=None)
@given(st.floats(1e-9, 1e9), st.floats(1e-4, 12), st.integers(3, 12))
def test_a_logarithmic_axis_has_distinct_ticks_around_its_values(axis_of, low, decades, count):
    high = low * 10**decades
    answer = axis_of(low, high, count, logarithmic=True)
    values = [tick["value"] for tick in answer["ticks"]]
    assert len(set(texts(answer))) == len(values) >= 2
    assert values == sorted(values)
    assert 0 < answer["low"] == values[0] <= low * (1 + 1e-6)
    assert high * (1 - 1e-6) <= values[-1] == answer["high"]
    assert len(values) <= 3 * count + 4
    assert all(math.isfinite(value) for value in values)


@pytest.mark.parametrize("locale", ["en", "zh", "ru", "ko", "ja"])
def test_ticks_are_written_in_the_pages_language(axis_of, locale):
    answer = axis_of(0.0, 1.5, 4, locale=locale)
    assert texts(answer)[1] == ("0,5" if locale == "ru" else "0.5")
