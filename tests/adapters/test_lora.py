"""LoRA alone: it starts as nothing, its gradients are peft's, its dropout drops what it says, frozen stays frozen."""

from __future__ import annotations

import dataclasses
import pathlib
import re
import sys

import jax
import jax.numpy as jnp
import numpy as np
import peft
import pytest
import torch
from twins import TOKENS, base, forward, move_weights, our_logits, trained_logits

from meshtune.adapters.config import FullConfig, LoraConfig
from meshtune.adapters.kind import InitializedAdapter
from meshtune.adapters.lora import LoRA
from meshtune.adapters.method import abstract, prepare
from meshtune.adapters.peft_format import BaseRecord, save_adapter
from meshtune.adapters.peft_tensors import Written, collect
from meshtune.adapters.registry import ADAPTERS, PEFT_FIELDS
from meshtune.arrays.spec import ArraySpec
from meshtune.arrays.tree import merge
from meshtune.model.compute import Compute
from tiny_models import torch_model

EVERYTHING = LoraConfig(rank=4, targets=("all-linear", "lm_head"))


@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        ("llama_bias", "float32"),
        ("qwen3", "bfloat16"),
        pytest.param("llama_bias", "bfloat16", marks=pytest.mark.slow),
        pytest.param("qwen3", "float32", marks=pytest.mark.slow),
    ],
)
def test_before_training_logits_equal_the_base_bit_for_bit(name: str, dtype: str):
    compute = Compute(dtype=dtype, attention="direct")
    spec, params = base(name)
    expected = our_logits(params, spec, compute)
    prepared = prepare(EVERYTHING, spec, params, jax.random.key(3))
    assert np.array_equal(our_logits(merge(prepared.trainable, prepared.frozen), prepared.spec, compute), expected)


def test_adapters_start_as_peft_starts_them():
    """kaiming_uniform_(a=sqrt(5)) is uniform in +-1/sqrt(in), whose standard deviation is that bound over sqrt(3).

    2% of 4 * 8 * 512 draws is about four standard errors of a uniform's deviation.
    """
    weight = ArraySpec((4, 64, 512), "float32", ("layers", "ffn", "embed"))
    a = LoRA.abstract(weight, LoraConfig(rank=8)).drawn(jax.random.split(jax.random.key(0), 4)).a
    theirs = torch.empty(8 * 4, 512)
    torch.nn.init.kaiming_uniform_(theirs, a=5**0.5)
    assert a.shape == (4, 8, 512)
    assert float(a.std()) == pytest.approx(float(theirs.std()), rel=0.02)
    assert float(jnp.abs(a).max()) == pytest.approx(float(theirs.abs().max()), rel=0.001)
    assert len(np.unique(np.asarray(a[:, 0, 0]))) == 4  # layers differ


def arrays(written: Written) -> dict[str, np.ndarray]:
    """The tensors of an adapter's file."""
    return {t.name: np.asarray(part.leaf[part.index]) for t in written.tensors for part in t.parts}


def test_an_adapter_starts_the_same_whatever_else_is_adapted_and_however_layers_are_stacked():
    def start(*targets: str) -> dict[str, np.ndarray]:
        config = LoraConfig(rank=4, targets=targets)
        prepared = prepare(config, *base("llama3"), jax.random.key(5))
        return arrays(collect(prepared.trainable, prepared.spec, config))

    everything, subset = start("all-linear"), start("layers.[02].mlp.up_proj", "layers.1.*")
    assert len(subset) == 2 * (2 + 7)
    assert all(np.array_equal(everything[name], tensor) for name, tensor in subset.items())


def test_abstract_adapters_have_the_axes_of_their_weight():
    adapter = abstract(LoraConfig(rank=4), base("llama3")[0]).trainable["layers"]["0.0"]["mlp"]["down"]["adapter"]
    assert adapter.a == ArraySpec((4, 4, 56), "float32", ("layers", "rank", "ffn"), "normal", role="matrix")
    assert adapter.b == ArraySpec((4, 32, 4), "float32", ("layers", "embed", "rank"), "zeros", role="matrix")


@pytest.mark.parametrize("scan", [True, pytest.param(False, marks=pytest.mark.slow)], ids=["scanned", "unrolled"])
def test_gradients_are_those_of_peft(scan: bool, tmp_path: pathlib.Path):
    """Same loss, same weights: relative to the largest entry of each gradient, 1e-4 is float32 summation order."""
    config = LoraConfig(rank=4, alpha=6, rslora=True, targets=EVERYTHING.targets, train_modules=("embed_tokens",))
    prepared = prepare(config, *base("llama_bias"), jax.random.key(0))
    trainable = move_weights(prepared.trainable)
    save_adapter(tmp_path / "a", trainable, prepared.spec, config, BaseRecord("x"))
    theirs = peft.PeftModel.from_pretrained(torch_model("llama_bias"), str(tmp_path / "a"), is_trainable=True)
    theirs(torch.from_numpy(TOKENS).long(), labels=torch.from_numpy(TOKENS).long()).loss.backward()

    def loss(trainable):
        z = forward(merge(trainable, prepared.frozen), prepared.spec, Compute(attention="direct", scan=scan), TOKENS)
        return -jnp.take_along_axis(jax.nn.log_softmax(z[:, :-1]), TOKENS[:, 1:, None], -1).mean()

    ours = arrays(collect(jax.jit(jax.grad(loss))(trainable), prepared.spec, config))
    compared = 0
    for name, parameter in theirs.named_parameters():
        if parameter.requires_grad:
            actual = ours[name.replace(".default", "").replace(".modules_to_save", "")]
            want = parameter.grad.numpy()
            assert np.abs(actual - want).max() < 1e-4 * np.abs(want).max(), name
            compared += 1
    assert compared == len(ours)


