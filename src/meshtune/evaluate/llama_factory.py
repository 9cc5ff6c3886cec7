"""LLaMA-Factory's own similarity of answers and references, under its names, to compare with numbers it has given.

Its BLEU-4 is nltk's sentence BLEU of characters with smoothing method 3, so that equal answers of one character have 35
and not 100; its ROUGE is rouge_chinese's F of words that jieba has cut, whose letters count as they are. Both are means
over records.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from types import ModuleType

from meshtune.evaluate.extras import optional

OTHERWISE = "leave the metric out: --metrics exact_match,f1"


@functools.cache
def jieba() -> ModuleType:
    """The package that cuts Chinese into words, quiet about its dictionary."""
    module = optional("jieba", "cutting Chinese into words", otherwise=OTHERWISE)
    module.setLogLevel(logging.WARNING)
    return module


def similarity() -> Callable[[str, str], dict[str, float]]:
    """(answer, reference) to LLaMA-Factory's numbers."""
    cut = jieba().cut
    rouge = optional("rouge_chinese", "LLaMA-Factory's ROUGE", otherwise=OTHERWISE).Rouge()
    bleu = optional("nltk.translate.bleu_score", "LLaMA-Factory's BLEU-4", otherwise=OTHERWISE)
    smoothing = bleu.SmoothingFunction().method3

    def score(answer: str, reference: str) -> dict[str, float]:
        words, expected = " ".join(cut(answer)), " ".join(cut(reference))
        values: dict[str, float] = {"rouge-1": 0.0, "rouge-2": 0.0, "rouge-l": 0.0}
        if words.split() and expected.split():
            values = {name: 100 * value["f"] for name, value in rouge.get_scores(words, expected)[0].items()}
        values["bleu-4"] = 100 * bleu.sentence_bleu([list(reference)], list(answer), smoothing_function=smoothing)
        return {f"llamafactory_{name}": float(value) for name, value in values.items()}

    return score
