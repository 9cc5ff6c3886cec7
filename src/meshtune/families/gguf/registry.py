"""Every model_type that is written as GGUF and read from it, by llama.cpp's architecture."""

from __future__ import annotations

import dataclasses
from typing import Any

from meshtune.families.gguf.apertus import APERTUS
from meshtune.families.gguf.architecture import (
    ALL_BIASES,
    QKV,
    WINDOW,
    Architecture,
    Metadata,
    attention,
    experts,
    layer_windows,
)
from meshtune.families.gguf.baichuan import BAICHUAN
from meshtune.families.gguf.gemma import GEMMA, longest_window
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
    expected = [None if (number + 1) % 4 == 0 else longest_window(spec) for number in range(spec.layers)]
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
    "ministral": dataclasses.replace(LLAMA, class_name="MinistralForCausalLM"),
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
        head="own",
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
    "phi3": Architecture("phi3", "Phi3ForCausalLM"),
    "olmo2": Architecture("olmo2", "Olmo2ForCausalLM", head="own"),
    "olmoe": Architecture(
        "olmoe",
        "OlmoeForCausalLM",
        head="own",
        normalized=False,
        refusal=_grouped_refusal,
        config={"norm_topk_prob": False},
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
    "stablelm": Architecture("stablelm", "StableLmForCausalLM", head="own", biases=QKV),
    "olmo3": Architecture(
        "olmo2",
        "Olmo3ForCausalLM",
        head="own",
        windows=True,
        several_ropes=True,
        refusal=_olmo3_refusal,
        write=lambda spec: {WINDOW: longest_window(spec)},
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
    "dots1": Architecture(
        "dots1", "Dots1ForCausalLM", head="own", routed=True, refusal=_dots1_refusal, read=deepseek_fields
    ),
    "glm4_moe": Architecture(
        "glm4moe",
        "Glm4MoeForCausalLM",
        biases=QKV,
        names={"mlp_norm": "post_attention_norm"},
        routed=True,
        read=deepseek_fields,
    ),
    "minimax_m2": Architecture(
        "minimax-m2", "MiniMaxM2ForCausalLM", head="own", routed=True, refusal=_minimax_refusal, read=_minimax_read
    ),
    "apertus": APERTUS,
    "baichuan": BAICHUAN,
    **LAYER_NORMS,
    **LATENT,
    **HYBRID,
    **STATE_SPACE,
    **WINDOWED,
    **GEMMA,
    **GEMMA4,
    **GEMMA3N,
}
# model_type -> why it is not written.
ABSENT = {
    "phimoe": "llama.cpp weighs a token's two experts by one softmax and not by the sparse mixer, and has root mean "
    "square norms in place of its layer norms: the file would give other answers than the model",
}
