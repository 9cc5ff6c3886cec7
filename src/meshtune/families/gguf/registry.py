"""Every model_type that is written as GGUF and read from it, by llama.cpp's architecture."""

from __future__ import annotations

import dataclasses
from typing import Any

from meshtune.families.gguf.architecture import (
    ALL_BIASES,
    QKV,
    WINDOW,
    Architecture,
    Metadata,
    attention,
    experts,
    integer,
    layer_windows,
)
from meshtune.families.gguf.gemma3n import GEMMA3N
from meshtune.families.gguf.gemma4 import GEMMA4
from meshtune.families.gguf.hybrid import HYBRID
from meshtune.families.gguf.latent import LATENT
from meshtune.families.gguf.layer_norms import LAYER_NORMS
from meshtune.families.gguf.routing import deepseek_fields
from meshtune.families.gguf.state_space import STATE_SPACE
from meshtune.families.gguf.windowed import WINDOWED
from meshtune.model.mlp import MlpSpec
from meshtune.model.spec import ModelSpec


def _gemma_softcaps(spec: ModelSpec) -> dict[str, Any]:
    fields = {"attn_logit_softcapping": attention(spec).softcap, "final_logit_softcapping": spec.logit_softcap}
    return {name: value for name, value in fields.items() if value is not None}


def _gemma2_write(spec: ModelSpec) -> dict[str, Any]:
    return _gemma_softcaps(spec) | {WINDOW: _window(spec)}


def _gemma2_read(metadata: Metadata) -> dict[str, Any]:
    head_dim, layers = metadata["attention.key_length"], metadata["block_count"]
    # llama.cpp divides the 27B's scores by the hidden size over the number of heads, those of others by the head's.
    per_head = integer(metadata, "embedding_length") // integer(metadata, "attention.head_count")
    return {
        "query_pre_attn_scalar": per_head if layers == 46 else head_dim,
        "attn_logit_softcapping": metadata.get("attn_logit_softcapping"),
        "final_logit_softcapping": metadata.get("final_logit_softcapping"),
        "sliding_window": metadata[WINDOW],
    }


