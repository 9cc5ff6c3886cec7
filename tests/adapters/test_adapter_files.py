"""Adapter directories: verified before they appear, whole or not at all, refused with the reason when bad."""

from __future__ import annotations

import dataclasses
import json
import pathlib
from typing import Any

import jax
import numpy as np
import peft
import pytest
import torch
import transformers
from safetensors import safe_open
from safetensors.numpy import load_file, save_file
from twins import base, move_weights, our_logits, trained_logits

import meshtune
from gguf_models import model_of
from meshtune.adapters import verify
from meshtune.adapters.config import LoraConfig
from meshtune.adapters.merge import merge_adapters
from meshtune.adapters.method import PreparedModel, prepare
from meshtune.adapters.peft_format import BaseRecord, attach, check_base, load_adapter, save_adapter
from meshtune.adapters.verify import export_adapter, verify_adapter
from meshtune.arrays.tree import merge
from meshtune.errors import UserError
from meshtune.model.spec import ModelSpec
from meshtune.runs.export import export

CONFIG = LoraConfig(rank=4, alpha=6, targets=("q_proj", "down_proj"), train_modules=("norm",))
BASE = BaseRecord("org/base", "sha256:aa")
FIRST = "base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight"


@pytest.fixture(scope="module")
def adapted_model() -> PreparedModel:
    adapted_model = prepare(CONFIG, *base("llama3"), jax.random.key(0))
    return dataclasses.replace(adapted_model, trainable=move_weights(adapted_model.trainable))


@pytest.fixture
def adapter_folder(adapted_model: PreparedModel, tmp_path: pathlib.Path) -> pathlib.Path:
    return save_adapter(tmp_path / "adapter", adapted_model.trainable, adapted_model.spec, CONFIG, BASE)


def change(adapter: pathlib.Path, **fields: Any) -> None:
    path = adapter / "adapter_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | fields))


def change_tensors(adapter: pathlib.Path, function: Any) -> None:
    path = adapter / "adapter_model.safetensors"
    tensors = load_file(path)
    function(tensors)
    save_file(tensors, path)


def test_an_export_is_verified_bit_for_bit(adapted_model: PreparedModel, tmp_path: pathlib.Path):
    path = export_adapter(tmp_path / "a", adapted_model, CONFIG, BASE)
    assert verify_adapter(path, adapted_model) == 0.0
    assert sorted(p.name for p in tmp_path.iterdir()) == ["a"]


def test_an_export_that_differs_from_what_was_trained_does_not_appear(
    adapted_model: PreparedModel, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
):
    """A defect of the field: a scale that is not recorded."""
    real = verify.save_adapter

    def losing(dest, trainable, spec, config, base, check, job, **options):
        def lose_the_scale(path: pathlib.Path) -> None:
            change(path, lora_alpha=config.alpha * 2)
            check(path)

        return real(dest, trainable, spec, config, base, check=lose_the_scale, job=job, **options)

    monkeypatch.setattr(verify, "save_adapter", losing)
    with pytest.raises(UserError, match="differs from what was trained"):
        export_adapter(tmp_path / "a", adapted_model, CONFIG, BASE)
    assert list(tmp_path.iterdir()) == []


def test_a_model_gone_wrong_is_not_exported(adapted_model: PreparedModel, tmp_path: pathlib.Path):
    broken = dataclasses.replace(adapted_model, trainable=jax.tree.map(lambda x: x * np.nan, adapted_model.trainable))
    with pytest.raises(UserError, match="not finite"):
        export_adapter(tmp_path / "a", broken, CONFIG, BASE)


def test_the_record_names_base_hash_rank_alpha_and_targets(adapter_folder: pathlib.Path):
    with safe_open(adapter_folder / "adapter_model.safetensors", framework="np") as file:
        record = json.loads(file.metadata()["meshtune"])
    assert record["base"] == {"path": "org/base", "hash": "sha256:aa"}
    assert (record["rank"], record["alpha"], record["targets"]) == (4, 6, ["down_proj", "q_proj"])
    config = json.loads((adapter_folder / "adapter_config.json").read_text())
    assert config["base_model_name_or_path"] == "org/base"
    assert config["modules_to_save"] == ["model.norm"]  # 'norm' alone would mean every layer norm to peft


def narrower(spec: ModelSpec, width: int) -> ModelSpec:
    """The same model with another width of its feed-forward networks."""
    (stack,) = spec.stacks
    (kind,) = stack.pattern
    kind = dataclasses.replace(kind, ffn=dataclasses.replace(kind.ffn, width=width))
    return dataclasses.replace(spec, stacks=(dataclasses.replace(stack, pattern=(kind,)),))


