"""A config is read strictly: what would change the mathematics is implemented or refused by name."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import json
import random
import re
import time
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from families.case import Case
from families.cases import BY_NAME, CASES, FIRST
from families.test_published_sizes import NEMOTRON_3_NANO
from meshtune.arrays.tree import flatten
from meshtune.data.chat_templates import template_names
from meshtune.errors import UserError
from meshtune.families import FAMILIES, description, model_spec, module_names, tensors
from meshtune.families.family import GROUPS
from meshtune.families.unsupported import KNOWN
from meshtune.model.spec import Stack, abstract_params, fewest_bodies, group_items, shortest_first, stacks_of
from model_specs import llama_layer, split_stacks

LLAMA = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 50,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "max_position_embeddings": 64,
    "rope_theta": 10000.0,
}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model_type": "lama"}, "did you mean 'llama'"),
        ({"model_type": "mamba"}, "model_type 'mamba' is a known model that Meshtune does not support"),
        ({"model_type": "qwen9"}, "model_type 'qwen9' is not supported"),
        ({"model_type": None}, "model_type is None"),
        ({"rope_parameters": {"rope_theta": 2.0}}, "rope_theta is 10000.0, and 2.0 in rope_parameters"),
        (
            {"rope_scaling": {"type": "linear", "rope_type": "yarn", "factor": 2.0}},
            "rope_type 'yarn' and type 'linear'",
        ),
        ({"hidden_act": "mish"}, "hidden_act 'mish' is not implemented"),
        ({"rope_scaling": {"rope_type": "spiral"}}, "rope type 'spiral' is not implemented"),
        ({"rope_scaling": {"rope_type": "longrope", "factor": 2.0}}, "needs long_factor, short_factor"),
        (
            {"rope_scaling": {"rope_type": "longrope", "long_factor": [1.0], "short_factor": [1.0]}},
            "rope_scaling.long_factor must list 2 numbers, one for each rotated pair",
        ),
        ({"rope_scaling": {"type": "linear"}}, "needs factor"),
        ({"rope_scaling": {"type": "linear", "factor": 2.0, "beta_fast": 3}}, "beta_fast = 3 is not known"),
        ({"rope_theta": None}, "rope_theta is missing"),
        ({"quantization_config": {"bits": 4}}, "already quantised"),
        ({"auto_map": {"AutoModel": "x.Y"}}, "never run"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor = 0.5"),
        ({"logit_scale": 0.5}, "logit_scale = 0.5 is a field that Meshtune does not know"),
        ({"architectures": ["LlamaForTokenClassification"]}, "LlamaForTokenClassification"),
        ({"architectures": ["LlamaForSequenceClassification"]}, "a model with 2 labels"),
        ({"hidden_size": None}, "hidden_size is missing"),
        ({"hidden_size": "16"}, "not a positive whole number"),
        ({"num_hidden_layers": 0}, "num_hidden_layers is 0"),
        ({"num_key_value_heads": 3}, "do not divide"),
        ({"num_attention_heads": 5}, "does not divide by 5 heads"),
        ({"head_dim": 7}, "odd"),
    ],
)
def test_a_field_that_is_not_implemented_is_named(changes, message):
    with pytest.raises(UserError, match=r"config\.json, field") as error:
        model_spec({**LLAMA, **changes})
    assert message in str(error.value)


def test_theta_has_no_default():
    """transformers fills in 10000; a config that has lost the field must not silently get another model's theta."""
    config = {key: value for key, value in LLAMA.items() if key != "rope_theta"}
    with pytest.raises(UserError, match="rope_theta is missing"):
        model_spec(config)


def test_old_and_new_rope_fields_mean_the_same():
    old = LLAMA | {"rope_scaling": {"type": "linear", "factor": 4.0}, "rope_theta": 5e5}
    new = {k: v for k, v in LLAMA.items() if k != "rope_theta"}
    new["rope_parameters"] = {"rope_type": "linear", "factor": 4.0, "rope_theta": 5e5}
    assert model_spec(old) == model_spec(new)
    assert model_spec(old).ropes[0].theta == 5e5


YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}


