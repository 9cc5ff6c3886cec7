"""Mixtures of experts in configs and files, as families share them.

A family builds an `ExpertsSpec` with `experts_spec`, and adds `expert_modules(spec, ..)` to the modules of its table.
Checkpoints hold each expert's matrices by themselves, or those of all experts in one tensor (as transformers 5 has them
in memory): `families.as_stored` finds out which, and a model is written in the layout that was read.

Reading DeepSeek V3's mixture of experts from a config (https://arxiv.org/abs/2412.19437), which other families have
too: a sigmoid router with a correction, experts in groups, a shared expert, dense layers before the sparse ones.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

from meshtune.families.config_fields import ConfigFields, read_activation
from meshtune.families.tensors import Shape, Stored, View
from meshtune.model.experts import ExpertsSpec, RouterSpec
from meshtune.model.layer import LayerSpec
from meshtune.model.mlp import MlpSpec
from meshtune.model.spec import ModelSpec

MOST_EXPERTS = 200_000  # of all layers, a table of which would take all memory; published models have up to 25,000
NAMES = {"gate": "gate_proj", "up": "up_proj", "down": "down_proj"}
# The parameters of transformers' experts modules, with all experts of a layer in each.
PARAMETERS = {"gate": "gate_up_proj", "up": "gate_up_proj", "down": "down_proj"}


def experts_spec(
    fields: ConfigFields,
    *,
    width: str = "moe_intermediate_size",
    top_k: str = "num_experts_per_tok",
    activation: str = "hidden_act",
    router: Mapping[str, Any],
    **switches: Any,
) -> ExpertsSpec:
    """A mixture of experts from the usual fields; `width` and `top_k` name two of them.

    `router` are fields of RouterSpec, `switches` of ExpertsSpec. The load-balancing loss is left out, as transformers
    leaves it out unless output_router_logits is set.
    Raises UserError for more experts per token than there are, and for an unknown activation.
    """
    experts = expert_count(fields)
    chosen = fields.integer(top_k)
    if chosen > experts:
        raise fields.error(
            top_k,
            f"{top_k} is {chosen}, and there are {experts} experts",
            f"give a number from 1 to {experts}, as the model was trained",
        )
    if (total := experts * fields.integer("num_hidden_layers")) > MOST_EXPERTS:
        raise fields.error(
            "num_hidden_layers",
            f"the layers have {total:,} experts, and at most {MOST_EXPERTS:,} can be",
            "give the config.json that was published with the model",
        )
    fields.get("output_router_logits")
    fields.get("router_aux_loss_coef")
    if "jitter" not in router:
        fields.only("router_jitter_noise", 0, 0.0)
    return ExpertsSpec(
        RouterSpec(experts, chosen, **router),
        fields.integer(width),
        fields.integer("num_hidden_layers"),
        activation=read_activation(fields, activation),
        **switches,
    )


def expert_count(fields: ConfigFields) -> int:
    """The number of experts, which transformers 5 and earlier versions call by different names."""
    names = ("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts")
    counts = {name: fields.get(name) for name in names}
    counts = {name: count for name, count in counts.items() if count is not None}
    if len(set(counts.values())) > 1:
        raise fields.error(next(iter(counts)), f"the number of experts is given twice: {counts}")
    return fields.integer(next(iter(counts), "num_experts"))


def sparse_layers(fields: ConfigFields, sparse: LayerSpec, dense: LayerSpec) -> list[LayerSpec]:
    """Every decoder_sparse_step-th layer is sparse, but for those in mlp_only_layers."""
    step, dense_layers = fields.integer("decoder_sparse_step", 1), set(fields.get("mlp_only_layers", ()))
    return [
        sparse if (index + 1) % step == 0 and index not in dense_layers else dense
        for index in range(fields.integer("num_hidden_layers"))
    ]


def expert_modules(
    spec: ModelSpec,
    *,
    block: str = "mlp",
    router: str = "gate",
    names: Mapping[str, str] = NAMES,
    memory: str = "mlp",
) -> dict[str, str | Stored]:
    """The modules of a table of tensors that a mixture of experts adds.

    In files with one tensor per matrix, `block` is the module of the mixture, `router` that of the router in it, and
    `names` are those of an expert's matrices. With all experts in one tensor every family has the names of
    transformers 5, in which `memory` is the module of the mixture.
    """
    if not spec.fused_experts:
        per_expert = {
            f"mlp/experts/{node}": Stored(
                f"{block}.experts.{{}}.{name}",
                f"{block}.experts.{name}",
                parameter=f"{memory}.experts.{PARAMETERS[node]}",
            )
            for node, name in names.items()
        }
        module = f"{block}.{router}"
        if block == memory:
            return {"mlp/router": module, **per_expert}
        weight = Stored(f"{module}.weight", module, View.identity, parameter=f"{memory}.gate.weight")
        return {"mlp/router/weight": weight, **per_expert}
    return {"mlp/router": f"{memory}.gate", **fused_modules(f"{memory}.experts")}


def fused_modules(experts: str, files: Mapping[str, str] = {}) -> dict[str, str | Stored]:
    """The routed experts with all of a layer in one tensor: [E, 2 F, D], the gate before up, and [E, D, F].

    `experts` is transformers' experts module, `files` the tensors' names in files where they are not its parameters'.
    """

    def place_in_file(node: str, view: Callable[[Shape], View]) -> Stored:
        parameter = PARAMETERS[node]
        name = files.get(parameter, f"{experts}.{parameter}")
        return Stored(name, f"{experts}.{NAMES[node]}", view, parameter=f"{experts}.{parameter}")

    views = {"gate": _first_half, "up": _second_half, "down": View.identity}
    return {f"mlp/experts/{node}": place_in_file(node, view) for node, view in views.items()}


def plain_modules(spec: ModelSpec, experts: str) -> dict[str, Stored]:
    """The routed experts of a family whose experts have no gate; `experts` is transformers' experts module. Files have
    their matrices one by one, or all of a layer in one tensor: [E, F, D] and [E, D, F]."""

    def place_in_file(name: str) -> Stored:
        parameter = f"{experts}.{name}"
        if spec.fused_experts:
            return Stored(parameter, parameter, View.identity)
        return Stored(f"{experts}.{{}}.{name}", parameter, parameter=parameter)

    return {f"mlp/experts/{node}": place_in_file(NAMES[node]) for node in ("up", "down")}


def shared_modules(name: str, block: str = "mlp") -> dict[str, str]:
    """The modules of a table of tensors that a shared expert adds: `name` is its module in the module `block`."""
    return {f"mlp/shared/{node}": f"{block}.{name}.{matrix}" for node, matrix in NAMES.items()}


def _first_half(shape: Shape) -> View:
    return _half(shape, 0)


def _second_half(shape: Shape) -> View:
    return _half(shape, 1)


def _half(shape: Shape, part: int) -> View:
    """A part [E, F, D] of a tensor [E, 2 F, D]."""
    experts, width, embed = shape
    tensor = View.identity((experts, 2 * width, embed))
    return tensor.split(experts, 2, width, embed).slice(1, part, part + 1).merge(experts, width, embed)


def column_half(shape: Shape, part: int) -> View:
    """Half `part` of the columns of a tensor [E, D, 2 F], as [E, F, D]."""
    experts, width, embed = shape
    tensor = View.identity((experts, embed, 2 * width)).split(experts, embed, 2, width)
    return tensor.slice(2, part, part + 1).transpose(0, 2, 3, 1).merge(experts, width, embed)


def transpose_experts(shape: Shape) -> View:
    """A tensor [E, F, D] as [E, D, F]."""
    experts, embed, width = shape
    return View.identity((experts, width, embed)).transpose(0, 2, 1)


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
