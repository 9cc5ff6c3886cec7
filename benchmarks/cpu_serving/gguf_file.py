"""A Hugging Face folder of a Llama with tied embeddings as a GGUF file in float32, for llama.cpp."""

from __future__ import annotations

import json
import pathlib

import gguf
import numpy as np
from safetensors import safe_open

NAMES = {
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def write(source: pathlib.Path, dest: pathlib.Path) -> None:
    """Writes `dest`. llama.cpp rotates neighbouring numbers of a head, so rows of queries and keys are interleaved."""
    config = json.loads((source / "config.json").read_text())
    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    writer = gguf.GGUFWriter(str(dest), "llama")
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(heads)
    writer.add_head_count_kv(kv_heads)
    writer.add_rope_dimension_count(config["hidden_size"] // heads)
    writer.add_rope_freq_base(config["rope_theta"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_vocab_size(config["vocab_size"])
    tokenizer = json.loads((source / "tokenizer.json").read_text())
    ids = tokenizer["model"]["vocab"] | {token["content"]: token["id"] for token in tokenizer["added_tokens"]}
    tokens = sorted(ids, key=ids.__getitem__)
    special = {token["content"] for token in tokenizer["added_tokens"]}
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(tokens)
    writer.add_token_types([gguf.TokenType.CONTROL if t in special else gguf.TokenType.NORMAL for t in tokens])
    merges = tokenizer["model"]["merges"]
    writer.add_token_merges([merge if isinstance(merge, str) else " ".join(merge) for merge in merges])
    with safe_open(source / "model.safetensors", framework="pt") as file:
        for name in file.keys():  # noqa: SIM118
            array = file.get_tensor(name).float().numpy()
            count = heads if "q_proj" in name else kv_heads
            if "q_proj" in name or "k_proj" in name:
                array = array.reshape(count, 2, -1, array.shape[-1]).swapaxes(1, 2).reshape(array.shape)
            writer.add_tensor(_name(name), np.ascontiguousarray(array))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _name(name: str) -> str:
    if name.startswith("model.layers."):
        _, _, layer, *rest = name.removesuffix(".weight").split(".")
        return f"blk.{layer}.{NAMES['.'.join(rest)]}.weight"
    return {"model.embed_tokens.weight": "token_embd.weight", "model.norm.weight": "output_norm.weight"}[name]