def _gemma_scale(whole: int, hidden: ModelSpec) -> float:
    mixer = attention(hidden)
    return (hidden.embed // mixer.heads if hidden.layers == whole else mixer.head_dim) ** -0.5


def _gemma_refusal(whole: int, pattern: int):
    def refusal(spec: ModelSpec) -> str | None:
        scale = attention(spec).scale
        if scale is not None and abs(scale - _gemma_scale(whole, spec)) > 1e-6:
            return "query_pre_attn_scalar: llama.cpp chooses it by the number of layers"
        expected = [None if (number + 1) % pattern == 0 else _window(spec) for number in range(spec.layers)]
        return None if layer_windows(spec) == expected else "layer_types: llama.cpp has another order of windows"

    return refusal


def _gemma3_write(spec: ModelSpec) -> dict[str, Any]:
    local = next((rope.theta for rope in spec.ropes if rope != attention(spec).rope), None)
    return {WINDOW: _window(spec), "rope.freq_base_swa": local if local is not None else 10000.0} | _gemma_softcaps(
        spec
    )


def _gemma3_read(metadata: Metadata) -> dict[str, Any]:
    head_dim, layers = metadata["attention.key_length"], metadata["block_count"]
    per_head = integer(metadata, "embedding_length") // integer(metadata, "attention.head_count")
    return {
        "query_pre_attn_scalar": per_head if layers == 62 else head_dim,
        "sliding_window": metadata[WINDOW],
        "sliding_window_pattern": 6,
        "rope_local_base_freq": metadata.get("rope.freq_base_swa", 10000.0),
        "final_logit_softcapping": metadata.get("final_logit_softcapping"),
    }


def _window(spec: ModelSpec) -> int:
    return next((window for window in layer_windows(spec) if window is not None), spec.max_length)


def _granite_write(spec: ModelSpec) -> dict[str, Any]:
    return {
        "attention.scale": attention(spec).scale,
        "embedding_scale": spec.embed_scale,
        "residual_scale": spec.layer_kinds[0].scale,
        "logit_scale": 1 / (spec.logit_scale or 1.0),
    }


def _granite_read(metadata: Metadata) -> dict[str, Any]:
    names = {
        "attention_multiplier": "attention.scale",
        "embedding_multiplier": "embedding_scale",
        "residual_multiplier": "residual_scale",
        "logits_scaling": "logit_scale",
    }
    return {field: metadata.get(key, 1.0) for field, key in names.items()}


def _granite_shared_read(metadata: Metadata) -> dict[str, Any]:
    shared = metadata["expert_shared_feed_forward_length"]
    return _granite_read(metadata) | {
        "num_local_experts": metadata["expert_count"],
        "shared_intermediate_size": shared,
    }


def _smollm3_refusal(spec: ModelSpec) -> str | None:
    rotated: dict[int, bool] = {}
    for _, _, layer, numbers in spec.positions():
        rotated |= dict.fromkeys(numbers, bool(layer.mixer and layer.mixer.ropes))
    expected = [(number + 1) % 4 != 0 for number in range(spec.layers)]
    return None if [rotated[n] for n in sorted(rotated)] == expected else "no_rope_layers other than every fourth"


def _grouped_refusal(spec: ModelSpec) -> str | None:
    mixer = attention(spec)
    return None if mixer.heads == mixer.kv_heads else "norms of keys over fewer heads than there are queries"


def _shared(spec: ModelSpec) -> MlpSpec | None:
    block = experts(spec)
    return None if block is None else block.shared


def _qwen2_moe_write(spec: ModelSpec) -> dict[str, Any]:
    shared = _shared(spec)
    return {} if shared is None else {"expert_shared_feed_forward_length": shared.width}


def _qwen2_moe_read(metadata: Metadata) -> dict[str, Any]:
    return {
        "shared_expert_intermediate_size": metadata["expert_shared_feed_forward_length"],
        "norm_topk_prob": False,
    }


LLAMA = Architecture("llama", "LlamaForCausalLM", permuted=True, biases=ALL_BIASES)


def _olmo3_refusal(spec: ModelSpec) -> str | None:
    expected = [None if (number + 1) % 4 == 0 else _window(spec) for number in range(spec.layers)]
    if layer_windows(spec) != expected:
        return "layer_types: llama.cpp has another order of windows"
    rotary = attention(spec).rope
    if rotary is None:
        return "it has no rotary embedding"
    alike = all(rope.kind == "default" and rope.theta == rotary.theta for rope in spec.ropes if rope != rotary)
    return None if alike else "windows with another base frequency"


def _olmo3_read(metadata: Metadata) -> dict[str, Any]:
    return {"sliding_window": metadata[WINDOW], "rope_local_base_freq": metadata.get("rope.freq_base", 10000.0)}


def _dots1_refusal(spec: ModelSpec) -> str | None:
    block = experts(spec)
    if block is not None and block.shared is None:
        return "it has no shared experts"
    mixer = attention(spec)
    return None if mixer.heads == mixer.kv_heads else "fewer heads of keys and values than of queries"


def _minimax_read(metadata: Metadata) -> dict[str, Any]:
    return {
        "num_local_experts": metadata["expert_count"],
        "intermediate_size": metadata["expert_feed_forward_length"],
    }


def _minimax_refusal(spec: ModelSpec) -> str | None:
    block = experts(spec)
    return None if block is None or block.router.normalize else "norm_topk_prob is False"


# model_type -> architecture.
ARCHITECTURES: dict[str, Architecture] = {
    "llama": LLAMA,
    "mistral": dataclasses.replace(LLAMA, class_name="MistralForCausalLM"),
    "mixtral": dataclasses.replace(LLAMA, class_name="MixtralForCausalLM", normalized=True),
    "internlm2": dataclasses.replace(
        LLAMA,
        class_name="InternLM2ForCausalLM",
        biases=ALL_BIASES | {"attn/qkv"},
        parted_qkv=True,
        chosen=lambda _: False,
    ),
    "internlm3": dataclasses.replace(LLAMA, class_name="InternLM3ForCausalLM"),
    "qwen2": Architecture("qwen2", "Qwen2ForCausalLM", biases=QKV),
    "qwen3": Architecture("qwen3", "Qwen3ForCausalLM"),
    "qwen2_moe": Architecture(
        "qwen2moe",
        "Qwen2MoeForCausalLM",
        biases=QKV,
        normalized=False,
        write=_qwen2_moe_write,
        read=_qwen2_moe_read,
        expects=("moe_intermediate_size",),
    ),
    "qwen3_moe": Architecture(
        "qwen3moe",
        "Qwen3MoeForCausalLM",
        normalized=True,
        config={"norm_topk_prob": True},
        expects=("moe_intermediate_size",),
    ),
    "gemma": Architecture("gemma", "GemmaForCausalLM", activation="gelu_tanh"),
    "gemma2": Architecture(
        "gemma2",
        "Gemma2ForCausalLM",
        activation="gelu_tanh",
        own_scale=True,
        windows=True,
        refusal=_gemma_refusal(46, 2),
        write=_gemma2_write,
        read=_gemma2_read,
    ),
    "gemma3_text": Architecture(
        "gemma3",
        "Gemma3ForCausalLM",
        activation="gelu_tanh",
        own_scale=True,
        several_ropes=True,
        windows=True,
        refusal=_gemma_refusal(62, 6),
        write=_gemma3_write,
        read=_gemma3_read,
    ),
    "phi3": Architecture("phi3", "Phi3ForCausalLM"),
    "olmo2": Architecture("olmo2", "Olmo2ForCausalLM"),
    "olmoe": Architecture(
        "olmoe", "OlmoeForCausalLM", normalized=False, refusal=_grouped_refusal, config={"norm_topk_prob": False}
    ),
    "smollm3": Architecture("smollm3", "SmolLM3ForCausalLM", permuted=True, refusal=_smollm3_refusal),
    "seed_oss": Architecture("seed_oss", "SeedOssForCausalLM", biases=QKV, names={"mlp_norm": "post_attention_norm"}),
    "granite": Architecture(
        "granite",
        "GraniteForCausalLM",
        permuted=True,
        own_scale=True,
        biases=ALL_BIASES,
        write=_granite_write,
        read=_granite_read,
    ),
    "arcee": Architecture(
        "arcee", "ArceeForCausalLM", activation="relu2", permuted=True, config={"hidden_act": "relu2"}
    ),
    "starcoder2": Architecture(
        "starcoder2",
        "Starcoder2ForCausalLM",
        activation="gelu_tanh",
        biases=ALL_BIASES,
        norm_field="norm_epsilon",
        config={"hidden_act": "gelu_pytorch_tanh"},
    ),
    "stablelm": Architecture("stablelm", "StableLmForCausalLM", biases=QKV),
    "olmo3": Architecture(
        "olmo2",
        "Olmo3ForCausalLM",
        windows=True,
        several_ropes=True,
        refusal=_olmo3_refusal,
        write=lambda spec: {WINDOW: _window(spec)},
        read=_olmo3_read,
        chosen=lambda metadata: bool(metadata.get(WINDOW)),
    ),
    "hunyuan_v1_dense": Architecture("hunyuan-dense", "HunYuanDenseV1ForCausalLM"),
    "granitemoe": Architecture(
        "granitemoe",
        "GraniteMoeForCausalLM",
        permuted=True,
        normalized=True,
        own_scale=True,
        write=_granite_write,
        read=lambda metadata: _granite_read(metadata) | {"num_local_experts": metadata["expert_count"]},
    ),
    "granitemoeshared": Architecture(
        "granitemoe",
        "GraniteMoeSharedForCausalLM",
        permuted=True,
        normalized=True,
        own_scale=True,
        parted_gate_up=True,
        write=lambda spec: _granite_write(spec) | _qwen2_moe_write(spec),
        read=_granite_shared_read,
        chosen=lambda metadata: "expert_shared_feed_forward_length" in metadata,
    ),
    "dots1": Architecture("dots1", "Dots1ForCausalLM", routed=True, refusal=_dots1_refusal, read=deepseek_fields),
    "glm4_moe": Architecture(
        "glm4moe",
        "Glm4MoeForCausalLM",
        biases=QKV,
        names={"mlp_norm": "post_attention_norm"},
        routed=True,
        read=deepseek_fields,
    ),
    "minimax_m2": Architecture(
        "minimax-m2", "MiniMaxM2ForCausalLM", routed=True, refusal=_minimax_refusal, read=_minimax_read
    ),
    **LAYER_NORMS,
    **LATENT,
    **HYBRID,
    **STATE_SPACE,
    **WINDOWED,
    **GEMMA4,
    **GEMMA3N,
}
# model_type -> why it is not written.
ABSENT = {
    "ministral": "llama.cpp has no such architecture",
    "phimoe": "llama.cpp weighs a token's two experts by one softmax, and the model by the sparse mixer",
    "apertus": "llama.cpp has the trained numbers of its activation in the metadata, which are written before weights",
    "baichuan": "llama.cpp takes the rows of its head as they are, and the model as vectors of length one",
}
