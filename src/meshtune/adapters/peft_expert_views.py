"""Where peft's two tensors for a parameter of all experts have the factors of one of its parts.

lora_A is [E * R, columns], expert by expert; lora_B is [rows, R * E], in which the expert counts fastest. Columns are
the inputs of the product and rows its outputs, or, exchanged, the other way round: which of them depends on how
transformers has the parameter in memory, and on the version of peft.
"""

from __future__ import annotations

import dataclasses

from meshtune.families.expert_layout import ExpertLayout
from meshtune.families.tensors import View

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
