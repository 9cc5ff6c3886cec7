"""A hub of the tests' own, and a finished run to push."""

from __future__ import annotations

import pathlib
from collections.abc import Iterator

import pytest

from hub.fake_hub import TOKEN, Hub, running_hub


@pytest.fixture
def hub(monkeypatch, tmp_path) -> Iterator[Hub]:
    """A running hub that huggingface_hub talks to, with a token that may write to ann/*."""
    from huggingface_hub import constants

    with running_hub() as running:
        monkeypatch.setenv("HF_ENDPOINT", running.url)
        monkeypatch.setenv("HF_TOKEN", TOKEN)
        monkeypatch.setattr(constants, "ENDPOINT", running.url)
        monkeypatch.setattr(
            constants, "HUGGINGFACE_CO_URL_TEMPLATE", running.url + "/{repo_id}/resolve/{revision}/{filename}"
        )
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
        monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)
        monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub-cache"))
        yield running


@pytest.fixture(scope="session")
def finished_run(tmp_path_factory) -> pathlib.Path:
    """A finished run of the quickstart's model: an adapter, three updates long."""
    from meshtune.quickstart import recipe
    from meshtune.train.run import train

    run = tmp_path_factory.mktemp("runs") / "lesson"
    train(
        recipe(
            str(run),
            "train.steps=3",
            "sample.prompts=[]",
            "data.max_length=128",
            "data.validation=null",
            "eval.every=null",
        )
    )
    return run
