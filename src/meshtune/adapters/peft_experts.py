"""Adapters of experts in PEFT's format.

transformers holds `gate_up_proj` and `down_proj` in the experts module of every layer, which the family's table of
tensors names (`Stored.parameter`, `Stored.layout`); peft_expert_views says where the two tensors have which factors.
Here gate and up have separate factors: the rank in peft is then the sum of theirs, the factor of the inputs has
both one below the other, and that of the outputs is zero where one's outputs meet the other's ranks.

lora_A is [E * R, columns], expert by expert; lora_B is [rows, R * E], in which the expert counts fastest. Columns are
the inputs of the product and rows its outputs, or, exchanged, the other way round: which of them depends on how
transformers has the parameter in memory, and on the version of peft.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING

import numpy as np

from meshtune.adapters.lora import LoRA
from meshtune.adapters.peft_misfits import check_shape, misfit
from meshtune.adapters.targets import Module
from meshtune.errors import UserError
from meshtune.families.expert_layout import ExpertLayout
from meshtune.families.tensors import View
from meshtune.weights.safetensors_files import Part, Tensor

if TYPE_CHECKING:
    from meshtune.adapters.peft_config import PeftConfig

# The last versions of peft that took the first dimension of a parameter for its inputs, of modules that transformers
# marks as transposed and of others; 0.19.0 alone had the marked ones exchanged.
UNMARKED_UNTIL, MARKED_EXCHANGED = (0, 19, 0), (0, 19, 0)


def is_exchanged(layout: ExpertLayout, version: tuple[int, int, int]) -> bool:
    """Whether a version of peft has inputs in lora_B and outputs in lora_A."""
    if layout.marked:
        return version == MARKED_EXCHANGED
    return (version <= UNMARKED_UNTIL) != layout.transposed


@dataclasses.dataclass(frozen=True)
class FactorViews:
    """The views of a parameter whose product with E experts' inputs of `into` numbers has `parts` outputs of `width`
    numbers each, one part after the other or interleaved; R is `rank`."""

    experts: int
    rank: int
    into: int
    width: int
    parts: int = 1
    interleaved: bool = False
    exchanged: bool = False

    @property
    def shapes(self) -> tuple[tuple[int, int], tuple[int, int]]:
        """Those of lora_A and lora_B."""
        columns, rows = self.into, self.parts * self.width
        if self.exchanged:
            columns, rows = rows, columns
        return (self.experts * self.rank, columns), (rows, self.rank * self.experts)

    @property
    def tensors(self) -> tuple[str, str]:
        """Which of the two, "a" or "b", hold the factor of the inputs and that of the outputs."""
        return ("b", "a") if self.exchanged else ("a", "b")

    def of_inputs(self, ranks: tuple[int, int]) -> View:
        """The ranks from..to of A, [E, r, in]."""
        a, b = self.shapes
        if self.exchanged:
            view = View.identity(b).split(self.into, self.rank, self.experts)
            return view.slice(1, *ranks).transpose(2, 1, 0)
        view = View.identity(a).split(self.experts, self.rank, self.into).slice(1, *ranks)
        return view.merge(self.experts, ranks[1] - ranks[0], self.into)

    def of_outputs(self, part: int, ranks: tuple[int, int]) -> View:
        """The ranks from..to of B, [E, width, r], for part `part` of the outputs."""
        a, b = self.shapes
        outputs = (self.width, self.parts) if self.interleaved else (self.parts, self.width)
        at = int(self.interleaved)
        if self.exchanged:
            view = View.identity(a).split(self.experts, self.rank, *outputs)
            view = view.slice(1, *ranks).slice(2 + at, part, part + 1).transpose(0, 2, 3, 1)
        else:
            view = View.identity(b).split(*outputs, self.rank, self.experts)
            view = view.slice(at, part, part + 1).slice(2, *ranks).transpose(3, 0, 1, 2)
        return view.merge(self.experts, self.width, ranks[1] - ranks[0])


PREFIX, DOWN = "base_model.model.", "down_proj"
FUSED = re.compile(r"^(?P<experts>.*\.experts)\.(?P<nested>base_layer\.)?lora_(?P<factor>[AB])\.weight$")
SINGLE = re.compile(r"^(?P<experts>.*\.experts)\.(?P<number>\d+)\.(?P<matrix>\w+)\.lora_(?P<factor>[AB])\.weight$")
VERSION, WRITTEN = "0.19.1", (0, 19, 1)  # the first version of peft that reads what is written here


def part_of(module: Module) -> str:
    """ "gate", "up" or "down"."""
    return module.node.rpartition("/")[2]


def parts_of(parameter: str) -> tuple[str, ...]:
    """The parts that a parameter of this name is made of, first to last."""
    last = parameter.rpartition(".")[2]
    return ("gate", "up") if last == "gate_up_proj" else (last.removesuffix("_proj"),)


def is_targeted(parameter: str, targets: Iterable[str]) -> bool:
    """Whether PEFT's target_parameters select the parameter of this full name."""
    return any(f".{parameter}".endswith(f".{target}") for target in targets)


