"""InternLM 2 is Llama with other names and one projection for queries, keys and values: the weights of a Llama model of
transformers, written as InternLM 2's files have them, make the same logits here. Its own code is never run."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from families.case import Case, as_inputs, our_logits, torch_logits, torch_model
from families.published_configs import PUBLISHED
from meshtune.model.compute import Compute
from meshtune.weights.load import load_params, load_spec

CONFIG = PUBLISHED["internlm/internlm2_5-7b-chat"]
ROPE = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e6}
LLAMA = Case("internlm2_as_llama", "llama", {"vocab_size": 96, "rope_parameters": ROPE, "attention_bias": True})
NAMES = {
    "model.embed_tokens": "model.tok_embeddings",
    "lm_head": "output",
    "self_attn.o_proj": "attention.wo",
    "input_layernorm": "attention_norm",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "feed_forward.w1",
    "mlp.up_proj": "feed_forward.w3",
    "mlp.down_proj": "feed_forward.w2",
}


def as_internlm2(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Rows of wqkv: for each key-value head its queries, its keys, its values (two queries a head here)."""
    renamed: dict[str, torch.Tensor] = {}
    for name, tensor in tensors.items():
        if ".q_proj." in name:
            q, k, v = (tensors[name.replace("q_proj", f"{x}_proj")].unflatten(0, (-1, 8)) for x in "qkv")
            groups = torch.cat([q.unflatten(0, (2, 2)), k[:, None], v[:, None]], dim=1)
            renamed[name.replace("self_attn.q_proj", "attention.wqkv")] = groups.flatten(0, 2).contiguous()
        elif ".k_proj." not in name and ".v_proj." not in name:
            for old, new in NAMES.items():
                name = name.replace(old, new)
            renamed[name] = tensor.contiguous()
    return renamed


@pytest.mark.parametrize("length", [9, 150])
def test_the_rearranged_weights_of_a_llama_make_the_same_logits(tmp_path, length):
    """float32 on both sides: 1e-4. 150 tokens are beyond the context, where the rotary embedding is rescaled."""
    model = torch_model(LLAMA)
    save_file(as_internlm2(dict(model.state_dict())), tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps({**CONFIG, "bias": True}))
    spec, _ = load_spec(tmp_path, "float32")
    tokens = np.random.default_rng(0).integers(0, 96, (1, length))
    ours = our_logits(load_params(tmp_path, spec), spec, *as_inputs([[tokens[0]]], length), Compute(attention="direct"))
    np.testing.assert_allclose(ours, torch_logits(model, tokens), atol=1e-4, rtol=1e-4)
