"""Describes for the banner which parts of a model a method adapts or trains, and how its base is quantised. `train`,
`plan` and `shard` show the same.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Mapping

import jax

from meshtune.adapters.method import PreparedModel
from meshtune.adapters.model_modules import ModelModules
from meshtune.adapters.targets import Module
from meshtune.adapters.training_method import Method, VisionTraining
from meshtune.arrays.tree import flatten, layer_site
from meshtune.families import tensors
from meshtune.families.balancing import has_experts
from meshtune.families.quantised import is_quantised
from meshtune.mesh.layout import Layout
from meshtune.model.spec import ModelSpec
from meshtune.quantize.config import QuantizeConfig
from meshtune.quantize.weight import QuantisedWeight
from meshtune.setup.choices import WARNING, Decision
from meshtune.translatable import Translatable, join_parts

# The blocks of a layer by the key of their parameters.
BLOCKS = {
    "attn": Translatable("attention"),
    "delta": Translatable("gated delta nets"),
    "mamba": Translatable("state spaces"),
    "conv": Translatable("short convolutions"),
    "mlp": Translatable("dense networks"),
}
SHARED = Translatable("shared experts")
VISION_PARTS = {"tower": Translatable("the vision tower"), "projector": Translatable("the projector")}
ROUTERS, GATES = Translatable("routers"), Translatable("gates of shared experts")
NORMS, REMAINDER = Translatable("norms"), Translatable("others")


def coverage_decisions(method: Method, spec: ModelSpec, vision: VisionTraining | None = None) -> list[Decision]:
    """Describes which modules have adapters and which are trained, and warns of a load-balancing loss that reaches no
    router. `vision` is what is trained of a model that sees.

    Returns [] for a dense model without adapters. Raises UserError for a method that the model cannot have.
    """
    if method.adapters is None and not has_experts(spec) and vision is None:
        return []
    among = ModelModules.of(spec)
    selection, decisions = among.choose(method, vision), []
    trained = {name: among.by_name[name] for name in selection.trained}
    frozen = _frozen_parts(among.by_name, {*selection.adapted, *trained}) if has_experts(spec) else None
    if config := method.adapters:
        targets = config.targets if isinstance(config.targets, str) else ", ".join(config.targets)
        adapted = [among.by_name[name] for name in selection.adapted]
        value, reason = Translatable("on {parts}", parts=_count_parts(adapted)), join_parts((config.adapter, targets))
        decisions.append(Decision("adapters", value, _with_frozen(reason, frozen)))
    if trained:
        reason = _with_frozen(Translatable("in full"), None if decisions else frozen)
        decisions.append(Decision("trained", _count_parts(trained.values()), reason))
    decisions += _bias_update(spec)
    return decisions + _aux_loss_warning(method, spec, among.by_name, {*selection.adapted, *trained})


def _count_parts(modules: Iterable[Module]) -> str:
    """Modules as counts by part of the model, such as "128 experts in each of 48 layers (6,144), 192 linear layers of
    attention"."""
    modules = list(modules)
    counts: dict[str, int] = {}
    for module in modules:
        if module.role != "experts":
            counts[_part(module)] = counts.get(_part(module), 0) + 1
    routed = _counted_experts([module for module in modules if module.role == "experts"])
    return join_parts([*routed, *(_counted_part(part, count) for part, count in counts.items())])


def _with_frozen(reason: str, frozen: str | None) -> str:
    return reason if frozen is None else Translatable("{reason}; {parts} frozen", reason=reason, parts=frozen)


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
        matrix_names = ", ".join(names)
        if layers > 1:
            text = Translatable(
                "{count} experts in each of {layers} layers ({total}): {matrices}",
                count=size,
                layers=layers,
                total=f"{size * layers:,}",
                matrices=matrix_names,
            )
        else:
            text = Translatable("{count} experts in one layer: {matrices}", count=size, matrices=matrix_names)
        texts.append(text)
    return texts


def _counted_part(part: str, count: int) -> str:
    if part in VISION_PARTS.values():
        return Translatable("{count} modules of {part}", count=count, part=part)
    if part in (ROUTERS, GATES, NORMS, REMAINDER):
        return Translatable("{count} {part}", count=count, part=part)
    if part in (SHARED, *BLOCKS.values()):
        return Translatable("{count} linear layers of {part}", count=count, part=part)
    return part


def _part(module: Module) -> str:
    """The part of the model that a module belongs to; of modules outside the layers their own name."""
    if module.part != "language":
        return VISION_PARTS[module.part]
    if module.layer is None:
        return module.name.rpartition(".")[2]
    if _routes(module):
        return ROUTERS
    if module.role == "router":
        return GATES
    if "/shared/" in module.node:
        return SHARED
    if module.role != "matrix":
        return NORMS if "norm" in module.site else REMAINDER
    return next((BLOCKS[key] for key in module.site.split("/") if key in BLOCKS), module.site.split("/")[0])


def _frozen_parts(among: Mapping[str, Module], chosen: set[str]) -> str | None:
    """Names the frozen parts of a mixture: routers, and experts if none of their matrices is chosen. None if there are
    none."""
    routers = [name for name, module in among.items() if _routes(module)]
    experts = [name for name, module in among.items() if module.role == "experts"]
    if chosen.isdisjoint(experts):
        return (
            Translatable("routed experts and routers") if chosen.isdisjoint(routers) else Translatable("routed experts")
        )
    return ROUTERS if chosen.isdisjoint(routers) else None


