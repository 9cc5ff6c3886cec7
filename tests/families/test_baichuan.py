"""Baichuan2 computes what a transcription of its equations in torch computes; files keep the original's form."""

from __future__ import annotations

import functools
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from safetensors.numpy import load_file

from baichuan_files import directory
from baichuan_in_torch import SEVEN, THIRTEEN
from meshtune.arrays.tree import flatten
from meshtune.errors import UserError
from meshtune.families import model_spec, tensors
from meshtune.generate.engine import Engine
from meshtune.kernels.attention import AttentionRequest, choose_backend
from meshtune.model.compute import Compute
from meshtune.model.decoder import forward, logits
from meshtune.model.inputs import Inputs
from meshtune.weights.export import export_model
from meshtune.weights.load import load_params, load_spec

SIZES = {"7B": SEVEN, "13B": THIRTEEN}


def rows(length: int, batch: int = 2, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 97, (batch, length)).astype(np.int32)


@functools.partial(jax.jit, static_argnums=(1, 3))
def our_logits(params, spec, tokens, compute=Compute(attention="direct")):
    positions = jnp.broadcast_to(jnp.arange(tokens.shape[1], dtype=jnp.int32), tokens.shape)
    inputs = Inputs(jnp.asarray(tokens), positions, jnp.ones_like(positions))
    hidden = forward(params, spec, compute, inputs).hidden
    return logits(params, spec, hidden)


@pytest.fixture(params=SIZES)
def both(request, tmp_path):
    folder, model = directory(tmp_path, SIZES[request.param])
    spec, _ = load_spec(folder)
    return spec, load_params(folder, spec), model


@pytest.mark.parametrize("length", [9, 150])
def test_logits_equal_the_equations(both, length):
    """float32 on both sides: 1e-4. 150 tokens are beyond the config's 64."""
    spec, params, model = both
    tokens = rows(length)
    with torch.no_grad():
        expected = model(torch.tensor(tokens).long()).numpy()
    np.testing.assert_allclose(our_logits(params, spec, tokens), expected, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("both", ["7B", pytest.param("13B", marks=pytest.mark.slow)], indirect=True)
def test_gradients_equal_the_equations(both):
    """Of the mean next-token loss, through the head's division too. 1e-4 of each tensor's largest: float32 sums."""
    spec, params, model = both
    tokens = rows(20)
    ids = torch.tensor(tokens).long()
    torch.nn.functional.cross_entropy(model(ids)[:, :-1].flatten(0, 1), ids[:, 1:].flatten()).backward()

    def loss(params):
        predicted = jax.nn.log_softmax(our_logits(params, spec, tokens)[:, :-1])
        return -jnp.mean(jnp.take_along_axis(predicted, jnp.asarray(tokens)[:, 1:, None], axis=-1))

    ours, theirs = flatten(jax.jit(jax.grad(loss))(params)), dict(model.named_parameters())
    for entry in tensors(spec):
        expected = entry.view.read(theirs[entry.name].grad.numpy())
        gradient = np.asarray(ours[entry.path])[entry.index]
        largest = max(np.abs(theirs[part.name].grad.numpy()).max() for part in tensors(spec) if part.path == entry.path)
        np.testing.assert_allclose(gradient, expected, atol=1e-4 * largest, rtol=0, err_msg=entry.name)


def test_an_export_has_the_files_own_form(tmp_path):
    """Bit for bit: one W_pack, and a head whose rows are as long as they were."""
    folder, _ = directory(tmp_path, SEVEN)
    spec, _ = load_spec(folder)
    done = export_model(load_params(folder, spec), spec, folder, tmp_path / "out")
    original, written = (load_file(path / "model.safetensors") for path in (folder, tmp_path / "out"))
    assert set(original) == set(written)
    for name, tensor in original.items():
        assert np.array_equal(tensor, written[name]), name
    assert done.verified.difference == 0
    assert json.loads((tmp_path / "out/config.json").read_text())["auto_map"] == SEVEN["auto_map"]


def test_the_slopes_of_40_heads_are_published():
    """The first 32 are those of 32 heads, 2^(-1/4) to 2^-8; the other 8 every second one of 64 heads: 2^(-1/8) on."""
    alibi = model_spec(THIRTEEN | {"num_attention_heads": 40, "hidden_size": 80}).stacks[0].pattern[0].mixer.alibi
    expected = [2 ** (-(i + 1) / 4) for i in range(32)] + [2 ** (-(2 * i + 1) / 8) for i in range(8)]
    np.testing.assert_allclose(alibi.slopes, expected, rtol=1e-12)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"z_loss_weight": 0.1}, "z_loss_weight = 0.1: a loss on the size of logits is not implemented"),
        ({"tie_word_embeddings": True}, "tie_word_embeddings = True is not implemented"),
        ({"rope_theta": 1e6}, "rope_theta = 1000000.0 is not implemented"),
        ({"num_key_value_heads": 2}, "num_key_value_heads = 2 is not implemented"),
        ({"max_position_embeddings": None, "hidden_size": 4096, "num_attention_heads": 32}, "is missing: a 7B has it"),
        ({"logit_scale": 2.0}, "does not know"),
        ({"architectures": ["BaichuanForTokenClassification"]}, "is not supported"),
    ],
)
def test_a_field_that_changes_the_mathematics_is_named(changes, message):
    with pytest.raises(UserError, match=r"config\.json, field") as error:
        model_spec(SEVEN | changes)
    assert message in str(error.value)


