"""Data sets of the hub: asked for as the source says; what it refuses is one clear message."""

from __future__ import annotations

import pytest

from data.reading import fails
from meshtune.data.sources import Source, open_source


def test_a_hub_id_offline_says_so_and_what_to_do():
    error = fails(None, "tatsu-lab/alpaca")
    assert "'tatsu-lab/alpaca' is no file here" in error.what
    assert "HF_HUB_OFFLINE" in error.what
    assert error.where == "data set tatsu-lab/alpaca, split train"
    assert "unset HF_HUB_OFFLINE" in error.fix
    assert "HF_HOME" in error.fix


def test_a_hub_data_set_is_asked_for_as_the_source_says(monkeypatch):
    import datasets

    asked = {}

    def load(path, **options):
        asked.update(options, path=path)
        return datasets.Dataset.from_list([{"text": "x", "n": None}])

    monkeypatch.setattr(datasets, "load_dataset", load)
    records = open_source(Source("o/n", subset="en", split="test", revision="v1", folder="python", hub=True))
    assert records[0] == {"text": "x", "n": None}
    assert str(records.origin(0)) == "o/n, record 0"
    assert asked == {
        "path": "o/n",
        "name": "en",
        "split": "test",
        "revision": "v1",
        "data_dir": "python",
        "streaming": False,
    }


@pytest.mark.parametrize(
    ("raised", "what", "fix"),
    [
        ("DatasetNotFoundError", "has no data set 'o/n' that you may read", "HF_TOKEN"),
        ("ValueError", "cannot load the data set: Unknown split", "split"),
        ("DatasetGenerationError", "cannot load the data set: Unknown split", "revision"),
    ],
)
def test_what_the_hub_refuses_is_one_clear_message(monkeypatch, raised, what, fix):
    import datasets

    def load(path, **options):
        raise getattr(datasets.exceptions, raised, ValueError)("Unknown split\nand much more")

    monkeypatch.setattr(datasets, "load_dataset", load)
    error = fails(None, "o/n")
    assert what in error.what
    assert "much more" not in error.what
    assert fix in error.fix


def test_a_connection_lost_inside_other_errors_is_still_called_that(monkeypatch):
    import datasets

    def load(path, **options):
        try:
            raise ConnectionError("no route")
        except ConnectionError as error:
            raise RuntimeError("wrapped") from error

    monkeypatch.setattr(datasets, "load_dataset", load)
    monkeypatch.delenv("HF_HUB_OFFLINE")
    monkeypatch.delenv("HF_DATASETS_OFFLINE", raising=False)
    assert "the Hugging Face hub cannot be reached" in fails(None, "o/n").what


def test_a_name_inside_a_folder_that_is_here_is_a_missing_file_and_no_hub_id(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "training").mkdir()
    error = fails(None, "data/trainin")
    assert error.fix == "did you mean data/training?"
