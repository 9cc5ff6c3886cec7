"""How tokens are routed to experts, as files of architectures say that leave it open."""

from __future__ import annotations

from typing import Any

from meshtune.families.gguf.architecture import Metadata
from meshtune.model.experts import ExpertsSpec
from meshtune.model.spec import ModelSpec

GATING = {"softmax": 1, "sigmoid": 2}


def routing_refusal(spec: ModelSpec, block: ExpertsSpec, grouped: bool = False) -> str | None:
    """What llama.cpp does not compute of a router, or of the order of layers; None where there is nothing. `grouped`
    says that it chooses experts in groups, by the sum of a group's two best."""
    router = block.router
    if router.groups > 1 and not (router.group_score == 2 and grouped):
        return "experts are chosen in groups (n_group)"
    if router.scoring not in GATING:
        return f"a router of type '{router.scoring}'"
    routed = routed_layers(spec)
    return None if routed == sorted(routed) else "layers without experts after those that have them"


def routed_layers(spec: ModelSpec) -> list[bool]:
    """Whether each layer has experts."""
    routed: dict[int, bool] = {}
    for _, _, layer, numbers in spec.positions():
        routed |= dict.fromkeys(numbers, isinstance(layer.ffn, ExpertsSpec))
    return [routed[number] for number in sorted(routed)]


def routing_metadata(spec: ModelSpec, block: ExpertsSpec) -> dict[str, Any]:
    """The keys of a router and of shared experts."""
    shared = 0 if block.shared is None else block.shared.width // block.width
    groups = {"expert_group_count": block.router.groups, "expert_group_used_count": block.router.top_groups}
    return (groups if block.router.groups > 1 else {}) | {
        "expert_gating_func": GATING[block.router.scoring],
        "expert_weights_norm": block.router.normalize,
        "expert_weights_scale": float(block.router.scale),
        "expert_shared_count": shared,
        "leading_dense_block_count": routed_layers(spec).count(False),
    }


def deepseek_fields(metadata: Metadata) -> dict[str, Any]:
    """The fields of a config that names experts as DeepSeek's do."""
    return {
        "n_routed_experts": metadata["expert_count"],
        "num_experts_per_tok": metadata["expert_used_count"],
        "moe_intermediate_size": metadata["expert_feed_forward_length"],
        "n_shared_experts": metadata.get("expert_shared_count", 0),
        "first_k_dense_replace": metadata.get("leading_dense_block_count", 0),
        "routed_scaling_factor": metadata.get("expert_weights_scale", 1.0),
        "norm_topk_prob": bool(metadata.get("expert_weights_norm", False)),
        "n_group": metadata.get("expert_group_count", 1),
        "topk_group": metadata.get("expert_group_used_count", 1),
    }
