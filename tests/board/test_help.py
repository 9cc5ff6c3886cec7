"""The help of the recipe's keys in every language of the page: text/help/LANGUAGE.json translates the English of the
schema, text by text. An English text that changes leaves its translation behind, which these tests name."""

from __future__ import annotations

import difflib
import json
import pathlib
import re
from collections.abc import Iterable, Mapping

import pytest

import meshtune.board
from meshtune.config.schema import json_schema

PAGE = pathlib.Path(meshtune.board.__file__).parent / "page"
LETTERS = {"zh": "[一-鿿]", "ru": "[а-яё]", "ko": "[가-힣]", "ja": "[ぁ-んァ-ン]"}
# What is the same in every language: names with an underscore or a dot, paths, addresses, {code}, <tags>, fractions.
CODE = re.compile(
    r"https?://[^\s)]*[^\s).]|\{[^}]*\}|<\w+>|\b\w+(?:_\w+)+\b|\b(?!e\.g\b)[a-z]+\.[a-z_]+\b|\b\d+\.\d+\b|\b[a-z]+\d+\b"
)


def translations(language: str) -> dict[str, str]:
    return json.loads((PAGE / f"text/help/{language}.json").read_text(encoding="utf-8"))["keys"]


def descriptions() -> dict[str, str]:
    """The English help of every key, and which key has it first: LoraOptions.rank."""
    schema = json_schema()
    sections: Mapping[str, dict] = {"Recipe": schema, **schema["$defs"]}  # pyright: ignore[reportAssignmentType]
    texts: dict[str, str] = {}
    for section, fields in sections.items():
        for key, field in fields.get("properties", {}).items():
            if text := field.get("description"):
                texts.setdefault(text, f"{section}.{key}")
    return texts


def faults(translated: Iterable[str], english: Mapping[str, str]) -> list[str]:
    """What is to be done so that exactly the English texts are translated."""
    left_over = [text for text in translated if text not in english]
    messages = []
    for text in (text for text in english if text not in translated):
        old = difflib.get_close_matches(text, left_over, n=1, cutoff=0.5)
        if old:
            left_over.remove(old[0])
            messages.append(f"{english[text]} now says {text!r}: translate it again, in place of {old[0]!r}")
        else:
            messages.append(f"{english[text]} is not translated: add {text!r} with its translation")
    return messages + [f"no key says {text!r} any more: remove it" for text in left_over]


@pytest.mark.parametrize("language", LETTERS)
def test_the_help_of_every_key_is_translated_and_nothing_else(language: str):
    english, translated = descriptions(), translations(language)
    messages = faults(translated, english)
    assert not messages, f"text/help/{language}.json:\n" + "\n".join(messages)
    assert list(translated) == list(english), "the order is that of the schema"


def test_a_translation_of_an_earlier_text_is_named():
    earlier = {"R, the inner dimension of adapters.": "...", "Gone.": "..."}
    english = {"R, the adapters' inner dimension.": "LoraOptions.rank", "Seed of all.": "Recipe.seed"}
    messages = faults(earlier, english)
    assert re.search(
        r"LoraOptions.rank now says .* again, in place of 'R, the inner dimension of adapters.'", messages[0]
    )
    assert "Recipe.seed is not translated" in messages[1]
    assert "'Gone.' any more: remove it" in messages[2]


@pytest.mark.parametrize("language", LETTERS)
def test_a_translation_is_in_its_language_and_keeps_names_values_and_code(language: str):
    for english, text in translations(language).items():
        assert re.search(LETTERS[language], text), text
        assert not (missing := [code for code in CODE.findall(english) if code not in text]), f"{missing}: {text}"
        named = re.match(r"[a-z0-9_]+(?:, [a-z0-9_]+)*:", english)  # the kinds that a key belongs to stand first
        if named:
            kinds = re.findall(r"[a-z0-9_]+", named[0])
            assert all(kind in text for kind in kinds), f"{kinds}: {text}"
