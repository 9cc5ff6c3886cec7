"""A checkpoint of a vision-language model: its text model is tuned in place, and all else in it passes through."""

from __future__ import annotations

import json
import pathlib
import shutil
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

import meshtune.quickstart
from families.case import directory
from families.cases import BY_NAME
from meshtune.adapters.config import LoraConfig
from meshtune.adapters.method import prepare
from meshtune.adapters.peft_format import BaseRecord, load_adapter, save_adapter
from meshtune.arrays.tree import flatten
from meshtune.errors import UserError
from meshtune.families import model_spec, module_names, scored_spec
from meshtune.families.composite import BEFORE, SINCE, replace_prefix
from meshtune.json_text import read_json
from meshtune.weights.export import export_model
from meshtune.weights.inspect import inspect_model
from meshtune.weights.load import load_params, load_spec
from meshtune.weights.passed_through import notes

WEIGHTS = "model.safetensors"


@pytest.fixture(params=["gemma3_vision", pytest.param("mistral3_vision", marks=pytest.mark.slow)])
def model(request: pytest.FixtureRequest, tmp_path: pathlib.Path) -> pathlib.Path:
    """A copy of a tiny composite as transformers wrote it: in the layout of before 4.52."""
    return pathlib.Path(shutil.copytree(directory(BY_NAME[request.param]), tmp_path / "model"))


@pytest.fixture
def gemma3(tmp_path: pathlib.Path) -> pathlib.Path:
    return pathlib.Path(shutil.copytree(directory(BY_NAME["gemma3_vision"]), tmp_path / "model"))


def change_config(model: pathlib.Path, **fields: object) -> None:
    config = read_json(model / "config.json") | fields
    (model / "config.json").write_text(json.dumps(config))


def to_newer_layout(model: pathlib.Path) -> None:
    tensors = load_file(model / WEIGHTS)
    pairs = [(before[1], since[1]) for before, since in zip(BEFORE, SINCE, strict=True)]
    towers = [("vision_tower.", "model.vision_tower."), ("multi_modal", "model.multi_modal")]
    save_file({replace_prefix(name, pairs + towers): array for name, array in tensors.items()}, model / WEIGHTS)


def test_both_layouts_are_read_and_written_as_they_were(model: pathlib.Path, tmp_path: pathlib.Path):
    older_spec, _ = load_spec(model)
    older = flatten(load_params(model, older_spec))
    to_newer_layout(model)
    spec, _ = load_spec(model)
    newer = load_params(model, spec)
    assert all(jax.tree.map(np.array_equal, older, flatten(newer)).values())
    assert module_names(spec) == module_names(older_spec)
    assert "model.language_model.layers.0.self_attn.q_proj" in module_names(spec)["layers/0.0/attn/q"]
    out = export_model(newer, spec, model, tmp_path / "out").path
    before, after = load_file(model / WEIGHTS), load_file(out / WEIGHTS)
    assert before.keys() == after.keys()
    assert all(np.array_equal(before[name], after[name]) for name in before)


def test_a_full_export_keeps_towers_and_config_and_what_processors_need(model: pathlib.Path, tmp_path: pathlib.Path):
    """Exported in bfloat16: the text model is rounded, the tower is the same to the byte, in its own dtype."""
    for file in ("preprocessor_config.json", "processor_config.json", "chat_template.json"):
        (model / file).write_text('{"a": 1}')
    spec, config = load_spec(model)[0], read_json(model / "config.json")
    params = jax.tree.map(lambda leaf: leaf + 1, load_params(model, spec))
    out = export_model(params, spec, model, tmp_path / "out", dtype="bfloat16", max_shard_bytes=30_000).path
    before = load_file(model / WEIGHTS)
    after = {name: array for file in out.glob("*.safetensors") for name, array in load_file(file).items()}
    assert before.keys() == after.keys()
    for name, array in before.items():
        if "language_model" in name:
            assert after[name].dtype == jnp.bfloat16
        else:
            np.testing.assert_array_equal(after[name], array, strict=True)
    written = read_json(out / "config.json")
    assert written["dtype"] == written["text_config"]["dtype"] == "bfloat16"
    assert written["vision_config"]["dtype"] == "float32"
    for fields in (written, config):
        fields["dtype"], fields["text_config"] = 0, {**dict(fields["text_config"]), "dtype": 0}
    assert written == config
    assert all((out / file).is_file() for file in ("preprocessor_config.json", "processor_config.json"))
    assert (out / "chat_template.json").is_file()


