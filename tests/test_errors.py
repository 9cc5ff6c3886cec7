"""A user's mistake: its three parts, alone and together, on the screen and between processes."""

from __future__ import annotations

import pickle

import pytest

from meshtune.cli.failure import show
from meshtune.errors import UserError, counted, nearest


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


def test_a_number_agrees_with_its_noun():
    assert [counted(n, "row") for n in (0, 1, 2048)] == ["0 rows", "1 row", "2,048 rows"]
    assert [counted(n, "matrix", "matrices") for n in (1, 2)] == ["1 matrix", "2 matrices"]
