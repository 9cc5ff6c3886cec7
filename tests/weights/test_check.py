"""A config and weights that disagree are refused before anything is allocated, naming tensor, file and config field."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from meshtune.errors import UserError
from meshtune.weights import shards
from meshtune.weights.load import load_params, load_spec


@pytest.fixture
def change(make_model):
    """change(family, edit) -> a model directory whose tensors went through `edit`."""

    def change(family: str, edit) -> Path:
        directory = make_model(family)
        tensors = load_file(directory / "model.safetensors")
        edit(tensors)
        save_file(tensors, directory / "model.safetensors")
        return directory

    return change


@pytest.fixture
def refusal(monkeypatch):
    def refusal_of(directory: Path) -> str:
        def allocate(_):
            raise AssertionError("allocated before the check")

        monkeypatch.setattr(shards, "allocate", allocate)
        with pytest.raises(UserError) as caught:
            load_params(directory, load_spec(directory)[0])
        assert str(directory) in str(caught.value)
        return str(caught.value)

    return refusal_of


def test_a_missing_tensor_is_named(change, refusal):
    message = refusal(change("llama", lambda t: t.pop("model.layers.2.mlp.up_proj.weight")))
    assert "tensor 'model.layers.2.mlp.up_proj.weight' is missing" in message


def test_a_misnamed_tensor_gets_a_suggestion(change, refusal):
    def rename(t):
        t["model.layers.2.mlp.up_project.weight"] = t.pop("model.layers.2.mlp.up_proj.weight")

    message = refusal(change("llama", rename))
    assert "disagree in 2 places" in message
    assert "did you mean 'model.layers.2.mlp.up_project.weight'?" in message
    assert "'model.layers.2.mlp.up_project.weight' in model.safetensors belongs to nothing" in message


def test_a_wrong_shape_names_file_shapes_and_config_field(make_model, edit_config, refusal):
    directory = make_model("llama")
    edit_config(directory, intermediate_size=60)
    message = refusal(directory)
    assert "disagree in 20 places" in message  # three weights and two biases that know F, in four layers
    assert (
        "tensor 'model.layers.0.mlp.gate_proj.weight' in model.safetensors has shape [56, 32], expected [60, 32] "
        "(intermediate_size is 60 in the config, 56 in the file)" in message
    )
    assert "... and 14 more" in message


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"vocab_size": 128}, "vocab_size is 128 in the config, 99 in the file"),
        ({"num_key_value_heads": 4}, "num_key_value_heads x head_dim is 48 in the config, 24 in the file"),
        ({"head_dim": 16}, "num_attention_heads x head_dim is 64 in the config, 48 in the file"),
        ({"num_hidden_layers": 6}, "num_hidden_layers is 6 in the config, but the files hold 4 layers"),
        ({"num_hidden_layers": 3}, "num_hidden_layers is 3 in the config, but the files hold 4 layers"),
        ({"mlp_bias": False}, "the weights have parts that the config switches off"),
    ],
)
def test_each_config_field_that_disagrees_is_named(make_model, edit_config, refusal, fields, message):
    directory = make_model("llama")
    edit_config(directory, **fields)
    assert message in refusal(directory)


def test_an_untied_config_without_a_head_suggests_tying(make_model, edit_config, refusal):
    directory = make_model("llama-tied")
    edit_config(directory, tie_word_embeddings=False)
    message = refusal(directory)
    assert "tensor 'lm_head.weight' is missing" in message
    assert "set tie_word_embeddings to true" in message


def test_a_tied_config_with_another_head_is_refused(make_model, edit_config, refusal):
    """transformers would quietly use one of the two."""
    directory = make_model("llama")
    edit_config(directory, tie_word_embeddings=True)
    assert "'lm_head.weight' in model.safetensors is not equal to 'model.embed_tokens.weight'" in refusal(directory)


def test_a_model_saved_without_its_head_is_recognised(change, refusal):
    def strip(t):
        for name in [name for name in t if name.startswith("model.")]:
            t[name.removeprefix("model.")] = t.pop(name)
        t.pop("lm_head.weight")

    assert "saved without its head" in refusal(change("llama", strip))


def test_quantised_weights_are_refused(change, refusal):
    def quantise(t):
        name = "model.layers.0.mlp.up_proj.weight"
        t[name] = (t[name] * 127).astype(np.int8)
        t[name.replace("weight", "weight_scale")] = np.ones(1, np.float32)

    message = refusal(change("llama", quantise))
    assert "has dtype I8; supported: F64, F32, F16, BF16" in message
    assert "use the full-precision checkpoint" in message
