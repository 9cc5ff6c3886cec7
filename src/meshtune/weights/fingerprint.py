"""A short name for a base model's content, to know it again when an adapter or a run comes back to it."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

from meshtune.weights.load import load_config
from meshtune.weights.safetensors_files import headers, samples
from meshtune.weights.tensor_reader import TensorReader

# The config fields that the mathematics depends on; all others (versions, names, token ids, dtypes) may be edited.
MATHEMATICS = """
    model_type vocab_size hidden_size intermediate_size num_hidden_layers num_attention_heads num_key_value_heads
    head_dim hidden_act rms_norm_eps rope_theta rope_scaling rope_parameters max_position_embeddings
    partial_rotary_factor sliding_window use_sliding_window max_window_layers layer_types attention_bias mlp_bias
    tie_word_embeddings
""".split()


def base_hash(directory: Path) -> str:
    """'sha256:<64 hex digits>' of a model directory.

    Hashed, in the order of tensor names: the config fields in MATHEMATICS; each tensor's name, dtype and shape; and its
    bytes, in full up to 64 KiB, else 16 samples of 4 KiB spread evenly from its first byte to its last. So the hash
    does not change with copying, renaming or sharding, does change with dtype and with any training that moves the
    weights, and reads about 75 MB of a 405B model. A change to single numbers between the samples goes unseen: it
    recognises a model, and is no defence against forgery. Raises UserError as `headers` does.
    """
    directory = Path(directory)
    config = load_config(directory)
    digest = hashlib.sha256(b"meshtune base 1\n")
    digest.update(_canonical({field: config[field] for field in MATHEMATICS if config.get(field) is not None}))
    with TensorReader() as reader:
        for name, info in sorted(headers(directory).items()):
            digest.update(_canonical([name, info.dtype, list(info.shape)]))
            for offset, length in samples(info):
                digest.update(reader.read(info, offset, length))
    return f"sha256:{digest.hexdigest()}"


def _canonical(value: object) -> bytes:
    return json.dumps(value, sort_keys=True, separators=(",", ":")).encode() + b"\n"