def test_adapters_are_for_the_text_model_alone(model: pathlib.Path, tmp_path: pathlib.Path):
    """Names of modules are those of transformers 5, and a pattern keeps peft from adapting the vision tower; adapters
    with the names of transformers before 4.52 are read too."""
    spec, _ = load_spec(model)
    config = LoraConfig(rank=2, targets=("q_proj",), train_modules=("norm",))
    prepared = prepare(config, spec, load_params(model, spec), jax.random.key(0))
    adapter = save_adapter(tmp_path / "adapter", prepared.trainable, prepared.spec, config, BaseRecord("base"))
    fields = read_json(adapter / "adapter_config.json")
    assert fields["target_modules"] == ["q_proj"]
    assert fields["exclude_modules"].startswith("(?!(")
    assert fields["modules_to_save"] == ["model.language_model.norm"]
    tensors = load_file(adapter / "adapter_model.safetensors")
    assert all(name.startswith("base_model.model.model.language_model.") for name in tensors)
    older = {
        name.replace("model.model.language_model.", "model.language_model.model."): t for name, t in tensors.items()
    }
    save_file(older, adapter / "adapter_model.safetensors")
    read = flatten(load_adapter(adapter, spec).trainable)
    assert all(jax.tree.map(np.array_equal, flatten(prepared.trainable), read).values())


def test_a_summary_says_what_passes_through(gemma3: pathlib.Path):
    summary = inspect_model(gemma3)
    assert (summary.composite, summary.family, summary.unused) == ("gemma3", "gemma3_text", [])
    tower = {name: array for name, array in load_file(gemma3 / WEIGHTS).items() if name.startswith("vision_tower.")}
    parts = {part.name: (part.tensors, part.nbytes) for part in summary.passed_through}
    assert parts["vision tower"] == (len(tower), sum(array.nbytes for array in tower.values()))
    assert parts["projector"][0] == 2
    ((tuned, passed_through),) = notes(gemma3, load_spec(gemma3)[0])
    assert tuned == "text model of gemma3"
    assert passed_through.startswith(f"{summary.parameters:,} parameters; not tuned and passed through: ")
    assert f"vision tower ({len(tower)} tensors, " in passed_through


def test_a_head_of_its_own_is_one_whatever_the_config_says(model: pathlib.Path):
    """As transformers does: Mistral3Config ties by default, and published files have a head."""
    change_config(model, tie_word_embeddings=True)
    tensors = load_file(model / WEIGHTS)
    embedding = tensors["language_model.model.embed_tokens.weight"]
    save_file(tensors | {"language_model.lm_head.weight": embedding + 1}, model / WEIGHTS)
    assert not load_spec(model)[0].tied
    save_file(tensors | {"language_model.lm_head.weight": embedding}, model / WEIGHTS)
    assert load_spec(model)[0].tied


def test_next_token_layers_pass_through(tmp_path: pathlib.Path):
    """Layers behind the model's own, as many as the config says, and whatever is called mtp."""
    model = pathlib.Path(shutil.copytree(directory(BY_NAME["llama_tied"]), tmp_path / "model"))
    tensors = load_file(model / WEIGHTS)
    extra = {"model.layers.4.eh_proj.weight": np.arange(6, dtype=np.int8), "mtp.fc.weight": np.ones(3, np.float16)}
    save_file(tensors | extra, model / WEIGHTS)
    with pytest.raises(UserError, match=r"model\.layers\.4\.eh_proj\.weight"):
        inspect_model(model)
    change_config(model, num_nextn_predict_layers=1)
    (part,) = inspect_model(model).passed_through
    assert (part.name, part.tensors, part.nbytes) == ("next-token prediction head", 2, 12)
    spec, _ = load_spec(model)
    out = export_model(load_params(model, spec), spec, model, tmp_path / "out").path
    written = load_file(out / WEIGHTS)
    assert all(np.array_equal(written[name], array) for name, array in (tensors | extra).items())


@pytest.mark.slow
def test_the_tower_and_the_next_token_head_of_qwen3_5_pass_through(tmp_path: pathlib.Path):
    model = pathlib.Path(shutil.copytree(directory(BY_NAME["qwen3_5_vision"]), tmp_path / "model"))
    tensors = load_file(model / WEIGHTS) | {"mtp.layers.0.mlp.up_proj.weight": np.ones((3, 2), np.float16)}
    save_file(tensors, model / WEIGHTS)
    summary = inspect_model(model)
    assert {part.name for part in summary.passed_through} == {"vision tower", "next-token prediction head"}
    assert (summary.composite, summary.unused) == ("qwen3_5", [])
    spec, _ = load_spec(model)
    out = export_model(load_params(model, spec), spec, model, tmp_path / "out").path
    written = load_file(out / WEIGHTS)
    assert written.keys() == tensors.keys()
    for name, array in tensors.items():
        np.testing.assert_array_equal(written[name], array, strict=True)


