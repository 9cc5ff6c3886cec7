"""Reading DeepSeek V3's mixture of experts from a config (https://arxiv.org/abs/2412.19437), which other families have
too: a sigmoid router with a correction, experts in groups, a shared expert, dense layers before the sparse ones."""

from __future__ import annotations

import dataclasses
from typing import Any

from meshtune.families.config_fields import ConfigFields
from meshtune.families.experts import expert_count, experts_spec
from meshtune.families.tensors import Stored, View
from meshtune.model.experts import ExpertsSpec
from meshtune.model.mlp import MlpSpec

CORRECTION = {"mlp/router/correction": Stored("mlp.gate.e_score_correction_bias", "mlp.gate", View.identity)}


def sigmoid_experts(fields: ConfigFields, *, shared: str = "n_shared_experts") -> ExpertsSpec:
    """Routed experts with V3's router, and a shared one as wide as `shared` of them (a field's name)."""
    fields.only("scoring_func", "sigmoid")
    fields.only("topk_method", "noaux_tc")
    router = {
        "scoring": "sigmoid",
        "normalize": bool(fields.get("norm_topk_prob", True)),
        "epsilon": 1e-20,
        "scale": fields.number("routed_scaling_factor"),
        "correction": True,
        "float32": True,
        **read_groups(fields),
    }
    return with_shared(experts_spec(fields, router=router), fields.integer(shared, 1))


def read_groups(fields: ConfigFields) -> dict[str, Any]:
    """The fields of RouterSpec that say in how many groups experts are, and from how many of them they are chosen.

    Raises UserError for groups of different sizes, and for more experts than there are in the chosen groups.
    """
    groups, chosen, experts = fields.integer("n_group", 1), fields.integer("topk_group", 1), expert_count(fields)
    if experts % groups:
        raise fields.error("n_group", f"{experts} experts do not divide into {groups} groups")
    if chosen > groups:
        raise fields.error("topk_group", f"topk_group is {chosen}, and there are {groups} groups of experts")
    if groups > 1 and fields.integer("num_experts_per_tok") > (available := chosen * experts // groups):
        raise fields.error(
            "num_experts_per_tok",
            f"{fields.integer('num_experts_per_tok')} experts compute a token, and the {chosen} groups that they are "
            f"chosen from have {available}",
        )
    return {"groups": groups, "top_groups": chosen}


def with_shared(experts: ExpertsSpec, count: int, **switches: Any) -> ExpertsSpec:
    """With a shared expert of `count` times the width of a routed one; `switches` are fields of its MlpSpec."""
    return dataclasses.replace(experts, shared=MlpSpec(count * experts.width, experts.activation, **switches))


def are_sparse(fields: ConfigFields) -> list[bool]:
    """Which layers have experts: those after the first few, or those that mlp_layer_types names."""
    count, kinds = fields.integer("num_hidden_layers"), fields.get("mlp_layer_types")
    first = fields.get("first_k_dense_replace")
    if kinds is None:
        return [index >= first for index in range(count)]
    if not isinstance(kinds, list) or len(kinds) != count or not set(kinds) <= {"dense", "sparse"}:
        raise fields.error(
            "mlp_layer_types", f"mlp_layer_types must list dense or sparse for each of the {count} layers"
        )
    return [kind == "sparse" for kind in kinds]
