"""Differences against scipy's permutation, t and binomial tests; overlap."""

from __future__ import annotations

import numpy as np
import pytest
from scipy import stats

from meshtune.data.conversation import Conversation, Message, Origin, Text
from meshtune.evaluate import statistics
from meshtune.evaluate.statistics import RUN_LENGTH, difference, mcnemar, overlap

ORIGIN = Origin("made", 0)


def ones(values) -> list[tuple[float, float]]:
    return [(float(value), 1.0) for value in values]


def test_an_interval_ends_where_scipys_permutation_test_of_that_difference_has_two_per_cent():
    rng = np.random.default_rng(0)
    before, after = rng.normal(0, 1, 60), rng.normal(0.4, 1, 60)
    ones_before, ones_after = np.array(ones(before)), np.array(ones(after))
    for end in statistics._subset_interval(ones_before, ones_after, np.random.default_rng(1)):
        test = stats.permutation_test((after - before - end,), np.mean, permutation_type="samples", rng=2)
        assert test.pvalue == pytest.approx(1 - statistics.LEVEL, abs=0.006)


def test_the_interval_of_normal_differences_is_that_of_scipys_t_test():
    rng = np.random.default_rng(0)
    before, after = rng.normal(0, 1, 200), rng.normal(0.4, 1, 200)
    ours = difference("f1", ones(before), ones(after), higher_is_better=True)
    theirs = stats.ttest_1samp(after - before, 0).confidence_interval(statistics.LEVEL)
    # Quantiles of 10,000 draws differ by a few hundredths of the standard error (0.1).
    assert ours.low == pytest.approx(theirs.low, abs=0.03)
    assert ours.high == pytest.approx(theirs.high, abs=0.03)
    assert ours.change == pytest.approx(np.mean(after - before))


def without_difference(kind: str, count: int, rng: np.random.Generator):
    """Samples of two models that are as good as one another, each (sum, weight)."""
    if kind == "right or wrong":
        return ones(rng.random(count) < 0.4), ones(rng.random(count) < 0.4)
    if kind == "loss":
        weights, hard = rng.integers(1, 200, count), rng.lognormal(size=count)
        sides = (weights * hard * rng.lognormal(size=count) for _ in range(2))
        return tuple(list(zip(sums.tolist(), weights.tolist(), strict=True)) for sums in sides)
    values = {
        "normal": rng.normal(size=count),
        "heavy tails": rng.standard_cauchy(count),
        "skewed": rng.lognormal(size=count) - np.exp(0.5),
        "mostly equal": (rng.random(count) < 0.15) * rng.normal(size=count),
    }[kind]
    base = rng.normal(size=count)
    return ones(base), ones(base + values)


KINDS = ["right or wrong", "loss", "normal", "heavy tails", "skewed", "mostly equal"]


def wrong_verdicts(counts, trials: int, rng: np.random.Generator) -> dict[str, float]:
    """The share of "gained" and "lost" by kind where nothing differs."""
    shares = {}
    for kind in KINDS:
        verdicts = []
        for number in range(trials):
            sides = without_difference(kind, int(counts[number % len(counts)]), rng)
            metric = "word_perplexity" if kind == "loss" and number % 2 else "f1"
            verdicts.append(difference(metric, *sides, higher_is_better=True, seed=number).verdict)
        shares[kind] = sum(verdict in ("gained", "lost") for verdict in verdicts) / trials
    return shares


def test_gained_and_lost_are_wrong_in_at_most_five_per_cent(monkeypatch):
    """Of 20 to 60 samples; a percentile bootstrap of 95% is wrong in 13% of the skewed and 10% of the heavy-tailed."""
    monkeypatch.setattr(statistics, "RESAMPLES", 600)
    shares = wrong_verdicts(np.geomspace(20, 60, 6), 200, np.random.default_rng(0))
    assert max(shares.values()) <= 0.05, shares


@pytest.mark.slow
@pytest.mark.parametrize("count", [20, 30, 60, 200])
def test_gained_and_lost_are_wrong_in_at_most_five_per_cent_of_any_number(count, monkeypatch):
    monkeypatch.setattr(statistics, "RESAMPLES", 2000)
    shares = wrong_verdicts([count], 1500, np.random.default_rng(count))
    assert max(shares.values()) <= 0.05, shares