@dataclasses.dataclass(frozen=True)
class WrittenExperts:
    """The tensors of adapters on experts, with the rank and the factor of B @ A of each parameter by full name."""

    tensors: list[Tensor]
    ranks: dict[str, int]
    scales: dict[str, float]
    parts: dict[str, list[str]]


def written_experts(adapters: Mapping[str, tuple[Module, int, LoRA]]) -> WrittenExperts:
    """Contents of a file for adapters on experts: module name -> (module, row in its stack, the stack's adapter)."""
    by_parameter: dict[str, list[tuple[Module, int, LoRA]]] = {}
    for module, row, adapter in adapters.values():
        by_parameter.setdefault(module.parameter, []).append((module, row, adapter))
    out = WrittenExperts([], {}, {}, {})
    for name, parts in by_parameter.items():
        experts, _, parameter = name.rpartition(".")
        nested = "base_layer." if parameter != DOWN and f"{experts}.{DOWN}" in by_parameter else ""
        scales = {adapter.scale for _, _, adapter in parts}
        assert len(scales) == 1, f"{name}: gate and up are scaled differently"
        out.ranks[name], out.scales[name] = sum(adapter.rank for *_, adapter in parts), scales.pop()
        out.parts[parameter] = [part_of(module) for module, *_ in parts]
        for factor, tensor_parts in _parts(parts, out.ranks[name]).items():
            tensor = f"{PREFIX}{experts}.{nested}lora_{factor.upper()}.weight"
            out.tensors.append(
                Tensor(tensor, tensor_parts[0].view.tensor, str(parts[0][2].a.dtype), tuple(tensor_parts))
            )
    return out


def _views(module: Module, rank: int, *, exchanged: bool) -> FactorViews:
    """Those of the parameter that a module is part of."""
    count, width, into = module.leaves["weight"].shape
    parts = len(parts_of(module.parameter))
    return FactorViews(count, rank, into, width, parts, module.layout.interleaved and parts > 1, exchanged)


def _parts(parts: list[tuple[Module, int, LoRA]], rank: int) -> dict[str, list[Part]]:
    """The parts of lora_A, "a", and of lora_B, "b"."""
    tensors: dict[str, list[Part]] = {"a": [], "b": []}
    first = 0
    for module, row, adapter in parts:
        views = _views(module, rank, exchanged=is_exchanged(module.layout, WRITTEN))
        ranks = (first, first + adapter.rank)
        inputs, outputs = (tensors[factor] for factor in views.tensors)
        inputs.append(Part(adapter.a, (row,), views.of_inputs(ranks)))
        for n, part in enumerate(parts_of(module.parameter)):
            view = views.of_outputs(n, ranks)
            zeros = np.zeros(view.shape, np.float32)
            outputs.append(Part(adapter.b, (row,), view) if part == part_of(module) else Part(zeros, (), view))
        first += adapter.rank
    return tensors


@dataclasses.dataclass
class ReadExperts:
    """Where a file has the factors of our experts modules: tensor names by module and field ("{}": a tensor for each
    expert), and views of fused tensors."""

    tensors: dict[str, dict[str, str]] = dataclasses.field(default_factory=dict)
    views: dict[str, dict[str, View]] = dataclasses.field(default_factory=dict)


def read_experts(
    shapes: Mapping[str, tuple[int, ...]], among: Mapping[str, Module], peft: PeftConfig, where: str
) -> tuple[ReadExperts, set[str]]:
    """(where the factors are, the tensors that they take up). Raises UserError for tensors that do not fit."""
    experts_read, used = ReadExperts(), set[str]()
    fused: dict[tuple[str, bool], dict[str, str]] = {}
    single: dict[str, dict[str, dict[int, str]]] = {}
    for name in shapes:
        inner = name.removeprefix(PREFIX).replace(".default.", ".")
        if match := FUSED.match(inner):
            fused.setdefault((match["experts"], bool(match["nested"])), {})[match["factor"].lower()] = name
        elif match := SINGLE.match(inner):
            module = f"{match['experts']}.{match['matrix']}"
            single.setdefault(module, {}).setdefault(match["factor"].lower(), {})[int(match["number"])] = name
    for (experts, nested), names in fused.items():
        parts = [m for m in among.values() if m.role == "experts" and m.parameter.startswith(f"{experts}.")]
        if not parts or names.keys() != {"a", "b"}:
            raise misfit(next(iter(names.values())), where, "the base has no such experts, or a factor is missing")
        parameter = _parameter({module.parameter for module in parts}, nested, peft, where)
        parts = [module for module in parts if module.parameter == parameter]
        _read_fused(experts_read, parts, names, shapes, peft, where)
        used |= set(names.values())
    for module, factors in single.items():
        _read_single(experts_read, module, factors, shapes, among, peft, where)
        used |= {name for names in factors.values() for name in names.values()}
    return experts_read, used


