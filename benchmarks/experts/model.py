"""The mixture that both sides train, and its data: a random Qwen3-MoE of 64 experts, 8 a token, and random tokens."""

from __future__ import annotations

import pathlib

import numpy as np

VOCAB, ROWS, LENGTH = 8192, 4, 512
CONFIG = {
    "vocab_size": VOCAB,
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "num_experts": 64,
    "num_experts_per_tok": 8,
    "moe_intermediate_size": 128,
    "norm_topk_prob": True,
    "max_position_embeddings": 1024,
    "tie_word_embeddings": False,
}
RANK, ALPHA, RATE = 8, 16, 1e-4
ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")
METHODS = ("lora", "lora-attention", "full")


def batch(update: int) -> np.ndarray:
    """The token ids [rows, length + 1] of an update: every token but the first is predicted."""
    return np.random.default_rng(update).integers(0, VOCAB, (ROWS, LENGTH + 1))


def write_model(folder: pathlib.Path) -> None:
    """Writes the model, in float32, as transformers does."""
    import torch
    import transformers

    torch.manual_seed(0)
    config = transformers.Qwen3MoeConfig(**CONFIG)
    transformers.Qwen3MoeForCausalLM(config).save_pretrained(folder)
