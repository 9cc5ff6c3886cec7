"""What `meshtune data inspect` shows of several sources."""

import json
import pathlib
import re

import pytest
from rich.console import Console

import meshtune.quickstart
from meshtune.config.load import load_recipe
from meshtune.data.inspection import inspect_data

MODEL = pathlib.Path(meshtune.quickstart.__file__).parent / "model"


@pytest.mark.parametrize(
    ("records", "shown"),
    [
        (2, ["a.jsonl, record 0", "a.jsonl, record 1", "b.jsonl, record 0", "c.jsonl, record 0"]),
        (0, []),
    ],
)
def test_the_first_document_of_every_source_is_shown(tmp_path, monkeypatch, capsys, records, shown):
    monkeypatch.setenv("MESHTUNE_CACHE", str(tmp_path / "cache"))
    for name in "abc":
        lines = [json.dumps({"prompt": f"{name}{number}", "completion": "so"}) for number in range(5)]
        (tmp_path / f"{name}.jsonl").write_text("\n".join(lines))
    train = "[" + ", ".join(f"{tmp_path}/{name}.jsonl" for name in "abc") + "]"
    recipe = load_recipe(None, [f"model={MODEL}", f"data.train={train}", f"output={tmp_path}/out"])
    inspect_data(recipe, records=records, console=Console(width=200))
    assert re.findall(r"\w\.jsonl, record \d+", capsys.readouterr().out) == shown
