"""Log-probabilities of many texts, beside those of transformers, and the plan of how they are computed."""

from __future__ import annotations

import dataclasses
import itertools

import numpy as np
import pytest

import meshtune
from meshtune.generate.target_log_probs import (
    SMALLEST_SAVING,
    Node,
    Planner,
    Run,
    TargetText,
    prefix_tree,
    target_log_probs,
)
from meshtune.model.model_cache import bucket, floor_bucket


def nodes(roots: list[Node]) -> list[Node]:
    return [node for root in roots for node in [root, *nodes(root.children)]]


def random_texts(seed: int) -> list[TargetText]:
    """Questions after one preamble with several choices each, one that begins another, and texts that share nothing."""
    draw = np.random.default_rng(seed)
    preamble = draw.integers(3, 500, 40).tolist()
    texts = []
    for _ in range(4):
        question = preamble + draw.integers(3, 500, int(draw.integers(12, 30))).tolist()
        for length in (1, 1, 3, 7):
            texts.append(TargetText((*question, *draw.integers(3, 500, length).tolist()), len(question)))
    texts.append(TargetText((*texts[-1].ids, 5, 6), len(texts[-1].ids) - 3))
    texts += [TargetText(tuple(draw.integers(3, 500, length).tolist())) for length in (2, 9, 30, 100)]
    texts.append(texts[0])
    return texts


@pytest.fixture(scope="module")
def model(stories260k):
    return meshtune.load(stories260k)


def test_scores_equal_those_of_each_text_alone(model):
    texts = random_texts(0)
    scores = target_log_probs(model.params, model.spec, model.compute, texts)
    rows = np.zeros((len(texts), 128), np.int64)
    for row, text in zip(rows, texts, strict=True):
        row[: len(text.ids)] = text.ids
    logits = model.logits(rows).astype(np.float64)
    expected = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
    for row, text, score in zip(expected, texts, scores, strict=True):
        targets = np.asarray(text.ids[text.first :])
        before = row[text.first - 1 : len(text.ids) - 1]
        # float32 sums over 512 logits in another order: a few units in the last place of numbers near 10.
        np.testing.assert_allclose(score.log_probabilities, before[np.arange(len(targets)), targets], atol=3e-5)
        np.testing.assert_array_equal(score.likeliest, before.argmax(-1) == targets)


def test_what_texts_share_is_in_the_tree_once():
    texts = random_texts(1)
    tree = nodes(prefix_tree(texts))
    alone = nodes(prefix_tree(texts, shared=False))
    tokens = sum(len(node.tokens) for node in tree)
    assert tokens < 0.4 * sum(len(node.tokens) for node in alone)
    assert all(len(node.children) * len(node.tokens) >= SMALLEST_SAVING for node in tree if node.children)


def test_every_token_is_scored_once_after_the_tokens_before_it():
    texts = random_texts(2)
    scored: dict[int, list[int]] = {}

    def follow(node: Node, before: tuple[int, ...]) -> None:
        path = (*before, *node.tokens.tolist())
        assert node.start == len(before)
        for query in node.queries:
            text = texts[query.text]
            for at, (position, target) in enumerate(zip(query.positions, query.targets, strict=True)):
                index = text.first + query.offset + at
                assert text.ids[index] == target
                assert text.ids[:index] == path[: node.start + position + 1]
                scored.setdefault(query.text, []).append(index)
        for child in node.children:
            follow(child, path)

    for root in prefix_tree(texts):
        follow(root, ())
    assert {number: sorted(indices) for number, indices in scored.items()} == {
        number: list(range(text.first, len(text.ids))) for number, text in enumerate(texts)
    }


def test_texts_that_each_begin_the_next_need_no_deep_recursion():
    ids = tuple(itertools.islice(itertools.cycle(range(3, 500)), 3000))
    roots = prefix_tree([TargetText(ids[:n], n - 1) for n in range(2, 3000)])
    assert sum(len(node.tokens) for node in nodes(roots)) < 200_000


def test_progress_ends_at_the_total(model):
    reports: list[tuple[int, int]] = []
    target_log_probs(
        model.params, model.spec, model.compute, random_texts(0), lambda done, total: reports.append((done, total))
    )
    assert reports[-1][0] == reports[-1][1]
    assert [done for done, _ in reports] == sorted({done for done, _ in reports})


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
