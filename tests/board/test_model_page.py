"""The API behind the Model page: models by family with the memory of each method, and what this machine holds."""

from __future__ import annotations

import json
import math
import pathlib
import shutil

import pytest
from boards import READABLE, client

from meshtune.arrays.tree import flatten
from meshtune.board.routes.results import listed
from meshtune.board.workspace import workspace_at
from meshtune.model.spec import abstract_params
from meshtune.quickstart import MODEL
from meshtune.weights.load import load_config, spec_of

DOCS = pathlib.Path(__file__).parents[2] / "docs/families-memory.md"


def test_the_list_is_that_of_the_docs():
    rows = {line.split(" | ")[0].removeprefix("| "): line for line in DOCS.read_text(encoding="utf-8").splitlines()}
    for model in listed():
        for size in model["bytes"].values():
            figures = f" {size / 2**30:,.1f} (", f" {size / 2**30:,.0f} ("
            assert any(figure in rows[model["name"]] for figure in figures)


LIST = pathlib.Path(__file__).parents[2] / "benchmarks/plans/models.json"
COUNTED = [model for model in json.loads(LIST.read_text()) if "parameters" in model]


@pytest.mark.parametrize("model", COUNTED, ids=lambda model: model["name"])
def test_a_listed_config_has_the_parameters_of_the_published_checkpoint(model, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(model["config"]))
    spec = spec_of(load_config(tmp_path), tmp_path, "bfloat16")
    assert sum(math.prod(leaf.shape) for leaf in flatten(abstract_params(spec)).values()) == model["parameters"]


def test_models_of_the_folders_are_listed_and_measured(tmp_path):
    workspace = workspace_at(tmp_path / "root", READABLE)
    shutil.copytree(MODEL, workspace.root / "small")
    with client(workspace) as board:
        answer = board.get("/api/models").json()
        assert {"path": "small", "kind": "model"} in answer["local"]
        machine = board.get("/api/models/machine").json()
        sizes = board.post("/api/models/memory", json={"path": "small"}).json()
        assert 0 < sizes["bytes"]["lora"] < sizes["bytes"]["full"] < machine["memory"] == sizes["memory"]
        body = board.post("/api/models/memory", json={"path": "/etc"})
        assert body.status_code == 400
        assert "outside" in body.json()["problems"][0]["message"]
        assert board.post("/api/models/memory", json={}).json()["problems"][0]["path"] == "path"
