"""The models of families that see, with their processors and without weights; and a cache of `datasets` of its test."""

from __future__ import annotations

import pytest

from data.pictures import make_model


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """The directory of a family's model."""
    folder, models = tmp_path_factory.mktemp("models"), {}

    def of(family):
        if family not in models:
            models[family] = make_model(folder / family, family)
        return models[family]

    return of


@pytest.fixture
def hf_home(tmp_path, monkeypatch):
    import datasets

    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", str(tmp_path / "hf"))
    return tmp_path / "hf"
