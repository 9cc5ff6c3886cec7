"""Adapters on experts: their targets, and the same logits in peft and here, whoever wrote them."""

from __future__ import annotations

import json

import jax
import jax.numpy as jnp
import numpy as np
import peft
import pytest
import torch
from safetensors.numpy import load_file, save_file
from twins import in_peft, move_weights, our_logits, torch_logits, trained_logits

from families.case import directory, torch_model
from families.cases import BY_NAME
from meshtune.adapters.config import LoraConfig
from meshtune.adapters.merge import merge_adapters
from meshtune.adapters.method import PreparedModel, abstract, prepare
from meshtune.adapters.peft_format import BaseRecord, attach, load_adapter, save_adapter
from meshtune.arrays.tree import flatten, merge, unflatten
from meshtune.errors import UserError
from meshtune.model.compute import Compute
from meshtune.model.decoder import forward
from meshtune.model.inputs import Inputs
from meshtune.quantize.config import QuantizeConfig
from meshtune.quantize.weight import QuantisedWeight
from meshtune.weights.load import load_params, load_spec

SPARSE = BY_NAME["qwen3_moe"].changed(mlp_only_layers=[])
CASES = {"qwen3_moe": SPARSE, **{name: BY_NAME[name] for name in ("mixtral", "qwen2_moe", "gpt_oss", "llama4")}}
ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")
BASE = BaseRecord("some/base", "sha256:0")


def load_case(name):
    spec, _ = load_spec(directory(CASES[name]))
    return spec, load_params(directory(CASES[name]), spec)


def tuned_model(name, config):
    prepared = prepare(config, *load_case(name), jax.random.key(0))
    return PreparedModel(prepared.spec, move_weights(prepared.trainable), prepared.frozen)


@pytest.mark.parametrize(
    "targets",
    [
        "all-linear",
        ("experts.up_proj",),
        *(pytest.param(t, marks=pytest.mark.slow) for t in (("experts", *ATTENTION), ("experts.down_proj",))),
    ],
)
def test_our_adapters_have_the_same_logits_in_peft(targets, tmp_path):
    model = torch_model(SPARSE)
    prepared = tuned_model("qwen3_moe", LoraConfig(rank=4, alpha=6, targets=targets))
    expected = trained_logits(prepared)
    assert np.abs(expected - torch_logits(model)).max() > 0.05
    save_adapter(
        tmp_path / "adapter", prepared.trainable, prepared.spec, LoraConfig(rank=4, alpha=6, targets=targets), BASE
    )
    assert np.abs(torch_logits(in_peft(model, tmp_path / "adapter")) - expected).max() < 1e-4
    again = load_adapter(tmp_path / "adapter", load_case("qwen3_moe")[0])
    for path, leaf in flatten(prepared.trainable).items():
        np.testing.assert_array_equal(flatten(again.trainable)[path].a, leaf.a, err_msg=path)
        np.testing.assert_array_equal(flatten(again.trainable)[path].b, leaf.b, err_msg=path)
        assert flatten(again.trainable)[path].scale == pytest.approx(leaf.scale)


def of_peft(folder, name="qwen3_moe", parameters=("mlp.experts.gate_up_proj", "mlp.experts.down_proj")):
    """(the logits of a random adapter of peft, its directory)."""
    config = peft.LoraConfig(
        r=3, lora_alpha=5, target_modules=list(ATTENTION), target_parameters=list(parameters), task_type="CAUSAL_LM"
    )
    model = peft.get_peft_model(torch_model(CASES[name]), config)
    torch.manual_seed(1)
    with torch.no_grad():
        for parameter in (p for n, p in model.named_parameters() if "lora_B" in n):
            parameter.copy_(torch.randn_like(parameter) * 0.2)
    model.save_pretrained(folder)
    return torch_logits(model), folder


def logits_with(name, folder):
    spec, params = load_case(name)
    spec, params = attach(params, spec, load_adapter(folder, spec))
    return our_logits(params, spec)


