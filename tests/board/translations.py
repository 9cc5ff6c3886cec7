"""Lists the board's texts without a translation, and translations of texts that are gone (`make translations`).

text/LANGUAGE.json holds the words of the page, text/help/LANGUAGE.json the help of the recipe's keys and the reasons of
automatic choices, by their English. English stands in where a text is missing.
"""

from __future__ import annotations

import ast
import difflib
import functools
import json
import pathlib
import re
from collections.abc import Iterable, Mapping

import meshtune.board
from meshtune.config.fields import json_schema

PAGE = pathlib.Path(meshtune.board.__file__).parent / "page"
LANGUAGES = ("zh", "ru", "ko", "ja")


def help_texts(language: str) -> dict[str, dict[str, str]]:
    """`keys`: the help of the recipe's keys; `templates`: reasons of choices. By their English."""
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


@functools.cache
def templates() -> set[str]:
    """The templates of every Translatable in the sources."""
    package = pathlib.Path(meshtune.__file__).parent
    collected: set[str] = set()
    for path in package.rglob("*.py"):
        source = path.read_text(encoding="utf-8")
        for node in ast.walk(ast.parse(source)) if "Translatable" in source else ():
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "Translatable":
                template = node.args[0]
                assert isinstance(template, ast.Constant), f"{path}:{node.lineno}: a template is a literal"
                assert set(placeholders(template.value)) == {keyword.arg for keyword in node.keywords}, template.value
                collected.add(template.value)
    return collected


def placeholders(text: str) -> list[str]:
    """The {names} in a text, sorted."""
    names = re.findall(r"\{(\w+)\}", text)
    assert text.count("{") == text.count("}") == len(names), text
    return sorted(set(names))


def missing(translated: Iterable[str], english: Mapping[str, str]) -> list[str]:
    """Tells what to add, replace or remove so that exactly the English texts are translated."""
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


def _page_texts(value: object, prefix: str = "") -> dict[str, str]:
    if not isinstance(value, dict):
        return {prefix: prefix}
    return {key: key for name, inner in value.items() for key in _page_texts(inner, f"{prefix}.{name}".strip("."))}


def _report() -> None:
    def page(name: str) -> dict[str, str]:
        return _page_texts(json.loads((PAGE / f"text/{name}.json").read_text(encoding="utf-8")))

    for language in LANGUAGES:
        texts, words, forms = help_texts(language), page(language), (".zero", ".one", ".two", ".few", ".many")
        messages = missing(texts["keys"], descriptions())
        messages += missing(texts["templates"], dict.fromkeys(templates(), "a template"))
        messages += [
            f"text/{language}.json has no {key}" for key in page("en") if key not in words and not key.endswith(forms)
        ]
        print(f"{language}: {len(messages)} to do", *messages, sep="\n  ")


if __name__ == "__main__":
    _report()
