"""Published configs are accepted unchanged, and mean what transformers reads of them."""

from __future__ import annotations

from typing import Any

import pytest

from families.published_configs import PUBLISHED
from meshtune.errors import UserError
from meshtune.families import description, model_spec, tensors
from meshtune.model.attention import AttentionSpec
from meshtune.model.spec import ModelSpec


def attentions(spec: ModelSpec) -> list[AttentionSpec]:
    """The attention of every layer, in order."""
    layers = [layer for stack in spec.stacks for _ in range(stack.repeats) for layer in stack.pattern]
    assert all(isinstance(layer.mixer, AttentionSpec) for layer in layers)
    return [layer.mixer for layer in layers if isinstance(layer.mixer, AttentionSpec)]


def spec_with(name: str, **fields: Any) -> ModelSpec:
    return model_spec({**PUBLISHED[name], **fields})


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_published_config_is_accepted(name):
    """With every tensor that its model has, by name."""
    spec = model_spec(PUBLISHED[name])
    assert tensors(spec)
    assert description(spec.family).title


def test_dropout_of_the_model_is_said_and_not_applied():
    assert model_spec(PUBLISHED["ByteDance-Seed/Seed-OSS-36B-Instruct"]).notes == (
        "attention_dropout = 0.1 of the model's config is not applied",
        "residual_dropout = 0.1 of the model's config is not applied",
    )


def test_smollm3_has_a_rotary_embedding_where_no_rope_layers_is_one():
    assert [a.rope is not None for a in attentions(model_spec(PUBLISHED["HuggingFaceTB/SmolLM3-3B"]))] == [
        True, True, True, False,
    ]  # fmt: skip


def test_exaone4_slides_by_letters_and_its_other_layers_have_no_rotary_embedding():
    layers = attentions(model_spec(PUBLISHED["LGAI-EXAONE/EXAONE-4.0-32B"]))
    assert [a.window for a in layers] == [8, 8, 8, None]
    assert [a.rope is None for a in layers] == [False, False, False, True]
    assert all(a.rope is not None for a in attentions(model_spec(PUBLISHED["LGAI-EXAONE/EXAONE-4.0-1.2B"])))
    by_number = spec_with("LGAI-EXAONE/EXAONE-4.0-32B", sliding_window_pattern=4)
    assert by_number == model_spec(PUBLISHED["LGAI-EXAONE/EXAONE-4.0-32B"])
    last_is_global = spec_with("LGAI-EXAONE/EXAONE-4.0-32B", sliding_window_pattern="GL")
    assert [a.window for a in attentions(last_is_global)] == [None, 8, None, None]


def test_ministral3_without_a_beta_has_no_growing_queries():
    name = "mistralai/Devstral-2-123B-Instruct-2512"
    assert all(a.long_query is None for a in attentions(model_spec(PUBLISHED[name])))
    block = {**PUBLISHED[name]["rope_parameters"], "llama_4_scaling_beta": 0.1}
    queries = {a.long_query for a in attentions(spec_with(name, rope_parameters=block))}
    assert [(query.beta, query.length) for query in queries if query] == [(0.1, 16)]


@pytest.mark.parametrize(
    ("name", "changes", "message"),
    [
        ("HuggingFaceTB/SmolLM3-3B", {"no_rope_layers": [1, 0]}, "no_rope_layers must list 0 or 1"),
        ("HuggingFaceTB/SmolLM3-3B", {"layer_types": ["sliding_attention"] * 4}, "there is no window"),
        ("LGAI-EXAONE/EXAONE-4.0-1.2B", {"layer_types": ["sliding_attention"] * 4}, "sliding_window is null"),
        ("LGAI-EXAONE/EXAONE-4.0-32B", {"sliding_window_pattern": "LXG"}, "sliding_window_pattern is 'LXG'"),
        ("mistralai/Devstral-2-123B-Instruct-2512", {"layer_types": ["sliding_attention"] * 4}, "layer_types ="),
        ("tencent/Hunyuan-7B-Instruct", {"use_cla": True}, "use_cla = True"),
        ("tencent/Hunyuan-7B-Instruct", {"use_qk_norm": False}, "use_qk_norm = False"),
        ("tencent/Hunyuan-7B-Instruct", {"attention_head_dim": 16}, "attention_head_dim = 16"),
        ("microsoft/phi-2", {"tie_word_embeddings": True}, "tie_word_embeddings = True"),
        ("internlm/internlm3-8b-instruct", {"mlp_bias": True}, "bias and mlp_bias disagree"),
        ("baidu/ERNIE-4.5-0.3B-PT", {"architectures": ["Ernie4_5_MoeForCausalLM"]}, "expected ['Ernie4_5ForCausalLM']"),
    ],
)
def test_what_is_not_implemented_is_named(name, changes, message):
    with pytest.raises(UserError, match=r"config\.json, field") as error:
        spec_with(name, **changes)
    assert message in str(error.value)
