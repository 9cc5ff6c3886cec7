"""Configs and recipes of Llamas that are planned for and never loaded."""

from __future__ import annotations

import json
import pathlib
from typing import Any

from meshtune.config.load import load_recipe
from meshtune.config.recipe import Recipe

LLAMA_8B: dict[str, Any] = {
    "model_type": "llama", "vocab_size": 128256, "hidden_size": 4096, "intermediate_size": 14336,
    "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8, "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-5, "rope_theta": 500000.0, "hidden_act": "silu", "tie_word_embeddings": False,
    "attention_bias": False, "mlp_bias": False, "torch_dtype": "bfloat16",
}  # fmt: skip
LLAMA_1B = LLAMA_8B | {
    "hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16, "head_dim": 64,
    "tie_word_embeddings": True,
}  # fmt: skip
LLAMA_70B = LLAMA_8B | {
    "hidden_size": 8192, "intermediate_size": 28672, "num_hidden_layers": 80, "num_attention_heads": 64,
}  # fmt: skip
LLAMA_405B = LLAMA_8B | {
    "hidden_size": 16384, "intermediate_size": 53248, "num_hidden_layers": 126, "num_attention_heads": 128,
}  # fmt: skip
CONFIGS = {"1B": LLAMA_1B, "8B": LLAMA_8B, "70B": LLAMA_70B, "405B": LLAMA_405B}
# Parameters as Meta counts them, in thousands of millions.
SIZES = {"1B": 1.24, "8B": 8.03, "70B": 70.55, "405B": 405.85}


def recipe_file(folder: pathlib.Path, model: str) -> pathlib.Path:
    """A recipe for one of CONFIGS, with nothing said of mesh, memory or speed."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(CONFIGS[model]))
    file = folder / "recipe.yaml"
    file.write_text(
        f"model: {folder}\ndata: {{train: nothing.jsonl, max_length: 4096}}\noutput: {folder}/out\n"
        "train: {batch_size: 8, steps: 1000}\n"
    )
    return file


def llama(folder: pathlib.Path, model: str, *overrides: str) -> Recipe:
    """The recipe, read."""
    return load_recipe(recipe_file(folder / model, model), overrides)
