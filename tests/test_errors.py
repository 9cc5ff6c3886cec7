"""A user's mistake: its three parts, alone and together, on the screen and between processes."""

from __future__ import annotations

import pathlib
import pickle
import re
import tomllib

import pytest

from meshtune.cli.failure import show
from meshtune.errors import UserError, amount, nearest, pip_install


@pytest.mark.parametrize("fix", [None, ""])
def test_an_empty_fix_is_none_and_prints_no_line(fix, capsys):
    error = UserError("the file is empty", where="data.jsonl", fix=fix)
    assert error.fix is None
    assert str(error) == "the file is empty\nwhere: data.jsonl"
    show(error)
    assert [line.strip() for line in capsys.readouterr().err.splitlines()] == [
        "error: the file is empty",
        "where: data.jsonl",
    ]


def test_an_error_of_another_process_has_the_same_parts():
    error = UserError("no such file", where="model.path", fix="correct it")
    again = pickle.loads(pickle.dumps(error))
    assert type(again) is UserError
    assert (again.what, again.where, again.fix) == ("no such file", "model.path", "correct it")
    assert str(again) == str(error) == "no such file\nwhere: model.path\nfix: correct it"


def test_the_nearest_name_extends_what_was_written():
    names = ["badam", "adamw", "adafactor"]
    assert nearest("adam", names) == nearest("adamv", names) == "did you mean 'adamw'? "
    assert nearest("zzz", names) == ""


def test_extras_that_messages_and_pages_name_are_ones_of_the_project_and_no_index_is_asked_for_them():
    root = pathlib.Path(__file__).parents[1]
    extras = tomllib.loads((root / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    texts = [*root.glob("*.md"), *root.glob("docs/*.md"), *root.rglob("examples/**/*.yaml"), *root.glob("src/**/*.py")]
    texts += [path for path in root.glob("src/meshtune/board/page/**/*") if path.suffix in (".js", ".json", ".html")]
    for path in texts:
        text = path.read_text(encoding="utf-8")
        history = path.name == "CHANGELOG.md"
        assert history or not re.search(r"pip install ['\"]?meshtune\b", text), path
        named = re.findall(r"pip_install\(\"([\w-]+)\"\)|pip install '\.\[([\w-]+)\]'", text)
        assert {first or second for first, second in named} <= set(extras), path
    assert pip_install("serve").endswith("pip install '.[serve]'")


def test_a_number_agrees_with_its_noun():
    assert [amount(n, "row") for n in (0, 1, 2048)] == ["0 rows", "1 row", "2,048 rows"]
    assert [amount(n, "matrix", "matrices") for n in (1, 2)] == ["1 matrix", "2 matrices"]
