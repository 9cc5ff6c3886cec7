"""There is a recipe for every family, and each runs in miniature: its own data and method, on a tiny random model."""

from __future__ import annotations

import pathlib
import shutil

import pytest

import meshtune.quickstart
from families.tiny import tiny_model
from meshtune.config.load import load_recipe
from meshtune.families import FAMILIES, description
from meshtune.train.run import train

ROOT = pathlib.Path(__file__).resolve().parents[2]
RECIPES = {path.stem: path for path in sorted((ROOT / "examples/families").glob("*.yaml"))}
# The families of the first examples, which test_examples.py runs.
ELSEWHERE = {"llama": "llama3-lora", "mistral": "mistral-lora", "qwen2": "qwen2.5-lora", "qwen3": "qwen3-lora"}
TOKENIZER = pathlib.Path(meshtune.quickstart.__file__).parent / "model"
VOCAB = 520  # the quickstart's tokenizer has 512 tokens


def test_every_family_has_a_recipe():
    assert RECIPES.keys() | ELSEWHERE.keys() == FAMILIES.keys()
    assert all((ROOT / f"examples/{name}.yaml").exists() for name in ELSEWHERE.values())


@pytest.mark.parametrize("name", RECIPES)
def test_a_recipe_says_how_it_is_run_and_names_a_published_model(name):
    assert RECIPES[name].read_text().startswith(f"# meshtune train examples/families/{name}.yaml\n")
    assert load_recipe(RECIPES[name]).model.path in description(name).models


@pytest.mark.slow
@pytest.mark.parametrize("name", RECIPES)
def test_a_recipe_runs_in_miniature(name, tmp_path):
    model = tiny_model(name, tmp_path, VOCAB)
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