def _bias_update(spec: ModelSpec) -> list[Decision]:
    """Describes the biases that move by the load of experts, if model.router_bias_update_rate is set."""
    if not has_experts(spec):
        return []
    from meshtune.model.experts import ExpertsSpec

    layers = [
        (kind.ffn.router.experts, kind.ffn.bias_update_rate, repeats)
        for _, repeats, kind, _ in spec.positions()
        if isinstance(kind.ffn, ExpertsSpec) and kind.ffn.bias_update_rate
    ]
    if not layers:
        return []
    experts, rate, _ = layers[0]
    value = Translatable(
        "of {count} experts in each of {layers} layers", count=experts, layers=sum(repeats for *_, repeats in layers)
    )
    reason = Translatable(
        "every update moves each by {rate} towards an even load; saved with checkpoints and the model", rate=f"{rate:g}"
    )
    return [Decision("correction biases", value, reason)]


def _aux_loss_warning(method: Method, spec: ModelSpec, among: Mapping[str, Module], chosen: set[str]) -> list[Decision]:
    """A warning where the load-balancing loss is asked for and every router is frozen."""
    if not has_experts(spec):
        return []
    from meshtune.model.experts import ExpertsSpec

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
    remedy = Translatable("leave it out")
    if method.kind in switch:
        remedy = Translatable("{change} trains the routers; else leave it out", change=switch[method.kind])
    if upstream or rows:
        parts = Translatable("1 module") if upstream == 1 else Translatable("{count} modules", count=upstream)
        value = Translatable("model.router_aux_loss trains no router")
        reason = Translatable(
            "routers are frozen: it trains what lies before them ({parts}) to balance their load; {remedy}",
            parts=parts if upstream else Translatable("rows of the embedding"),
            remedy=remedy,
        )
    else:
        value = Translatable("model.router_aux_loss has no effect")
        reason = Translatable("routers are frozen, and so is all that lies before them; {remedy}", remedy=remedy)
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


def quantize_decisions(arrays: PreparedModel, layout: Layout | None, quantize: QuantizeConfig | None) -> list[Decision]:
    """Describes the format of the quantised weights, their bits, and which of them a mesh cannot split; of a checkpoint
    that is published quantised also the weights that are read wide."""
    weights = {path: x for path, x in flatten(arrays.frozen).items() if isinstance(x, QuantisedWeight)}
    decisions = _read_wide(arrays, set(weights), quantize)
    if not weights:
        return decisions
    for format in dict.fromkeys(weight.format for weight in weights.values()):
        of_format = {path: weight for path, weight in weights.items() if weight.format == format}
        stored_bytes = sum(array.nbytes for weight in of_format.values() for array in jax.tree.leaves(weight))
        numbers = sum(weight.size for weight in of_format.values())
        first = next(iter(of_format.values()))
        published = f"as published ({arrays.spec.published.method})" if arrays.spec.published else ""
        why = f"{published if first.is_published else 'asked for'}: {8 * stored_bytes / numbers:.2f} bits a weight"
        where = "" if len(of_format) == len(weights) else f", in {_sites(of_format)}"
        chosen = f"{format}, blocks of {first.block_size}" if first.is_published else str(first.config)
        decisions.append(Decision("quantize", chosen, f"{why} of {numbers:,}{where}"))
    uneven = [] if layout is None else [path for path, weight in weights.items() if _cut_short(weight, layout)]
    if uneven:
        blocks = f"blocks of {weights[uneven[0]].block_size} cannot be dealt out evenly in {_sites(uneven)}"
        why = f"{blocks}: whole rows are on each device"
        decisions.append(Decision("quantize", "whole", why))
    return decisions


def _read_wide(arrays: PreparedModel, coded: set[str], quantize: QuantizeConfig | None) -> list[Decision]:
    """Says which weights of a quantised checkpoint are read as unquantised numbers, and why."""
    scheme, spec = arrays.spec.published, arrays.spec
    if scheme is None or (quantize is not None and quantize.quantises):
        return []
    wide = [
        entry.path
        for entry in tensors(spec)
        if entry.path not in coded
        and is_quantised(entry.path, entry.array)
        and scheme.converts(entry.name.removesuffix(".weight"), entry.array)
    ]
    if not wide:
        return []
    why = f"published in {scheme.method}, "
    why += "and asked for wide" if quantize is not None else f"whose codes have no product here: {_sites(wide)}"
    return [Decision("quantize", spec.dtype, why)]


def _sites(paths: Iterable[str]) -> str:
    return ", ".join(dict.fromkeys(layer_site(path.removesuffix("/weight")) for path in paths))


def _cut_short(weight: QuantisedWeight, layout: Layout) -> bool:
    """Whether whole blocks keep a weight from being split as it would be were blocks of one number."""
    freely = dataclasses.replace(weight.codes, unit=1, shape=(*weight.codes.shape[:-1], weight.shape[-1]))
    free, bound = layout.of(freely), layout.of(weight.codes)
    share = math.prod(free.shard_shape(freely.shape)) / freely.size
    return math.prod(bound.shard_shape(weight.codes.shape)) / weight.codes.size > share
