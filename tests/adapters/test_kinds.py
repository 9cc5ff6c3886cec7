"""DoRA, PiSSA, OFT and VeRA are peft's: forward, backward, on disk both ways, and merged.

Tolerance 1e-4 on float32 logits of size ~1-10, and of the largest entry of each gradient: orders of summation.
"""

from __future__ import annotations

import copy
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from kinds import EVERYWHERE, KINDS, config_of, in_peft, made_by_peft, moved
from twins import COMPUTE, TOKENS, base, forward, our_logits, torch_logits, trained_logits

from meshtune.adapters import ADAPTERS
from meshtune.adapters.merge import merged
from meshtune.adapters.method import SHARED, Prepared, prepare
from meshtune.adapters.peft_format import BaseRecord, attach, load_adapter, save_adapter
from meshtune.adapters.peft_tensors import collect
from meshtune.adapters.verify import export_adapter
from meshtune.model.tree import merge
from tiny_models import torch_model

BASE = BaseRecord("some/base", "sha256:0")


def prepared(kind: str, name: str = "llama_bias", **more) -> Prepared:
    return prepare(config_of(kind, **more), *base(name), jax.random.key(3))


@pytest.mark.parametrize("kind", KINDS)
def test_a_kind_is_pefts_forward_backward_on_disk_and_merged(kind: str, tmp_path: pathlib.Path):
    config = config_of(kind, targets=EVERYWHERE)
    made = prepared(kind, targets=EVERYWHERE)
    plain = torch_logits(torch_model("llama_bias"))
    assert np.abs(trained_logits(made) - plain).max() < 1e-4  # before training the model is the base
    made = moved(made, KINDS[kind][2])
    expected = trained_logits(made)
    assert np.abs(expected - plain).max() > 0.1  # the adapter does something

    saved = export_adapter(tmp_path / "adapter", made, config, BASE)  # read again, and compared
    theirs = in_peft(torch_model("llama_bias"), saved, trainable=True)
    # PEFT's own form of PiSSA: two decompositions in float32, each off by rounding over the gap of singular values.
    assert np.abs(torch_logits(theirs) - expected).max() < (5e-4 if kind == "pissa" else 1e-4)

    tokens = torch.from_numpy(TOKENS).long()
    theirs(tokens, labels=tokens).loss.backward()

    def loss(trainable):
        z = forward(merge(trainable, made.frozen), made.spec, COMPUTE, TOKENS)
        return -jnp.take_along_axis(jax.nn.log_softmax(z[:, :-1]), TOKENS[:, 1:, None], -1).mean()

    written = collect(jax.jit(jax.grad(loss))(made.trainable), made.spec, config, made.frozen.get(SHARED))
    ours = {t.name: np.asarray(t.leaf if t.row is None else t.leaf[t.row]) for t in written.tensors}
    compared = 0
    for name, parameter in theirs.named_parameters():
        if parameter.requires_grad:
            own = name.replace(".default", "").replace("magnitude_vector.weight", "magnitude_vector")
            want = parameter.grad.numpy()
            assert np.abs(ours[own] - want).max() < 1e-4 * np.abs(want).max() + 1e-7, name
            compared += 1
    assert compared == len(ours) - len(ADAPTERS[kind].PEFT_SHARED)

    spec = made.spec
    whole = merge(*(jax.tree.map(jnp.copy, tree) for tree in (made.trainable, made.frozen)))
    assert np.abs(our_logits(merged(whole), spec) - expected).max() < 1e-4


@pytest.mark.parametrize("kind", KINDS)
def test_what_peft_writes_loads_here(kind: str, tmp_path: pathlib.Path):
    theirs = copy.deepcopy(KINDS[kind][1])
    theirs.task_type, theirs.target_modules = "CAUSAL_LM", {"q_proj", "o_proj", "up_proj", "down_proj"}
    expected = made_by_peft(torch_model("llama3"), theirs, tmp_path, KINDS[kind][2])
    assert np.abs(expected - torch_logits(torch_model("llama3"))).max() > 0.1
    spec, params = base("llama3")
    loaded = load_adapter(tmp_path, spec)
    assert loaded.config.adapter == kind
    new, params = attach(params, spec, loaded)
    assert np.abs(our_logits(params, new) - expected).max() < 1e-4
    shared = loaded.frozen.get(SHARED)
    save_adapter(tmp_path / "again", loaded.trainable, loaded.spec, loaded.config, loaded.base, shared=shared)
    assert np.abs(torch_logits(in_peft(torch_model("llama3"), tmp_path / "again")) - expected).max() < 1e-4
    assert np.abs(our_logits(merged(params), new) - expected).max() < 1e-4
