"""Differences against scipy's bootstrap and binomial test; overlap and LLaMA-Factory's protocol."""

from __future__ import annotations

import numpy as np
import pytest
from scipy import stats

from meshtune.data.conversation import Conversation, Message, Origin, Text
from meshtune.evaluate.overlap import WORDS, overlap
from meshtune.evaluate.statistics import difference, mcnemar

ORIGIN = Origin("made", 0)


def ones(values) -> list[tuple[float, float]]:
    return [(float(value), 1.0) for value in values]


def test_the_interval_is_that_of_scipys_percentile_bootstrap():
    rng = np.random.default_rng(0)
    before, after = rng.normal(0, 1, 60), rng.normal(0.4, 1, 60)
    ours = difference("f1", ones(before), ones(after), higher_is_better=True)
    theirs = stats.bootstrap((after - before,), np.mean, n_resamples=20_000, method="percentile", rng=1)
    # Two draws of 10,000 and more: their quantiles differ by a few hundredths of the standard error (0.18).
    assert ours.low == pytest.approx(theirs.confidence_interval.low, abs=0.02)
    assert ours.high == pytest.approx(theirs.confidence_interval.high, abs=0.02)
    assert ours.change == pytest.approx(np.mean(after - before))


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
    few = difference("acc", ones([0, 0, 1, 1]), ones([1, 0, 1, 1]), higher_is_better=True)
    assert few.verdict == "unclear"
    assert (few.wins, few.losses, few.p) == (1, 0, 1.0)


def test_a_loss_is_weighted_by_its_tokens_and_perplexity_is_of_the_whole():
    before, after = [(10.0, 10.0), (1.0, 1.0)], [(5.0, 10.0), (2.0, 1.0)]
    loss = difference("loss", before, after, higher_is_better=False)
    assert (loss.before, loss.after) == (1.0, pytest.approx(7 / 11))
    assert (loss.wins, loss.losses) == (1, 1)
    perplexity = difference("word_perplexity", [(-10.0, 5.0)], [(-5.0, 5.0)], higher_is_better=False)
    assert perplexity.before == pytest.approx(np.exp(2.0))
    assert (perplexity.wins, perplexity.verdict) == (1, "gained")


def chat(question: str, answer: str) -> Conversation:
    return Conversation(
        (Message("system", "You help."), Message("user", question), Message("assistant", answer)), ORIGIN
    )


def test_overlap_finds_copies_and_runs_of_words():
    words = [f"word{n}" for n in range(40)]
    long, cut = " ".join(words), " ".join(words[5 : 5 + WORDS])
    training = [chat("Who are you?", "I am a model."), Text(long, ORIGIN)]
    evaluation = [
        chat("who are you", "I am a model"),  # the same but for capitals and punctuation
        Text(f"Something else, then {cut.upper()} and more", ORIGIN),
        Text(" ".join(words[: WORDS - 1]), ORIGIN),  # one word too short
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
