"""Metrics against numbers worked out by hand, and against the packages called directly."""

from __future__ import annotations

import sys

import pytest

from meshtune.errors import UserError
from meshtune.evaluate import metrics
from meshtune.evaluate.metrics import check_metrics, corpus_scores, corpus_statistics, record_metrics

ENGLISH = ["the cat sat on the mat", "Paris"], ["A cat sat on a mat.", "Paris "]
CHINESE = ["北京是中国的首都", "我喜欢喝绿茶"], ["北京是中国首都。", "我喜欢喝茶"]


def test_exact_match_ignores_white_space_at_the_ends_alone():
    assert [metrics.exact_match(*pair)["exact_match"] for pair in zip(*ENGLISH, strict=True)] == [0.0, 100.0]


def test_f1_is_that_of_squad():
    # cat sat on mat, on both sides, once articles and punctuation are gone.
    assert metrics.f1(ENGLISH[0][0], ENGLISH[1][0]) == {"f1": 100.0}
    assert metrics.f1("red green", "green blue black")["f1"] == pytest.approx(100 * 2 * 1 / 5)
    assert metrics.f1("", "") == {"f1": 100.0}
    assert metrics.f1("", "a word") == {"f1": 0.0}


def test_f1_counts_chinese_characters():
    assert metrics.f1("绿茶", "红茶")["f1"] == pytest.approx(50.0)


def test_bleu_and_chrf_of_parts_are_sacrebleus_of_the_whole_with_its_signature():
    sacrebleu = pytest.importorskip("sacrebleu", reason="the extra evaluate is not installed")
    parts = [
        corpus_statistics(("bleu", "chrf"), *(texts[n : n + 1] for texts in ENGLISH), chinese=False) for n in (0, 1)
    ]
    totals = corpus_scores(parts)
    assert totals["bleu"] == pytest.approx(sacrebleu.corpus_bleu(ENGLISH[0], [ENGLISH[1]]).score)
    assert totals["chrf"] == pytest.approx(sacrebleu.corpus_chrf(ENGLISH[0], [ENGLISH[1]]).score)
    scores = [sacrebleu.sentence_chrf(*pair[:1], [pair[1]]).score for pair in zip(*ENGLISH, strict=True)]
    records = record_metrics(("chrf",), *ENGLISH, chinese=False)
    assert [record["sentence_chrf"] for record in records] == pytest.approx(scores, abs=1e-4)
    assert "tok:13a" in totals["bleu_signature"]
    chinese = corpus_scores([corpus_statistics(("bleu",), *CHINESE, chinese=True)])
    assert chinese["bleu"] == pytest.approx(sacrebleu.corpus_bleu(CHINESE[0], [CHINESE[1]], tokenize="zh").score)
    assert "tok:zh" in chinese["bleu_signature"]


def test_rouge_is_rouge_scores_and_reads_chinese():
    pytest.importorskip("rouge_score", reason="the extra evaluate is not installed")
    from rouge_score.rouge_scorer import RougeScorer

    expected = RougeScorer(["rouge1", "rougeL"]).score(ENGLISH[1][0], ENGLISH[0][0])
    english = record_metrics(("rouge",), *ENGLISH, chinese=False)[0]
    assert english["rouge1"] == pytest.approx(100 * expected["rouge1"].fmeasure, abs=1e-3)
    assert english["rougeL"] == pytest.approx(100 * expected["rougeL"].fmeasure, abs=1e-3)
    # 北京 是 中国 (的) 首都: four words of five and four in common.
    assert record_metrics(("rouge",), *CHINESE, chinese=True)[0]["rouge1"] == pytest.approx(100 * 8 / 9, abs=1e-3)


def test_an_unknown_metric_is_refused_with_a_near_name():
    with pytest.raises(UserError, match="did you mean 'rouge'"):
        check_metrics(("rogue",))


def test_a_missing_package_is_named_with_the_extra_that_brings_it(monkeypatch):
    monkeypatch.setitem(sys.modules, "sacrebleu", None)
    with pytest.raises(UserError, match=r"needs the package sacrebleu[\s\S]*pip install '\.\[evaluate\]'"):
        check_metrics(("bleu",))
    assert check_metrics(("exact_match", "f1")) == ("exact_match", "f1")
