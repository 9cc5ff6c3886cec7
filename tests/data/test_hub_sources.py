"""Data sets of the hub are requested as the source describes; a failure is one clear message."""

from __future__ import annotations

import os
import socket
import subprocess
import sys

import pytest

from data.reading import fails
from meshtune.data.readers import hub
from meshtune.data.sources import DataSource, open_source


def test_a_hub_id_in_offline_mode_names_the_remedy():
    error = fails(None, "tatsu-lab/alpaca")
    assert "'tatsu-lab/alpaca' is not a local file" in error.what
    assert "HF_HUB_OFFLINE" in error.what
    assert error.where == "data set tatsu-lab/alpaca, split train"
    assert "unset HF_HUB_OFFLINE" in error.fix
    assert "HF_HOME" in error.fix


def test_a_hub_data_set_is_requested_as_the_source_describes(monkeypatch):
    import datasets

    request = {}

    def load(path, **options):
        request.update(options, path=path)
        return datasets.Dataset.from_list([{"text": "x", "n": None}])

    monkeypatch.setattr(datasets, "load_dataset", load)
    records = open_source(DataSource("o/n", subset="en", split="test", revision="v1", folder="python", hub=True))
    assert records[0] == {"text": "x", "n": None}
    assert str(records.origin(0)) == "o/n, record 0"
    assert request == {
        "path": "o/n",
        "name": "en",
        "split": "test",
        "revision": "v1",
        "data_dir": "python",
        "streaming": False,
    }


@pytest.mark.parametrize(
    ("raised", "message", "fix"),
    [
        ("DatasetNotFoundError", "has no data set 'o/n' that you may read", "HF_TOKEN"),
        ("ValueError", "cannot load the data set: Unknown split", "split"),
        ("DatasetGenerationError", "cannot load the data set: Unknown split", "revision"),
    ],
)
def test_a_refusal_of_the_hub_is_one_clear_message(monkeypatch, raised, message, fix):
    import datasets

    def load(path, **options):
        raise getattr(datasets.exceptions, raised, ValueError)("Unknown split\nand much more")

    monkeypatch.setattr(datasets, "load_dataset", load)
    error = fails(None, "o/n")
    assert message in error.what
    assert "much more" not in error.what
    assert fix in error.fix


def test_a_wrapped_connection_error_is_reported_as_unreachable(monkeypatch):
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


def test_a_hub_data_set_without_a_network_fails_within_two_seconds(tmp_path):
    """The client alone retries for 24 seconds. Timed in a process whose environment does not say offline."""
    code = (
        "import time, datasets\n"
        "from meshtune.data.sources import DataSource, open_source\n"
        "start = time.monotonic()\n"
        "try:\n"
        "    open_source(DataSource('tatsu-lab/alpaca'))\n"
        "except ValueError as error:\n"
        "    print(time.monotonic() - start, error.what)\n"
    )
    offline = ("HF_HUB_OFFLINE", "HF_DATASETS_OFFLINE", "TRANSFORMERS_OFFLINE")
    environment = {name: value for name, value in os.environ.items() if name not in offline}
    environment |= {"HF_ENDPOINT": "http://127.0.0.1:9", "HF_HOME": str(tmp_path), "no_proxy": "*"}
    run = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    seconds, message = run.stdout.split(maxsplit=1)
    assert float(seconds) < 2
    assert "the Hugging Face hub cannot be reached" in message


def test_an_unreachable_hub_leaves_the_cache_readable(monkeypatch):
    import datasets

    offline = []

    def load(path, **options):
        offline.append(datasets.config.HF_HUB_OFFLINE)
        return datasets.Dataset.from_list([{"text": "x"}])

    monkeypatch.setattr(datasets, "load_dataset", load)
    monkeypatch.setattr(hub, "is_reachable", lambda endpoint: False)
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", False)
    monkeypatch.delenv("HF_HUB_OFFLINE")
    monkeypatch.delenv("HF_DATASETS_OFFLINE", raising=False)
    assert len(open_source(DataSource("o/n"))) == 1
    assert offline == [True], "datasets reads its cache alone"
    assert datasets.config.HF_HUB_OFFLINE is False


def test_an_endpoint_that_accepts_connections_is_reachable(monkeypatch):
    monkeypatch.setenv("no_proxy", "*")
    with socket.create_server(("127.0.0.1", 0)) as server:
        assert hub.is_reachable(f"http://127.0.0.1:{server.getsockname()[1]}")
    assert not hub.is_reachable("http://127.0.0.1:9")


def test_a_missing_name_in_a_local_folder_is_not_a_hub_id(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "training").mkdir()
    error = fails(None, "data/trainin")
    assert error.fix == "did you mean data/training?"
