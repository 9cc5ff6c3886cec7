"""Rotary embeddings by layer type are read from every form of config, and refused where the forms disagree."""

from __future__ import annotations

import pytest
from transformers import AutoConfig

from meshtune.errors import UserError
from meshtune.families import model_spec
from meshtune.families.config_fields import ConfigFields, read_ropes
from meshtune.model.attention import AttentionSpec
from meshtune.model.mlp import MlpSpec

GEMMA3 = {"model_type": "gemma3_text", "num_hidden_layers": 24, "architectures": ["Gemma3ForCausalLM"]}
LINEAR = {"rope_type": "linear", "factor": 8.0}
BY_LAYER = {
    "full_attention": {**LINEAR, "rope_theta": 5e5},
    "sliding_attention": {"rope_type": "default", "rope_theta": 2e4},
}
THETAS = {"full_attention": ("rope_theta", None), "sliding_attention": ("rope_theta", None)}


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"rope_theta": 5e5, "rope_local_base_freq": 2e4, "rope_scaling": LINEAR},
        {"rope_theta": 5e5, "rope_scaling": LINEAR, "sliding_window_pattern": 4},
        {"rope_parameters": BY_LAYER},
        {"rope_parameters": {"full_attention": {"rope_type": "default"}, "sliding_attention": None}},
        {"rope_parameters": BY_LAYER, "rope_scaling": LINEAR, "rope_theta": 5e5},
    ],
)
def test_older_and_newer_configs_of_gemma3_are_read_as_transformers_reads_them(changes):
    """transformers writes the config again with one block for each layer type: the same model."""
    written = AutoConfig.for_model(**GEMMA3 | changes).to_dict()
    assert set(written["rope_parameters"]) == {"full_attention", "sliding_attention"}
    assert model_spec(GEMMA3 | changes) == model_spec(written)


def test_gemma3_has_two_rotary_embeddings_and_six_layers_a_pattern():
    spec = model_spec(GEMMA3)
    (stack,) = spec.stacks
    mixers = [layer.mixer for layer in stack.pattern if isinstance(layer.mixer, AttentionSpec)]
    assert [mixer.window for mixer in mixers] == [4096] * 5 + [None]
    assert [rope.theta for mixer in mixers for rope in mixer.ropes] == [1e4] * 5 + [1e6]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"rope_parameters": {**LINEAR, "rope_theta": 1e6}}, "does not say which layers it is for"),
        ({"rope_parameters": {"chunked_attention": {}, **BY_LAYER}}, "chunked_attention is no layer type"),
        ({"rope_parameters": {"full_attention": "linear"}}, "full_attention must be a mapping"),
        ({"rope_parameters": "linear"}, "rope_parameters must be a mapping"),
        ({"rope_scaling": 8.0}, "rope_scaling must be a mapping"),
        ({"rope_parameters": BY_LAYER, "rope_scaling": LINEAR | {"factor": 2.0}}, "only one of them can hold"),
        ({"rope_parameters": BY_LAYER, "rope_theta": 1e4}, "rope_theta is 10000.0, and 500000.0 in rope_parameters"),
        ({"rope_scaling": {"rope_type": "linear"}}, "config.json, full_attention layers, field rope_parameters"),
        ({"use_bidirectional_attention": True}, "use_bidirectional_attention = True is not implemented"),
        ({"layer_types": ["full_attention"]}, "for each of the 24 layers"),
        ({"architectures": ["Gemma3TextModel"]}, "Gemma3TextModel"),
    ],
)
def test_what_would_change_the_mathematics_is_named(changes, message):
    with pytest.raises(UserError) as error:
        model_spec(GEMMA3 | changes)
    assert message in str(error.value)


def test_a_block_that_is_null_means_no_rotary_embedding():
    config = {"max_position_embeddings": 64, "rope_parameters": BY_LAYER | {"full_attention": None}}
    assert read_ropes(ConfigFields(config, "config.json"), 8, THETAS).keys() == {"sliding_attention"}


def test_one_block_holds_for_all_layer_types():
    config = {"max_position_embeddings": 64, "rope_parameters": {**LINEAR, "rope_theta": 3.0}}
    ropes = read_ropes(ConfigFields(config, "config.json"), {"full_attention": 16, "sliding_attention": 8}, THETAS)
    assert {kind: (rope.kind, rope.theta, rope.dim) for kind, rope in ropes.items()} == {
        "full_attention": ("linear", 3.0, 16),
        "sliding_attention": ("linear", 3.0, 8),
    }


def test_a_layer_type_without_a_block_is_missing():
    config = {"max_position_embeddings": 64, "rope_parameters": {"full_attention": BY_LAYER["full_attention"]}}
    with pytest.raises(UserError, match="no block for sliding_attention layers"):
        read_ropes(ConfigFields(config, "config.json"), 8, THETAS)


@pytest.mark.parametrize("name", ["gelu", "gelu_pytorch_tanh", None])
def test_gelu_of_gemma_means_its_tanh_approximation(name):
    config = {
        "model_type": "gemma",
        "vocab_size": 50,
        "hidden_size": 16,
        "intermediate_size": 24,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "max_position_embeddings": 64,
        "rope_theta": 10000.0,
        "hidden_act": name,
    }
    ffn = model_spec(config).layer_kinds[0].ffn
    assert isinstance(ffn, MlpSpec)
    assert ffn.activation == "gelu_tanh"
    with pytest.raises(UserError, match="hidden_activation = 'silu'"):
        model_spec(config | {"hidden_activation": "silu"})
