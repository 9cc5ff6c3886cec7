"""The page's files: every language says everything, no page has hard-coded words, nothing comes from elsewhere."""

from __future__ import annotations

import json
import pathlib
import re

import pytest

import meshtune.board
from meshtune.board.kinds import KINDS
from meshtune.config.fields import json_schema
from meshtune.costs.estimate import ROLES

PAGE = pathlib.Path(meshtune.board.__file__).parent / "page"
LANGUAGES = ("en", "zh", "ru", "ko", "ja")
SCRIPTS = sorted(PAGE.rglob("*.js"))
PLURALS = {"zero", "one", "two", "few", "many", "other"}
STRING = re.compile(r"""'((?:[^'\\\n]|\\.)*)'|"((?:[^"\\\n]|\\.)*)"|`((?:[^`\\]|\\.)*)`""")
COMMENT = re.compile(r"^\s*//.*$", re.MULTILINE)


def texts(language: str) -> dict[str, object]:
    return json.loads((PAGE / f"text/{language}.json").read_text(encoding="utf-8"))


def flat(value: object, prefix: str = "") -> dict[str, str]:
    """Texts by key; forms for several numbers count as one."""
    if isinstance(value, str):
        return {prefix: value}
    assert isinstance(value, dict), prefix
    if set(value) <= PLURALS:
        assert "other" in value, prefix
        return {prefix: " ".join(value.values())}
    return {
        key: text for name, inner in value.items() for key, text in flat(inner, f"{prefix}.{name}".strip(".")).items()
    }


def names(text: str) -> set[str]:
    return set(re.findall(r"\{(\w+)\}", text))


@pytest.mark.parametrize("language", LANGUAGES)
def test_texts_are_those_of_the_english_page(language: str):
    """A text that is not translated yet may be missing; `make translations` lists it."""
    english, translated = flat(texts("en")), flat(texts(language))
    assert set(translated) <= set(english)
    for key, text in translated.items():
        assert text.strip(), key
        assert names(text) == names(english[key]), key


def test_there_is_a_file_for_every_language_and_no_other():
    assert {path.stem for path in (PAGE / "text").glob("*.json")} == set(LANGUAGES)
    assert {path.stem for path in (PAGE / "text/help").iterdir()} == set(LANGUAGES) - {"en"}
    listed = re.search(r"LANGUAGES = \{(.*)\}", (PAGE / "text.js").read_text(encoding="utf-8"))
    assert listed
    assert re.findall(r"(\w+): '", listed[1]) == list(LANGUAGES)


def test_every_kind_of_job_has_a_name():
    assert set(texts("en")["kind"]) == set(KINDS)  # pyright: ignore[reportArgumentType]


def test_everything_of_a_recipe_that_the_form_shows_has_a_name():
    properties, english = json_schema()["properties"], set(flat(texts("en")))
    sections = {name for name, field in properties.items() if "$defs" in json.dumps(field)} - {"rewards"}  # of rollout
    assert {"model", "teacher", "vision"} <= sections
    kinds = {kind for name in ("stage", "method") for kind in properties[name]["discriminator"]["mapping"]}
    assert {f"recipe.section.{name}" for name in sections} <= english
    assert {f"recipe.kind.{kind}" for kind in kinds} <= english
    assert {f"plan.role.{role}" for role in ROLES} <= english


@pytest.mark.parametrize("path", SCRIPTS, ids=lambda path: path.name)
def test_every_text_that_a_script_asks_for_exists(path: pathlib.Path):
    keys = flat(texts("en"))
    for key in re.findall(r"\bt\('([\w.]+)'", COMMENT.sub("", path.read_text(encoding="utf-8"))):
        assert key in keys, f"{path.name} asks for {key}"


@pytest.mark.parametrize("path", sorted((PAGE / "views").glob("*.js")), ids=lambda path: path.name)
def test_a_page_has_no_words_of_its_own(path: pathlib.Path):
    """Literals are names of elements, classes, keys and addresses; words for people have a capital, or a neighbour."""
    code = COMMENT.sub("", path.read_text(encoding="utf-8"))
    code = re.sub(r"\bclass: ('[^']*'|`[^`]*`)", "", code)
    code = re.sub(r"^import .*$", "", code, flags=re.MULTILINE)
    for match in STRING.finditer(code):
        literal = re.sub(r"\$\{[^}]*\}", "", next(group for group in match.groups() if group is not None))
        prose = re.findall(r"[A-Z][a-z]{2,}|[a-z]{2,} [a-z]{2,}|[^\x00-\x7f…–·×→]", literal)
        assert not prose, f"{path.name}: {match[0]}"


def test_text_never_becomes_markup():
    """The page makes elements and text nodes; nothing reads HTML, runs text, or holds styles and scripts inline."""
    forbidden = (
        r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|DOMParser|\beval\(|new Function|javascript:|\.style\b"
    )
    for path in SCRIPTS:
        assert re.search(forbidden, path.read_text(encoding="utf-8")) is None, path.name
    html = (PAGE / "index.html").read_text(encoding="utf-8")
    assert "style=" not in html
    assert re.findall(r"<script(?![^>]* src=)", html) == []


def test_nothing_comes_from_another_host():
    for path in PAGE.rglob("*.*"):
        if path.parent.name == "help":
            continue  # names papers, as the schema does; shown as text
        addresses = re.findall(r"https?://[^\s'\"]+", path.read_text(encoding="utf-8"))
        assert set(addresses) <= {"http://www.w3.org/2000/svg"}, path.name


def test_the_page_is_light():
    """Below 330 KB with English, another language and its help, before compression."""
    languages = [path.stat().st_size for path in (PAGE / "text").glob("*.json")]
    english = (PAGE / "text/en.json").stat().st_size
    helps = [path.stat().st_size for path in (PAGE / "text/help").iterdir()]
    sizes = [path.stat().st_size for path in PAGE.rglob("*") if path.is_file() and PAGE / "text" not in path.parents]
    assert sum(sizes) + english + max(languages) + max(helps) < 330_000
