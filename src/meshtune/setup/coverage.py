"""Describes for the banner which parts of a model a method adapts or trains, with their counts, and warns of a
load-balancing loss that reaches no router. `train`, `plan` and `shard` show the same."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from meshtune.adapters.model_modules import ModelModules
from meshtune.adapters.targets import Module
from meshtune.adapters.training_method import Method
from meshtune.families.experts import has_experts
from meshtune.model.experts import ExpertsSpec
from meshtune.model.spec import ModelSpec
from meshtune.setup.choices import WARNING, Decision

# The blocks of a layer by the key of their parameters.
BLOCKS = {
    "attn": "attention",
    "delta": "gated delta nets",
    "mamba": "state spaces",
    "conv": "short convolutions",
    "mlp": "dense networks",
}
ROUTERS, SHARED, GATES = "routers", "shared experts", "gates of shared experts"


def coverage_decisions(method: Method, spec: ModelSpec) -> list[Decision]:
    """What has adapters, what is trained itself, and a warning where the load-balancing loss reaches no router.

    Of a dense model without adapters nothing is said. Raises UserError for a method that the model cannot have.
    """
    if method.adapters is None and not has_experts(spec):
        return []
    among = ModelModules.of(spec)
    selection, decisions = method.choose(among), []
    trained = {name: among.by_name[name] for name in selection.trained}
    frozen = _frozen_parts(among.by_name, {*selection.adapted, *trained}) if has_experts(spec) else ""
    if config := method.adapters:
        targets = config.targets if isinstance(config.targets, str) else ", ".join(config.targets)
        adapted = [among.by_name[name] for name in selection.adapted]
        decisions.append(Decision("adapters", f"on {_counted(adapted)}", f"{config.adapter}, {targets}{frozen}"))
    if trained:
        decisions.append(Decision("trained", _counted(trained.values()), f"in full{'' if decisions else frozen}"))
    decisions += _bias_update(spec)
    return decisions + _aux_loss_warning(method, spec, among.by_name, {*selection.adapted, *trained})


def _counted(modules: Iterable[Module]) -> str:
    """Modules as counts by part of the model, such as "128 experts in each of 48 layers (6,144), 192 linear layers of
    attention"."""
    modules = list(modules)
    counts: dict[str, int] = {}
    for module in modules:
        if module.role != "experts":
            counts[_part(module)] = counts.get(_part(module), 0) + 1
    routed = _counted_experts([module for module in modules if module.role == "experts"])
    return ", ".join([*routed, *(_counted_part(part, count) for part, count in counts.items())])


def _counted_experts(modules: list[Module]) -> list[str]:
    """The routed experts by their number in a layer; their matrices are named where they are not all of them."""
    matrices: dict[int | None, list[str]] = {}
    sizes: dict[int | None, int] = {}
    for module in modules:
        matrices.setdefault(module.layer, []).append(module.name.rpartition(".")[2])
        sizes[module.layer] = module.leaves["weight"].shape[0]
    kinds: dict[tuple[int, tuple[str, ...]], int] = {}
    for layer, names in matrices.items():
        kind = sizes[layer], tuple(names)
        kinds[kind] = kinds.get(kind, 0) + 1
    texts = []
    for (size, names), layers in kinds.items():
        where = f"in each of {layers} layers ({size * layers:,})" if layers > 1 else "in one layer"
        texts.append(f"{size} experts {where}: {', '.join(names)}")
    return texts


def _counted_part(part: str, count: int) -> str:
    if part in (ROUTERS, GATES, "norms") or part.startswith("others"):
        return f"{count} {part}"
    blocks = (SHARED, *BLOCKS.values())
    return f"{count} linear layers of {part}" if part in blocks else part


def _part(module: Module) -> str:
    """The part of the model that a module belongs to; of modules outside the layers their own name."""
    if module.layer is None:
        return module.name.rpartition(".")[2]
    if _routes(module):
        return ROUTERS
    if module.role == "router":
        return GATES
    if "/shared/" in module.node:
        return SHARED
    if module.role != "matrix":
        return "norms" if "norm" in module.site else "others"
    return next((BLOCKS[key] for key in module.site.split("/") if key in BLOCKS), module.site.split("/")[0])


def _frozen_parts(among: Mapping[str, Module], chosen: set[str]) -> str:
    """The parts of a mixture that stay as they are: routers, and experts where none of their matrices is chosen."""
    routers = [name for name, module in among.items() if _routes(module)]
    experts = [name for name, module in among.items() if module.role == "experts"]
    parts = [*["routed experts"] * chosen.isdisjoint(experts), *["routers"] * chosen.isdisjoint(routers)]
    return f"; {' and '.join(parts)} frozen" if parts else ""


def _bias_update(spec: ModelSpec) -> list[Decision]:
    """What moves by the load of experts, where model.router_bias_update_rate asks for it."""
    layers = [
        (kind.ffn.router.experts, kind.ffn.bias_update_rate, repeats)
        for _, repeats, kind, _ in spec.positions()
        if isinstance(kind.ffn, ExpertsSpec) and kind.ffn.bias_update_rate
    ]
    if not layers:
        return []
    experts, rate, _ = layers[0]
    value = f"of {experts} experts in each of {sum(repeats for *_, repeats in layers)} layers"
    reason = f"every update moves each by {rate:g} towards an even load; saved with checkpoints and the model"
    return [Decision("correction biases", value, reason)]


def _aux_loss_warning(method: Method, spec: ModelSpec, among: Mapping[str, Module], chosen: set[str]) -> list[Decision]:
    """A warning where the load-balancing loss is asked for and every router is frozen."""
    coefficient = max((block.aux_loss for block in spec.blocks if isinstance(block, ExpertsSpec)), default=0.0)
    routers = {name: module for name, module in among.items() if _routes(module)}
    if not coefficient or not chosen.isdisjoint(routers):
        return []
    last = max(module.layer for module in routers.values() if module.layer is not None)
    upstream = sum(_precedes(module, last) for name, module in among.items() if name in chosen)
    rows = method.adapters is not None and bool(method.adapters.token_rows)
    router = ".".join(next(iter(routers)).split(".")[-2:])
    switch = {
        "lora": f"method.train_modules: [{router}]",
        "freeze": f"method.modules: [.., {router}]",
        "full": "method.train_router: true",
    }
    remedy = f"{switch[method.kind]} trains the routers; else leave it out" if method.kind in switch else "leave it out"
    if upstream or rows:
        parts = f"{upstream} module{'s' * (upstream > 1)}" if upstream else "rows of the embedding"
        value = "model.router_aux_loss trains no router"
        reason = f"routers are frozen: it trains what lies before them ({parts}) to balance their load; {remedy}"
    else:
        value = "model.router_aux_loss has no effect"
        reason = f"routers are frozen, and so is all that lies before them; {remedy}"
    return [Decision(WARNING, value, reason)]


def _precedes(module: Module, layer: int) -> bool:
    """Whether a module computes something that the router of this layer reads."""
    if module.layer is None:
        return module.node not in ("norm", "head", "score")
    if module.layer != layer:
        return module.layer < layer
    return module.site.split("/")[0] not in ("mlp", "mlp_post_norm")


def _routes(module: Module) -> bool:
    """Whether a module is a router, or scales its input or result."""
    return "router" in module.node.split("/")