def test_an_adapter_for_another_base_is_refused(adapter_folder: pathlib.Path):
    loaded = load_adapter(adapter_folder, base("llama3")[0])
    check_base(loaded, "org/base", "sha256:aa")
    with pytest.raises(UserError, match=r"org/base \(sha256:aa\), not org/other \(sha256:bb\)"):
        check_base(loaded, "org/other", "sha256:bb")
    narrow = narrower(base("llama3")[0], 24)
    with pytest.raises(UserError, match=r"down_proj.lora_A.weight is 4 x 56, but the base needs 4 x 24"):
        load_adapter(adapter_folder, narrow)
    with pytest.raises(UserError, match=r"trained on base \(4 layers\), and the model has 3"):
        load_adapter(adapter_folder, dataclasses.replace(narrow, stacks=base("qwen2_window")[0].stacks[:1]))


FIELDS: dict[str, Any] = {
    "bias": "all",
    "lora_bias": True,
    "peft_type": "IA3",
    "task_type": "TOKEN_CLS",
    "init_lora_weights": "olora",
    "layer_replication": [[0, 2]],
    "trainable_token_indices": [1],
    "use_qalora": True,
    "a_field_of_the_future": 3,
    "rank_pattern": {"q_proj": 2},
}


@pytest.mark.parametrize("field", FIELDS)
def test_a_field_that_would_change_the_result_is_named(field: str, adapter_folder: pathlib.Path):
    change(adapter_folder, **{field: FIELDS[field]})
    with pytest.raises(UserError, match="q_proj.lora_A.weight is 4 x 32.*for rank 2" if "rank" in field else field):
        load_adapter(adapter_folder, base("llama3")[0])


def test_a_missing_file_or_tensor_is_named(adapter_folder: pathlib.Path):
    spec = base("llama3")[0]
    change_tensors(adapter_folder, lambda t: t.pop(FIRST))
    with pytest.raises(UserError, match=f"tensor {FIRST} is missing"):
        load_adapter(adapter_folder, spec)
    change_tensors(adapter_folder, lambda t: t.pop(FIRST.replace("lora_A", "lora_B")))
    with pytest.raises(UserError, match=f"tensor {FIRST} is missing"):
        load_adapter(adapter_folder, spec)
    weights = adapter_folder / "adapter_model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])
    with pytest.raises(UserError, match="damaged or only half written"):
        load_adapter(adapter_folder, spec)
    weights.rename(adapter_folder / "adapter_model.bin")
    with pytest.raises(UserError, match="a pickle, which Meshtune never opens"):
        load_adapter(adapter_folder, spec)
    (adapter_folder / "adapter_config.json").write_text('{"r": 4,')
    with pytest.raises(UserError, match=r"(?s)not JSON.*line 1"):
        load_adapter(adapter_folder, spec)
    with pytest.raises(UserError, match="the directory does not exist"):
        load_adapter(adapter_folder / "nowhere", spec)


def test_an_adapter_is_replaced_but_nothing_else_is(
    adapted_model: PreparedModel, adapter_folder: pathlib.Path, tmp_path: pathlib.Path
):
    save_adapter(adapter_folder, adapted_model.trainable, adapted_model.spec, CONFIG, BaseRecord("new"))
    assert load_adapter(adapter_folder, adapted_model.spec).base.path == "new"
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine/notes.txt").write_text("keep")
    with pytest.raises(UserError, match="is not what was to be written there"):
        save_adapter(tmp_path / "mine", adapted_model.trainable, adapted_model.spec, CONFIG, BASE)
    assert (tmp_path / "mine/notes.txt").read_text() == "keep"

    def fail(path: pathlib.Path) -> None:
        raise UserError("no")

    with pytest.raises(UserError, match="no"):
        save_adapter(adapter_folder, adapted_model.trainable, adapted_model.spec, CONFIG, BASE, check=fail)
    assert load_adapter(adapter_folder, adapted_model.spec).base.path == "new"  # the old one is still whole
    assert sorted(p.name for p in tmp_path.iterdir()) == ["adapter", "mine"]


def test_a_copy_of_another_bases_head_is_refused(tmp_path: pathlib.Path):
    config = LoraConfig(rank=4, targets=("lm_head",))
    adapted_model = prepare(config, *base("llama3"), jax.random.key(0))
    saved = save_adapter(tmp_path / "a", adapted_model.trainable, adapted_model.spec, config, BASE)
    name = "base_model.model.lm_head.base_layer.weight"
    change_tensors(saved, lambda t: t.update({name: np.zeros((97, 32), np.float32)}))
    spec, params = base("llama3")
    with pytest.raises(UserError, match="carries a lm_head that is not this base's"):
        attach(params, spec, load_adapter(saved, spec))


