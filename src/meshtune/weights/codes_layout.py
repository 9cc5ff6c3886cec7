"""Which tensors a checkpoint in codes has: those of its source, with each expert's matrices by themselves."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence

from meshtune.arrays.tree import Leaves
from meshtune.errors import UserError
from meshtune.families import tensors
from meshtune.families.tensors import Shape, TensorMap, by_name
from meshtune.model.spec import ModelSpec
from meshtune.quantize.weight import QuantisedWeight
from meshtune.weights.safetensors_files import TensorInfo


@dataclasses.dataclass(frozen=True)
class CodesTensor:
    """A tensor as a model without codes would have it: written from the parts of leaves that `entries` say, or, where
    `copied` is given, copied byte for byte from there."""

    name: str
    entries: Sequence[TensorMap]
    copied: TensorInfo | None = None

    @property
    def shape(self) -> Shape:
        return self.copied.shape if self.copied is not None else self.entries[0].view.tensor


def codes_tensors(
    params: Leaves, changed: frozenset[str], spec: ModelSpec, stored: Mapping[str, TensorInfo]
) -> list[CodesTensor]:
    """The tensors of a checkpoint of `params` (path -> leaf), in the order of those `stored` in the source's files.

    Written are QuantisedWeights and the leaves whose paths are in `changed`. Where experts are quantised, each expert's
    matrices are tensors of their own, as the loaders of codes expect, also if the source has all of a layer in one.
    Raises UserError where some matrices of experts are quantised and others are not.
    """
    split = dataclasses.replace(spec, fused_experts=False) if experts_as_codes(params, spec) else spec
    return list(_in_order(params, changed, by_name(tensors(spec)), by_name(tensors(split)), stored))


def experts_as_codes(params: Leaves, spec: ModelSpec) -> bool:
    """Whether a model's experts are quantised. Raises UserError where some of their matrices are and others are not."""
    names = {False: "", True: ""}
    for entry in tensors(spec):
        if entry.array.role == "experts":
            names[isinstance(params[entry.path], QuantisedWeight)] = entry.name
    if all(names.values()):
        raise UserError(
            f"of the experts '{names[True]}' is quantised and '{names[False]}' is not: loaders of codes read all "
            "matrices of an expert in one format",
            where="--format",
            fix="leave --format out; or train with quantize.modules naming all matrices of the experts, or none",
        )
    return bool(names[True])


def _in_order(
    params: Leaves,
    changed: frozenset[str],
    read: Mapping[str, Sequence[TensorMap]],
    written: Mapping[str, Sequence[TensorMap]],
    stored: Mapping[str, TensorInfo],
) -> Iterator[CodesTensor]:
    def is_new(entry: TensorMap) -> bool:
        return entry.path in changed or isinstance(params.get(entry.path), QuantisedWeight)

    # The layers of leaves that each tensor has a part of, in files with and without tensors of single experts.
    places: dict[tuple[str, tuple[int, ...]], list[str]] = {}
    for name, entries in written.items():
        for entry in entries:
            places.setdefault((entry.path, entry.index[:1]), []).append(name)
    done = set[str]()
    for name, info in stored.items():
        if name not in read:
            yield CodesTensor(name, (), info)
            continue
        targets = (target for entry in read[name] for target in places[entry.path, entry.index[:1]])
        for target in dict.fromkeys(targets):
            if target in done:
                continue
            done.add(target)
            if any(map(is_new, written[target])):
                yield CodesTensor(target, written[target])
            else:
                source = stored.get(target, info)
                assert source.shape == written[target][0].view.tensor, (target, name)
                yield CodesTensor(target, written[target], source)
