"""Recipes that a stranger wrote end in a sentence, in bounded time and memory."""

from __future__ import annotations

import os
import time

import pytest

from meshtune.config.load import load_recipe
from meshtune.errors import UserError


def error_of(source) -> UserError:
    with pytest.raises(UserError) as caught:
        load_recipe(source)
    return caught.value


ALIASES = "".join(f"a{n}: &a{n} [{','.join([f'*a{n - 1}'] * 9)}]\n" for n in range(1, 10))
MERGES = "".join(f"a{n}: &a{n} {{<<: [{','.join([f'*a{n - 1}'] * 9)}]}}\n" for n in range(1, 10))
HOSTILE = {
    "aliases of aliases": f"a0: &a0 [x]\n{ALIASES}",
    "merges of merges": f"a0: &a0 {{x: 1}}\n{MERGES}",
    "a merge of itself": "a: &a {<<: *a}",
    "a long list many times": f"a: &a [{'x,' * 9000}]\nb: [{'*a,' * 9000}]",
    "many values": f"a: [{'x,' * 400_000}]",
    "much text": "a: " + "x" * 2_000_000,
    "deep": "a: " + "[" * 5000,
    "deep by indentation": "".join(f"{' ' * depth}a:\n" for depth in range(200)),
    "unknown keys": "".join(f"key{n}: 1\n" for n in range(9000)),
    "sources without a path": "data: [" + "{cap: 1}, " * 3000 + "]",
    "digits": "seed: " + "1" * 6000,
    "hexadecimal digits": "seed: 0x" + "f" * 6000,
    "digits of a version": f"%YAML 1.{'9' * 5000}\n--- a",
    "an escape beyond Unicode": 'a: "\\U99999999"',
    "half of a surrogate pair": 'a: "\\ud800"',
    "a null character in a path": 'model: "\\0"\ndata: a\noutput: b',
} | {
    f"!!{tag}": f"seed: !!{tag} x"
    for tag in ("bool", "int", "float", "timestamp", "set", "omap", "binary", "map", "seq", "merge")
}


@pytest.mark.parametrize("name", HOSTILE)
def test_no_text_of_a_recipe_takes_long_or_ends_in_a_traceback(tmp_path, name):
    """Each in a file and, where a command line can be so long, as an override."""
    before = time.process_time()
    file = tmp_path / "recipe.yaml"
    file.write_text(HOSTILE[name], encoding="utf-8")
    error_of(file)
    if len(HOSTILE[name]) < 120_000:
        with pytest.raises(UserError):
            load_recipe({"model": "m", "data": "d", "output": "o"}, [f"seed={HOSTILE[name]}"])
    assert time.process_time() - before < 20, "limits of size bound it to a few seconds"


@pytest.mark.parametrize("override", [f"a{'.a' * 50_000}=1", f"data.train.{'9' * 5000}.path=a"])
def test_no_key_of_an_override_ends_in_a_traceback(override):
    with pytest.raises(UserError):
        load_recipe({"model": "m", "data": "d", "output": "o"}, [override])


def test_pipes_devices_and_huge_files_are_no_recipes(tmp_path):
    """A read of a pipe that nobody writes to would never return, and one of /dev/zero never end."""
    os.mkfifo(tmp_path / "pipe.yaml")
    (tmp_path / "zero.yaml").symlink_to("/dev/zero")
    for name in ("pipe.yaml", "zero.yaml"):
        assert error_of(tmp_path / name).what == "the recipe is a pipe or a device, not a file"
    with (tmp_path / "huge.yaml").open("wb") as file:
        file.truncate(1 << 40)
    assert error_of(tmp_path / "huge.yaml").what == "the file has 1,099,511,627,776 bytes: that is no recipe"
