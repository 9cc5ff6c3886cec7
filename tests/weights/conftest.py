"""Small random models, made and saved by transformers."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

COMMON: dict[str, Any] = {
    "vocab_size": 99,
    "hidden_size": 32,
    "intermediate_size": 56,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 12,
    "max_position_embeddings": 128,
    "tie_word_embeddings": False,
}
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {"attention_bias": True, "mlp_bias": True},
    "llama-tied": {"tie_word_embeddings": True},
    "qwen3": {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 2},
}

Make = Callable[..., Path]


@pytest.fixture(scope="session")
def make_model(tmp_path_factory: pytest.TempPathFactory) -> Make:
    """make_model(family, dtype="float32", max_shard_size="5GB", **config) -> a new directory each time."""
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")

    def make(family: str, dtype: str = "float32", max_shard_size: str | int = "5GB", **config: Any) -> Path:
        settings = COMMON | FAMILIES[family] | config
        torch.manual_seed(0)
        model_config = transformers.AutoConfig.for_model(family.split("-")[0], **settings)
        model = transformers.AutoModelForCausalLM.from_config(model_config, dtype=getattr(torch, dtype))
        for parameter in model.parameters():  # biases and norms start as constants, which would hide a mix-up
            parameter.data.uniform_(-0.3, 0.3)
        folder = tmp_path_factory.mktemp(family) / "model"
        model.save_pretrained(folder, max_shard_size=max_shard_size)
        return folder

    return make


@pytest.fixture
def edit_config() -> Callable[..., None]:
    """edit_config(directory, field=value, ...) changes fields of its config.json."""

    def edit(directory: Path, **fields: Any) -> None:
        file = directory / "config.json"
        file.write_text(json.dumps(json.loads(file.read_text()) | fields))

    return edit