@pytest.mark.parametrize(
    "targets", [("experts", *ATTENTION), pytest.param(("experts.up_proj",), marks=pytest.mark.slow)]
)
@pytest.mark.parametrize("name", ["gpt_oss", "llama4"])
def test_our_adapters_on_transposed_experts_have_the_same_logits_in_peft(name, targets, tmp_path):
    """gpt-oss has the gate and up in turn, and says that it is transposed; Llama 4 does not say it."""
    config = LoraConfig(rank=4, alpha=6, targets=targets)
    prepared = tuned_model(name, config)
    expected = trained_logits(prepared)
    model = torch_model(CASES[name])
    assert np.abs(expected - torch_logits(model)).max() > 0.05
    save_adapter(tmp_path / "adapter", prepared.trainable, prepared.spec, config, BASE)
    assert np.abs(torch_logits(in_peft(model, tmp_path / "adapter")) - expected).max() < 1e-4
    again = flatten(load_adapter(tmp_path / "adapter", load_case(name)[0]).trainable)
    for path, leaf in flatten(prepared.trainable).items():
        np.testing.assert_array_equal(again[path].a, leaf.a, err_msg=path)
        np.testing.assert_array_equal(again[path].b, leaf.b, err_msg=path)


@pytest.mark.parametrize(
    "name", ["qwen3_moe", *(pytest.param(name, marks=pytest.mark.slow) for name in ("mixtral", "gpt_oss", "llama4"))]
)
def test_adapters_of_peft_have_the_same_logits_here(name, tmp_path):
    block = "feed_forward" if name == "llama4" else "mlp"
    expected, folder = of_peft(tmp_path, name, [f"{block}.experts.{part}" for part in ("gate_up_proj", "down_proj")])
    assert np.abs(logits_with(name, folder) - expected).max() < 1e-4


@pytest.mark.parametrize(
    "parameter", ["mlp.experts.down_proj", pytest.param("mlp.experts.gate_up_proj", marks=pytest.mark.slow)]
)
def test_one_parameter_alone_is_told_by_target_parameters(parameter, tmp_path):
    expected, folder = of_peft(tmp_path, parameters=(parameter,))
    assert np.abs(logits_with("qwen3_moe", folder) - expected).max() < 1e-4


def exchange(tensors, experts):
    """Makes each product's factors those of the transposed one."""
    for name in [name for name in tensors if "experts" in name and "lora_A" in name]:
        partner = name.replace("lora_A", "lora_B")
        a, b = tensors[name].reshape(experts, 3, -1), tensors[partner].reshape(-1, 3, experts)
        tensors[name] = np.ascontiguousarray(b.transpose(2, 1, 0)).reshape(experts * 3, -1)
        tensors[partner] = np.ascontiguousarray(a.transpose(2, 1, 0)).reshape(-1, 3 * experts)


def test_factors_of_an_old_peft_are_exchanged(tmp_path):
    """Before 0.19.1 A was that of the transposed product."""
    expected, folder = of_peft(tmp_path)
    tensors = load_file(folder / "adapter_model.safetensors")
    exchange(tensors, experts=8)
    save_file(tensors, folder / "adapter_model.safetensors", {"format": "pt"})
    assert np.abs(logits_with("qwen3_moe", folder) - expected).max() < 1e-4


def test_the_version_of_peft_tells_square_factors(tmp_path, monkeypatch):
    """Of gpt-oss's down_proj; peft 0.19.0 alone exchanged its factors."""
    monkeypatch.setitem(CASES, "square", CASES["gpt_oss"].changed(intermediate_size=32))
    expected, folder = of_peft(tmp_path, "square", ["mlp.experts.down_proj"])
    assert np.abs(logits_with("square", folder) - expected).max() < 1e-4
    tensors = load_file(folder / "adapter_model.safetensors")
    exchange(tensors, experts=6)
    save_file(tensors, folder / "adapter_model.safetensors", {"format": "pt"})
    assert np.abs(logits_with("square", folder) - expected).max() > 1e-2
    config = json.loads((folder / "adapter_config.json").read_text())
    (folder / "adapter_config.json").write_text(json.dumps(config | {"peft_version": "0.19.0"}))
    assert np.abs(logits_with("square", folder) - expected).max() < 1e-4
    (folder / "adapter_config.json").write_text(json.dumps(config | {"peft_version": None}))
    with pytest.raises(UserError, match="nothing says which of them is which"):
        load_adapter(folder, load_case("square")[0])


