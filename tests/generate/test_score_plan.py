"""How runs of tokens are grouped for scoring: every run once, in a shape that holds it, with little padding."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from meshtune.generate.score_plan import Planner, Run, bucket, floor_bucket


def planner(total: int = 2048, parameters: int = 106_000_000) -> Planner:
    return Planner.of("cpu", parameters, 2048, total)


def draw_runs(seed: int, count: int, start: int) -> list[Run]:
    lengths = np.random.default_rng(seed).geometric(0.04, count)
    return [Run(int(length), start + int(length)) for length in lengths]


@pytest.mark.parametrize("count", [1, 2, 7, 40, 3000])
@pytest.mark.parametrize("start", [0, 3, 600])
def test_every_run_is_in_one_group_whose_shape_holds_it(count, start):
    runs, plan = draw_runs(count, count, start), planner(count * 25)
    groups = plan.groups(runs, 64)
    assert sorted(n for members, _ in groups for n in members) == list(range(count))
    for members, shape in groups:
        assert 0 < len(members) <= shape.rows
        assert shape.slots >= 64
        for n in members:
            assert runs[n].length <= shape.length
            assert runs[n].end <= shape.slots
    shapes = {shape for _, shape in groups}
    assert shapes <= plan.compiled


def test_a_large_set_is_padded_by_less_than_a_third():
    runs = draw_runs(5, 4000, 12)
    groups = planner(100_000).groups(runs, 32)
    computed = sum(shape.rows * shape.length for _, shape in groups)
    assert computed < 1.33 * sum(run.length for run in runs)
    assert all(shape.rows * shape.length <= 2048 for _, shape in groups)
    assert len({shape for _, shape in groups}) <= 20


def test_a_small_set_of_a_small_model_is_compiled_once():
    groups = planner(parameters=300_000).groups(draw_runs(1, 30, 0), 32)
    assert len({shape for _, shape in groups}) == 1


def test_a_program_that_exists_is_used_again():
    plan = planner()
    first = plan.groups([Run(40, 52)] * 10, 32)
    again = plan.groups([Run(37, 49)] * 9, 32)
    assert [shape for _, shape in again] == [shape for _, shape in first]


def test_one_long_run_does_not_widen_the_others():
    runs = [*([Run(20, 32)] * 60), Run(900, 912)]
    groups = planner(40_000).groups(runs, 32)
    by_run = {n: shape for members, shape in groups for n in members}
    assert by_run[60].length >= 900
    assert all(by_run[n].length <= 24 and by_run[n].slots <= 48 for n in range(60))


def test_the_plan_is_the_same_each_time():
    runs = draw_runs(3, 200, 30)
    plans = [[(members, dataclasses.astuple(s)) for members, s in planner().groups(runs, 32)] for _ in range(2)]
    assert plans[0] == plans[1]


def test_buckets_waste_at_most_a_quarter():
    for n in range(1, 3000):
        assert n <= bucket(n, 1) <= max(1.25 * n, n + 1)
        assert n / 1.25 <= floor_bucket(n) <= n
