"""Rows of tokens trained together with an adapter are peft's trainable tokens, in embedding and head, tied or not.

Tolerance 1e-4 on float32 logits of size ~1-10: the libraries sum in different orders.
"""

from __future__ import annotations

import dataclasses
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import peft
import pytest
import torch
from test_peft_format import BASE, in_peft
from twins import TOKENS, base, move_weights, our_logits, torch_logits, trained_logits

from meshtune.adapters.config import LoraConfig
from meshtune.adapters.merge import merge_adapters
from meshtune.adapters.method import PreparedModel, count, prepare
from meshtune.adapters.peft_format import attach, load_adapter, save_adapter
from meshtune.arrays.tree import merge
from meshtune.errors import UserError
from tiny_models import torch_model

IDS = tuple(sorted({int(token) for token in TOKENS.ravel()[:3]} | {96}))
CONFIG = LoraConfig(rank=4, targets=("q_proj",), token_rows=IDS)


@pytest.mark.parametrize("name", ["llama3", "qwen3"])
def test_rows_have_the_same_logits_in_peft(name: str, tmp_path: pathlib.Path):
    started = prepare(CONFIG, *base(name), jax.random.key(0))
    np.testing.assert_array_equal(trained_logits(started), our_logits(*reversed(base(name))))  # they begin as they were
    prepared = PreparedModel(started.spec, move_weights(started.trainable), started.frozen)
    tables = 1 if prepared.spec.tied else 2
    assert (
        count(prepared).adapters
        == count(prepare(LoraConfig(rank=4, targets=("q_proj",)), *base(name), jax.random.key(0))).adapters
        + tables * len(IDS) * prepared.spec.embed
    )
    expected = trained_logits(prepared)
    save_adapter(tmp_path / "a", prepared.trainable, prepared.spec, CONFIG, BASE)
    assert np.abs(torch_logits(in_peft(torch_model(name), tmp_path / "a")) - expected).max() < 1e-4
    assert np.abs(expected - torch_logits(torch_model(name))).max() > 0.1
    spec, params = base(name)
    spec, params = attach(params, spec, load_adapter(tmp_path / "a", spec))
    np.testing.assert_array_equal(our_logits(params, spec), expected)
    flat = merge_adapters(merge(prepared.trainable, jax.tree.map(jnp.copy, prepared.frozen)))
    assert np.abs(our_logits(flat, prepared.spec) - expected).max() < 1e-4


@pytest.mark.parametrize(
    ("name", "indices"),
    [
        ("llama3", list(IDS)),
        pytest.param("qwen3", list(IDS), marks=pytest.mark.slow),
        ("llama3", {"lm_head": list(IDS)}),
    ],
)
def test_what_peft_writes_loads_here(name: str, indices, tmp_path: pathlib.Path):
    config = peft.LoraConfig(r=4, target_modules=["q_proj"], trainable_token_indices=indices, init_lora_weights=False)
    model = peft.get_peft_model(torch_model(name), config).eval()
    torch.manual_seed(0)
    with torch.no_grad():
        for path, parameter in model.named_parameters():
            if "trainable_tokens" in path:
                parameter += 0.3 * torch.randn_like(parameter)
    model.save_pretrained(tmp_path / "theirs")
    spec, params = base(name)
    spec, params = attach(params, spec, load_adapter(tmp_path / "theirs", spec))
    assert np.abs(our_logits(params, spec) - torch_logits(model)).max() < 1e-4


def test_rows_that_cannot_be_are_refused(tmp_path: pathlib.Path):
    for config, reason in (
        (LoraConfig(rank=4, targets=("lm_head",), token_rows=IDS), "the head is to have an adapter and the rows"),
        (LoraConfig(targets=("q_proj",), adapter="vera", rank=4, token_rows=IDS), "no place for the rows"),
    ):
        with pytest.raises(UserError, match=reason):
            prepare(config, *base("llama3"), jax.random.key(0))
    prepared = prepare(CONFIG, *base("llama3"), jax.random.key(0))
    saved = save_adapter(tmp_path / "a", prepared.trainable, prepared.spec, CONFIG, BASE)

    small = dataclasses.replace(base("llama3")[0], vocab=90)
    with pytest.raises(UserError, match="rows of tokens up to 96, and the base has 90"):
        load_adapter(saved, small)


TIED, FIRST = list(IDS), [int(IDS[0])]


@pytest.mark.parametrize(
    "indices", [{"embed_tokens": TIED, "lm_head": TIED}, {"embed_tokens": TIED, "lm_head": FIRST}, {"lm_head": TIED}]
)
@pytest.mark.parametrize("name", ["qwen3", "llama3"])
def test_rows_of_embedding_and_head_are_pefts_tied_or_not(name: str, indices, tmp_path: pathlib.Path):
    config = peft.LoraConfig(r=4, target_modules=["q_proj"], trainable_token_indices=indices, init_lora_weights=False)
    model = peft.get_peft_model(torch_model(name), config).eval()
    torch.manual_seed(0)
    with torch.no_grad():
        for path, parameter in model.named_parameters():
            if "trainable_tokens" in path:
                parameter += 0.3 * torch.randn_like(parameter)
    model.save_pretrained(tmp_path / "theirs")
    expected = torch_logits(in_peft(torch_model(name), tmp_path / "theirs"))
    spec, params = base(name)
    spec, params = attach(params, spec, load_adapter(tmp_path / "theirs", spec))
    assert np.abs(our_logits(params, spec) - expected).max() < 1e-4
