"""Goodput by Daly's formula, and the interval with the highest one."""

from __future__ import annotations

import random

import pytest

from meshtune.costs.goodput import best_interval, goodput, mean_time_between_failures

HOUR = 3600.0
MINUTE = 60.0


@pytest.mark.parametrize(
    ("chips", "expected"),
    [
        (64, (0.996, 0.989, 0.988, 0.996, 0.984, 0.984)),
        (512, (0.984, 0.916, 0.985, 0.988, 0.983, 0.983)),
        (1024, (0.970, 0.837, 0.981, 0.982, 0.982, 0.983)),
        (4096, (0.892, 0.464, 0.956, 0.957, 0.978, 0.982)),
        (16384, (0.626, 0.023, 0.864, 0.893, 0.963, 0.976)),
    ],
)
def test_goodput_of_jobs_of_64_to_16384_chips(chips: int, expected: tuple[float, ...]):
    """Ten saves in a day, ten in a week, every half hour, the best interval, and two with faster restarts."""
    mtbf = mean_time_between_failures(chips)
    best = best_interval(20.0, mtbf)
    slow = [goodput(interval, 20.0, 10 * MINUTE, mtbf) for interval in (2.4 * HOUR, 16.8 * HOUR, 0.5 * HOUR, best)]
    fast = [goodput(2 * MINUTE, 2.0, 3 * MINUTE, mtbf), goodput(MINUTE, 1.0, MINUTE, mtbf)]
    assert [*slow, *fast] == pytest.approx(expected, abs=0.001)  # the figures were computed with rounded MTBFs


@pytest.mark.parametrize("write", [0.0, 120.0])
def test_a_simulated_run_has_the_goodput_of_the_formula(write: float):
    """A simulation of 20,000 failures; its standard error is below 0.4%."""
    random_numbers = random.Random(0)
    interval, save, restart, mtbf = 200.0, 15.0, 60.0, 900.0
    useful = total = 0.0
    for _ in range(20_000):
        up = random_numbers.expovariate(1 / mtbf)
        useful += max(0.0, up - write) // (interval + save) * interval
        total += up + restart
    assert useful / total == pytest.approx(goodput(interval, save, restart, mtbf, write), rel=0.01)


@pytest.mark.parametrize(("save", "mtbf"), [(0.4, 12 * HOUR), (20.0, 3 * HOUR), (487.0, 3 * HOUR), (60.0, 300.0)])
def test_the_best_interval_is_the_best(save: float, mtbf: float):
    best = best_interval(save, mtbf)
    highest = goodput(best, save, 60.0, mtbf)
    intervals = [best * factor for factor in (0.3, 0.6, 0.8, 1.25, 1.6, 3.0)]
    assert all(goodput(interval, save, 60.0, mtbf) < highest for interval in intervals)


def test_where_saves_take_longer_than_failures_leave_nothing_is_done():
    assert goodput(10.0, 1e6, 1.0, 10.0) == 0.0
    assert best_interval(100.0, 10.0) == 10.0
