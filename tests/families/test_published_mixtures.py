"""Published configs of mixtures of experts are accepted, and mean what transformers reads of them."""

from __future__ import annotations

from typing import Any

import pytest
import transformers

from families.published_mixtures import PUBLISHED, SIZES
from meshtune.errors import UserError
from meshtune.families import model_spec, tensors
from meshtune.model.attention import AttentionSpec
from meshtune.model.spec import ModelSpec

SCOUT, PHI = "meta-llama/Llama-4-Scout-17B-16E-Instruct", "microsoft/Phi-3.5-MoE-instruct"
TRINITY, EXAONE = "arcee-ai/Trinity-Mini", "LGAI-EXAONE/K-EXAONE-236B-A23B"
GRANITE = "ibm-granite/granite-3.1-1b-a400m-instruct"
LONGROPE = PUBLISHED[PHI]["rope_scaling"]


def spec_with(name: str, **fields: Any) -> ModelSpec:
    config = PUBLISHED[name]
    if "text_config" in config:
        return model_spec({**config, "text_config": {**config["text_config"], **fields}})
    return model_spec({**config, **fields})


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_published_config_means_what_transformers_reads_of_it(name):
    """transformers writes every field in its new form, defaults and derived fields included."""
    config = dict(PUBLISHED[name])
    spec = model_spec(config)
    assert tensors(spec)
    config.pop("auto_map", None)
    assert model_spec(transformers.AutoConfig.for_model(**config).to_dict()) == spec


def test_llama4_layers_without_a_rotary_embedding_see_the_whole_document():
    chunked, full = (layer.mixer for layer in spec_with(SCOUT).layer_kinds)
    assert isinstance(chunked, AttentionSpec)
    assert isinstance(full, AttentionSpec)
    assert (chunked.chunk, chunked.rope is None, chunked.long_query is None) == (16, False, True)
    assert (full.chunk, full.rope is None, full.long_query is None) == (None, True, False)
    assert [stack.layers for stack in spec_with(SCOUT).stacks] == [3, 1]


def test_llama4_fields_that_are_absent_are_those_of_transformers():
    short = {**SIZES, "model_type": "llama4_text", "num_local_experts": 4}
    assert model_spec(short) == model_spec(transformers.AutoConfig.for_model(**short).to_dict())


def test_phimoe_says_what_it_does_not_apply():
    noise, rope = model_spec(PUBLISHED[PHI]).notes
    assert noise == "input_jitter_noise = 0.01 of the model's config is not applied"
    assert "beyond 32 tokens LongRoPE has its short factors" in rope


@pytest.mark.parametrize(
    ("name", "changes", "message"),
    [
        (SCOUT, {"num_experts_per_tok": 5}, "num_experts_per_tok is 5, and there are 4 experts"),
        (SCOUT, {"moe_layers": [4]}, "moe_layers must list numbers of layers, from 0 to 3"),
        (SCOUT, {"no_rope_layers": [1, 2, 1, 0]}, "no_rope_layers must list 0 or 1"),
        (SCOUT, {"attention_chunk_size": None}, "attention_chunk_size is null"),
        (SCOUT, {"router_jitter_noise": 0.1}, "router_jitter_noise = 0.1"),
        (PHI, {"num_experts_per_tok": 3}, "num_experts_per_tok = 3 is not implemented"),
        (PHI, {"rope_scaling": {**LONGROPE, "long_mscale": 1.3}}, "one number for both is implemented"),
        (PHI, {"rope_scaling": {"type": "linear", "factor": 2.0}}, "one number for both is implemented"),
        (PHI, {"rope_scaling": {**LONGROPE, "type": "entropic"}}, "rope type 'entropic' is not implemented"),
        (TRINITY, {"score_func": "softmax"}, "score_func = 'softmax' is not implemented"),
        (TRINITY, {"num_experts_per_tok": 9}, "num_experts_per_tok is 9, and there are 8 experts"),
        (EXAONE, {"scoring_func": "softmax"}, "scoring_func = 'softmax' is not implemented"),
        (EXAONE, {"is_moe_layer": [True] * 4}, "is_moe_layer = [True, True, True, True]"),
        (GRANITE, {"num_experts_per_tok": 9}, "num_experts_per_tok is 9, and there are 8 experts"),
        (SCOUT, {"layer_types": ["sliding_attention"] * 4}, "layer_types must list"),
    ],
)
def test_what_is_not_implemented_is_named(name, changes, message):
    with pytest.raises(UserError, match=r"config\.json, .*field") as error:
        spec_with(name, **changes)
    assert message in str(error.value)
