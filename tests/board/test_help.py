"""Translations of the help of the recipe's keys and of the reasons of automatic choices (board/page/text/help).

A translation may be missing: English stands in, and `make translations` lists it (translations.py).
"""

from __future__ import annotations

import pathlib
import re
from typing import Any

import pytest
from translations import LANGUAGES, help_texts, missing, placeholders, templates

from meshtune.board.planning_work import plan
from meshtune.board.recipe_text import dump_recipe

MODELS = pathlib.Path(__file__).parents[2] / "examples/headline/models"
LETTERS = {"zh": "[一-鿿]", "ru": "[а-яё]", "ko": "[가-힣]", "ja": "[ぁ-んァ-ン一-鿿]"}
# What is the same in every language: names with an underscore or a dot, paths, addresses, {code}, <tags>, fractions.
CODE = re.compile(
    r"https?://[^\s)]*[^\s).]|\{[^}]*\}|<\w+>|\b\w+(?:_\w+)+\b|\b(?!e\.g\b)[a-z]+\.[a-z_]+\b|\b\d+\.\d+\b|\b[a-z]+\d+\b"
)


def test_a_translation_of_an_earlier_text_is_named():
    earlier = {"R, the inner dimension of adapters.": "...", "Gone.": "..."}
    english = {"R, the adapters' inner dimension.": "LoraOptions.rank", "Seed of all.": "Recipe.seed"}
    messages = missing(earlier, english)
    assert re.search(
        r"LoraOptions.rank now says .* again, in place of 'R, the inner dimension of adapters.'", messages[0]
    )
    assert "Recipe.seed is not translated" in messages[1]
    assert "'Gone.' any more: remove it" in messages[2]


@pytest.mark.parametrize("language", LETTERS)
def test_a_translation_is_in_its_language_and_keeps_names_values_and_code(language: str):
    for english, text in help_texts(language)["keys"].items():
        assert re.search(LETTERS[language], text), text
        assert not (lost := [code for code in CODE.findall(english) if code not in text]), f"{lost}: {text}"
        named = re.match(r"[a-z0-9_]+(?:, [a-z0-9_]+)*:", english)  # the kinds that a key belongs to stand first
        if named:
            kinds = re.findall(r"[a-z0-9_]+", named[0])
            assert all(kind in text for kind in kinds), f"{kinds}: {text}"


@pytest.mark.parametrize("language", LANGUAGES)
def test_a_translated_reason_has_the_values_of_the_english(language: str):
    for template, text in help_texts(language)["templates"].items():
        assert placeholders(text) == placeholders(template), text
        plain = re.sub(r"\{\w+\}", "", text)
        assert re.search(LETTERS[language], plain) or not re.search(r"\w", plain), text


def test_every_reason_is_a_literal_template_with_its_values():
    assert len(templates()) > 50  # each is checked as it is collected


RECIPES: dict[str, tuple[str, dict[str, Any]]] = {
    "an adapter over a mixture": ("8xH100", {"model": "qwen3-30b-a3b"}),
    "experts over devices": ("8xMI300X", {"model": "qwen3-30b-a3b", "mesh": {"ep": 8}}),
    "a loss that trains no router": ("1xH100", {"model": "qwen3-30b-a3b", "router_aux_loss": 0.001}),
    "what does not fit": ("1xRTX4090", {"model": "llama-3.1-8b", "method": {"kind": "full"}}),
    "windows, and what is asked for": (
        "4xTPUv5p",
        {"model": "gemma-3-27b", "compute": {"precision": "mixed", "remat": "full", "mlp_chunk": "auto"}},
    ),
    "long rows": ("4xTPUv5p", {"model": "llama-3.1-8b", "max_length": 65536, "compute": {"attention_chunk": "auto"}}),
}


@pytest.mark.parametrize(("target", "keys"), RECIPES.values(), ids=RECIPES)
def test_the_page_is_sent_no_words_without_a_template(target: str, keys: dict[str, Any]):
    keys = dict(keys)
    model = {"path": str(MODELS / keys.pop("model"))}
    if "router_aux_loss" in keys:
        model |= {"router_aux_loss": keys.pop("router_aux_loss")}
    data = {"train": "none", "max_length": keys.pop("max_length", 1024)}
    recipe = {"model": model, "data": data, "output": "none", "train": {"steps": 3}, **keys}
    answer = plan({"recipe": dump_recipe(recipe), "target": target})
    assert len(answer["choices"]) >= 5
    for choice in answer["choices"]:
        assert render(choice["templates"]["value"]) == choice["value"]
        assert render(choice["templates"]["reason"]) == choice["reason"]
    for remedy in answer["plan"]["remedies"]:
        assert render(remedy["templates"]["remedy"]) == remedy["remedy"]
        assert render(remedy["templates"]["cost"]) == remedy["cost"]
    assert bool(answer["plan"]["remedies"]) == (target == "1xRTX4090")


def render(part: Any) -> str:
    """The English text of a template with its values, as the page makes it; what has none are names and numbers."""
    if isinstance(part, str):
        assert not re.search(r"[A-Za-z]{2,} [a-z]{2,}", part), part
        return part
    return re.sub(r"\{(\w+)\}", lambda name: render(part["values"][name[1]]), part["template"])
