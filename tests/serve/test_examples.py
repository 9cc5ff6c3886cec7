"""The programs of examples/serve run unchanged."""

from __future__ import annotations

import runpy
from collections.abc import Iterator
from pathlib import Path

import pytest
from random_model import save_random_model
from serving import TOKEN, serving

from meshtune.generate.api import load
from meshtune.serve.models import Models

EXAMPLES = Path(__file__).parents[2] / "examples/serve"


@pytest.fixture(scope="module")
def address(shared, tmp_path_factory) -> Iterator[str]:
    path = save_random_model(tmp_path_factory.mktemp("models") / "random", shared)
    model = load(path, dtype="float32", chat_template="chatml")
    with serving(Models({"random": model}, rows=2, queue=8), token=TOKEN) as url:
        yield f"{url}/v1"


@pytest.mark.parametrize("name", [path.name for path in sorted(EXAMPLES.glob("*.py"))])
def test_an_example_runs(name, address, monkeypatch, capsys):
    monkeypatch.setenv("MESHTUNE_URL", address)
    monkeypatch.setenv("MESHTUNE_TOKEN", TOKEN)
    runpy.run_path(str(EXAMPLES / name))
    assert capsys.readouterr().out.strip()