def weight_gradients(method: LoraConfig | FullConfig) -> int:
    """Products in the compiled gradient that give an array of mlp.up's or the head's shape, [56, 32] and [97, 32]."""
    prepared = prepare(method, *base("llama3"), jax.random.key(0))

    def loss(trainable, frozen):
        return jnp.square(forward(merge(trainable, frozen), prepared.spec, Compute(attention="direct"), TOKENS)).mean()

    text = jax.jit(jax.grad(loss)).lower(prepared.trainable, prepared.frozen).compile().as_text()
    return len(re.findall(r"= f32\[(?:56,32|32,56|97,32|32,97)\]\S* (?:dot|custom-call)\(", text))


def test_no_gradient_of_a_frozen_weight_is_in_the_compiled_program():
    assert weight_gradients(FullConfig()) >= 3  # gate and up, the head: the count sees gradients where they are
    assert weight_gradients(EVERYTHING) == 0


def test_dropout_drops_the_adapters_input_and_nothing_else():
    """Tolerances are four standard errors: of a share of 64 * 512 draws, of a mean over 400 keys."""
    rng = np.random.default_rng(0)
    x, weight = rng.standard_normal((64, 512)), rng.standard_normal((16, 512))
    x, weight = jnp.asarray(x, jnp.float32), jnp.asarray(weight, jnp.float32)
    eye = LoRA(jnp.eye(512), jnp.eye(512), scale=1.0, dropout=0.25)
    key = jax.random.key(1)
    output = np.asarray(eye.apply(x, jnp.zeros((512, 512)), key))
    dropped = output == 0
    assert abs(dropped.mean() - 0.25) < 4 * (0.25 * 0.75 / dropped.size) ** 0.5
    assert np.allclose(output[~dropped], np.asarray(x)[~dropped] / 0.75, rtol=1e-6)
    assert np.array_equal(eye.apply(x, jnp.zeros((512, 512))), x)  # without a key nothing is dropped

    lora = LoRA(jnp.asarray(rng.standard_normal((4, 512)), jnp.float32), jnp.ones((16, 4)), 0.5, 0.25)
    started = dataclasses.replace(lora, b=jnp.zeros((16, 4)))
    assert np.array_equal(started.apply(x, weight, key), x @ weight.T)  # the weight's own input is whole
    outputs = jax.vmap(lambda k: lora.apply(x[0], weight, k))(jax.random.split(key, 400))
    error = np.asarray(outputs.std(0)) / 400**0.5
    assert (np.abs(np.asarray(outputs.mean(0) - lora.apply(x[0], weight))) < 4 * error).all()


def test_dropout_differs_between_layers_modules_and_steps():
    config = LoraConfig(rank=4, dropout=0.5, targets=("q_proj", "down_proj"))
    prepared = prepare(config, *base("llama3"), jax.random.key(0))
    params = merge(move_weights(prepared.trainable), prepared.frozen)
    plain, first, again, two = (
        our_logits(params, prepared.spec, rng=r) for r in (None, *map(jax.random.key, (1, 1, 2)))
    )
    assert np.array_equal(first, again)
    assert not np.array_equal(first, two)
    assert not np.array_equal(first, plain)


def test_a_new_kind_of_adapter_is_one_class_and_one_line(monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path):
    @jax.tree_util.register_dataclass
    @dataclasses.dataclass(frozen=True)
    class Scale:
        """y = (x W^T) * s."""

        s: object
        PEFT_TENSORS = {"s": "scale.weight"}  # noqa: RUF012
        PEFT_READ, PEFT_SHARED, ORIGINAL = LoRA.PEFT_READ, {}, False
        rank, scale = 8, 2.0
        check = check_weight = staticmethod(lambda *arguments: None)
        fixed, shared, derived = (staticmethod(hook) for hook in (LoRA.fixed, LoRA.shared, LoRA.derived))
        fields, options, exported = (staticmethod(hook) for hook in (LoRA.fields, LoRA.options, LoRA.exported))

        @classmethod
        def abstract(cls, weight, config, dtype="float32"):
            del config
            return cls(ArraySpec(weight.shape[:-1], dtype, weight.axes[:-1], "ones", role="vector"))

        @staticmethod
        def start(adapter, config, keys, weight, original=None):
            del config, keys, original
            return InitializedAdapter(Scale(jnp.full(adapter.s.shape, 2.0)), weight)

        def apply(self, x, weight, key=None, out=None, fixed=None):
            del key, out, fixed
            return (x @ weight.T) * self.s

        def merge(self, weight, fixed=None):
            del fixed
            return weight * self.s[..., None]

    monkeypatch.setattr(sys.modules[__name__], "Scale", Scale, raising=False)
    monkeypatch.setitem(ADAPTERS.targets, "toy", f"{__name__}:Scale")
    monkeypatch.setitem(PEFT_FIELDS, "toy", {"peft_type": "TOY"})
    config = LoraConfig(targets=("o_proj",), adapter="toy")
    prepared = prepare(config, *base("llama3"), jax.random.key(0))
    spec, params = base("llama3")
    node = params["layers"]["0.0"]["attn"]["o"]
    node["weight"] = node["weight"] * 2
    assert np.allclose(trained_logits(prepared), our_logits(params, spec), atol=1e-5)

    from meshtune.adapters.peft_format import load_adapter

    save_adapter(tmp_path / "a", prepared.trainable, prepared.spec, config, BaseRecord("x"))
    assert load_adapter(tmp_path / "a", spec).config.adapter == "toy"
