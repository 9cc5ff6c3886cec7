"""The models that are timed, and what both sides count: parameters, model FLOPs, and lines of JSON."""

from __future__ import annotations

import json
import pathlib
from typing import Any

RANK = 16
COMMON = {
    "model_type": "llama", "architectures": ["LlamaForCausalLM"], "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-5, "hidden_act": "silu", "tie_word_embeddings": False, "attention_bias": False,
    "mlp_bias": False, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
MODELS: dict[str, dict[str, Any]] = {
    "8b": {
        "vocab_size": 128256, "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32,
        "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128, "rope_theta": 500000.0,
    },
    "1b": {
        "vocab_size": 128256, "hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16,
        "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 64, "rope_theta": 500000.0,
    },
    "tiny": {
        "vocab_size": 512, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "rope_theta": 10000.0,
    },
}  # fmt: skip


def config_of(model: str, dtype: str) -> dict[str, Any]:
    """config.json of a model: Llama 3's shapes, or tiny ones."""
    return COMMON | MODELS[model] | {"dtype": dtype}


def write_config(model: str, dtype: str, folder: pathlib.Path) -> pathlib.Path:
    """A model directory with a config alone: weights are made on the device."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config_of(model, dtype)))
    return folder


def flops_per_token(model: str, length: int) -> float:
    """Model FLOPs of LoRA: 4 per parameter (forward, and backward to the inputs), and causal attention at half the
    square, forward once and backward twice. Nothing that is computed again counts.
    """
    shape = MODELS[model]
    width, ffn, layers = shape["hidden_size"], shape["intermediate_size"], shape["num_hidden_layers"]
    heads, kv_heads = (shape[key] * shape["head_dim"] for key in ("num_attention_heads", "num_key_value_heads"))
    weights = layers * (2 * width * heads + 2 * width * kv_heads + 3 * width * ffn) + width * shape["vocab_size"]
    return 4 * weights + 3 * 4 * layers * heads * length / 2


def print_result(result: dict[str, Any]) -> None:
    """The last line of a measurement's output, which run.py reads."""
    print(json.dumps(result), flush=True)
