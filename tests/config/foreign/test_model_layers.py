"""Which modules get adapters in mixtures of experts, and in families whose layers have other names.

Of the table, names are compared with the linear layers of transformers' models, and `converted` and `shared` with the
parameters that peft adapts in them.
"""

from __future__ import annotations

import copy
import json
import re

import pytest
from files import AXOLOTL, LLAMA_FACTORY, finding_of

from meshtune.config.foreign.models import BY_TYPE, GATED, Layers, layers_of_model, match_names
from meshtune.families import FAMILIES

QUERIES = ["q_proj", "k_proj", "v_proj", "o_proj"]
ALL = {"adapter": "lora", "lora_r": 8, "lora_alpha": 16, "lora_dropout": 0.05, "lora_target_linear": True}
# A published model of an entry -> the tiny case that has its kinds of layers.
CASES = {
    "microsoft/Phi-4": "phi3",
    "THUDM/GLM-4-32B-0414": "glm4",
    "zai-org/GLM-4.7-Flash": "glm4_moe_lite",
    "zai-org/GLM-4.5-Air": "glm4_moe",
    "deepseek-ai/DeepSeek-V2-Lite": "deepseek_v2_lite",
    "deepseek-ai/DeepSeek-V3": "deepseek_v3",
    "mistralai/Mixtral-8x7B-v0.1": "mixtral",
    "MiniMaxAI/MiniMax-M2": "minimax_m2",
    "allenai/OLMoE-1B-7B-0924": "olmoe",
    "Qwen/Qwen3-Next-80B-A3B-Instruct": "qwen3_next",
    "Qwen/Qwen3.5-35B-A3B": "qwen3_5_moe",
    "Qwen/Qwen1.5-MoE-A2.7B": "qwen2_moe",
    "openai/gpt-oss-20b": "gpt_oss",
    "ibm-granite/granite-3.1-1b-a400m-instruct": "granitemoe",
    "ibm-granite/granite-4.0-h-tiny": "granitemoehybrid",
    "google/gemma-4-26B-A4B-it": "gemma4",
    "LiquidAI/LFM2-8B-A1B": "lfm2_moe",
    "LiquidAI/LFM2-1.2B": "lfm2",
    "arcee-ai/Trinity-Mini": "afmoe",
    "microsoft/Phi-3.5-MoE-instruct": "phimoe",
}
# Linear layers of transformers that are no targets here: routers, and of Gemma 4 what its 26B does not have.
EXCLUDED = r"router|gate$|shared|per_layer|\bwg$"


def layers_of(path: str) -> Layers:
    layers = layers_of_model(path)
    assert layers is not None
    return layers


def test_all_linear_layers_of_a_mixture_are_those_that_the_tool_adapts(translate_file, recipe_of):
    """axolotl with transformers 5 and peft 0.19: of Mixtral only attention, of DeepSeek the routed experts as well."""
    recipe = recipe_of(AXOLOTL | ALL | {"base_model": "mistralai/Mixtral-8x7B-v0.1"})
    assert (list(recipe.method.targets), recipe.method.dropout) == (QUERIES, 0.05)
    deepseek = AXOLOTL | ALL | {"base_model": "deepseek-ai/DeepSeek-V2-Lite"}
    recipe = recipe_of(deepseek)
    assert "experts" in recipe.method.targets
    assert "gate_proj" not in recipe.method.targets
    assert recipe.method.dropout == 0  # experts' adapters have none
    assert finding_of(translate_file(deepseek), "lora_dropout").verdict == "differs"
    recipe = recipe_of(LLAMA_FACTORY | {"model_name_or_path": "deepseek-ai/DeepSeek-V2-Lite"})  # an older peft
    assert "experts" not in recipe.method.targets
    assert recipe_of(AXOLOTL | ALL).method.targets == "all-linear"


def test_a_config_on_this_disk_says_what_the_layers_are(tmp_path):
    for model_type, rank in (("mixtral", 0), ("deepseek_v3", None), ("deepseek_v3", 1536), ("llama", 0)):
        config = {"model_type": model_type, "q_lora_rank": rank}
        (tmp_path / "config.json").write_text(json.dumps(config))
        layers = layers_of_model(str(tmp_path))
        assert (layers is None) == (model_type == "llama")
        if layers is not None:
            assert ("q_proj" in layers.linear) == (rank != 1536)


def test_every_type_stands_for_layers_of_its_own():
    assert all(layers_of_model(name) is not None for name in BY_TYPE.values())
    assert set(BY_TYPE) <= {*FAMILIES, *(name.removesuffix("_text") for name in FAMILIES)}


def test_names_that_a_model_does_not_have_are_left_out(translate_file, recipe_of):
    """The tools ignore them, and training here would stop."""
    content = AXOLOTL | ALL | {"lora_target_linear": None, "lora_target_modules": [*QUERIES, *GATED]}
    content |= {"base_model": "THUDM/GLM-4-32B-0414"}
    assert list(recipe_of(content).method.targets) == [*QUERIES, "down_proj"]
    finding = finding_of(translate_file(content), "lora_target_modules")
    assert (finding.verdict, "gate_proj, up_proj" in finding.note) == ("differs", True)
    refused = translate_file(content | {"lora_target_modules": ["gate_proj"]}).refused
    assert [finding.key for finding in refused] == ["lora_target_modules"]


@pytest.mark.parametrize("tool", [LLAMA_FACTORY | {"lora_target": ".*(q|v)_proj$"}, AXOLOTL | ALL])
def test_an_expression_in_a_list_is_refused(translate_file, tool):
    """peft compares the entries of a list as names, and no module has that one."""
    if "base_model" in tool:
        tool = tool | {"lora_target_linear": None, "lora_target_modules": ["q_proj", ".*(q|v)_proj$"]}
    assert [finding.key.startswith("lora_target") for finding in translate_file(tool).refused] == [True]


@pytest.mark.slow
@pytest.mark.parametrize("path", CASES)
def test_names_are_those_of_the_linear_layers(path):
    """In transformers' own model; layers that some of a family's models alone have may be in one direction only."""
    import torch

    from families.case import torch_model
    from families.cases import BY_NAME

    layers = layers_of(path)
    model = torch_model(BY_NAME[CASES[path]])
    linear = {name for name, module in model.named_modules() if isinstance(module, torch.nn.Linear)}
    for name in layers.linear:
        assert any(f".{module}".endswith(f".{name}") for module in linear), name
    first = r"mlp\.|feed_forward\.|self_attn\.gate" if layers.is_mixture else "$^"  # dense layers before the mixtures
    unnamed = {
        name.rpartition(".")[2]
        for name in linear
        if not any(f".{name}".endswith(f".{known}") for known in layers.linear)
        and not re.search(f"{EXCLUDED}|lm_head|{first}", name)
    }
    assert unnamed == set()


@pytest.mark.slow
@pytest.mark.parametrize("path", [path for path in CASES if layers_of_model(path).is_mixture])
def test_peft_reads_the_names_of_experts_as_it_is_filed(path):
    import peft

    from families.case import torch_model
    from families.cases import BY_NAME

    layers = layers_of(path)
    model = copy.deepcopy(torch_model(BY_NAME[CASES[path]]))
    config = peft.LoraConfig(r=2, target_modules=[*layers.experts, "o_proj"])
    adapted = {name for name, _ in peft.get_peft_model(model, config).named_parameters() if "lora_A" in name}
    routed = any(re.search(r"experts\.(base_layer\.)?lora_A", name) for name in adapted)
    assert routed == layers.converted
    targets = match_names(list(layers.experts), layers, converts=True)
    assert ("experts" in targets.names) == layers.converted
