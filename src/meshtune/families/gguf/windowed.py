"""Architectures of newer design whose layers differ in their windows or rotary embeddings."""

from __future__ import annotations

from typing import Any

from meshtune.families.gguf.architecture import (
    QKV,
    WINDOW,
    Architecture,
    Metadata,
    experts,
    layer_windows,
)
from meshtune.model.spec import ModelSpec

OSS_LIMIT = 7.0  # of the activation of gpt-oss, which llama.cpp has as a constant


def window(spec: ModelSpec) -> int | None:
    """The sliding window of the layers that have one."""
    return next((number for number in layer_windows(spec) if number is not None), None)


def other_windows(spec: ModelSpec, period: int) -> str | None:
    """What llama.cpp does not compute where it expects every layer of `period`, but the last, to have a window."""
    expected = [None if (number + 1) % period == 0 else window(spec) for number in range(spec.layers)]
    return None if layer_windows(spec) == expected else "layer_types: llama.cpp has another order of windows"


def _oss_refusal(spec: ModelSpec) -> str | None:
    block = experts(spec)
    if block is None or block.clamp != OSS_LIMIT:
        return f"swiglu_limit is not {OSS_LIMIT:g}"
    return other_windows(spec, 2)


def _oss_read(metadata: Metadata) -> dict[str, Any]:
    return {
        "num_local_experts": metadata["expert_count"],
        "intermediate_size": metadata["expert_feed_forward_length"],
        "sliding_window": metadata[WINDOW],
    }


def _oss_rope(block: dict[str, Any]) -> dict[str, Any]:
    """Published models have YaRN without rounded bounds, which files do not say."""
    return block | {"truncate": False} if block["rope_type"] == "yarn" else block


WINDOWED: dict[str, Architecture] = {
    "gpt_oss": Architecture(
        "gpt-oss",
        "GptOssForCausalLM",
        windows=True,
        biases=QKV | {"attn/o", "mlp/router", *(f"mlp/experts/{name}" for name in ("gate", "up", "down"))},
        names={"mlp_norm": "post_attention_norm"},
        normalized=True,
        rounded_yarn=True,
        refusal=_oss_refusal,
        write=lambda spec: {WINDOW: window(spec)},
        read=_oss_read,
        rope=_oss_rope,
        without=("num_experts",),
    ),
}
