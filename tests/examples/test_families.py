"""There is a recipe for every family, and each runs in miniature: its own data and method, on a tiny random model."""

from __future__ import annotations

import json
import pathlib
import shutil
from typing import Any

import jax
import numpy as np
import pytest
from safetensors.numpy import save_file

import meshtune.quickstart
from baichuan_files import directory as baichuan_directory
from baichuan_in_torch import SEVEN
from families.case import SMALL, torch_model, written
from families.cases import CASES
from families.published_configs import PUBLISHED
from meshtune.config.load import load_recipe
from meshtune.families import FAMILIES, description, model_spec
from meshtune.model.init import init_params
from meshtune.train.run import train
from meshtune.weights.export import export_model

ROOT = pathlib.Path(__file__).resolve().parents[2]
RECIPES = {path.stem: path for path in sorted((ROOT / "examples/families").glob("*.yaml"))}
# The families of the first examples, which test_examples.py runs.
ELSEWHERE = {"llama": "llama3-lora", "mistral": "mistral-lora", "qwen2": "qwen2.5-lora", "qwen3": "qwen3-lora"}
TOKENIZER = pathlib.Path(meshtune.quickstart.__file__).parent / "model"
VOCAB = 520  # the quickstart's tokenizer has 512 tokens
FAST = "gemma2"


def test_every_family_has_a_recipe():
    assert RECIPES.keys() | ELSEWHERE.keys() == FAMILIES.keys()
    assert all((ROOT / f"examples/{name}.yaml").exists() for name in ELSEWHERE.values())


@pytest.mark.parametrize("name", RECIPES)
def test_a_recipe_says_how_it_is_run_and_names_a_published_model(name):
    assert RECIPES[name].read_text().startswith(f"# meshtune train examples/families/{name}.yaml\n")
    assert load_recipe(RECIPES[name]).model.path in description(name).models


@pytest.mark.parametrize("name", [pytest.param(n, marks=() if n == FAST else pytest.mark.slow) for n in RECIPES])
def test_a_recipe_runs_in_miniature(name, tmp_path):
    model = tiny_model(name, tmp_path)
    for file in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(TOKENIZER / file, model)
    small = ["train.epochs=null", "train.steps=2", "train.batch_size=2", "train.micro_batch=1", "data.max_length=192"]
    overrides = [f"model.path={model}", "model.chat_template=chatml", f"output={tmp_path / 'run'}", "mesh=auto", *small]
    overrides.append("method.rank=4")
    if "quantize" in RECIPES[name].read_text():
        overrides.append("quantize.block_size=8")  # the tiny models' rows have 32 and 56 numbers
    result = train(load_recipe(RECIPES[name], overrides))
    assert result.steps == 2
    assert (tmp_path / "run/adapter/adapter_model.safetensors").exists()


def tiny_model(name: str, folder: pathlib.Path) -> pathlib.Path:
    """A directory with the first tiny model of a family, with a vocabulary that the tokenizer fits in."""
    if name == "baichuan":
        return baichuan_directory(folder, SEVEN | {"vocab_size": VOCAB})[0]
    if name == "internlm2":
        return own_model(PUBLISHED["internlm/internlm2_5-7b-chat"] | SMALL | {"vocab_size": VOCAB}, folder)
    model_type = {"kimi_k2": "deepseek_v3"}.get(name, name)
    case = next(case for case in CASES if case.model_type == model_type)
    model = written(torch_model(case.changed(vocab_size=VOCAB)))
    if model_type != name:
        config = json.loads((model / "config.json").read_text())
        (model / "config.json").write_text(json.dumps(config | {"model_type": name}))
    return model


def own_model(config: dict[str, Any], folder: pathlib.Path) -> pathlib.Path:
    """A random model of a family that transformers does not have, written by us."""
    (folder / "source").mkdir()
    (folder / "source/config.json").write_text(json.dumps(config | {"torch_dtype": "float32"}))
    save_file({"unused": np.ones(1, np.float32)}, folder / "source/model.safetensors")
    spec = model_spec(config)
    return export_model(init_params(spec, jax.random.key(0)), spec, folder / "source", folder / "base").path
