"""The numbers of an adapter merged into its base, computed module by module on demand."""

from __future__ import annotations

import dataclasses

import numpy as np
from jaxtyping import Float

from meshtune.adapters.merge import merge_adapters
from meshtune.adapters.peft_format import LoadedAdapter, attach, check_base, load_adapter
from meshtune.arrays.tree import Leaves, flatten, layer_site, stack_path, unflatten
from meshtune.families.quantised import quantised_leaves
from meshtune.model.spec import ModelSpec, abstract_params
from meshtune.quantize.config import QuantizeConfig
from meshtune.quantize.weight import QuantisedWeight
from meshtune.runs.merged_into import merged_into
from meshtune.runs.sources import Source
from meshtune.weights.fingerprint import base_hash
from meshtune.weights.gguf.numbers import Numbers
from meshtune.weights.load import load_spec, load_weight

OUTSIDE = "outside the layers"


class MergedNumbers:
    """The parameters of a base with an adapter merged. The weights of one kind of module, of all layers, are in memory
    at a time; weights that are neither adapted nor quantised in training are read from the base's files."""

    def __init__(
        self, source: Source, spec: ModelSpec, adapter: LoadedAdapter, base: Numbers, quantised: QuantizeConfig | None
    ):
        self._source, self._spec, self._adapter, self._base = source, spec, adapter, base
        self._group, self._leaves = "", Leaves()
        self._quantised = {} if quantised is None else dict.fromkeys(_quantised_paths(spec, quantised), quantised)
        self._adapted = {_group(path) for path in (*flatten(adapter.trainable), *self._quantised)}
        if spec.tied and not adapter.spec.tied:
            self._adapted.add(OUTSIDE)
        rows = {n: (key, row) for key, _, _, numbers in spec.positions() for row, n in enumerate(numbers)}
        self._base_rows = {
            (key, row): rows[n] for key, _, _, numbers in adapter.spec.positions() for row, n in enumerate(numbers)
        }

    def rows(self, path: str, index: tuple[int, ...], start: int, stop: int) -> Float[np.ndarray, "rows ..."]:
        """Rows start..stop of `params[path][index]`, in the stacks of the adapter's spec."""
        group = _group(path)
        if group in self._adapted:
            if group != self._group:
                self._leaves.clear()
                self._group, self._leaves = group, self._merge(group)
            return np.asarray(self._leaves[path][index][start:stop], np.float32)
        if (place := stack_path(path)) is not None:
            base_key, row = self._base_rows[place.key, index[0]]
            path, index = f"layers/{base_key}/{place.site}", (row, *index[1:])
        return self._base.rows(path, index, start, stop)

    def group(self, path: str) -> str:
        """The kind of module, where it is adapted."""
        group = _group(path)
        return group if group in self._adapted else ""

    def _merge(self, group: str) -> Leaves:
        paths = [path for path in flatten(abstract_params(self._spec)) if _group(path) == group]
        leaves = {
            path: load_weight(self._source.base, self._spec, path, quantize=self._quantised.get(path)) for path in paths
        }
        trainable = {path: leaf for path, leaf in flatten(self._adapter.trainable).items() if _group(path) == group}
        part = dataclasses.replace(self._adapter, trainable=unflatten(trainable))
        spec = self._spec
        if group != OUTSIDE:
            part = dataclasses.replace(part, copies={})
            spec = dataclasses.replace(spec, tied=part.spec.tied)
        _, tree = attach({"layers": {}} | unflatten(leaves), spec, part)
        return flatten(merge_adapters(tree))


def merged_numbers(source: Source, base: Numbers, into: str | None, any_base: bool) -> tuple[ModelSpec, MergedNumbers]:
    """(the spec, the numbers) of a base with its adapter merged; `into` as `runs.export.export` has it.

    Raises UserError for a base that is not the adapter's.
    """
    assert source.adapter is not None
    spec, _ = load_spec(source.base, "float32")
    adapter = load_adapter(source.adapter, spec).mergeable
    if not any_base:
        check_base(adapter, str(source.base), base_hash(source.base))
    return adapter.spec, MergedNumbers(source, spec, adapter, base, merged_into(adapter.base, into))


def _quantised_paths(spec: ModelSpec, config: QuantizeConfig) -> list[str]:
    arrays = quantised_leaves(flatten(abstract_params(spec)), config, spec)
    return [path for path, array in arrays.items() if isinstance(array, QuantisedWeight)]


def _group(path: str) -> str:
    if stack_path(path) is None:
        node = path.rpartition("/")[0]
        return f"{OUTSIDE}, {node}" if "/" in node else OUTSIDE  # a table of per-layer embeddings is large
    return layer_site(path).rpartition("/")[0]
