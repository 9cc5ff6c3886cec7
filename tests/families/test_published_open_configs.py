"""Configs as models are published are accepted, and mean what transformers reads of them."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import transformers

from families.published_open_configs import PUBLISHED
from meshtune.errors import UserError
from meshtune.families import model_spec, scored_fields, tensors
from meshtune.families.expansion import expanded_config
from meshtune.model.spec import ModelSpec

GPT2, PYTHIA, COHERE2 = "openai-community/gpt2", "EleutherAI/pythia-1.4b", "CohereForAI/c4ai-command-r7b-12-2024"


def spec_with(name: str, **fields: Any) -> ModelSpec:
    return model_spec({**PUBLISHED[name], **fields})


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_published_config_means_what_transformers_reads_of_it(name):
    """transformers writes every field in its new form, defaults and derived fields included."""
    config = dict(PUBLISHED[name])
    spec = model_spec(config)
    assert tensors(spec)
    config.pop("auto_map", None)
    written = transformers.AutoConfig.for_model(**config).to_dict()
    assert model_spec(written) == spec


def test_dropout_of_the_model_is_said_and_not_applied():
    assert model_spec(PUBLISHED["bigcode/starcoder2-3b"]).notes == tuple(
        f"{name}_dropout = 0.1 of the model's config is not applied" for name in ("attention", "embedding", "residual")
    )


def test_falcons_differ_in_key_value_heads_and_norms():
    def layer(name: str) -> tuple[str, int]:
        (kind,) = model_spec(PUBLISHED[f"tiiuae/falcon-{name}"]).layer_kinds
        assert kind.mixer is not None
        return kind.placement, {d.name: d.size for d in kind.mixer.divisors()}["key and value heads"]

    assert {name: layer(name) for name in ("7b", "40b", "11B", "rw-1b")} == {
        "7b": ("parallel_shared", 1),
        "40b": ("parallel", 2),
        "11B": ("parallel_shared", 2),
        "rw-1b": ("pre", 4),
    }


def test_a_deeper_gpt2_has_its_own_name_of_the_number_of_layers():
    deeper = expanded_config(PUBLISHED[GPT2], 2)
    assert deeper["n_layer"] == 6
    assert "num_hidden_layers" not in deeper


def test_gpt2_can_be_a_reward_model():
    fields = {"architectures": ["GPT2ForSequenceClassification"], "id2label": {"0": "LABEL_0"}}
    assert spec_with(GPT2, **fields) == dataclasses.replace(spec_with(GPT2), scored=True, tied=False)
    assert scored_fields(PUBLISHED[GPT2], 0)["architectures"] == fields["architectures"]


@pytest.mark.parametrize(
    ("name", "changes", "message"),
    [
        ("allenai/Olmo-3-7B-Instruct", {"rope_theta": 10000}, "rope_theta = 10000 is not implemented"),
        ("allenai/Olmo-3-7B-Instruct", {"sliding_window": None}, "sliding_window is missing"),
        (COHERE2, {"layer_switch": 3}, "layer_switch = 3"),
        (COHERE2, {"order_of_interleaved_layers": "global_attn_first"}, "order_of_interleaved_layers"),
        (COHERE2, {"head_dim": 16}, "head_dim = 16"),
        (COHERE2, {"use_parallel_block": False}, "use_parallel_block = False"),
        ("bigcode/starcoder2-3b", {"norm_type": "rms"}, "norm_type = 'rms'"),
        (PYTHIA, {"rope_theta": 500.0}, "rope_theta = 500.0"),
        (PYTHIA, {"rotary_pct": 2}, "the share of a head that is rotated is 2"),
        ("tiiuae/falcon-40b", {"parallel_attn": False}, "parallel_attn is false"),
        ("tiiuae/falcon-7b", {"num_ln_in_parallel_attn": 2}, "num_ln_in_parallel_attn = 2"),
        ("tiiuae/falcon-7b", {"apply_residual_connection_post_layernorm": True}, "apply_residual_connection"),
        (GPT2, {"num_hidden_layers": 6}, "n_layer is 4, and num_hidden_layers, its other name, is 6"),
        (GPT2, {"add_cross_attention": True}, "add_cross_attention = True"),
        (GPT2, {"activation_function": "mish"}, "activation_function 'mish'"),
        ("nvidia/Minitron-4B-Base", {"rope_percent": 1.0}, "rope_percent = 1.0"),
    ],
)
def test_what_is_not_implemented_is_named(name, changes, message):
    with pytest.raises(UserError, match=r"config\.json, field") as error:
        spec_with(name, **changes)
    assert message in str(error.value)