def test_the_published_configs_are_read():
    seven = model_spec(SEVEN | {"hidden_size": 4096, "num_attention_heads": 32, "vocab_size": 125696})
    thirteen = model_spec(THIRTEEN | {"hidden_size": 5120, "num_attention_heads": 40, "vocab_size": 125696})
    first = model_spec(SEVEN | {"vocab_size": 64000, "architectures": ["BaiChuanForCausalLM"]})
    (rotary,), (biased,) = ([block for block in spec.blocks if block.name == "attn"] for spec in (seven, thirteen))
    assert (rotary.rope.theta, rotary.packed, seven.norm_head) == (10000, True, True)
    assert (biased.rope, biased.head_dim, thirteen.norm_head) == (None, 128, True)
    assert len(first.ropes) == 1
    assert not first.norm_head


def packed_logits(spec, params, compute):
    """Logits of two documents in one row, and of each in a separate row."""
    lengths = (70, 50)
    tokens = rows(120, batch=1)
    positions = np.concatenate([np.arange(n) for n in lengths])[None].astype(np.int32)
    segments = np.repeat([1, 2], lengths)[None].astype(np.int32)
    inputs = Inputs(jnp.asarray(tokens), jnp.asarray(positions), jnp.asarray(segments))
    hidden = forward(params, spec, compute, inputs).hidden
    together = logits(params, spec, hidden)[0]
    apart = [our_logits(params, spec, tokens[:, :70])[0], our_logits(params, spec, tokens[:, 70:])[0]]
    return np.asarray(together), np.concatenate(apart)


@pytest.mark.parametrize(
    "changes",
    [
        {"attention": "blockwise"},
        pytest.param({"attention": "direct"}, marks=pytest.mark.slow),
        pytest.param({"attention": "blockwise", "attention_chunk": 40, "mlp_chunk": 32}, marks=pytest.mark.slow),
    ],
    ids=["blockwise", "direct", "chunks"],
)
def test_packed_documents_with_biases_by_distance_equal_documents_alone(tmp_path, changes):
    """2e-5: the same sums in blocks. Distances are counted within a document."""
    folder, _ = directory(tmp_path, THIRTEEN)
    spec, _ = load_spec(folder)
    together, apart = packed_logits(spec, load_params(folder, spec), Compute(**changes))
    np.testing.assert_allclose(together, apart, atol=2e-5, rtol=2e-5)


@pytest.mark.slow
def test_gradients_by_chunks_and_blocks_equal_those_of_plain_products(tmp_path):
    """1e-5 of each array's largest. By chunks W_pack is used twice, and its gradient is the sum of both."""
    folder, _ = directory(tmp_path, THIRTEEN)
    spec, _ = load_spec(folder)
    params, tokens = load_params(folder, spec), rows(80)

    def gradient(compute):
        return flatten(jax.jit(jax.grad(lambda p: jnp.mean(our_logits(p, spec, tokens, compute) ** 2)))(params))

    plain = gradient(Compute(attention="direct"))
    cut = gradient(Compute(attention="blockwise", attention_chunk=32, mlp_chunk=24, remat="full"))
    for path, leaf in plain.items():
        np.testing.assert_allclose(cut[path], leaf, atol=1e-5 * float(jnp.abs(leaf).max()), rtol=0, err_msg=path)


@pytest.mark.slow
@pytest.mark.parametrize("size", SIZES)
def test_generation_equals_the_equations(tmp_path, size):
    """Greedy, with the cache here and without one there: the same tokens."""
    folder, model = directory(tmp_path, SIZES[size], seed=2)
    spec, _ = load_spec(folder)
    engine = Engine(load_params(folder, spec), spec, Compute(attention="auto"))
    prompts = [rows(11, 1)[0].tolist(), rows(5, 1, seed=1)[0].tolist()]
    for prompt, actual in zip(prompts, engine.generate(prompts, max_tokens=20), strict=True):
        text = list(prompt)
        with torch.no_grad():
            for _ in range(20):
                text.append(int(model(torch.tensor([text]))[0, -1].argmax()))
        assert actual == text[len(prompt) :]


@pytest.mark.parametrize("backend", ["splash", "cudnn", "triton"])
def test_kernels_without_biases_say_so(backend):
    facts = {"splash": ("tpu", "TPU v5 lite"), "cudnn": ("cuda", "sm_90a"), "triton": ("cuda", "sm_90a")}[backend]
    request = AttentionRequest(
        1, 4096, 4096, 40, 40, 128, "bfloat16", facts[0], 1.0, aligned=True, packed=False, alibi=True, chip=facts[1]
    )
    with pytest.raises(UserError, match=rf"{backend}: .*\(ALiBi\)"):
        choose_backend(request, backend)
    assert choose_backend(request)[0].name == "blockwise"
