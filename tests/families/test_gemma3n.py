"""Gemma 3n's peculiarities: coefficients that are limited, its composite, and configs that cannot be."""

from __future__ import annotations

import json
import pathlib
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from safetensors.numpy import load_file, save_file

from families.case import Case, as_inputs, directory, load_case, our_logits, torch_model
from families.cases import BY_NAME
from meshtune.arrays.tree import flatten
from meshtune.errors import UserError
from meshtune.families import model_spec
from meshtune.families.gguf import gguf_layout, read_config
from meshtune.json_text import read_json
from meshtune.model.mlp import gaussian_topk
from meshtune.weights.export import export_model
from meshtune.weights.inspect import inspect_model
from meshtune.weights.load import load_params, load_spec

CASE = BY_NAME["gemma3n"].changed(
    num_hidden_layers=2,
    layer_types=["sliding_attention", "full_attention"],
    intermediate_size=56,
    activation_sparsity_pattern=[0.5, 0.0],
    num_kv_shared_layers=0,
    altup_coef_clip=0.2,
)
WEIGHTS = "model.safetensors"
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 8192, "rope_theta": 1e6}
TOWERS = {
    "model.vision_tower.timm_model.conv_stem.conv.weight": np.arange(12, dtype=np.float16).reshape(3, 4),
    "model.embed_vision.embedding.weight": np.ones((4, 2), np.float16),
    "model.audio_tower.conformer.0.norm.weight": np.full(3, 2, np.float16),
    "model.embed_audio.embedding.weight": np.zeros((4, 2), np.float16),
    "model.language_model.layers.1.self_attn.v_norm.weight": np.ones(8, np.float16),
}


def torch_in_training(case: Case) -> Any:
    """transformers limits the coefficients only in training; nothing else differs there: there is no dropout."""
    return torch_model(case).train()


@pytest.fixture(scope="module")
def tokens() -> np.ndarray:
    return np.random.default_rng(0).integers(0, 90, (1, 11))


def test_coefficients_are_limited_as_transformers_limits_them_in_training(tokens: np.ndarray):
    """Logits, and the gradients of the coefficients: those of the prediction pass the limit, those of the correction
    stop at it."""
    spec, params = load_case(CASE)
    rows = as_inputs([[tokens[0]]], 11)

    def total(params: dict) -> tuple[jax.Array, jax.Array]:
        logits = our_logits(params, spec, *rows)
        return jnp.sum(jnp.sin(logits)), logits

    model = torch_in_training(CASE)
    assert all(layer.altup.prediction_coefs.weight.abs().max() > 0.2 for layer in model.model.layers)
    gradients, logits = jax.jit(jax.grad(total, has_aux=True))(params)
    gradients = flatten(gradients)
    theirs = model(torch.as_tensor(tokens)).logits
    theirs.sin().sum().backward()
    np.testing.assert_allclose(logits, theirs.detach(), atol=1e-4, rtol=1e-4)
    for number, layer in enumerate(model.model.layers):
        for ours, module in (("predict", "prediction_coefs"), ("correct", "correction_coefs")):
            expected = getattr(layer.altup, module).weight.grad.numpy()
            gradient = gradients[f"layers/{number}.0/streams/{ours}/weight"]
            np.testing.assert_allclose(gradient[0], expected, atol=1e-4 * np.abs(expected).max())
    assert np.any(model.model.layers[0].altup.correction_coefs.weight.grad.numpy() == 0), "nothing was at the limit"


def composite(tmp_path: pathlib.Path) -> pathlib.Path:
    """The files of a composite around the text model, with towers of a few numbers."""
    return composite_of(directory(BY_NAME["gemma3n"]), tmp_path / "model")


def composite_of(text: pathlib.Path, model: pathlib.Path) -> pathlib.Path:
    """Writes the files of a composite around a text model."""
    model.mkdir()
    config = read_json(text / "config.json") | {"model_type": "gemma3n_text"}
    towers = {"vision_config": {"model_type": "gemma3n_vision"}, "audio_config": {"model_type": "gemma3n_audio"}}
    named = {"model_type": "gemma3n", "architectures": ["Gemma3nForConditionalGeneration"], "eoi_token_id": 262144}
    tokens = {"audio_soft_tokens_per_image": 188, "vision_soft_tokens_per_image": 256}
    (model / "config.json").write_text(json.dumps({**named, **towers, **tokens, "text_config": config}))
    tensors = {
        name.replace("model.", "model.language_model.", 1): array for name, array in load_file(text / WEIGHTS).items()
    }
    save_file(tensors | TOWERS, model / WEIGHTS)
    return model


@pytest.mark.slow
def test_the_text_model_of_the_composite_is_read_and_all_else_passes_through(tmp_path: pathlib.Path):
    """As in published files, layers that share keys and values have tensors of their own, which nothing reads."""
    model = composite(tmp_path)
    extra = {"model.language_model.layers.4.self_attn.k_proj.weight": np.arange(6, dtype=np.float16)}
    extra |= {name: array for name, array in TOWERS.items() if "v_norm" not in name}
    tensors = {name: array for name, array in load_file(model / WEIGHTS).items() if "v_norm" not in name} | extra
    save_file(tensors, model / WEIGHTS)
    summary = inspect_model(model)
    assert (summary.composite, summary.family, summary.unused) == ("gemma3n", "gemma3n_text", [])
    parts = {part.name for part in summary.passed_through}
    assert parts == {"vision tower", "audio tower", "unused keys and values"}
    spec, _ = load_spec(model)
    alone_spec, alone = load_case(BY_NAME["gemma3n"])
    params = load_params(model, spec)
    assert spec.tied == alone_spec.tied
    assert all(np.array_equal(leaf, flatten(params)[path]) for path, leaf in flatten(alone).items())
    exported = load_file(export_model(params, spec, model, tmp_path / "out").path / WEIGHTS)
    assert exported.keys() == tensors.keys()
    for name, array in tensors.items():
        np.testing.assert_array_equal(exported[name], array, strict=True)


