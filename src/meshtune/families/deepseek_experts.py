"""Mixtures of experts as DeepSeek V3 has them, which many later families share: a sigmoid router with a correction for
each expert, shared experts beside the routed ones, and dense layers before the sparse ones."""

from __future__ import annotations

import dataclasses
from typing import Any

from meshtune.families.config_fields import ConfigFields
from meshtune.families.tensors import Stored, View
from meshtune.model.experts import ExpertsSpec
from meshtune.model.layer import LayerSpec
from meshtune.model.mlp import MlpSpec

SHARED = {
    "mlp/shared/gate": "mlp.shared_experts.gate_proj",
    "mlp/shared/up": "mlp.shared_experts.up_proj",
    "mlp/shared/down": "mlp.shared_experts.down_proj",
}
CORRECTION = {"mlp/router/correction": Stored("mlp.gate.e_score_correction_bias", "mlp.gate", View.identity)}


def sigmoid_router(fields: ConfigFields) -> dict[str, Any]:
    """The fields of a RouterSpec that chooses by sigmoid scores and corrections, from the best groups of experts."""
    fields.only("scoring_func", "sigmoid")
    fields.only("topk_method", "noaux_tc")
    return {
        "scoring": "sigmoid",
        "normalize": bool(fields.get("norm_topk_prob", True)),
        "epsilon": 1e-20,
        "scale": fields.number("routed_scaling_factor", 1.0),
        "correction": True,
        "groups": fields.get("n_group", 1),
        "top_groups": fields.get("topk_group", 1),
        "float32": True,
    }


def with_shared_experts(fields: ConfigFields, experts: ExpertsSpec, count: int = 1) -> ExpertsSpec:
    """With n_shared_experts (`count` where the config does not say) as one network of their width."""
    width = experts.width * fields.integer("n_shared_experts", count)
    return dataclasses.replace(experts, shared=MlpSpec(width, experts.activation))


def dense_then_sparse(fields: ConfigFields, dense: LayerSpec, experts: ExpertsSpec) -> list[LayerSpec]:
    """The layers: dense ones first, as many as first_k_dense_replace says, or those that mlp_layer_types names."""
    count, kinds = fields.integer("num_hidden_layers"), fields.get("mlp_layer_types")
    first, sparse = fields.get("first_k_dense_replace", 0), dataclasses.replace(dense, ffn=experts)
    if kinds is None:
        return [sparse if index >= first else dense for index in range(count)]
    if not isinstance(kinds, list) or len(kinds) != count or not set(kinds) <= {"dense", "sparse"}:
        raise fields.error(
            "mlp_layer_types", f"mlp_layer_types must list dense or sparse for each of the {count} layers"
        )
    return [sparse if kind == "sparse" else dense for kind in kinds]
