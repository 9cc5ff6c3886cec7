"""Objectives: what is predicted and how it is scored.

An objective is a function (params, spec, compute, batch, rng) -> Score. Adding one is a module and a line in
OBJECTIVES.
"""

from __future__ import annotations

from meshtune.objectives import sft
from meshtune.objectives.score import Objective

OBJECTIVES: dict[str, Objective] = {"sft": sft.score}