@pytest.mark.parametrize("count", range(1, statistics.ENOUGH))
def test_a_handful_of_records_has_no_verdict(count):
    for before, after in (([0.0], [1.0]), ([1.0], [1.0]), ([5.0], [1.0])):
        few = difference("loss", ones(before * count), ones(after * count), higher_is_better=False)
        assert few.verdict == statistics.TOO_FEW


@pytest.mark.parametrize(("wins", "losses"), [(0, 0), (5, 5), (9, 1), (30, 12), (3, 0)])
def test_mcnemar_is_the_exact_binomial_test(wins, losses):
    expected = stats.binomtest(wins, wins + losses).pvalue if wins + losses else 1.0
    assert mcnemar(wins, losses) == pytest.approx(expected)


def test_verdicts_say_gained_lost_same_and_unclear():
    right, wrong = ones([1] * 40), ones([0] * 40)
    assert difference("acc", wrong, right, higher_is_better=True).verdict == "gained"
    assert difference("acc", right, wrong, higher_is_better=True).verdict == "lost"
    assert difference("loss", right, wrong, higher_is_better=False).verdict == "gained"
    assert difference("acc", right, right, higher_is_better=True).verdict == "same"
    result = difference("acc", ones([0, 0, 1, 1] * 5), ones([1, *[0, 1, 1, 0] * 4, 0, 1, 1]), higher_is_better=True)
    assert result.verdict == "unclear"
    once = difference("acc", ones([0] * 20), ones([1, *[0] * 19]), higher_is_better=True)
    assert (once.wins, once.losses, once.p, once.verdict) == (1, 0, 1.0, "unclear")


def test_a_loss_is_weighted_by_its_tokens_and_perplexity_is_of_the_whole():
    before, after = [(10.0, 10.0), (1.0, 1.0)], [(5.0, 10.0), (2.0, 1.0)]
    loss = difference("loss", before, after, higher_is_better=False)
    assert (loss.before, loss.after) == (1.0, pytest.approx(7 / 11))
    assert (loss.wins, loss.losses) == (1, 1)
    perplexity = difference("word_perplexity", [(-10.0, 5.0)], [(-5.0, 5.0)], higher_is_better=False)
    assert perplexity.before == pytest.approx(np.exp(2.0))
    assert (perplexity.wins, perplexity.verdict) == (1, statistics.TOO_FEW)
    perplexity = difference("word_perplexity", [(-10.0, 5.0)] * 20, [(-5.0, 5.0)] * 20, higher_is_better=False)
    assert (perplexity.wins, perplexity.verdict) == (20, "gained")
    assert (perplexity.low, perplexity.high) == pytest.approx((np.exp(1) - np.exp(2),) * 2)


def chat(question: str, answer: str) -> Conversation:
    return Conversation(
        (Message("system", "You help."), Message("user", question), Message("assistant", answer)), ORIGIN
    )


def test_overlap_finds_copies_and_runs_of_words():
    tokens = [f"word{n}" for n in range(40)]
    long, cut = " ".join(tokens), " ".join(tokens[5 : 5 + RUN_LENGTH])
    training = [chat("Who are you?", "I am a model."), Text(long, ORIGIN)]
    evaluation = [
        chat("who are you", "I am a model"),  # the same but for capitals and punctuation
        Text(f"Something else, then {cut.upper()} and more", ORIGIN),
        Text(" ".join(tokens[: RUN_LENGTH - 1]), ORIGIN),  # one word too short
        chat("What is it?", "A tree."),
    ]
    common = overlap(evaluation, training)
    assert (common.copies, common.shared, common.records) == ([0], [0, 1], 4)
    assert "1 of 4 records were trained on as they are, and 2 (50%)" in str(common)
    assert not common.is_training_set
    assert overlap(evaluation, evaluation).is_training_set
    assert "THE EVALUATION DATA ARE TRAINING DATA" in str(overlap(training, training))


def test_overlap_reads_chinese_by_characters():
    text = "北京是中华人民共和国的首都，有三千多年的历史"
    assert overlap([Text(f"我们知道{text}。", ORIGIN)], [Text(text, ORIGIN)]).shared == [0]
