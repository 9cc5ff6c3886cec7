"""The learned augmented residual layer (LAuReL, https://arxiv.org/abs/2411.07501), in its low-rank form."""

from __future__ import annotations

import dataclasses
from typing import ClassVar

from meshtune.arrays.tree import Tree
from meshtune.model.block import Activation, Context, Cost, Divisor, FeedForward, Hidden, Output
from meshtune.model.cache import LayerCache
from meshtune.model.linear import linear, linear_params, site_key
from meshtune.model.norm import NormSpec


@dataclasses.dataclass(frozen=True)
class LaurelSpec(FeedForward):
    """x + norm(right(left(x))), with `rank` numbers between the two."""

    rank: int
    norm: NormSpec
    name: ClassVar[str] = "laurel"

    def params(self, embed: int) -> Tree:
        """left/weight [R, D], right/weight [D, R], norm/weight [D]."""
        narrow, wide = (self.rank, "whole"), (embed, "embed")
        return {
            "left": linear_params(narrow, wide, bias=False),
            "right": linear_params(wide, narrow, bias=False),
            "norm": self.norm.params(embed, "embed"),
        }

    def apply(self, x: Hidden, node: Tree, context: Context, cache: LayerCache | None = None) -> Output:
        key = context.key
        narrow = linear(x, node["left"], site_key(key, "left"))
        wide = linear(narrow, node["right"], site_key(key, "right"))
        return Output(x + self.norm(wide, node["norm"]), cache, {})

    def divisors(self) -> tuple[Divisor, ...]:
        return ()

    def cost(self, embed: int) -> Cost:
        narrow = Activation("whole", self.rank, 1, kept=True)
        return Cost(2 * embed * self.rank, (narrow, Activation("embed", embed, 1, kept=True, elementwise=1)))
