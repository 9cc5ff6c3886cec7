"""Small random models of every family, made by transformers, and the same weights as our tree."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import torch
import transformers

from meshtune.arrays.tree import Tree, flatten, unflatten
from meshtune.families import model_spec, tensors
from meshtune.model.spec import ModelSpec, abstract_params

SMALL = {
    "vocab_size": 97,
    "hidden_size": 32,
    "intermediate_size": 56,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "initializer_range": 0.2,
    "rms_norm_eps": 1e-5,
}
ROPE = {
    "linear": {"rope_type": "linear", "factor": 3.0},
    "dynamic": {"rope_type": "dynamic", "factor": 2.0},
    "yarn": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32},
    "yarn_mscale": {
        "rope_type": "yarn",
        "factor": 4.0,
        "original_max_position_embeddings": 32,
        "beta_fast": 16.0,
        "beta_slow": 2.0,
        "mscale": 0.7,
        "mscale_all_dim": 1.3,
        "truncate": False,
    },
    "llama3": {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 32,
    },
}
CONFIGS: dict[str, tuple[str, dict]] = {
    "llama2": ("llama", {"num_key_value_heads": 4, "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0}}),
    "llama3": ("llama", {"rope_parameters": {"rope_type": "default", "rope_theta": 500000.0}}),
    "llama_tied": ("llama", {"tie_word_embeddings": True}),
    "llama_bias": ("llama", {"attention_bias": True, "mlp_bias": True}),
    "llama_head_dim": ("llama", {"head_dim": 12}),
    "mistral": ("mistral", {"sliding_window": None}),
    "mistral_window": ("mistral", {"sliding_window": 7}),
    "qwen2": ("qwen2", {}),
    "qwen2_window": ("qwen2", {"use_sliding_window": True, "sliding_window": 5, "max_window_layers": 3}),
    "qwen3": ("qwen3", {"head_dim": 16, "tie_word_embeddings": True}),
    "qwen3_bias_window": (
        "qwen3",
        {
            "attention_bias": True,
            "head_dim": 8,
            "use_sliding_window": True,
            "sliding_window": 6,
            "layer_types": ["sliding_attention", "full_attention"] * 2,
        },
    ),
    "gemma2": (
        "gemma2",
        {
            "head_dim": 8,
            "query_pre_attn_scalar": 11,
            "sliding_window": 6,
            "attn_logit_softcapping": 3.0,
            "final_logit_softcapping": 5.0,
        },
    ),
    **{f"rope_{name}": ("llama", {"rope_parameters": {"rope_theta": 10000.0, **rope}}) for name, rope in ROPE.items()},
}


def torch_model(name: str, seed: int = 0) -> transformers.PreTrainedModel:
    """A random float32 model; biases and norms are random too, so that none can be dropped unseen."""
    kind, changes = CONFIGS[name]
    config = transformers.AutoConfig.for_model(kind, **{**SMALL, **changes})
    torch.manual_seed(seed)
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager", dtype=torch.float32)
    with torch.no_grad():
        for path, weight in model.named_parameters():
            if weight.ndim == 1:
                weight.copy_(torch.randn_like(weight) * 0.3 + (0.0 if path.endswith("bias") else 1.0))
    return model.eval()


def tensor_names(spec: ModelSpec) -> dict[str, list[str]]:
    """Path of a leaf -> the Hugging Face tensors it is made of, in the order of its rows."""
    names: dict[str, list[str]] = {}
    for entry in sorted(tensors(spec), key=lambda entry: entry.index):
        names.setdefault(entry.path, []).append(entry.name)
    return names


def same_weights(model: transformers.PreTrainedModel) -> tuple[ModelSpec, Tree]:
    """Our spec and tree of a torch model's weights."""
    spec = model_spec(model.config.to_dict())
    tensors = {name: tensor.detach().numpy() for name, tensor in model.state_dict().items()}
    leaves = {}
    abstract = flatten(abstract_params(spec))
    for path, names in tensor_names(spec).items():
        parts = [tensors[name] for name in names]
        array = np.stack(parts) if path.startswith("layers/") else parts[0]
        assert array.shape == abstract[path].shape
        leaves[path] = jnp.asarray(array)
    return spec, unflatten(leaves)
