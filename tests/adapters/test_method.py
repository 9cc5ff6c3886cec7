"""Each method's trained parameters, by the names transformers gives the parameters, and what it refuses."""

from __future__ import annotations

import fnmatch

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from twins import base, our_logits, trained_logits

import meshtune.adapters.method as layout
from meshtune.adapters.config import FreezeConfig, FullConfig, LoraConfig
from meshtune.adapters.method import abstract, count, prepare
from meshtune.adapters.training_method import Method
from meshtune.arrays.tree import flatten
from meshtune.errors import UserError
from tiny_models import tensor_names, torch_model

CASES: dict[str, tuple[Method, list[str]]] = {
    "full": (FullConfig(), ["*"]),
    "last": (FreezeConfig(last_layers=1), ["model.layers.3.*"]),
    "first": (FreezeConfig(first_layers=3), ["model.layers.[012].*"]),
    "all_layers": (FreezeConfig(last_layers=4), ["model.layers.*"]),
    "inside": (FreezeConfig(last_layers=2, modules=("mlp", "norm")), ["model.layers.[23].mlp.*", "model.norm.*"]),
    "outside": (FreezeConfig(modules=("embed_tokens", "lm_head")), ["model.embed_tokens.*", "lm_head.*"]),
    "name": (FreezeConfig(modules=("self_attn.q_proj",)), ["model.layers.*.self_attn.q_proj.*"]),
    "one_layer": (FreezeConfig(modules=("layers.2",)), ["model.layers.2.*"]),
    "patterns": (
        FreezeConfig(modules=("model.layers.[13].mlp.*", "*norm")),
        ["model.layers.[13].mlp.*", "*norm.*"],
    ),
    "beside_lora": (LoraConfig(train_modules=("embed_tokens", "norm")), ["model.embed_tokens.*", "model.norm.*"]),
}


@pytest.mark.parametrize("name", ["llama_bias", "qwen3", "qwen3_bias_window"])
@pytest.mark.parametrize("case", CASES)
def test_a_method_trains_what_it_says(case: str, name: str):
    method, patterns = CASES[case]
    prepared = abstract(method, base(name)[0])
    names = tensor_names(prepared.spec)
    trained = {hf for path in flatten(prepared.trainable) if not path.endswith("/adapter") for hf in names[path]}
    theirs = {path for path, _ in torch_model(name).named_parameters()}  # a tied head is not among them
    assert trained == {path for path in theirs if any(fnmatch.fnmatchcase(path, p) for p in patterns)}
    assert {
        hf for tree in (prepared.trainable, prepared.frozen) for p in flatten(tree) for hf in names.get(p, [])
    } == theirs
    assert count(prepared).full + count(prepared).frozen == torch_model(name).num_parameters()


@pytest.mark.parametrize("case", ["last", "patterns", "beside_lora"])
def test_a_prepared_model_is_the_abstract_one_and_computes_the_same(case: str):
    method, _ = CASES[case]
    spec, params = base("qwen3_bias_window")
    expected, planned = our_logits(params, spec), abstract(method, spec)
    prepared = prepare(method, spec, params, jax.random.key(0))
    for tree, plan in ((prepared.trainable, planned.trainable), (prepared.frozen, planned.frozen)):
        assert jax.tree.map(lambda x: (x.shape, str(x.dtype)), tree) == jax.tree.map(lambda x: (x.shape, x.dtype), plan)
    assert count(prepared) == count(planned)
    # Tolerance: other stacks are other programs, in which XLA may fuse, and so round, differently.
    assert np.abs(trained_logits(prepared) - expected).max() < 1e-5


def test_trainables_take_their_dtype_and_frozen_weights_keep_theirs():
    spec, params = base("llama3")
    params = jax.tree.map(lambda x: x.astype(jnp.bfloat16), params)
    prepared = prepare(LoraConfig(targets=("q_proj",), train_modules=("norm",)), spec, params, jax.random.key(0))
    assert {x.dtype for x in jax.tree.leaves(prepared.trainable)} == {jnp.dtype("float32")}
    assert {x.dtype for x in jax.tree.leaves(prepared.frozen)} == {jnp.dtype("bfloat16")}
    spec, params = base("llama3")
    prepared = prepare(LoraConfig(targets=("q_proj",)), spec, params, jax.random.key(0), "bfloat16")
    assert {x.dtype for x in jax.tree.leaves(prepared.trainable)} == {jnp.dtype("bfloat16")}