def test_an_adapter_for_each_expert_is_read(tmp_path):
    """As peft wrote them before transformers 5, and as peft 0.21 converts them."""
    rng = np.random.default_rng(0)
    tensors, widths = {}, {"gate_proj": (24, 32), "up_proj": (24, 32), "down_proj": (32, 24)}
    for layer in range(4):
        for expert in range(8):
            for matrix, (out, into) in widths.items():
                name = f"base_model.model.model.layers.{layer}.mlp.experts.{expert}.{matrix}"
                tensors[f"{name}.lora_A.weight"] = rng.normal(size=(2, into)).astype(np.float32) * 0.3
                tensors[f"{name}.lora_B.weight"] = rng.normal(size=(out, 2)).astype(np.float32) * 0.3
    save_file(tensors, tmp_path / "adapter_model.safetensors", {"format": "pt"})
    fields = {"peft_type": "LORA", "task_type": "CAUSAL_LM", "r": 2, "lora_alpha": 4, "target_modules": list(widths)}
    (tmp_path / "adapter_config.json").write_text(json.dumps(fields))
    expected = torch_logits(in_peft(torch_model(SPARSE), tmp_path))
    assert np.abs(logits_with("qwen3_moe", tmp_path) - expected).max() < 1e-4
    del tensors["base_model.model.model.layers.2.mlp.experts.5.up_proj.lora_B.weight"]
    save_file(tensors, tmp_path / "adapter_model.safetensors", {"format": "pt"})
    with pytest.raises(UserError, match="expert 5 has no lora_B"):
        load_adapter(tmp_path, load_case("qwen3_moe")[0])


def test_merging_gives_the_logits_of_the_adapters():
    prepared = tuned_model("qwen3_moe", LoraConfig(rank=4, targets=("experts",)))
    expected = trained_logits(prepared)
    assert (
        np.abs(our_logits(merge_adapters(merge(prepared.trainable, prepared.frozen)), prepared.spec) - expected).max()
        < 1e-4
    )


def test_quantised_experts_are_those_of_their_numbers():
    """Every adapter gets a gradient."""
    spec, _ = load_spec(directory(SPARSE))
    params = load_params(directory(SPARSE), spec, quantize=QuantizeConfig("nf4", block_size=8))
    prepared = prepare(LoraConfig(rank=4), spec, params, jax.random.key(0))
    experts = {path: leaf for path, leaf in flatten(prepared.frozen).items() if "/experts/" in path}
    assert experts
    assert all(isinstance(leaf, QuantisedWeight) for leaf in experts.values())
    wide = {
        path: leaf.dequantise("float32") if isinstance(leaf, QuantisedWeight) else leaf
        for path, leaf in flatten(prepared.frozen).items()
    }
    tokens = jnp.arange(24).reshape(2, 12) % 97
    rows = Inputs(tokens, jnp.broadcast_to(jnp.arange(12), (2, 12)), jnp.ones((2, 12), jnp.int32))

    @jax.jit
    def total(trainable, frozen):
        return jnp.sum(forward(merge(trainable, frozen), prepared.spec, Compute(), rows).hidden ** 2)

    trainable = move_weights(prepared.trainable)
    ours, gradient = jax.jit(jax.value_and_grad(total))(trainable, prepared.frozen)
    assert float(ours) == pytest.approx(float(total(trainable, unflatten(wide))), rel=1e-5)
    for path, adapter in flatten(gradient).items():
        assert float(jnp.abs(adapter.b).max()) > 0, path
        assert float(jnp.abs(adapter.a).max()) > 0, path


def test_all_linear_has_the_routed_experts_and_not_the_router():
    sites = {path.split("/", 2)[2] for path in flatten(abstract(LoraConfig(), load_case("qwen2_moe")[0]).trainable)}
    attention = {f"attn/{name}/adapter" for name in "qkvo"}
    networks = {f"mlp/{kind}/{name}/adapter" for kind in ("experts", "shared") for name in ("gate", "up", "down")}
    assert sites == attention | networks


@pytest.mark.parametrize(
    ("config", "message", "fix"),
    [
        (LoraConfig(targets=("shared_expert", "q_proj")), "match the shared expert alone", "add 'experts'"),
        (LoraConfig(dropout=0.1), "experts cannot have dropout", "set dropout to 0"),
        (LoraConfig(adapter="dora"), "adapter dora is not possible on experts", "method.adapter: lora"),
        (LoraConfig(rank=33), "rank 33 is above what", "at most"),
    ],
)
def test_targets_that_cannot_be_are_errors(config, message, fix):
    with pytest.raises(UserError, match=message) as raised:
        abstract(config, load_case("qwen2_moe")[0])
    assert fix in raised.value.fix
