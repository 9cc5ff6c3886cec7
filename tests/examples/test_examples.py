"""Every recipe in examples/ runs: its own data, method and settings, on a tiny random model of its family."""

from __future__ import annotations

import importlib.util
import json
import math
import os
import pathlib
import shutil
import subprocess
import sys

import pytest
import torch
import transformers
from pictures_to_see import write_model

import meshtune.quickstart
from meshtune.config.load import load_recipe
from meshtune.config.sections import is_gym
from meshtune.train.run import train
from tiny_models import SMALL

ROOT = pathlib.Path(__file__).resolve().parents[2]
EXAMPLES = sorted(path.stem for path in (ROOT / "examples").glob("*.yaml"))
# Pairs and tools; every method, stage, format of weights and optimizer has fast runs in tests/train and tests/quantize.
QUICK = ("qwen3-tools", "smollm2-dpo")
ONLINE = sorted(path.stem for path in (ROOT / "examples/grpo").glob("*.yaml") if path.stem != "tool-sft")
RECIPES = sorted(path for path in (ROOT / "examples").rglob("*.yaml") if path.parent.name != "generate")  # of data
KINDS = {"llama3": "llama", "mistral": "mistral", "qwen2.5": "qwen2", "qwen3": "qwen3"}
MESHES = {name: load_recipe(ROOT / f"examples/{name}.yaml", []).mesh for name in EXAMPLES}
TOKENIZER = pathlib.Path(meshtune.quickstart.__file__).parent / "model"


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """A directory with a random model of each family, all with the quickstart's tokenizer of 512 (Qwen: 513) tokens."""
    root = tmp_path_factory.mktemp("models")
    for kind in ("llama", "mistral", "qwen2", "qwen3"):
        torch.manual_seed(0)
        changes = {"vocab_size": 520, "num_hidden_layers": 5, "max_position_embeddings": 4096}
        config = transformers.AutoConfig.for_model(kind, **SMALL | changes)
        transformers.AutoModelForCausalLM.from_config(config).save_pretrained(root / kind)
        for name in ("tokenizer.json", "tokenizer_config.json"):
            shutil.copy(TOKENIZER / name, root / kind)
    return root


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_every_shipped_recipe_finds_its_files_from_any_directory(path, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    notices: list[str] = []
    recipe = load_recipe(path, notify=notices.append)
    named = [source.path for source in recipe.data.train if not is_gym(source.path)] + [recipe.data.registry]
    named += [reward.function.rpartition(":")[0] for reward in recipe.rewards if reward.kind == "function"]
    if recipe.rollout is not None and isinstance(recipe.rollout.environment, str):
        named.append(recipe.rollout.environment.rpartition(":")[0])
    if path.parent.name == "headline":
        named.append(recipe.model.path)
    assert all(pathlib.Path(name).exists() for name in named if name is not None)
    assert len(notices) == any(named)
    assert "".join(notices) == "" or notices[0].startswith(
        "not found from the current directory, so taken from beside the recipe: "
    )


def test_there_is_an_example_for_every_family_and_method():
    text = {name: (ROOT / f"examples/{name}.yaml").read_text() for name in EXAMPLES}
    assert all(any(name.startswith(family) for name in EXAMPLES) for family in KINDS)
    assert all(any(kind in body for body in text.values()) for kind in ("kind: lora", "kind: freeze", "method: full"))
    assert all(body.startswith(f"# meshtune train examples/{name}.yaml\n") for name, body in text.items())


@pytest.mark.parametrize(
    "name", [name if name in QUICK else pytest.param(name, marks=pytest.mark.slow) for name in EXAMPLES]
)
def test_example_runs(name, models, tmp_path, monkeypatch):
    monkeypatch.chdir(ROOT)
    kind = next((kind for prefix, kind in KINDS.items() if name.startswith(prefix)), "llama")
    small = ["train.steps=2", "train.batch_size=2", "train.micro_batch=1", "data.max_length=192", "sample.max_tokens=4"]
    # Its mesh needs as many devices: see the next test.
    overrides = [f"model.path={models / kind}", f"output={tmp_path / 'run'}", "train.epochs=null", "mesh=auto", *small]
    if name.endswith("tools"):
        overrides.append("data.max_length=1536")  # a prompt with tools is longer, above all in a vocabulary of 512
    if "quantize:" in (ROOT / f"examples/{name}.yaml").read_text():
        overrides.append("quantize.block_size=8")  # the small model's rows have 32 and 56 numbers
    optimizer = load_recipe(f"examples/{name}.yaml", []).optimizer
    if optimizer.in_backward:
        overrides.append("train.micro_batch=null")
    if optimizer.name == "galore":
        overrides.append("optimizer.rank=8")
    recipe = load_recipe(f"examples/{name}.yaml", [*overrides, "model.chat_template=chatml"])
    result = train(recipe)
    assert result.steps == 2
    assert result.path is not None
    assert any(result.path.glob("*.safetensors"))
    lines = [json.loads(line) for line in (tmp_path / "run/metrics.jsonl").read_text().splitlines()]
    assert all(line["loss"] > 0 for line in lines if "loss" in line)


@pytest.mark.slow
@pytest.mark.parametrize("name", ONLINE)
def test_online_example_runs(name, models, tmp_path, monkeypatch):
    """Two updates; the small model's tokens are shorter. The tool recipe begins from its first step's adapter."""
    monkeypatch.chdir(ROOT)
    small = ["train.steps=2", "rollout.prompts=2", "rollout.samples=2", "rollout.max_tokens=8", "data.max_length=512"]
    small += ["data.max_length=2048"] * (name == "tool")  # a prompt with tools is long in a vocabulary of 512
    model = [f"model.path={models / 'llama'}", "model.chat_template=chatml"]
    if name == "pictures":
        model = [f"model.path={write_model(tmp_path / 'model')}"]
    places = [*model, f"output={tmp_path / 'run'}"]
    if name == "tool":
        first = ["train.steps=1", "train.batch_size=1", "data.max_length=1536", f"output={tmp_path / 'first'}"]
        train(load_recipe("examples/grpo/tool-sft.yaml", [*model, *first]))
        places.append(f"model.adapter={tmp_path / 'first'}")
    recipe = load_recipe(f"examples/grpo/{name}.yaml", [*small, *places, "eval.at_start=false"])
    if is_gym(recipe.data.train[0].path) and importlib.util.find_spec("reasoning_gym") is None:
        pytest.skip("reasoning_gym is not installed")
    assert train(recipe).steps == 2
    lines = [json.loads(line) for line in (tmp_path / "run/rollouts.jsonl").read_text().splitlines()]
    assert len(lines) == 8
    assert all(0 <= value <= 1 for line in lines for value in line["rewards"].values())


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name, mesh in MESHES.items() if mesh != "auto"])
def test_example_runs_on_its_mesh(name, models, tmp_path):
    """As many simulated devices as the mesh asks for, in a process of their own, a row on each way of dp and fsdp."""
    mesh = MESHES[name]
    devices, rows = math.prod(mesh.model_dump().values()), mesh.dp * mesh.fsdp
    small = ["train.epochs=null", "train.steps=2", f"train.batch_size={rows}", f"train.micro_batch={rows}"]
    small += ["data.max_length=2048"] * (name == "tool")  # a prompt with tools is long in a vocabulary of 512
    places = [f"model.path={models / 'llama'}", "model.chat_template=chatml", f"output={tmp_path / 'run'}"]
    command = [sys.executable, "-m", "meshtune", "train", f"examples/{name}.yaml", *small, *places]
    env = os.environ | {"XLA_FLAGS": f"--xla_force_host_platform_device_count={devices}"}
    ran = subprocess.run([*command, "data.max_length=64"], cwd=ROOT, env=env, capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr
    assert f"mesh        {' x '.join(f'{axis}={n}' for axis, n in mesh.model_dump().items() if n > 1)}" in ran.stdout
    assert (tmp_path / "run/adapter/adapter_model.safetensors").exists()