def test_gaussian_topk_of_equal_numbers_has_a_gradient():
    """Padding may be zero: the deviation of equal numbers is zero, and its root has no derivative there."""
    x = jnp.zeros((2, 8))
    assert jnp.all(jax.grad(lambda x: jnp.sum(gaussian_topk(x, 0.95)))(x) == jax.grad(lambda x: jnp.sum(x * 0))(x))


def test_a_share_of_numbers_remains():
    x = jax.random.normal(jax.random.key(0), (4, 20_000))
    share = jnp.mean(gaussian_topk(x, 0.95) > 0, axis=-1)
    np.testing.assert_allclose(share, 0.05, atol=0.01)


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("activation_sparsity_pattern", [0.95], "has no share from 0 to less than 1 for each of 6 layers"),
        ("activation_sparsity_pattern", [1.0] * 6, "has no share from 0 to less than 1"),
        ("activation_sparsity_pattern", 0.5, "must be a list"),
        ("intermediate_size", [56, 56], "has no width for each of 6 layers"),
        ("altup_active_idx", 3, "altup_active_idx 3 is none of 3 streams"),
        ("altup_coef_clip", -1.0, "altup_coef_clip is -1.0, not a positive number"),
        ("num_kv_shared_layers", 6, "6 of 6 layers share keys and values"),
        ("num_kv_shared_layers", 4, "no layer before the last 4 has keys and values for full_attention"),
        ("use_bidirectional_attention", True, "use_bidirectional_attention = True is not implemented"),
        ("laurel_rank", 0, "laurel_rank is 0, not a positive whole number"),
    ],
)
def test_a_config_that_cannot_be_is_refused_by_its_field(field: str, value: object, message: str):
    config = read_json(directory(BY_NAME["gemma3n"]) / "config.json") | {field: value}
    with pytest.raises(UserError) as error:
        model_spec(config)
    assert message in str(error.value)
    assert field in str(error.value)


# As published: its first layers are sparse, and those behind the twentieth read keys and values.
E2B = {
    "model_type": "gemma3n_text",
    "num_hidden_layers": 30,
    "num_kv_shared_layers": 10,
    "intermediate_size": [8192] * 30,
}


def test_a_gguf_file_has_projections_of_streams_as_one_tensor_and_a_row_for_every_token():
    layout = gguf_layout(model_spec(dict(E2B)))
    shapes = layout.shapes
    assert shapes["altup_proj.weight"] == shapes["altup_unembd_proj.weight"] == (3, 2048, 2048)
    assert shapes["per_layer_token_embd.weight"] == (262_400, 30 * 256)
    unused = {f"blk.{number}.{name}.weight" for number in range(20, 30) for name in ("attn_k", "attn_v", "attn_k_norm")}
    assert layout.computed.keys() == unused
    assert not shapes.keys() & unused


def test_the_metadata_of_llama_cpps_own_converter_is_read():
    """Its multiples of the deviation come from another computation of the normal distribution."""
    metadata = {
        **{key.removeprefix("gemma3n."): value for key, value in gguf_layout(model_spec(dict(E2B))).metadata.items()},
        "feed_forward_length": [8192] * 30,
        "activation_sparsity_scale": [1.6448533535003662] * 10 + [float("-inf")] * 20,
    }
    del metadata["rope.freq_base_swa"]
    config = read_config("gemma3n", metadata, {}, ["token_embd.weight"], 262_144, "model.gguf")
    published, read = model_spec(dict(E2B)), model_spec(config)
    assert [kind.ffn for kind in read.layer_kinds] == [kind.ffn for kind in published.layer_kinds]
    assert [kind.mixer for kind in read.layer_kinds] == [kind.mixer for kind in published.layer_kinds]
    metadata["activation_sparsity_scale"][3] = 1.2
    with pytest.raises(UserError, match=r"gemma3n\.activation_sparsity_scale"):
        read_config("gemma3n", metadata, {}, ["token_embd.weight"], 262_144, "model.gguf")


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("altup_num_inputs", 3),
        ("altup_active_idx", 1),
        ("altup_correct_scale", False),
        ("laurel_rank", 32),
        ("hidden_size_per_layer_input", 128),
        ("final_logit_softcapping", None),
        ("num_kv_shared_layers", 5),
        ("layer_types", [*["sliding_attention"] * 3, "full_attention"] * 7 + ["sliding_attention", "full_attention"]),
        ("layer_types", ["full_attention"] * 30),
        ("intermediate_size", [8192] * 29 + [4096]),
        ("activation_sparsity_pattern", [0.95] * 11 + [0.0] * 19),
        ("activation_sparsity_pattern", [0.9] * 10 + [0.0] * 20),
        ("vocab_size_per_layer_input", 262_401),
        ("rope_parameters", {"full_attention": YARN, "sliding_attention": {"rope_type": "default"}}),
    ],
)
def test_what_llama_cpp_has_as_constants_is_not_written_otherwise(field: str, value: object):
    with pytest.raises(UserError, match=field) as error:
        gguf_layout(model_spec({**E2B, field: value}))
    assert "llama.cpp's 'gemma3n' does not compute this gemma3n_text model" in str(error.value)
