"""The base's hash: the same for the same model however it is stored, another for any other."""

from __future__ import annotations

import re
import shutil

import pytest
from safetensors.numpy import load_file, save_file

from families.case import directory as written_by_transformers
from families.cases import BY_NAME
from meshtune.families import mathematics
from meshtune.json_text import read_json
from meshtune.weights.inspect import base_hash


def test_copying_and_sharding_keep_the_hash(make_model, tmp_path):
    original = make_model("llama")
    first = base_hash(original)
    assert re.fullmatch(r"sha256:[0-9a-f]{64}", first)
    assert base_hash(shutil.copytree(original, tmp_path / "copy")) == first
    assert base_hash(make_model("llama", max_shard_size=10_000)) == first


def test_bookkeeping_in_the_config_keeps_the_hash(make_model, edit_config):
    directory = make_model("llama")
    first = base_hash(directory)
    edit_config(directory, transformers_version="9.9", _name_or_path="elsewhere", eos_token_id=7, use_cache=False)
    assert base_hash(directory) == first


@pytest.mark.parametrize(
    "fields",
    [
        {"rope_parameters": {"rope_theta": 1.0}},
        {"rms_norm_eps": 1e-3},
        {"num_attention_heads": 2},
        {"hidden_act": "gelu"},
        {"num_nextn_predict_layers": 1},
    ],
)
def test_mathematics_in_the_config_changes_the_hash(make_model, edit_config, fields):
    directory = make_model("llama")
    first = base_hash(directory)
    edit_config(directory, **fields)
    assert base_hash(directory) != first


def test_what_the_text_model_of_a_composite_reads_is_hashed(tmp_path, edit_config):
    directory = shutil.copytree(written_by_transformers(BY_NAME["gemma3_vision"]), tmp_path / "model")
    first = base_hash(directory)
    text = read_json(directory / "config.json")["text_config"]
    edit_config(directory, image_token_index=7, text_config=text | {"use_cache": False})
    assert base_hash(directory) == first
    edit_config(directory, text_config=text | {"query_pre_attn_scalar": 12})
    assert base_hash(directory) != first


def test_the_hash_of_a_llama_is_that_of_earlier_versions(make_model):
    """Their adapters and checkpoints name their base by it: over the fields that were listed by hand then."""
    directory = make_model("llama")
    config = read_json(directory / "config.json")
    listed = """model_type vocab_size hidden_size intermediate_size num_hidden_layers num_attention_heads
        num_key_value_heads head_dim hidden_act rms_norm_eps rope_theta rope_scaling rope_parameters
        max_position_embeddings partial_rotary_factor sliding_window attention_bias mlp_bias tie_word_embeddings"""
    assert mathematics(config) == {name: config[name] for name in listed.split() if config.get(name) is not None}


def test_dtype_and_any_changed_tensor_change_the_hash(make_model):
    directory = make_model("llama")
    hashes = {base_hash(directory), base_hash(make_model("llama", "bfloat16"))}
    tensors = load_file(directory / "model.safetensors")
    for name in tensors:
        save_file(tensors | {name: tensors[name] * 1.01}, directory / "model.safetensors")
        hashes.add(base_hash(directory))
    assert len(hashes) == len(tensors) + 2


def test_a_large_tensor_is_sampled_from_its_first_byte_to_its_last(make_model):
    directory = make_model("llama", vocab_size=4096)  # the embedding is 512 KiB
    tensors = load_file(directory / "model.safetensors")
    hashes = {base_hash(directory)}
    for row, column in ((0, 0), (-1, -1)):
        changed = tensors["model.embed_tokens.weight"].copy()
        changed[row, column] += 1
        save_file(tensors | {"model.embed_tokens.weight": changed}, directory / "model.safetensors")
        hashes.add(base_hash(directory))
    assert len(hashes) == 3