def _parameter(names: set[str], nested: bool, peft: PeftConfig, where: str) -> str:
    """The parameter of an experts module, of those with the full names `names`, whose factors these are: the first of
    two is nested, and the key of a single one names none."""
    targets = peft.fields.get("target_parameters") or ()
    ordered = sorted(names, key=lambda name: name.endswith(f".{DOWN}"))
    targeted = [name for name in ordered if is_targeted(name, targets)]
    if not targeted or (nested and len(targeted) == 1):
        raise UserError(
            f"the adapter has tensors for {ordered[0].rpartition('.')[0]}, and target_parameters does not name them",
            where=f"{where}, field target_parameters",
            fix="give the adapter_config.json that was saved with these tensors",
        )
    return targeted[0] if nested or len(targeted) == 1 else targeted[1]


def _read_fused(
    experts_read: ReadExperts,
    parts: list[Module],
    names: dict[str, str],
    shapes: Mapping[str, tuple[int, ...]],
    peft: PeftConfig,
    where: str,
) -> None:
    parameter, layout = parts[0].parameter, parts[0].layout
    in_parameter, rank = parts_of(parameter), peft.rank(parameter)
    straight, swapped = (_views(parts[0], rank, exchanged=exchanged) for exchanged in (False, True))
    has = (shapes[names["a"]], shapes[names["b"]])
    if has not in (straight.shapes, swapped.shapes):
        raise misfit(
            names["a"],
            where,
            f"it is {has[0]} and lora_B {has[1]}; {straight.experts} experts with rank {rank} need {straight.shapes}",
        )
    exchanged = has == swapped.shapes
    if straight.shapes == swapped.shapes:
        exchanged = is_exchanged(layout, _version(peft, where))
    views = swapped if exchanged else straight
    parts_with_factors = peft.expert_parts.get(parameter.rpartition(".")[2])
    for module in parts:
        part = part_of(module)
        if parts_with_factors is not None and part not in parts_with_factors:
            continue
        ranks = (
            (0, rank)
            if parts_with_factors is None
            else (
                parts_with_factors.index(part) * rank // len(parts_with_factors),
                (parts_with_factors.index(part) + 1) * rank // len(parts_with_factors),
            )
        )
        experts_read.views[module.name] = {
            "a": views.of_inputs(ranks),
            "b": views.of_outputs(in_parameter.index(part), ranks),
        }
        experts_read.tensors[module.name] = dict(zip("ab", (names[factor] for factor in views.tensors), strict=True))


def _version(peft: PeftConfig, where: str) -> tuple[int, int, int]:
    """The version of peft that wrote square factors, whose shapes do not tell which of them is which."""
    version = re.match(r"(\d+)\.(\d+)\.(\d+)", str(peft.fields.get("peft_version") or ""))
    if version is None:
        raise UserError(
            "the adapter's factors for experts are square, and nothing says which of them is which: peft exchanged "
            "them in version 0.19.1",
            where=f"{where}, field peft_version",
            fix="add the peft_version that saved the adapter to its adapter_config.json",
        )
    return int(version[1]), int(version[2]), int(version[3])


def _read_single(
    experts_read: ReadExperts,
    module: str,
    factors: dict[str, dict[int, str]],
    shapes: Mapping[str, tuple[int, ...]],
    among: Mapping[str, Module],
    peft: PeftConfig,
    where: str,
) -> None:
    """A tensor for each expert, as peft wrote them before transformers 5."""
    first = next(iter(next(iter(factors.values())).values()))
    if module not in among or among[module].role != "experts":
        raise misfit(first, where, "this model has no such experts")
    (count, out, into), rank = among[module].leaves["weight"].shape, peft.rank(module)
    for factor, expected in (("a", (rank, into)), ("b", (out, rank))):
        names = factors.get(factor, {})
        if missing := sorted(set(range(count)) - names.keys()):
            raise misfit(first, where, f"expert {missing[0]} has no lora_{factor.upper()}")
        if len(names) != count:
            raise misfit(first, where, f"the base has {count} experts")
        for name in names.values():
            check_shape(name, shapes, expected, where, f" for rank {rank}")
    experts_read.tensors[module] = {
        factor: re.sub(r"(\.experts)\.\d+\.", r"\1.{}.", names[0]) for factor, names in factors.items()
    }
