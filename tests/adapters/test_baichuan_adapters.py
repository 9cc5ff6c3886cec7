"""Adapters of Baichuan2: one on W_pack, as peft makes it; and its head, which is no linear layer, trained in full."""

from __future__ import annotations

import dataclasses
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import peft
import pytest
import torch
from twins import TOKENS, move_weights, our_logits, trained_logits

from baichuan_in_torch import SEVEN, Baichuan
from meshtune.adapters.config import LoraConfig
from meshtune.adapters.merge import merge_adapters
from meshtune.adapters.method import prepare
from meshtune.adapters.peft_format import BaseRecord, attach, load_adapter, save_adapter
from meshtune.arrays.tree import flatten, unflatten
from meshtune.errors import UserError
from meshtune.families import model_spec, tensors
from meshtune.model.spec import abstract_params

ALL_LINEAR = ["W_pack", "o_proj", "gate_proj", "up_proj", "down_proj"]


def base():
    """Our tree of the torch model's weights."""
    spec, model = model_spec(SEVEN), Baichuan(SEVEN)
    numbers = {name: weight.detach().numpy() for name, weight in model.named_parameters()}
    parts: dict[str, list[np.ndarray]] = {}
    for entry in sorted(tensors(spec), key=lambda entry: entry.index):
        parts.setdefault(entry.path, []).append(entry.view.read(numbers[entry.name]))
    abstract = flatten(abstract_params(spec))
    leaves = {path: jnp.asarray(np.stack(group).reshape(abstract[path].shape)) for path, group in parts.items()}
    return spec, unflatten(leaves)


def torch_logits(model) -> np.ndarray:
    with torch.no_grad():
        return model(torch.from_numpy(TOKENS.astype(np.int64))).numpy()


def test_an_adapter_of_peft_has_the_same_logits_here_and_back(tmp_path: pathlib.Path):
    """1e-4: float32 sums in two orders."""
    config = peft.LoraConfig(
        task_type="CAUSAL_LM", r=4, lora_alpha=8, target_modules=ALL_LINEAR, modules_to_save=["lm_head"]
    )
    model = peft.get_peft_model(Baichuan(SEVEN), config)
    torch.manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.add_(torch.randn_like(parameter) * 0.1)
    expected = torch_logits(model.eval())
    model.save_pretrained(str(tmp_path / "theirs"))
    spec, params = base()
    loaded = load_adapter(tmp_path / "theirs", spec)
    pack = flatten(loaded.trainable)["layers/0.0/attn/qkv/adapter"]
    assert (pack.a.shape, pack.b.shape) == ((2, 4, 32), (2, 96, 4))
    new, params = attach(params, spec, loaded)
    np.testing.assert_allclose(our_logits(params, new), expected, atol=1e-4)
    save_adapter(tmp_path / "ours", loaded.trainable, loaded.spec, loaded.config, loaded.base)
    again = peft.PeftModel.from_pretrained(Baichuan(SEVEN), str(tmp_path / "ours")).eval()
    np.testing.assert_allclose(torch_logits(again), expected, atol=1e-4)
    np.testing.assert_allclose(our_logits(merge_adapters(params), new), expected, atol=1e-4)


@pytest.mark.parametrize("kind", ["lora", *(pytest.param(kind, marks=pytest.mark.slow) for kind in ("dora", "oft"))])
def test_every_linear_layer_is_what_peft_makes_of_it(tmp_path: pathlib.Path, kind: str):
    """DoRA keeps a number for each row of W_pack: in a file they are in the file's order."""
    spec, params = base()
    method = LoraConfig(rank=4, targets="all-linear", adapter=kind)
    if kind == "oft":
        method = LoraConfig(oft_block_size=8, targets="all-linear", adapter=kind)
    prepared = prepare(method, spec, params, jax.random.key(0))
    assert {path.split("/")[-2] for path in flatten(prepared.trainable)} == {"qkv", "o", "gate", "up", "down"}
    prepared = dataclasses.replace(prepared, trainable=move_weights(prepared.trainable))
    expected = trained_logits(prepared)
    save_adapter(tmp_path / "ours", prepared.trainable, prepared.spec, method, BaseRecord("base"))
    peft_model = peft.PeftModel.from_pretrained(Baichuan(SEVEN), str(tmp_path / "ours")).eval()
    np.testing.assert_allclose(torch_logits(peft_model), expected, atol=1e-4)


def test_a_head_of_normalised_rows_has_no_adapter():
    spec, params = base()
    with pytest.raises(UserError, match="'lm_head' is not a linear layer") as error:
        prepare(LoraConfig(targets=("W_pack", "lm_head")), spec, params, jax.random.key(0))
    assert "method.train_modules: ['lm_head']" in str(error.value)


def test_vera_says_why_it_cannot_adapt_the_packed_projection():
    spec, params = base()
    with pytest.raises(UserError, match=r"VeRA cannot adapt model\.layers\.0\.self_attn\.W_pack"):
        prepare(LoraConfig(rank=4, adapter="vera"), spec, params, jax.random.key(0))


def test_rows_of_queries_keys_and_values_stand_together_in_memory():
    view = next(entry.view for entry in tensors(model_spec(SEVEN)) if "W_pack" in entry.name).of_rows()
    in_memory = view.read(np.arange(96))
    assert in_memory[:24].tolist() == [*range(8), *range(32, 40), *range(64, 72)]
    in_file = np.empty(96, int)
    view.write(in_memory, in_file)
    assert in_file.tolist() == list(range(96))
