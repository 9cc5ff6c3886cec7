"""Architectures of older design, most of them with layer norms and biases, and those that followed them."""

from __future__ import annotations

from typing import Any

from meshtune.families.gguf.architecture import (
    QKV,
    WINDOW,
    Architecture,
    Metadata,
    attention,
    integer,
    layer_windows,
    windows,
)
from meshtune.model.spec import ModelSpec

ATTENTION = QKV | {"attn/o"}
LAYERS_OF_R_PLUS = 64
PLAIN_MLP = frozenset({"mlp/up", "mlp/down"})


def _logit_scale(spec: ModelSpec) -> dict[str, Any]:
    return {"logit_scale": spec.logit_scale if spec.logit_scale is not None else 1.0}


def _cohere_read(metadata: Metadata) -> dict[str, Any]:
    return {"logit_scale": metadata["logit_scale"]}


def _cohere_refusal(spec: ModelSpec) -> str | None:
    mixer = attention(spec)
    if (mixer.qk_norm is not None) != (spec.layers >= LAYERS_OF_R_PLUS):
        return f"use_qk_norm: llama.cpp has such norms in models of {LAYERS_OF_R_PLUS} layers and more"
    return None


def _wide_refusal(spec: ModelSpec) -> str | None:
    mixer = attention(spec)
    same = mixer.heads * mixer.head_dim == spec.embed
    return None if same else "heads that are not together as wide as the hidden state"


def _plain_refusal(spec: ModelSpec) -> str | None:
    return None if attention(spec).qk_norm is None else "queries and keys are normalised (qk_layernorm)"


def _cohere2_refusal(spec: ModelSpec) -> str | None:
    expected = [None if (number + 1) % 4 == 0 else _window(spec) for number in range(spec.layers)]
    return None if layer_windows(spec) == expected else "layer_types: llama.cpp has another order of windows"


def _window(spec: ModelSpec) -> int | None:
    return next((window for window in windows(spec) if window is not None), None)


def _cohere2_write(spec: ModelSpec) -> dict[str, Any]:
    return {WINDOW: _window(spec), **_logit_scale(spec)}


def _cohere2_read(metadata: Metadata) -> dict[str, Any]:
    return {"logit_scale": metadata["logit_scale"], "sliding_window": metadata[WINDOW], "sliding_window_pattern": 4}


def _gpt2_read(metadata: Metadata) -> dict[str, Any]:
    return {
        "n_embd": integer(metadata, "embedding_length"),
        "n_layer": integer(metadata, "block_count"),
        "n_head": integer(metadata, "attention.head_count"),
        "n_positions": integer(metadata, "context_length"),
        "n_inner": integer(metadata, "feed_forward_length"),
        "activation_function": "gelu_new",
    }


def _parallel(spec: ModelSpec) -> dict[str, Any]:
    return {"use_parallel_residual": spec.layer_kinds[0].placement.startswith("parallel")}


def _parallel_read(metadata: Metadata) -> dict[str, Any]:
    return {"use_parallel_residual": bool(metadata["use_parallel_residual"])}


def _falcon_refusal(spec: ModelSpec) -> str | None:
    if attention(spec).rope is None:
        return "biases by distance (ALiBi)"
    return None if spec.layer_kinds[0].placement.startswith("parallel") else "blocks in sequence"


def _falcon_names(spec: ModelSpec) -> dict[str, str]:
    return (
        {}
        if spec.layer_kinds[0].placement == "parallel_shared"
        else {"attn_norm": "attn_norm_2", "mlp_norm": "attn_norm"}
    )


def _falcon_read(metadata: Metadata) -> dict[str, Any]:
    heads = integer(metadata, "attention.head_count_kv")
    return {
        "new_decoder_architecture": heads > 1,
        "multi_query": heads == 1,
        "num_kv_heads": heads,
        "ffn_hidden_size": integer(metadata, "feed_forward_length"),
        "parallel_attn": True,
        "bias": False,
        "alibi": False,
    }


def _olmo_write(spec: ModelSpec) -> dict[str, Any]:
    clip = attention(spec).clip
    return {} if clip is None else {"attention.clamp_kqv": clip}


def _olmo_read(metadata: Metadata) -> dict[str, Any]:
    return {"clip_qkv": metadata.get("attention.clamp_kqv") or None}


LAYER_NORMS: dict[str, Architecture] = {
    "cohere": Architecture(
        "command-r",
        "CohereForCausalLM",
        head="embedding",
        refusal=_cohere_refusal,
        write=_logit_scale,
        read=_cohere_read,
    ),
    "cohere2": Architecture(
        "cohere2",
        "Cohere2ForCausalLM",
        head="embedding",
        windows=True,
        refusal=_cohere2_refusal,
        write=_cohere2_write,
        read=_cohere2_read,
    ),
    "gpt2": Architecture(
        "gpt2",
        "GPT2LMHeadModel",
        activation="gelu_tanh",
        biases=frozenset({"attn/qkv", "attn/o"}) | PLAIN_MLP,
        norm_field="layer_norm_epsilon",
        read=_gpt2_read,
        without=("rope_parameters",),
    ),
    "gpt_neox": Architecture(
        "gptneox",
        "GPTNeoXForCausalLM",
        head="own",
        activation="gelu",
        biases=frozenset({"attn/qkv", "attn/o"}) | PLAIN_MLP,
        write=_parallel,
        read=_parallel_read,
    ),
    "phi": Architecture(
        "phi2",
        "PhiForCausalLM",
        refusal=_plain_refusal,
        activation="gelu_tanh",
        biases=ATTENTION | PLAIN_MLP | {"head"},
        config={"hidden_act": "gelu_new"},
    ),
    "falcon": Architecture(
        "falcon",
        "FalconForCausalLM",
        activation="gelu",
        norm_field="layer_norm_epsilon",
        refusal=_falcon_refusal,
        named=_falcon_names,
        read=_falcon_read,
    ),
    "nemotron": Architecture(
        "nemotron",
        "NemotronForCausalLM",
        head="own",
        activation="relu2",
        biases=ATTENTION | PLAIN_MLP,
        norm_field="norm_eps",
        config={"hidden_act": "relu2"},
    ),
    "olmo": Architecture(
        "olmo", "OlmoForCausalLM", permuted=True, write=_olmo_write, read=_olmo_read, without=("layer_norm_eps",)
    ),
    "glm": Architecture("chatglm", "GlmForCausalLM", biases=QKV, refusal=_wide_refusal),
    "glm4": Architecture("glm4", "Glm4ForCausalLM", biases=QKV),
    "ernie4_5": Architecture("ernie4_5", "Ernie4_5ForCausalLM"),
}
