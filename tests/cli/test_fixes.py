"""Keys of recipes, options, commands and pages that messages tell people to use exist, in every fix of the sources."""

from __future__ import annotations

import ast
import functools
import pathlib
import re
from collections.abc import Iterator

import click
import pytest
import typer

import meshtune
from meshtune.cli.main import app
from meshtune.config.data_recipe import DataRecipe
from meshtune.config.fields import keys
from meshtune.config.load import load_recipe, silent
from meshtune.config.recipe import Recipe
from meshtune.config.section import section_fields
from meshtune.errors import UserError

PACKAGE = pathlib.Path(meshtune.__file__).parent
HOLE = "\0"  # what an f-string puts in


def text_of(node: ast.expr) -> str:
    """The literal parts of an expression that makes a text, joined, with HOLE where a value is put in."""
    match node:
        case ast.Constant(value=str(value)):
            return value
        case ast.JoinedStr(values=values):
            return "".join(text_of(value) for value in values)
        case ast.BinOp(left=left, op=ast.Add(), right=right):
            return text_of(left) + text_of(right)
        case ast.IfExp(body=body, orelse=orelse):
            return f"{text_of(body)} ; {text_of(orelse)}"
        case _:
            return HOLE


@functools.cache
def fixes() -> tuple[tuple[str, str], ...]:
    """(place, text) of every literal `fix=` and `fix = ...`, and of constants that hold one."""
    return tuple(iterate_fixes())


def iterate_fixes() -> Iterator[tuple[str, str]]:
    for path in sorted(PACKAGE.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            texts: list[ast.expr] = []
            if isinstance(node, ast.keyword) and node.arg == "fix":
                texts = [node.value]
            elif isinstance(node, ast.Assign):
                names = [target.id for target in node.targets if isinstance(target, ast.Name)]
                texts = [node.value] if any(re.search(r"(?i)(^|_)fix(es)?$|remedy", name) for name in names) else []
            for text in map(text_of, texts):
                if text.strip(HOLE):
                    yield f"{path.relative_to(PACKAGE)}:{node.value.lineno}", text  # pyright: ignore[reportOptionalMemberAccess]


@functools.cache
def known_keys() -> frozenset[str]:
    """Every key of a recipe, those of all kinds of a method or stage, those of recipes of data, and the sections
    themselves."""
    names = {key.name for key in (*keys(), *keys(DataRecipe))}
    parts = {".".join(name.split(".")[:count]) for name in names for count in range(1, name.count(".") + 2)}
    return frozenset(re.sub(r"\.N\b", "", name) for name in parts)


@functools.cache
def commands() -> dict[str, click.Command]:
    """Every command by its words, without `meshtune`."""
    by_name: dict[str, click.Command] = {}

    def add(command: click.Command, path: tuple[str, ...]) -> None:
        by_name[" ".join(path)] = command
        for name, inner in getattr(command, "commands", {}).items():
            add(inner, (*path, name))

    add(typer.main.get_command(app), ())
    return by_name


def test_fixes_are_found():
    assert len(fixes()) > 400


def test_keys_that_fixes_name_are_keys():
    sections = "|".join(section_fields(Recipe))
    wrong = []
    for place, text in fixes():
        for name in re.findall(rf"(?<![\w./-])((?:{sections})(?:\.[a-z_]+)+)(?![\w.]*\()", text.replace(HOLE, " ")):
            if name.rpartition(".")[2] in ("json", "jsonl", "jinja", "yaml", "csv", "parquet"):
                continue  # a file
            if name not in known_keys():
                wrong.append(f"{place}: {name}")
    assert wrong == []


def test_values_that_fixes_give_to_keys_are_values_of_them():
    sections = "|".join(section_fields(Recipe))
    changes = [
        (place, f"{key}={value.rstrip('.')}")
        for place, text in fixes()
        for key, value in re.findall(rf"(?<![\w./-])((?:{sections})(?:\.[a-z_]+)+)(?:=|: )([\w.+-]+)(?!\0)", text)
    ]
    assert len(changes) > 30
    wrong = []
    for place, change in changes:
        try:
            load_recipe({"model": "m", "data": "d", "output": "o"}, [change], notify=silent)
        except UserError as error:
            if re.search(r"must be|is not a key|expected", str(error)):
                wrong.append(f"{place}: {change}: {error.what}")
    assert wrong == []


# Of other programs, and what every command has.
COMMON_OPTIONS = {"--help", "--constraint", "--ntasks"}


def test_options_that_fixes_name_are_options_of_a_command():
    parameters = [parameter for command in commands().values() for parameter in command.params]
    options = COMMON_OPTIONS | {
        name for parameter in parameters for name in (*parameter.opts, *parameter.secondary_opts)
    }
    named = [(place, name) for place, text in fixes() for name in re.findall(r"(?<![\w-])(--[a-z][a-z-]+)", text)]
    assert len(named) > 30
    assert [f"{place}: {name}" for place, name in named if name not in options] == []


def test_commands_that_fixes_name_are_commands():
    named = [(place, verb) for place, text in fixes() for verb in re.findall(r"(?<![\w./])meshtune ([a-z]+)", text)]
    assert len(named) > 10
    assert [f"{place}: meshtune {verb}" for place, verb in named if verb not in commands()] == []


@pytest.mark.skipif(not (PACKAGE.parents[1] / "docs").is_dir(), reason="no docs beside an installed package")
def test_pages_that_fixes_name_are_there():
    docs = PACKAGE.parents[1] / "docs"
    pages = {(place, page) for place, text in fixes() for page in re.findall(r"docs/([\w-]+\.md)", text)}
    assert [place for place, page in pages if not (docs / page).is_file()] == []