def test_a_rope_block_beside_another_is_refused_where_they_disagree():
    """A saved Qwen3 has rope_parameters; its model card says to add YaRN as rope_scaling, which transformers obeys."""
    saved = LLAMA | {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0}}
    with pytest.raises(UserError, match=r"only one of them can hold\nwhere: config\.json, field rope_scaling") as error:
        model_spec(saved | {"rope_scaling": YARN})
    assert "under rope_parameters and remove rope_scaling" in str(error.value)
    yarn = YARN | {"rope_theta": 10000.0}
    both = model_spec(LLAMA | {"rope_parameters": yarn, "rope_scaling": {**YARN, "attention_factor": None}})
    assert both == model_spec(LLAMA | {"rope_parameters": yarn})


def test_layer_types_that_slide_without_a_window_are_refused():
    config = LLAMA | {"model_type": "qwen2", "architectures": ["Qwen2ForCausalLM"], "num_hidden_layers": 2}
    kinds = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 8}
    spec = model_spec(config | kinds | {"use_sliding_window": True})
    assert [layer.mixer.window for stack in spec.stacks for layer in stack.pattern] == [8, None]
    with pytest.raises(UserError, match="there is no window: use_sliding_window is not true"):
        model_spec(config | kinds)
    assert model_spec(config | {"sliding_window": 8, "use_sliding_window": False}) == model_spec(config)


@pytest.mark.parametrize("name", ["qwen3_moe", "mistral3", "gemma3_text", "llama4", "qwen2_5_vl"])
def test_a_name_like_that_of_a_family_is_not_taken_for_a_misspelling(name):
    """`did you mean 'qwen3'?` for qwen3_moe was advice that would be wrong to follow."""
    with pytest.raises(UserError) as error:
        model_spec({**LLAMA, "model_type": name})
    assert "did you mean" not in str(error.value)


def test_a_composite_is_named_with_the_text_model_that_it_wraps():
    def message(model_type: str, text_type: str) -> str:
        with pytest.raises(UserError) as error:
            model_spec({"model_type": model_type, "text_config": {"model_type": text_type}, "vision_config": {}})
        return str(error.value)

    unknown = message("mistral3", "mistral9")
    assert "model_type 'mistral3' is a composite, and its text model 'mistral9' (text_config) is not" in unknown
    assert "use another model; supported: " in unknown
    text = message("mllama", "llama")
    assert "'mllama' is a composite, and this composite around the text model 'llama' (text_config) is not" in text
    assert "as a model of type 'llama', and give that" in text


def test_the_known_models_are_those_of_transformers():
    assert MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.keys() - FAMILIES.keys() <= KNOWN


@pytest.mark.parametrize("case", FIRST, ids=lambda case: case.name)
def test_every_parameter_has_a_name_for_each_layer(case: Case):
    """`tensors` itself checks that every part of every leaf and tensor is there once."""
    spec = model_spec(case.torch_config().to_dict())
    abstract = flatten(abstract_params(spec))
    assert {entry.path for entry in tensors(spec)} == abstract.keys()
    assert {path.rsplit("/", 1)[0] for path in abstract} == module_names(spec).keys()


def test_every_family_has_a_case():
    """But for those that transformers does not have: Baichuan's own tests transcribe its equations, InternLM 2's
    rearrange a Llama, Kimi K2 is DeepSeek V3 by another name."""
    proved = {case.model_type for case in CASES} | {case.text for case in CASES}
    assert FAMILIES.keys() - proved <= {"baichuan", "internlm2", "kimi_k2"}


def test_kimi_k2_is_deepseek_v3():
    config = BY_NAME["deepseek_v3"].torch_config().to_dict()
    expected = model_spec(config)
    assert dataclasses.replace(model_spec(config | {"model_type": "kimi_k2"}), family="deepseek_v3") == expected


def test_layers_are_grouped_by_their_shortest_pattern():
    full, slide = llama_layer(24, 4, 4, 4), llama_layer(24, 4, 4, 4, window=4)
    assert stacks_of([full] * 5) == (Stack((full,), 5),)
    assert stacks_of([slide, slide, full] * 2 + [slide]) == (Stack((slide, slide, full), 2), Stack((slide,), 1))
    assert stacks_of([full] * 3 + [slide]) == (Stack((full,), 3), Stack((slide,), 1))
    assert stacks_of([full, slide, slide, full, full]) == (Stack((full,), 1), Stack((slide,), 2), Stack((full,), 2))