def test_merging_gives_the_logits_of_what_was_trained(adapted_model: PreparedModel):
    """1e-4: x (W + sBA)^T and x W^T + s (x A^T) B^T round differently in float32."""
    expected = trained_logits(adapted_model)
    merged_tree = merge(
        jax.tree.map(lambda x: x + 0, adapted_model.trainable), jax.tree.map(lambda x: x + 0, adapted_model.frozen)
    )
    flat = merge_adapters(merged_tree)
    assert merged_tree == {}
    assert jax.tree.structure(flat) == jax.tree.structure(base("llama3")[1])
    assert np.abs(our_logits(flat, adapted_model.spec) - expected).max() < 1e-4


def test_an_adapter_of_a_tied_head_is_merged_into_a_head_of_its_own(tmp_path):
    """Into safetensors and GGUF alike; compared with peft's logits, where only the head is adapted too."""
    directory = model_of("llama_tied")
    config = peft.LoraConfig(r=4, target_modules=["q_proj", "lm_head"], init_lora_weights=False)
    model = peft.get_peft_model(transformers.AutoModelForCausalLM.from_pretrained(directory), config).eval()
    model.save_pretrained(tmp_path / "adapter")
    ids = [[1, 5, 7, 9]]
    with torch.no_grad():
        expected = model(torch.tensor(ids)).logits[0].numpy()
    export(tmp_path / "adapter", tmp_path / "merged", merge=True, base=directory)
    assert not json.loads((tmp_path / "merged/config.json").read_text())["tie_word_embeddings"]
    merged_model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "merged").eval()
    with torch.no_grad():
        assert np.abs(merged_model(torch.tensor(ids)).logits[0].numpy() - expected).max() < 1e-4
    export(tmp_path / "adapter", tmp_path / "merged.gguf", merge=True, base=directory, gguf="F32")
    assert np.abs(meshtune.load(tmp_path / "merged.gguf").logits(ids)[0] - expected).max() < 1e-4
    assert np.abs(meshtune.load(directory, adapter=tmp_path / "adapter").logits(ids)[0] - expected).max() < 1e-4


@pytest.mark.parametrize("tied", [False, True])
def test_a_lora_of_an_embedding_is_named_and_what_is_offered_works(tied, tmp_path):
    directory = model_of("llama_tied" if tied else "llama_bias")
    config = peft.LoraConfig(
        r=2, target_modules=["embed_tokens", "q_proj"], init_lora_weights=False, task_type="CAUSAL_LM"
    )
    model = peft.get_peft_model(transformers.AutoModelForCausalLM.from_pretrained(directory), config).eval()
    model.save_pretrained(tmp_path / "adapter")
    ids = [[1, 5, 7, 9]]
    with torch.no_grad():
        expected = model(torch.tensor(ids)).logits[0].numpy()
    with pytest.raises(UserError, match="LoRA on an embedding is not supported") as error:
        meshtune.load(directory, adapter=tmp_path / "adapter")
    assert ("after giving the head a weight of its own" in error.value.fix) == tied
    page = (pathlib.Path(__file__).parents[2] / "docs/adapters.md").read_text()
    lines = page.split("LoRA on embeddings")[1].split("```python\n")[1].split("```")[0]
    names = {"BASE": str(directory), "ADAPTER": str(tmp_path / "adapter"), "MERGED": str(tmp_path / "merged")}
    for name, path in names.items():
        lines = lines.replace(f'"{name}"', repr(path))
    exec(lines, {})
    assert np.abs(meshtune.load(tmp_path / "merged").logits(ids)[0] - expected).max() < 1e-4


def test_an_adapter_of_a_model_with_another_number_of_layers_says_so_first(adapted_model, adapter_folder):
    spec, _ = base("llama3")
    short = dataclasses.replace(spec, stacks=tuple(dataclasses.replace(stack, repeats=1) for stack in spec.stacks[:1]))
    assert short.layers < spec.layers
    with pytest.raises(UserError, match=rf"trained on base \({spec.layers} layers\), and the model has {short.layers}"):
        load_adapter(adapter_folder, short)
    longer = dataclasses.replace(spec, stacks=(*spec.stacks, *spec.stacks))
    with pytest.raises(
        UserError, match=rf"trained on base \({spec.layers} layers\), and the model has {longer.layers}"
    ):
        load_adapter(adapter_folder, longer)