def test_keys_and_values_that_no_layer_reads_pass_through(tmp_path: pathlib.Path):
    """Published Gemma 4 files have them in the layers that read those of earlier layers."""
    model = pathlib.Path(shutil.copytree(directory(BY_NAME["gemma4_vision"]), tmp_path / "model"))
    extra = {"model.language_model.layers.4.self_attn.k_proj.weight": np.arange(6, dtype=np.float16)}
    tensors = load_file(model / WEIGHTS) | extra
    save_file(tensors, model / WEIGHTS)
    summary = inspect_model(model)
    assert {part.name for part in summary.passed_through} == {"vision tower", "unused keys and values"}
    assert (summary.composite, summary.unused) == ("gemma4", [])
    spec, _ = load_spec(model)
    written = load_file(export_model(load_params(model, spec), spec, model, tmp_path / "out").path / WEIGHTS)
    assert written.keys() == tensors.keys()
    for name, array in tensors.items():
        np.testing.assert_array_equal(written[name], array, strict=True)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"text_config": None}, "text_config of this gemma3 is None, not a mapping"),
        ({"text_config": ["gemma3_text"]}, "not a mapping"),
        ({"text_config": {"model_type": "gemma9"}}, "its text model 'gemma9' (text_config) is not supported"),
        ({"text_config": {"model_type": "llama"}}, "this composite around the text model 'llama' (text_config) is not"),
        ({"text_config": {"final_logit_softcapping": 30.0}}, "transformers ignores it"),
        ({"text_config": {"hidden_size": "wide"}}, "config.json, text_config, field hidden_size"),
        ({"cross_attention_layers": [3]}, "cross_attention_layers = [3] is a field that Meshtune does not know"),
        ({"quantization_config": {"bits": 4}}, "already quantised"),
        ({"architectures": ["Gemma3ForCausalLM"]}, "expected ['Gemma3ForConditionalGeneration']"),
    ],
)
def test_a_composite_that_cannot_be_tuned_is_refused_by_name(changes: dict[str, object], message: str):
    config = {"model_type": "gemma3", "text_config": {}, "vision_config": {}}
    with pytest.raises(UserError) as error:
        model_spec(config | changes)
    assert message in str(error.value)


def test_a_text_model_in_both_layouts_is_refused(gemma3: pathlib.Path):
    tensors = load_file(gemma3 / WEIGHTS)
    save_file(tensors | {"model.language_model.norm.weight": np.zeros(32, np.float32)}, gemma3 / WEIGHTS)
    with pytest.raises(UserError, match="the text model is there twice"):
        load_spec(gemma3)


def test_what_is_missing_of_a_tower_is_named(gemma3: pathlib.Path):
    tensors = load_file(gemma3 / WEIGHTS)
    name = "vision_tower.encoder.layers.1.mlp.fc1.bias"
    save_file({key: array for key, array in tensors.items() if key != name}, gemma3 / WEIGHTS)
    with pytest.raises(UserError, match=f"tensor '{name}' of the vision tower is missing"):
        inspect_model(gemma3)
    save_file({key: array for key, array in tensors.items() if "vision" not in key}, gemma3 / WEIGHTS)
    with pytest.raises(UserError, match="the vision tower of this gemma3 is missing"):
        inspect_model(gemma3)


def test_the_reward_model_of_a_composite_is_refused(gemma3: pathlib.Path):
    with pytest.raises(UserError, match="a reward model cannot be made of the text model inside a gemma3"):
        scored_spec(load_spec(gemma3)[0])


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_several_processes_tune_the_text_model_and_pass_the_tower_through(tmp_path: pathlib.Path):
    """Two real processes, each with half of every weight: the exported model has all tensors of the composite, those of
    the tower to the bit."""
    model = directory(BY_NAME["gemma3_vision"].changed(vocab_size=520))
    folder = pathlib.Path(shutil.copytree(model, tmp_path / "base"))
    for file in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(pathlib.Path(meshtune.quickstart.__file__).parent / "model" / file, folder)
    data = pathlib.Path(__file__).parents[2] / "examples/data/messages.jsonl"
    options = ["method.kind=full", f"model.path={folder}", "model.chat_template=chatml", f"output={tmp_path / 'run'}"]
    options += [f"data.train={data}", "data.max_length=192", "train.steps=1", "train.batch_size=2", "mesh.fsdp=2"]
    command = [sys.executable, "-m", "meshtune", "launch", "local", "-n", "2", "-d", "1", *options]
    run = subprocess.run(command, capture_output=True, text=True, timeout=800)
    assert run.returncode == 0, run.stderr[-3000:] + run.stdout[-3000:]
    before, after = load_file(folder / WEIGHTS), load_file(tmp_path / "run/model" / WEIGHTS)
    assert before.keys() == after.keys()
    changed = {name for name, array in before.items() if not np.array_equal(after[name], array)}
    assert changed == {name for name in before if name.startswith("language_model.")}
