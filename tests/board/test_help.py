"""What the commands say, in every language of the page: text/help/LANGUAGE.json translates the help of the recipe's
keys and the reasons of automatic choices, text by text. An English text that changes leaves its translation behind,
which these tests name."""

from __future__ import annotations

import ast
import difflib
import functools
import json
import pathlib
import re
from collections.abc import Iterable, Mapping
from typing import Any

import pytest

import meshtune.board
from meshtune.board.planning_work import plan
from meshtune.board.recipe_text import dumped
from meshtune.config.schema import json_schema

MODELS = pathlib.Path(__file__).parents[2] / "examples/headline/models"
PAGE = pathlib.Path(meshtune.board.__file__).parent / "page"
LETTERS = {"zh": "[一-鿿]", "ru": "[а-яё]", "ko": "[가-힣]", "ja": "[ぁ-んァ-ン一-鿿]"}
# What is the same in every language: names with an underscore or a dot, paths, addresses, {code}, <tags>, fractions.
CODE = re.compile(
    r"https?://[^\s)]*[^\s).]|\{[^}]*\}|<\w+>|\b\w+(?:_\w+)+\b|\b(?!e\.g\b)[a-z]+\.[a-z_]+\b|\b\d+\.\d+\b|\b[a-z]+\d+\b"
)


def texts(language: str) -> dict[str, dict[str, str]]:
    """`keys`: the help of the recipe's keys; `templates`: what commands say of their choices. By their English."""
    return json.loads((PAGE / f"text/help/{language}.json").read_text(encoding="utf-8"))


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
    english, translated = descriptions(), texts(language)["keys"]
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
    for english, text in texts(language)["keys"].items():
        assert re.search(LETTERS[language], text), text
        assert not (missing := [code for code in CODE.findall(english) if code not in text]), f"{missing}: {text}"
        named = re.match(r"[a-z0-9_]+(?:, [a-z0-9_]+)*:", english)  # the kinds that a key belongs to stand first
        if named:
            kinds = re.findall(r"[a-z0-9_]+", named[0])
            assert all(kind in text for kind in kinds), f"{kinds}: {text}"


@functools.cache
def templates() -> set[str]:
    """The templates of every Translatable in the sources."""
    package = pathlib.Path(meshtune.__file__).parent
    found: set[str] = set()
    for path in package.rglob("*.py"):
        source = path.read_text(encoding="utf-8")
        for node in ast.walk(ast.parse(source)) if "Translatable" in source else ():
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "Translatable":
                template = node.args[0]
                assert isinstance(template, ast.Constant), f"{path}:{node.lineno}: a template is a literal"
                assert set(placeholders(template.value)) == {keyword.arg for keyword in node.keywords}, template.value
                found.add(template.value)
    return found


def placeholders(text: str) -> list[str]:
    names = re.findall(r"\{(\w+)\}", text)
    assert text.count("{") == text.count("}") == len(names), text
    return sorted(set(names))


@pytest.mark.parametrize("language", LETTERS)
def test_what_the_commands_say_of_their_choices_is_translated_and_nothing_else(language: str):
    english = templates()
    translated = texts(language)["templates"]
    assert not (messages := faults(translated, dict.fromkeys(english, "a template"))), "\n".join(messages)
    assert list(translated) == sorted(english), "the order is that of the alphabet"
    for template, text in translated.items():
        assert placeholders(text) == placeholders(template), text
        words = re.sub(r"\{\w+\}", "", text)
        assert re.search(LETTERS[language], words) or not re.search(r"\w", words), text


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
    answer = plan({"recipe": dumped(recipe), "target": target})
    assert len(answer["choices"]) >= 5
    for choice in answer["choices"]:
        assert said(choice["templates"]["value"]) == choice["value"]
        assert said(choice["templates"]["reason"]) == choice["reason"]
    for remedy in answer["plan"]["remedies"]:
        assert said(remedy["templates"]["remedy"]) == remedy["remedy"]
        assert said(remedy["templates"]["cost"]) == remedy["cost"]
    assert bool(answer["plan"]["remedies"]) == (target == "1xRTX4090")


def said(part: Any) -> str:
    """The English text of a template with its values, as the page makes it; what has none are names and numbers."""
    if isinstance(part, str):
        assert not re.search(r"[A-Za-z]{2,} [a-z]{2,}", part), part
        return part
    return re.sub(r"\{(\w+)\}", lambda name: said(part["values"][name[1]]), part["template"])
