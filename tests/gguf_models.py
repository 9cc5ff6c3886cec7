"""Small random models of every family that is written as GGUF, with a tokenizer, and their logits."""

from __future__ import annotations

import functools
import shutil
from pathlib import Path

import jax.numpy as jnp
import numpy as np
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from families import case
from families.cases import BY_NAME
from meshtune.weights.load import load_params, load_spec

# As llama.cpp has it, DeepSeek's published models, whose two magnitudes are equal.
LATENT_YARN = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 32,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
}
# One size of heads of keys and values, and the epsilon of their norms, which transformers has as a constant.
DELTA = {"linear_value_head_dim": 8, "rms_norm_eps": 1e-6}
# What llama.cpp has as constants; the head is wide enough for Llama 3's factors to say their numbers.
LLAMA4 = {
    "attention_chunk_size": 8192,
    "floor_scale": 8192,
    "attn_scale": 0.1,
    "no_rope_layer_interval": 4,
    "head_dim": 64,
}
# As llama.cpp has it as constants, Gemma 3n's published models. The limit of coefficients bites.
GEMMA3N = {
    "num_hidden_layers": 25,
    "layer_types": None,
    "num_kv_shared_layers": 5,
    # llama.cpp's deviation, over one number less, moves the limit of what is active by a half of the width's inverse.
    "intermediate_size": 4096,
    "activation_sparsity_pattern": None,
    "altup_num_inputs": 4,
    "altup_active_idx": 0,
    "altup_coef_clip": 0.1,
    "laurel_rank": 64,
    "hidden_size_per_layer_input": 256,
    "final_logit_softcapping": 30.0,
    "initializer_range": 0.1,
}
# What llama.cpp computes of a family that the case of tests/families goes beyond.
WITHIN = {
    "rope_llama3": {"head_dim": 64},
    "glm": {"head_dim": 8},
    "granitemoe": {"attention_bias": False},
    "mixtral": {"sliding_window": None},
    "phi3_longrope": {"original_max_position_embeddings": 512, "max_position_embeddings": 1024},
    "qwen3_moe": {"mlp_only_layers": []},
    "gemma2": {"query_pre_attn_scalar": 8, "head_dim": 8},
    "gemma3_text": {"query_pre_attn_scalar": 8, "head_dim": 8, "layer_types": None, "num_hidden_layers": 7},
    "gpt_oss": {"swiglu_limit": 7.0, "rope_parameters": {"rope_type": "default", "rope_theta": 1000.0}},
    "qwen3_next": {**DELTA, "mlp_only_layers": []},
    "qwen3_5": DELTA,
    "qwen3_5_moe": DELTA,
    "lfm2": {"conv_bias": False},
    "lfm2_moe": {"conv_bias": False, "num_dense_layers": 2, "routed_scaling_factor": 1.0},
    "granitemoehybrid": {"mamba_proj_bias": False},
    "granitemoehybrid_dense": {"mamba_proj_bias": False},
    "deepseek_v2": {"topk_method": "greedy", "n_group": 1, "topk_group": 1},
    "deepseek_v2_lite": {"num_hidden_layers": 27},
    "deepseek_v3": {"attention_bias": False, "rms_norm_eps": 1e-6, "rope_parameters": LATENT_YARN},
    "glm4_moe_lite": {"rms_norm_eps": 1e-6},
    "gemma4": {"vocab_size_per_layer_input": 90},
    "gemma3n": GEMMA3N,
    "granitemoeshared": {"attention_bias": False},
    "llama4": LLAMA4,
    "llama4_128e": {
        **LLAMA4,
        "num_local_experts": 128,
        "moe_layers": [1, 3],
        "attn_temperature_tuning": True,
        "attention_bias": False,
    },
    "smollm3": {"no_rope_layers": [1, 1, 1, 0], "layer_types": None, "sliding_window": None},
}


def small_tokenizer(size: int) -> PreTrainedTokenizerFast:
    """A byte-level tokenizer of letters, with two merges and an end of text."""
    letters = [chr(n) for n in range(33, 33 + size - 3)]
    vocab = {text: number for number, text in enumerate(["<|endoftext|>", *letters, "ab", "abc"])}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[("a", "b"), ("ab", "c")]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|endoftext|>", bos_token="<|endoftext|>")


def with_tokenizer(directory: Path, vocab: int) -> Path:
    """A model directory with a tokenizer in it."""
    small_tokenizer(vocab).save_pretrained(directory)
    return directory


@functools.cache
def small_model(name: str) -> Path:
    """The files of a case of tests/families, with a tokenizer."""
    original = case.directory(BY_NAME[name])
    directory = original.with_name(f"{original.name}-gguf")
    shutil.copytree(original, directory)
    return with_tokenizer(directory, load_spec(directory)[0].vocab)


def model_of(name: str, **changes: object) -> Path:
    """The files of a case, within what llama.cpp computes of it, with a tokenizer."""
    if name not in WITHIN and not changes:
        return small_model(name)
    directory = case.directory(BY_NAME[name].changed(**WITHIN.get(name, {}) | changes))
    return with_tokenizer(directory, load_spec(directory)[0].vocab)


def logits_of(directory: Path, tokens: list[int]) -> np.ndarray:
    """Our float32 logits [T, V] of a model directory, or GGUF file."""
    spec, _ = load_spec(directory, "float32")
    params = load_params(directory, spec)
    ids = jnp.asarray([tokens])
    positions, segments = jnp.arange(ids.shape[1])[None], jnp.ones_like(ids)
    return np.asarray(case.our_logits(params, spec, ids, positions, segments))[0]
