"""Compares answers with references: metrics of each record and of a whole data set.

Percentages are from 0 to 100, as their authors' packages have them; exact_match and f1 too.
"""

from __future__ import annotations

import collections
import importlib
import logging
import re
import string
from collections.abc import Callable, Mapping, Sequence
from types import ModuleType
from typing import Any

import numpy as np

from meshtune.errors import UserError, nearest, pip_install

FIX = pip_install("evaluate")


def optional(module: str, purpose: str, *, otherwise: str = "") -> ModuleType:
    """The module of this name. Raises UserError where its package is not installed; `otherwise` is another way out."""
    try:
        return importlib.import_module(module)
    except ImportError as problem:
        package = (problem.name or module).partition(".")[0]
        raise UserError(
            f"{purpose} needs the package {package}", fix=f"{FIX}{f', or {otherwise}' if otherwise else ''}"
        ) from problem


CJK = "\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff\u3040-\u30ff"
WORD = re.compile(rf"[{CJK}]|[^\W{CJK}]+")
_ARTICLES = re.compile(r"\b(a|an|the)\b")
_PUNCTUATION = str.maketrans("", "", string.punctuation)

OTHERWISE = "leave the metric out: --metrics exact_match,f1"
RecordMetric = Callable[[str, str], dict[str, float]]
"""(answer, reference) to numbers by name"""


def is_chinese(texts: Sequence[str]) -> bool:
    """Whether texts are written without spaces between words: a fifth of their characters or more are Chinese ones."""
    joined = "".join(texts)
    return len(re.findall(f"[{CJK}]", joined)) >= 0.2 * max(1, len(joined))


def exact_match(answer: str, reference: str) -> dict[str, float]:
    """Whether the two are the same but for white space at their ends."""
    return {"exact_match": 100.0 * (answer.strip() == reference.strip())}


def f1(answer: str, reference: str) -> dict[str, float]:
    """The F1 of words as SQuAD's script counts them (lower case, without punctuation and articles); a Chinese
    character is a word."""
    predicted, expected = _normal_tokens(answer), _normal_tokens(reference)
    if not predicted or not expected:
        return {"f1": 100.0 * (predicted == expected)}
    common = sum((collections.Counter(predicted) & collections.Counter(expected)).values())
    return {"f1": 100.0 * 2 * common / (len(predicted) + len(expected))}


def _normal_tokens(text: str) -> list[str]:
    plain = _ARTICLES.sub(" ", text.lower().translate(_PUNCTUATION))
    return [word for part in plain.split() for word in re.findall(rf"[{CJK}]|[^{CJK}]+", part)]


def rouge(chinese: bool) -> RecordMetric:
    """The F measures of rouge_score, without stemming; Chinese is cut into words by jieba."""
    scorer = optional("rouge_score.rouge_scorer", "ROUGE", otherwise=OTHERWISE).RougeScorer(
        ["rouge1", "rouge2", "rougeL"], tokenizer=_ChineseWords() if chinese else None
    )

    def score(answer: str, reference: str) -> dict[str, float]:
        return {name: 100.0 * value.fmeasure for name, value in scorer.score(reference, answer).items()}

    return score


class _ChineseWords:
    """A tokenizer of rouge_score, whose own keeps nothing but Latin letters and digits."""

    def __init__(self):
        self._jieba = optional("jieba", "cutting Chinese into words", otherwise=OTHERWISE)
        self._jieba.setLogLevel(logging.WARNING)  # quiet about its dictionary

    def tokenize(self, text: str) -> list[str]:
        return [word.lower() for word in self._jieba.cut(text) if WORD.search(word)]


def chrf(_: bool) -> RecordMetric:
    """sacrebleu's chrF of one answer, by its name there; `chrf` itself is the score of a whole data set."""
    metrics = optional("sacrebleu", "chrF", otherwise=OTHERWISE)
    return lambda answer, reference: {"sentence_chrf": metrics.sentence_chrf(answer, [reference]).score}


# By name, given whether the references are Chinese. bleu is of whole data sets alone.
RECORD_METRICS: Mapping[str, Callable[[bool], RecordMetric]] = {
    "exact_match": lambda _: exact_match,
    "f1": lambda _: f1,
    "chrf": chrf,
    "rouge": rouge,
}
METRICS = ("exact_match", "f1", "bleu", "chrf", "rouge")


def check_metrics(names: Sequence[str]) -> tuple[str, ...]:
    """The names of metrics. Raises UserError for an unknown one, and where its package is not installed."""
    for name in names:
        if name not in METRICS:
            raise UserError(
                f"there is no metric '{name}'",
                where="--metrics",
                fix=f"{nearest(name, METRICS)}there are: {', '.join(METRICS)}",
            )
        if name == "bleu":
            optional("sacrebleu", "BLEU", otherwise=OTHERWISE)
        else:
            RECORD_METRICS[name](True)
    return tuple(names)


def record_metrics(
    names: Sequence[str], answers: Sequence[str], references: Sequence[str], *, chinese: bool
) -> list[dict[str, float]]:
    """The metrics of each record. `chinese`: the data set is, so that texts are cut into words as Chinese is."""
    functions = [RECORD_METRICS[name](chinese) for name in names if name in RECORD_METRICS]
    return [
        {name: round(value, 4) for function in functions for name, value in function(answer, reference).items()}
        for answer, reference in zip(answers, references, strict=True)
    ]


Statistics = dict[str, dict[str, Any]]
"""By metric: `sums` of counts, which add up over parts of a data set, and sacrebleu's `signature`."""


def corpus_statistics(
    names: Sequence[str], answers: Sequence[str], references: Sequence[str], *, chinese: bool
) -> Statistics:
    """The counts that bleu and chrf of a data set are computed from, of a part of it."""
    statistics: Statistics = {}
    for name in CORPUS_METRICS:
        if name in names:
            metric = _corpus_metric(name, chinese)
            # sacrebleu's public functions take all texts at once; its own bootstrap adds up the same counts.
            counts = metric._extract_corpus_statistics(list(answers), [list(references)])
            sums = np.sum(np.asarray(counts, np.int64), axis=0).tolist()
            statistics[name] = {"sums": sums, "signature": str(metric.get_signature())}
    return statistics


def corpus_scores(parts: Sequence[Statistics]) -> dict[str, Any]:
    """bleu and chrf of a data set from the statistics of its parts, with sacrebleu's signature, which says how texts
    were cut into words."""
    totals: dict[str, Any] = {}
    for name in parts[0]:
        score = _corpus_metric(name, False)._aggregate_and_compute([part[name]["sums"] for part in parts])
        totals |= {name: float(score.score), f"{name}_signature": parts[0][name]["signature"]}
    return totals


CORPUS_METRICS = ("bleu", "chrf")


def _corpus_metric(name: str, chinese: bool) -> Any:
    metrics = optional("sacrebleu.metrics", name)
    return metrics.BLEU(tokenize="zh" if chinese else "13a") if name == "bleu" else metrics.CHRF()
