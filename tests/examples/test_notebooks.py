"""The notebooks of examples/notebooks: their form, their recipes and plans, and each of them run in a kernel."""

from __future__ import annotations

import importlib.util
import json
import os
import pathlib
import re
import sys

import pytest
import torch
import transformers

import meshtune
from meshtune.config.load import load_recipe
from seeing_model import save_seeing_model
from tiny_models import SMALL

ROOT = pathlib.Path(__file__).resolve().parents[2]
NOTEBOOKS = sorted((ROOT / "examples/notebooks").glob("*.py"))
CELL = re.compile(r"^# %%(.*)$", re.MULTILINE)
CHAT_MODELS = ("HuggingFaceTB/SmolLM2-1.7B-Instruct", "HuggingFaceTB/SmolLM2-135M-Instruct", "Qwen/Qwen3-8B")
SEEING_MODEL = "Qwen/Qwen2-VL-2B-Instruct"


def cells(notebook: pathlib.Path) -> list[tuple[str, str]]:
    """(what follows the mark of a cell, its text) of every cell."""
    start, *parts = CELL.split(notebook.read_text(encoding="utf-8"))
    assert start.strip() == ""
    return list(zip(parts[::2], parts[1::2], strict=True))


spec = importlib.util.spec_from_file_location("plans", ROOT / "benchmarks/plans/run.py")
assert spec is not None
assert spec.loader is not None
plans = importlib.util.module_from_spec(spec)
spec.loader.exec_module(plans)


def name_of(path: pathlib.Path) -> str:
    return path.stem


@pytest.mark.parametrize("notebook", NOTEBOOKS, ids=name_of)
def test_a_notebook_is_short_and_installs_like_the_others(notebook):
    assert len(cells(notebook)) <= 10
    installs = [re.sub(r"\{device\}[\w,]*\]", "{device}]", cells(path)[1][1]) for path in NOTEBOOKS]
    assert set(installs) == {installs[0]}


@pytest.mark.parametrize("notebook", NOTEBOOKS, ids=name_of)
def test_the_plan_of_its_recipe_is_filed_for_both_free_devices_and_fits(notebook):
    recipe = plans.notebook_recipe(notebook)
    load_recipe(recipe)
    for target in plans.NOTEBOOK_TARGETS:
        filed = json.loads(plans.notebook_plan(notebook, target).read_text(encoding="utf-8"))
        assert plans.planned_part(filed["recipe"]) == plans.planned_part(recipe)
        assert filed["plan"]["fits"]
        assert not filed["plan"]["estimated"]


def save_chat_model(folder: pathlib.Path, shared: pathlib.Path) -> None:
    """A random Llama of two layers that reads long chats, with SmolLM2's tokenizer."""
    torch.manual_seed(0)
    tokenizer = transformers.AutoTokenizer.from_pretrained(shared / "assets/tokenizers/smollm2")
    sizes = {"hidden_size": 64, "intermediate_size": 128, "max_position_embeddings": 4096, "num_hidden_layers": 2}
    config = transformers.AutoConfig.for_model("llama", **SMALL | sizes | {"vocab_size": len(tokenizer)})
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)


@pytest.fixture(scope="module")
def hub(tmp_path_factory, shared):
    """A hub's cache in which the notebooks' models are tiny ones of the same names."""
    home = tmp_path_factory.mktemp("hub")
    for name in (*CHAT_MODELS, SEEING_MODEL):
        repository = home / "hub" / f"models--{name.replace('/', '--')}"
        snapshot = repository / "snapshots/0"
        snapshot.mkdir(parents=True)
        (repository / "refs").mkdir()
        (repository / "refs/main").write_text("0")
        save_seeing_model(snapshot, shared) if name == SEEING_MODEL else save_chat_model(snapshot, shared)
    return home


@pytest.mark.slow
@pytest.mark.parametrize("notebook", NOTEBOOKS, ids=name_of)
def test_every_cell_runs_in_a_kernel(notebook, hub, tmp_path, monkeypatch):
    jupytext, nbclient = pytest.importorskip("jupytext"), pytest.importorskip("nbclient")
    program = tmp_path / "bin/meshtune"  # for the lines of a shell
    program.parent.mkdir()
    program.write_text(f'#!/bin/sh\nexec {sys.executable} -m meshtune "$@"\n')
    program.chmod(0o755)
    source = str(pathlib.Path(meshtune.__file__).parents[1])
    paths = os.pathsep.join([source, *filter(None, [os.environ.get("PYTHONPATH")])])
    variables = {
        "HF_HOME": str(hub), "HF_HUB_OFFLINE": "1", "PYTHONPATH": paths, "JAX_PLATFORMS": "cpu",
        "PATH": f"{program.parent}{os.pathsep}{os.environ['PATH']}",
    }  # fmt: skip
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    content = jupytext.read(notebook, fmt="py:percent")
    place = {"metadata": {"path": str(tmp_path)}}
    nbclient.NotebookClient(content, timeout=1200, kernel_name="python3", resources=place).execute()
    outputs = [output for cell in content.cells for output in cell.get("outputs", [])]
    shown = "".join(str(output.get("data", {})) for output in outputs)
    assert "<progress value=" in shown, "a bar"
    assert "image/png" in shown, "a plot"
    printed = "".join(output.get("text", "") for output in outputs if output.get("name") == "stderr")
    assert 'install "ipywidgets"' not in printed, "rich's bars"
