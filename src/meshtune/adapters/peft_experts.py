"""LoRA on experts as PEFT stores it: beside the parameters of a layer's experts module, all experts in two tensors.

transformers holds `gate_up_proj` [E, 2 F, D] and `down_proj` [E, D, F] in the experts module of every layer, which the
family's table of tensors names (`Stored.parameter`). PEFT's lora_A is [E * R, in], expert by expert; its lora_B is
[out, R * E], in which the expert counts fastest. Here gate and up have factors of their own: R is then the sum of their
ranks, A has those of both one below the other, and B is zero where one's rows meet the other's ranks. From peft 0.19.1
on in and out are those of the products; before, they are exchanged, and the product is stored transposed.
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
from meshtune.families.tensors import View
from meshtune.weights.file_tensors import Part, Tensor

if TYPE_CHECKING:
    from meshtune.adapters.peft_config import PeftConfig

PREFIX, DOWN = "base_model.model.", "down_proj"
FUSED = re.compile(r"^(?P<experts>.*\.experts)\.(?P<nested>base_layer\.)?lora_(?P<factor>[AB])\.weight$")
SINGLE = re.compile(r"^(?P<experts>.*\.experts)\.(?P<number>\d+)\.(?P<matrix>\w+)\.lora_(?P<factor>[AB])\.weight$")
SWAPPED_UNTIL = (0, 19, 0)  # the last version of peft that stored the transposed product
VERSION = "0.19.1"  # the first that reads what is written here


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
    """What a file holds for adapters on experts: module name -> (module, row in its stack, the stack's adapter)."""
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
        for factor, tensor_parts in zip("AB", _parts(parts, out.ranks[name]), strict=True):
            tensor = f"{PREFIX}{experts}.{nested}lora_{factor}.weight"
            out.tensors.append(Tensor(tensor, tensor_parts[0].view.tensor, str(parts[0][2].a.dtype), tensor_parts))
    return out


def _parts(parts: list[tuple[Module, int, LoRA]], rank: int) -> tuple[tuple[Part, ...], tuple[Part, ...]]:
    """The parts of lora_A and of lora_B."""
    a, b, first = [], [], 0
    for module, row, adapter in parts:
        count, _, into = module.leaves["weight"].shape
        halves = parts_of(module.parameter)
        width = module.leaves["weight"].shape[1]
        ranks = (first, first + adapter.rank)
        a.append(Part(adapter.a, (row,), _a_view(count, rank, into, ranks)))
        for half, part in enumerate(halves):
            view = _b_view(count, rank, width, len(halves), half, ranks)
            zeros = np.zeros(view.shape, np.float32)
            b.append(Part(adapter.b, (row,), view) if part == part_of(module) else Part(zeros, (), view))
        first += adapter.rank
    return tuple(a), tuple(b)


def _a_view(experts: int, rank: int, into: int, ranks: tuple[int, int]) -> View:
    """A's rows `ranks` of every expert, [E, r, in], in a tensor [E * rank, in]."""
    tensor = View.identity((experts * rank, into)).split(experts, rank, into)
    return tensor.slice(1, *ranks).merge(experts, ranks[1] - ranks[0], into)


def _b_view(experts: int, rank: int, width: int, halves: int, half: int, ranks: tuple[int, int]) -> View:
    """B's columns `ranks` of every expert, [E, width, r], in half `half` of a tensor [halves * width, rank * E]."""
    tensor = View.identity((halves * width, rank * experts)).split(halves, width, rank, experts)
    return (
        tensor.slice(0, half, half + 1)
        .slice(2, *ranks)
        .transpose(3, 0, 1, 2)
        .merge(experts, width, ranks[1] - ranks[0])
    )


def _swapped_a_view(experts: int, rank: int, width: int, halves: int, half: int) -> View:
    """B [E, width, rank] in a tensor [E * rank, halves * width] of an old peft: the transposed product's A."""
    tensor = View.identity((experts * rank, halves * width)).split(experts, rank, halves, width)
    return tensor.slice(2, half, half + 1).transpose(0, 2, 3, 1).merge(experts, width, rank)


def _swapped_b_view(experts: int, rank: int, into: int) -> View:
    """A [E, rank, in] in a tensor [in, rank * E] of an old peft: the transposed product's B."""
    return View.identity((into, rank * experts)).split(into, rank, experts).transpose(2, 1, 0)


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
    found, used = ReadExperts(), set[str]()
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
        _read_fused(found, parts, names, shapes, peft, where)
        used |= set(names.values())
    for module, factors in single.items():
        _read_single(found, module, factors, shapes, among, peft, where)
        used |= {name for names in factors.values() for name in names.values()}
    return found, used


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
    found: ReadExperts,
    parts: list[Module],
    names: dict[str, str],
    shapes: Mapping[str, tuple[int, ...]],
    peft: PeftConfig,
    where: str,
) -> None:
    count, width, into = parts[0].leaves["weight"].shape
    parameter = parts[0].parameter
    in_parameter, rank = parts_of(parameter), peft.rank(parameter)
    halves = len(in_parameter)
    out, a, b = halves * width, shapes[names["a"]], shapes[names["b"]]
    straight, swapped = ((count * rank, into), (out, rank * count)), ((count * rank, out), (into, rank * count))
    if (a, b) not in (straight, swapped):
        raise misfit(names["a"], where, f"it is {a} and lora_B {b}; {count} experts with rank {rank} need {straight}")
    is_swapped = _is_swapped(peft, where) if straight == swapped else (a, b) == swapped
    own = peft.expert_parts.get(parameter.rpartition(".")[2])
    for module in parts:
        part = part_of(module)
        half = in_parameter.index(part)
        if own is not None and part not in own:
            continue
        ranks = (
            (0, rank) if own is None else (own.index(part) * rank // len(own), (own.index(part) + 1) * rank // len(own))
        )
        if is_swapped:
            views = {
                "a": _swapped_b_view(count, rank, into),
                "b": _swapped_a_view(count, rank, width, halves, half),
            }
            tensors = {"a": names["b"], "b": names["a"]}
        else:
            views = {"a": _a_view(count, rank, into, ranks), "b": _b_view(count, rank, width, halves, half, ranks)}
            tensors = dict(names)
        found.tensors[module.name], found.views[module.name] = tensors, views


def _is_swapped(peft: PeftConfig, where: str) -> bool:
    """Whether a version of peft before 0.19.1 wrote square factors, whose shapes do not tell."""
    version = re.match(r"(\d+)\.(\d+)\.(\d+)", str(peft.fields.get("peft_version") or ""))
    if version is None:
        raise UserError(
            "the adapter's factors for experts are square, and nothing says which of them is which: peft exchanged "
            "them in version 0.19.1",
            where=f"{where}, field peft_version",
            fix="add the peft_version that saved the adapter to its adapter_config.json",
        )
    return tuple(map(int, version.groups())) <= SWAPPED_UNTIL


def _read_single(
    found: ReadExperts,
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
    found.tensors[module] = {
        factor: re.sub(r"(\.experts)\.\d+\.", r"\1.{}.", names[0]) for factor, names in factors.items()
    }
