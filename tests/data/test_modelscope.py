"""ModelScope by its package: which ids go there, the calls of the package, and the error without it.

The package here is a stand-in with the functions that the real one (1.40) has; the service itself is not asked.
"""

from __future__ import annotations

import json
import pathlib
import shutil
import sys
import types

import pytest

import meshtune.quickstart
from data.reading import fails
from meshtune.config.load import load_recipe
from meshtune.data.registry import load_registry
from meshtune.data.sources import DataSource, open_source
from meshtune.errors import UserError, pip_install
from meshtune.runs.sources import find
from meshtune.weights.hub import MODEL, locate, modelscope_id


class NotExistError(Exception):
    pass


@pytest.fixture
def package(monkeypatch, tmp_path):
    """A stand-in for the package: the folders that it "downloads", by id, and the calls that it was given."""
    folders: dict[str, pathlib.Path] = {}
    calls: list[tuple[str, str, dict[str, object]]] = []

    def downloads(kind: str):
        def download(repository: str, **options: object) -> str:
            calls.append((kind, repository, options))
            if repository not in folders:
                raise NotExistError(f"{repository} does not exist")
            return str(folders[repository])

        return download

    modules = {name: types.ModuleType(name) for name in ("modelscope", "modelscope.hub")}
    modules["modelscope.hub.errors"] = errors = types.ModuleType("modelscope.hub.errors")
    modules["modelscope.hub.snapshot_download"] = source = types.ModuleType("modelscope.hub.snapshot_download")
    errors.NotExistError = NotExistError
    source.snapshot_download, source.dataset_snapshot_download = downloads("model"), downloads("data")
    modules["modelscope.hub"].errors, modules["modelscope.hub"].snapshot_download = errors, source
    for name, module in modules.items():
        monkeypatch.setitem(sys.modules, name, module)
    return folders, calls


def test_ids_with_the_prefix_or_by_the_variable_are_those_of_modelscope(monkeypatch):
    assert modelscope_id("modelscope:qwen/Qwen3") == "qwen/Qwen3"
    assert modelscope_id("qwen/Qwen3") is None
    monkeypatch.setenv("USE_MODELSCOPE_HUB", "1")
    assert modelscope_id("qwen/Qwen3") == "qwen/Qwen3"
    assert modelscope_id("./qwen/Qwen3") is None
    with pytest.raises(UserError, match="not an id of ModelScope"):
        modelscope_id("modelscope:Qwen3")


def test_a_model_is_asked_for_by_patterns_and_used(package):
    folders, calls = package
    folders["ann/stories"] = meshtune.quickstart.MODEL
    assert locate("modelscope:ann/stories", "v1") == meshtune.quickstart.MODEL
    kind, repository, options = calls[0]
    assert (kind, repository, options["revision"]) == ("model", "ann/stories", "v1")
    assert options["allow_patterns"] == list(MODEL)
    assert find("modelscope:ann/stories").base == meshtune.quickstart.MODEL


def test_a_data_set_is_read_from_the_files_that_were_downloaded(package, tmp_path):
    folders, calls = package
    folders["ann/lesson"] = tmp_path / "lesson"
    folders["ann/lesson"].mkdir()
    (folders["ann/lesson"] / "train.jsonl").write_text('{"text": "a"}\n{"text": "b"}\n')
    records = open_source(DataSource("modelscope:ann/lesson", revision="v2"))
    assert [record["text"] for record in records.sweep()] == ["a", "b"]
    assert str(records.origin(1)) == "modelscope:ann/lesson, record 1"
    assert calls == [("data", "ann/lesson", {"revision": "v2"})]
    with pytest.raises(UserError, match="cannot load the data set"):
        open_source(DataSource("modelscope:ann/lesson", split="test"))


@pytest.mark.parametrize(
    ("entry", "variable", "path"),
    [
        ({"ms_hub_url": "a/b"}, "", "modelscope:a/b"),
        ({"ms_hub_url": "a/b", "hf_hub_url": "c/d"}, "", "c/d"),
        ({"ms_hub_url": "a/b", "hf_hub_url": "c/d"}, "1", "modelscope:a/b"),
        ({"hf_hub_url": "c/d"}, "1", "c/d"),
    ],
)
def test_a_registry_names_modelscope_as_in_llama_factory(tmp_path, monkeypatch, entry, variable, path):
    monkeypatch.setenv("USE_MODELSCOPE_HUB", variable)
    (tmp_path / "dataset_info.json").write_text(json.dumps({"lesson": entry}))
    recipe = {"model": {"path": "m"}, "output": "o", "data": {"train": [{"name": "lesson"}], "registry": str(tmp_path)}}
    section = load_recipe(recipe).data
    source = load_registry(str(tmp_path)).source(section.train[0])
    assert source.path == path


def test_what_modelscope_refuses_and_a_missing_package_are_one_message(package, monkeypatch, tmp_path):
    with pytest.raises(UserError, match="ModelScope could not give 'ann/unknown': NotExistError"):
        locate("modelscope:ann/unknown")
    shutil.rmtree(tmp_path / "lesson", ignore_errors=True)
    for name in ("modelscope", "modelscope.hub"):
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(UserError) as error:
        locate("modelscope:ann/stories")
    assert "not installed" in error.value.what
    assert error.value.fix == pip_install("modelscope")
    assert "not installed" in fails(None, "modelscope:ann/lesson").what
