"""Checkpoints with experts: one tensor per matrix or all experts in one, and damaged ones."""

from __future__ import annotations

import json
import shutil

import numpy as np
import pytest
import torch
import transformers
from safetensors.numpy import load_file, save_file

from families.cases import BY_NAME
from meshtune.arrays.tree import flatten
from meshtune.errors import UserError
from meshtune.families import model_spec
from meshtune.weights.export import export_model
from meshtune.weights.load import load_params, load_spec

SMALL = {
    "vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 64, "num_experts_per_tok": 2,
}  # fmt: skip
SPARSE = {"moe_intermediate_size": 24, "num_experts": 4}
CONFIGS = {
    "qwen3_moe": SPARSE | {"head_dim": 8, "mlp_only_layers": [1]},
    "qwen2_moe": SPARSE | {"shared_expert_intermediate_size": 40},
    "mixtral": {"num_local_experts": 4},
}


@pytest.fixture(scope="module")
def saved_models(tmp_path_factory):
    """A model of every family as transformers saves it, by family."""
    folders = {}
    for family, changes in CONFIGS.items():
        config = transformers.AutoConfig.for_model(family, **SMALL | changes)
        torch.manual_seed(0)
        folders[family] = tmp_path_factory.mktemp(family)
        transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(folders[family])
    return folders


def fuse_experts(source, dest):
    """The same checkpoint with all experts of a layer in one tensor."""
    shutil.copytree(source, dest)
    tensors = load_file(source / "model.safetensors")
    names = {"gate_proj": "gate", "w1": "gate", "up_proj": "up", "w3": "up", "down_proj": "down", "w2": "down"}
    parts, result = {}, {}
    for name, array in tensors.items():
        layer, _, expert = name.replace("block_sparse_moe", "mlp").partition(".experts.")
        if expert:
            number, module, _ = expert.split(".")
            parts[layer, names[module], int(number)] = array
        else:
            result[layer] = array
    for layer in {layer for layer, *_ in parts}:
        stacked = {kind: np.stack([parts[layer, kind, e] for e in range(4)]) for kind in ("gate", "up", "down")}
        result[f"{layer}.experts.gate_up_proj"] = np.concatenate([stacked["gate"], stacked["up"]], axis=1)
        result[f"{layer}.experts.down_proj"] = stacked["down"]
    save_file(result, dest / "model.safetensors", {"format": "pt"})
    return dest


@pytest.mark.parametrize("family", ["qwen3_moe", "mixtral", pytest.param("qwen2_moe", marks=pytest.mark.slow)])
def test_both_layouts_are_read_and_written_as_they_were(family, saved_models, tmp_path):
    """Every number and every name; export_model verifies logits from the files by itself."""
    sources = {"single": saved_models[family], "fused": fuse_experts(saved_models[family], tmp_path / "fused")}
    leaves = {}
    for layout, source in sources.items():
        spec, _ = load_spec(source)
        assert spec.fused_experts == (layout == "fused")
        params = load_params(source, spec)
        leaves[layout] = flatten(params)
        export_model(params, spec, source, tmp_path / f"{layout}_out")
        before, after = (load_file(folder / "model.safetensors") for folder in (source, tmp_path / f"{layout}_out"))
        assert before.keys() == after.keys()
        for name, array in before.items():
            np.testing.assert_array_equal(after[name], array, err_msg=name)
    for path, leaf in leaves["single"].items():
        np.testing.assert_array_equal(leaves["fused"][path], leaf, err_msg=path)


def test_experts_that_are_there_twice_are_an_error(saved_models, tmp_path):
    folder = fuse_experts(saved_models["qwen3_moe"], tmp_path / "both")
    file = folder / "model.safetensors"
    both = load_file(file) | load_file(saved_models["qwen3_moe"] / "model.safetensors")
    save_file(both, file, {"format": "pt"})
    with pytest.raises(UserError, match="the experts are there twice") as raised:
        load_spec(folder)
    assert "mlp.experts.down_proj" in raised.value.what
    assert "mlp.experts.0.down_proj.weight" in raised.value.what


def test_a_missing_expert_is_an_error(saved_models, tmp_path):
    folder = tmp_path / "missing"
    shutil.copytree(saved_models["mixtral"], folder)
    tensors = load_file(folder / "model.safetensors")
    name = "model.layers.1.block_sparse_moe.experts.3.w2.weight"
    del tensors[name]
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    with pytest.raises(UserError, match=f"tensor '{name}' is missing"):
        load_params(folder, load_spec(folder)[0])


@pytest.mark.parametrize(
    ("family", "change", "message"),
    [
        ("qwen3_moe", {"num_experts_per_tok": 5}, "num_experts_per_tok is 5, and there are 4 experts"),
        ("qwen3_moe", {"num_experts": 8}, "the number of experts is given twice"),
        ("mixtral", {"num_local_experts": 9000, "num_hidden_layers": 100}, "900,000 experts, and at most 200,000"),
        ("mixtral", {"router_jitter_noise": 0.1}, "router_jitter_noise = 0.1 is not implemented"),
        ("mixtral", {"hidden_act": "mish"}, "hidden_act 'mish' is not implemented"),
    ],
)
def test_configs_that_cannot_be_are_errors(family, change, message, saved_models):
    config = json.loads((saved_models[family] / "config.json").read_text())
    with pytest.raises(UserError, match=message):
        model_spec({"num_local_experts": 4} | config | change)


@pytest.mark.parametrize(
    ("case", "change", "message"),
    [
        ("glm4_moe", {"scoring_func": "entmax"}, "scoring_func = 'entmax' is not implemented"),
        ("dots1", {"topk_method": "greedy"}, "topk_method = 'greedy' is not implemented"),
        ("dots1", {"num_experts_per_tok": 9}, "num_experts_per_tok is 9, and there are 8 experts"),
        ("glm4_moe", {"n_group": 3}, "8 experts do not divide into 3 groups"),
        ("glm4_moe", {"n_group": 2, "topk_group": 3}, "topk_group is 3, and there are 2 groups"),
        ("glm4_moe", {"n_group": 4, "num_experts_per_tok": 3}, "the 1 groups that they are chosen from have 2"),
    ],
)
def test_routers_that_cannot_be_are_errors(case, change, message):
    config = BY_NAME[case].torch_config().to_dict()
    with pytest.raises(UserError, match=message):
        model_spec(config | change)
