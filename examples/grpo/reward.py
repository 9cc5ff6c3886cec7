"""Rewards of the recipes in this folder: functions with the arguments of TRL's."""

import json
import re


def right_number(completions, answer, **kwargs):
    """1 where the last number of the completion is the answer."""
    numbers = [re.findall(r"-?\d+", completion[0]["content"]) for completion in completions]
    return [float(found[-1:] == [str(right)]) for found, right in zip(numbers, answer, strict=True)]


def right_word(completions, answer, **kwargs):
    """The share of the completion's words that are the answer, at most that of one: 1 for the answer by itself."""
    texts = [re.findall(r"[a-z]+", completion[0]["content"].lower()) for completion in completions]
    return [(right in words) / len(words) if words else 0.0 for words, right in zip(texts, answer, strict=True)]


def json_line(completions, fruit, count, **kwargs):
    """0.3 for a text that begins as an object, 0.3 more if it is JSON, and 0.2 each for the right count and fruit."""
    texts = [completion[0]["content"].strip() for completion in completions]
    return [json_score(*fields) for fields in zip(texts, fruit, count, strict=True)]


def json_score(text, fruit, count):
    score = 0.3 * text.startswith("{")
    try:
        value = json.loads(text)
    except ValueError:
        return score
    if not isinstance(value, dict):
        return score
    score += 0.3
    if value.keys() == {"fruit", "count"}:
        score += 0.2 * (value["count"] == count) + 0.2 * (value["fruit"] == fruit)
    return score
