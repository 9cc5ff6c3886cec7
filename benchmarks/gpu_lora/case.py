"""What both sides tune: a random model in Hugging Face form, and texts that fill rows."""

from __future__ import annotations

import json
import pathlib
import shutil

import numpy as np

MODELS = {
    "8b": {
        "vocab_size": 128256,
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "rope_theta": 500000.0,
    },
    "tiny": {
        "vocab_size": 512,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "rope_theta": 10000.0,
    },
}


def write_model(name: str, folder: pathlib.Path, dtype: str) -> None:
    """A Llama of random weights and the quickstart's tokenizer, whose 512 tokens every vocabulary here holds.

    One block of random numbers is repeated in all tensors: figures of speed do not ask for more, and 16 GB are soon
    written. Norms are ones.
    """
    import ml_dtypes
    from safetensors.numpy import save_file

    from meshtune.families import model_spec, tensors
    from meshtune.quickstart import MODEL

    config = MODELS[name] | {
        "model_type": "llama",
        "architectures": ["LlamaForCausalLM"],
        "max_position_embeddings": 131072,
        "rms_norm_eps": 1e-5,
        "hidden_act": "silu",
        "bos_token_id": 1,
        "eos_token_id": 2,
        "tie_word_embeddings": False,
        "dtype": dtype,
    }
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(config))
    for file in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(MODEL / file, folder / file)
    kind = ml_dtypes.bfloat16 if dtype == "bfloat16" else np.float32
    block = (0.02 * np.random.default_rng(0).standard_normal((1 << 20) + 3, np.float32)).astype(kind)
    files: list[dict[str, np.ndarray]] = [{}]
    for entry in tensors(model_spec(config, dtype)):
        size = int(np.prod(entry.view.tensor))
        tensor = (
            np.ones(entry.view.tensor, kind)
            if len(entry.view.tensor) == 1
            else np.resize(block, size).reshape(entry.view.tensor)
        )
        if sum(one.nbytes for one in files[-1].values()) > 4 << 30:
            files.append({})
        files[-1][entry.name] = tensor
    weight_map = {}
    for number, shard in enumerate(files, 1):
        file = f"model-{number:05d}-of-{len(files):05d}.safetensors"
        save_file(shard, folder / file, {"format": "pt"})
        weight_map |= dict.fromkeys(shard, file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))


def write_texts(file: pathlib.Path, count: int) -> None:
    """Texts of some 330 tokens, no two alike, which pack into rows that are all but full."""
    made = np.random.default_rng(1)
    words = ["Tom", "Lily", "the dog", "a big tree", "went home", "was happy", "saw a cake", "in the park", "and then"]
    texts = [{"text": f"Once upon a time {' '.join(made.choice(words, 120))}."} for _ in range(count)]
    file.write_text("".join(json.dumps(text) + "\n" for text in texts))