def test_nemotron_3_nano_is_scanned():
    """No prefix of its 52 layers repeats through to the end: they are four stacks with 14 layers to compile."""
    spec = model_spec(NEMOTRON_3_NANO)
    assert [(len(stack.pattern), stack.repeats) for stack in spec.stacks] == [(7, 5), (2, 3), (3, 1), (2, 4)]
    blocks = {"mamba": "M", "attn": "*", "mlp": "E"}
    layers = [layer for stack in spec.stacks for layer in stack.pattern * stack.repeats]
    letters = [blocks[layer.blocks[0].name] for layer in layers]
    assert "".join(letters) == NEMOTRON_3_NANO["hybrid_override_pattern"]


@given(st.lists(st.integers(0, 2), min_size=1, max_size=40))
def test_any_layers_keep_their_order_and_no_grouping_compiles_more(items):
    def expand(runs):
        layers, first = [], 0
        for width, repeats in runs:
            layers += items[first : first + width] * repeats
            first += width * repeats
        return layers

    for group in (shortest_first, fewest_bodies, group_items):
        assert expand(group(items)) == items
    bodies = {group: sum(run.width for run in group(items)) for group in (shortest_first, fewest_bodies, group_items)}
    assert bodies[fewest_bodies] <= bodies[group_items] <= bodies[shortest_first]


def test_split_stacks_keeps_every_layer_in_order():
    spec = model_spec(LLAMA | {"num_hidden_layers": 7})
    parts = split_stacks(spec, 5)
    assert [stack.repeats for stack in parts.stacks] == [5, 2]
    assert [n for *_, numbers in parts.positions() for n in numbers] == list(range(7))
    assert split_stacks(spec, 0) == split_stacks(spec, 7) == spec


@pytest.mark.parametrize("name", FAMILIES)
def test_every_family_says_what_it_is(name):
    family = description(name)
    assert family.title
    assert family.special
    assert family.group in GROUPS
    assert all(re.fullmatch(r"[\w.-]+/[\w.-]+", model) for model in family.models)
    assert family.template is None or family.template in template_names()


VALUES = (
    [], [1], ["x"], {}, {"a": 1}, {"a": {"b": []}}, "x", "", -1, 0, 1, 2.5, float("nan"), float("inf"), 10**6, 10**9,
    10**300, True, False, [[]], [None], None,
)  # fmt: skip


def places(config: dict[str, Any], *above: str) -> Iterator[tuple[str, ...]]:
    for name, value in config.items():
        yield (*above, name)
        if isinstance(value, dict) and name in (
            "text_config",
            "quantization_config",
            "rope_parameters",
            "rope_scaling",
        ):
            yield from places(value, *above, name)


@pytest.mark.parametrize("case", FIRST, ids=lambda case: case.name)
def test_a_field_of_any_other_type_or_size_is_read_or_refused_at_once(case: Case):
    """Every field of every family's config is given other kinds of values: either the spec is made, or the error names
    the reason."""
    name, config = case.name, json.loads(case.torch_config().to_json_string(use_diff=False))
    started = time.process_time()
    for place in places(config):
        for value in random.Random(f"{name} {place}").sample(VALUES, 3):
            changed = copy.deepcopy(config)
            node = changed
            for key in place[:-1]:
                node = node[key]
            node[place[-1]] = value
            with contextlib.suppress(UserError):
                model_spec(changed)
    assert time.process_time() - started < 10


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("num_hidden_layers", 10**6), ("num_hidden_layers", 10**9), ("rope_theta", float("nan")), 
        ("hidden_size", 10**12), ("attention_bias", [1]), ("model_type", ["llama"]), ("architectures", [7]),
        ("rms_norm_eps", float("inf")),
        ("head_dim", True), ("rope_theta", 10**300 * 10**9), ("tie_word_embeddings", "no"),
        ("rope_parameters", [1]),
    ],
)  # fmt: skip
def test_the_field_that_cannot_be_is_named(field: str, value: object):
    with pytest.raises(UserError, match=field):
        model_spec(LLAMA | {field: value})
