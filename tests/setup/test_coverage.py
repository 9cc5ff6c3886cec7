"""The modules that a method adapts or trains, in words and counts, and the warning of a load-balancing loss without an
effect."""

from __future__ import annotations

import functools
import json
import pathlib

import pytest

from meshtune.adapters.config import FreezeConfig, FullConfig, LoraConfig
from meshtune.config.load import load_recipe
from meshtune.costs.hardware import find_target
from meshtune.families.balancing import with_aux_loss
from meshtune.plan.render import print_report
from meshtune.plan.report import report_for, to_json
from meshtune.plan.shards import shardings_of
from meshtune.setup.choices import WARNING
from meshtune.setup.coverage import coverage_decisions
from meshtune.setup.machine import this_machine
from meshtune.setup.run import resolve_run
from meshtune.terminal import console
from meshtune.weights.load import load_config, spec_of

MODELS = pathlib.Path(__file__).parents[2] / "examples/headline/models"


@functools.cache
def spec(name):
    return spec_of(load_config(MODELS / name), MODELS / name, "bfloat16")


def decision_texts(method, name="qwen3-30b-a3b", aux_loss=None):
    return [choice.text for choice in coverage_decisions(method, with_aux_loss(spec(name), aux_loss))]


def test_all_linear_counts_experts_and_attention():
    assert decision_texts(LoraConfig()) == [
        "adapters: on 128 experts in each of 48 layers (6,144): gate_proj, up_proj, down_proj, "
        "192 linear layers of attention (lora, all-linear; routers frozen)"
    ]


def test_all_linear_counts_shared_experts_and_dense_networks():
    # Of DeepSeek V3's 61 layers 3 are dense: 58 of 256 experts and one shared expert of three matrices.
    assert decision_texts(LoraConfig(), "deepseek-v3") == [
        "adapters: on 256 experts in each of 58 layers (14,848): gate_proj, up_proj, down_proj, "
        "305 linear layers of attention, 9 linear layers of dense networks, 174 linear layers of shared experts "
        "(lora, all-linear; routers frozen)"
    ]


def test_targets_name_what_they_leave_out():
    assert decision_texts(LoraConfig(targets=("q_proj", "v_proj"))) == [
        "adapters: on 96 linear layers of attention (lora, q_proj, v_proj; routed experts and routers frozen)"
    ]
    assert decision_texts(LoraConfig(targets=("layers.3.mlp.experts.down_proj",), train_modules=("mlp.gate",))) == [
        "adapters: on 128 experts in one layer: down_proj (lora, layers.3.mlp.experts.down_proj)",
        "trained: 48 routers (in full)",
    ]


def test_full_tuning_of_a_mixture_says_what_becomes_of_routers():
    experts = "128 experts in each of 48 layers (6,144): gate_proj, up_proj, down_proj"
    (line,) = decision_texts(FullConfig())
    assert line.startswith(f"trained: {experts}, embed_tokens, ")
    assert "192 linear layers of attention" in line
    assert line.endswith("(in full; routers frozen)")
    assert "48 routers" in decision_texts(FullConfig(train_router=True))[0]


def test_dense_models_count_their_adapters_alone():
    assert decision_texts(LoraConfig(), "llama-3.1-8b") == [
        "adapters: on 128 linear layers of attention, 96 linear layers of dense networks (lora, all-linear)"
    ]
    assert decision_texts(FullConfig(), "llama-3.1-8b") == []


@pytest.mark.parametrize(
    ("method", "message"),
    [
        # Before the last router comes all but the last layer's experts, three modules, the last norm and lm_head.
        (LoraConfig(), "trains what lies before them (333 modules) to balance their load; method.train_modules"),
        (FullConfig(), "(526 modules) to balance their load; method.train_router: true trains the routers"),
        (LoraConfig(targets=("layers.47.mlp.experts", "lm_head")), "has no effect (routers are frozen, and so is all"),
        (LoraConfig(targets=("layers.47.mlp.experts",), token_rows=(3,)), "(rows of the embedding)"),
        (FreezeConfig(modules=("layers.47.mlp.experts", "layers.47.post_attention_layernorm")), "(1 module)"),
        (FreezeConfig(modules=("layers.47.mlp.experts", "lm_head")), "method.modules: [.., mlp.gate] trains"),
        (LoraConfig(train_modules=("mlp.gate",)), None),
        (FullConfig(train_router=True), None),
    ],
)
def test_a_loss_that_reaches_no_router_is_warned_of(method, message):
    assert not [
        line for line in decision_texts(method) + decision_texts(method, aux_loss=0.0) if line.startswith(WARNING)
    ]
    warnings = [line for line in decision_texts(method, aux_loss=0.001) if line.startswith(WARNING)]
    assert len(warnings) == (message is not None), warnings
    assert message is None or message in warnings[0]


def test_train_plan_and_shard_say_the_same(tmp_path, capsys):
    file = tmp_path / "recipe.yaml"
    model = {"path": str(MODELS / "qwen3-30b-a3b"), "router_aux_loss": 0.001}
    file.write_text(json.dumps({"model": model, "data": "nothing.jsonl", "output": str(tmp_path), "mesh": {"ep": 1}}))
    recipe, target = load_recipe(file), find_target("1xMI300X")
    expected = decision_texts(LoraConfig(), aux_loss=0.001)
    assert len(expected) == 2

    def of(decisions):
        return [choice.text for choice in decisions if choice.name in ("adapters", WARNING)]

    assert of(resolve_run(recipe, this_machine(), weights=False).decisions) == expected
    assert of(shardings_of(recipe, target).decisions) == expected
    report = report_for(recipe, target)
    assert to_json(report)["notes"] == expected
    print_report(report, [], console())
    printed = " ".join(capsys.readouterr().out.replace("│", " ").split())
    for part in ("128 experts in each of 48 layers (6,144)", "trains no router", "method.train_modules: [mlp.gate]"):
        assert part in printed