@pytest.mark.parametrize("method", [FreezeConfig(last_layers=1), FreezeConfig(modules=("layers.1",))])
def test_restacking_never_holds_the_model_twice(method: FreezeConfig, monkeypatch: pytest.MonkeyPatch):
    def live() -> int:
        return sum(array.nbytes for array in jax.live_arrays())

    before = live()
    spec, params = base("llama3")
    params = jax.tree.map(jnp.copy, params)
    model, largest = live() - before, max(x.nbytes for x in jax.tree.leaves(params))
    bytes_alive, rows = [], layout._rows
    monkeypatch.setattr(
        layout, "_rows", lambda *a: (bytes_alive.append(live()), rows(*a), bytes_alive.append(live()))[1]
    )
    prepared = prepare(method, spec, params, jax.random.key(0))
    assert params == {}
    assert live() - before <= model + 64
    assert max(bytes_alive) - before <= model + largest + 64
    assert prepared.spec != spec


BAD: dict[str, tuple[Method | None, dict, str]] = {
    "more layers": (FreezeConfig(last_layers=5), {}, "last_layers is 5, but the model has 4 layers"),
    "unknown module": (FreezeConfig(modules=("q_pro",)), {}, r"(?s)'q_pro' matches nothing.*did you mean 'q_proj'"),
    "unknown pattern": (LoraConfig(targets=("layers.9.*",)), {}, r"pattern 'layers.9.\*' matches nothing"),
    "unknown target": (LoraConfig(targets=("qproj",)), {}, "(?s)method.targets.*did you mean 'q_proj'"),
    "unknown trained": (
        LoraConfig(train_modules=("embed_token",)),
        {},
        "(?s)train_modules.*did you mean 'embed_tokens'",
    ),
    "not linear": (LoraConfig(targets=("norm",)), {}, "(?s)'norm' is not a linear layer.*train_modules"),
    "embedding": (LoraConfig(targets=("embed_tokens",)), {}, "is not a linear layer"),
    "rank": (LoraConfig(rank=17), {}, r"(?s)rank 17 is above .*self_attn.k_proj.*16 x 32.*at most 16"),
    "twice": (LoraConfig(train_modules=("o_proj",)), {}, "o_proj is to have an adapter and to be trained in full"),
    "head dropout": (LoraConfig(targets=("lm_head",), dropout=0.1), {}, "(?s)lm_head.*dropout to 0"),
    "no targets": (LoraConfig(targets=()), {}, "no targets"),
    "outside layers": (
        FreezeConfig(last_layers=1, modules=("layers.0.mlp",)),
        {},
        "nothing in the chosen layers 3",
    ),
    "rank zero": (None, {"rank": 0}, "rank is 0"),
    "rank negative": (None, {"rank": -2}, "rank is -2"),
    "alpha": (None, {"alpha": float("nan")}, "alpha is nan"),
    "dropout": (None, {"dropout": 1.0}, "dropout is 1.0"),
}


@pytest.mark.parametrize("case", BAD)
def test_what_cannot_be_is_refused(case: str):
    method, fields, message = BAD[case]
    with pytest.raises(UserError, match=message):
        abstract(method or LoraConfig(**fields), base("llama3")[0])


def test_a_tied_head_cannot_be_trained_and_adapted():
    with pytest.raises(UserError, match="shares the embedding's matrix"):
        abstract(LoraConfig(targets=("lm_head",), train_modules=("embed_tokens",)), base("llama_tied")[0])


@pytest.mark.parametrize("fields", [{}, {"last_layers": 0}, {"last_layers": 1, "first_layers": 1}])
def test_freeze_needs_one_choice(fields: dict):
    with pytest.raises(UserError):
        FreezeConfig(**fields)
