"""Mixers side by side in one layer, which read the same normalised input and whose results are added."""

from __future__ import annotations

import dataclasses
import functools
import operator
from collections.abc import Mapping
from typing import ClassVar

from jaxtyping import Array

from meshtune.arrays.tree import Tree
from meshtune.kernels.attention import AttentionRequest
from meshtune.model.block import Context, Cost, Divisor, Hidden, Mixer, Output, Sums
from meshtune.model.cache import LayerCache
from meshtune.model.compute import Compute
from meshtune.model.linear import site_key
from meshtune.model.rope import RopeSpec


@dataclasses.dataclass(frozen=True)
class Branch:
    """A mixer whose input and result are multiplied by numbers."""

    mixer: Mixer
    in_scale: float = 1.0
    out_scale: float = 1.0


@dataclasses.dataclass(frozen=True)
class ParallelSpec(Mixer):
    """The sum of different mixers' results. The parameters and the cache of each are under its name."""

    branches: tuple[Branch, ...]
    name: ClassVar[str] = "parallel"

    @property
    def mixers(self) -> tuple[Mixer, ...]:
        return tuple(branch.mixer for branch in self.branches)

    @property
    def ropes(self) -> tuple[RopeSpec, ...]:
        return tuple(dict.fromkeys(rope for mixer in self.mixers for rope in mixer.ropes))

    def params(self, embed: int) -> Tree:
        return {mixer.name: mixer.params(embed) for mixer in self.mixers}

    def apply(self, x: Hidden, node: Tree, context: Context, cache: LayerCache | None) -> Output:
        """The sum, and the sums and caches of all branches."""
        outputs, arrays = [], {}
        for branch in self.branches:
            name = branch.mixer.name
            branch_context = dataclasses.replace(context, key=site_key(context.key, name))
            before = None if cache is None else dataclasses.replace(cache, arrays=cache.arrays[name])
            y, after, sums, _ = branch.mixer.apply(x * branch.in_scale, node[name], branch_context, before)
            outputs.append((y * branch.out_scale, sums))
            if after is not None:
                arrays[name] = after.arrays
        y = functools.reduce(operator.add, (y for y, _ in outputs))
        cache = None if cache is None else dataclasses.replace(cache, arrays=arrays)
        return Output(y, cache, {name: value for _, sums in outputs for name, value in sums.items()})

    def cache(self, batch: int, slots: int, dtype: str) -> Tree:
        return {mixer.name: mixer.cache(batch, slots, dtype) for mixer in self.mixers}

    @property
    def side_inputs(self) -> frozenset[str]:
        return frozenset(name for mixer in self.mixers for name in mixer.side_inputs)

    def sums(self) -> Mapping[str, tuple[int, ...]]:
        return {name: shape for mixer in self.mixers for name, shape in mixer.sums().items()}

    def loss(self, sums: Sums) -> Array | None:
        losses = [loss for mixer in self.mixers if (loss := mixer.loss(sums)) is not None]
        return sum(losses[1:], losses[0]) if losses else None

    def divisors(self) -> tuple[Divisor, ...]:
        return tuple(divisor for mixer in self.mixers for divisor in mixer.divisors())

    def cost(self, embed: int) -> Cost:
        """Pairs of a window, as many for every token, count as multiplications by weights."""
        costs = [mixer.cost(embed) for mixer in self.mixers]
        windowed = sum(cost.pairs * cost.window // 2 for cost in costs if cost.window is not None)
        activations = tuple(activation for cost in costs for activation in cost.activations)
        pairs = sum(cost.pairs for cost in costs if cost.window is None)
        return Cost(sum(cost.weights for cost in costs) + windowed, activations, pairs=pairs)

    def attention_request(self, rows: int, q_length: int, kv_length: int, compute: Compute) -> AttentionRequest | None:
        requests = (mixer.attention_request(rows, q_length, kv_length, compute) for mixer in self.mixers)
        return next((request for request in requests if request is not None), None)
