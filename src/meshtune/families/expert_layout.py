"""How transformers has the parameters of all experts of a layer in memory, which adapters of peft follow."""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True)
class ExpertLayout:
    """The layout of parameters such as gate_up_proj: [E, out, in], or `transposed`, [E, in, out].

    `marked` says that the experts module has `is_transposed`, which tells peft in from out. In gate_up_proj the
    outputs of the gate come before those of up, or `interleaved`, in turn.
    """

    transposed: bool = False
    marked: bool = False
    interleaved: bool = False


STRAIGHT = ExpertLayout()
