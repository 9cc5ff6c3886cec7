"""Objectives: what is predicted and how it is scored.

An objective is a function (params, spec, compute, batch, rng) -> Score. Adding one is a module with a frozen dataclass
of options and `make(options) -> Objective`, and a line in STAGES (and, for its recipe keys, a section in
config/stage.py).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, Literal

from meshtune.objectives import cpo, dpo, kto, orpo, rm, sft, simpo
from meshtune.objectives.score import Objective


@dataclasses.dataclass(frozen=True)
class Stage:
    """A way of tuning. `config` is the dataclass of its options, `make(options)` its objective.

    `learns` is what a record must be: a document (text or conversation), a pair of a chosen and a rejected answer, or
    an answer labelled good or bad. `reference` says that the model's start, or another model, is compared with;
    `scores` that the model has a head of one score instead of one over the vocabulary; `nll(options)` that the chosen
    answers' cross-entropy is a term of the loss.
    """

    config: type
    make: Callable[[Any], Objective]
    learns: Literal["documents", "pairs", "labelled"] = "documents"
    reference: bool = False
    scores: bool = False
    nll: Callable[[Any], bool] = lambda options: False


def _weighted(options: Any) -> bool:
    return options.sft_weight > 0


STAGES: dict[str, Stage] = {
    "sft": Stage(sft.SftConfig, sft.make),
    "pt": Stage(sft.SftConfig, sft.make),
    "rm": Stage(rm.RmConfig, rm.make, "pairs", scores=True),
    "dpo": Stage(dpo.DpoConfig, dpo.make, "pairs", reference=True, nll=_weighted),
    "orpo": Stage(orpo.OrpoConfig, orpo.make, "pairs", nll=lambda options: True),
    "simpo": Stage(simpo.SimpoConfig, simpo.make, "pairs", nll=_weighted),
    "cpo": Stage(cpo.CpoConfig, cpo.make, "pairs", nll=_weighted),
    "kto": Stage(kto.KtoConfig, kto.make, "labelled", reference=True),
}

# Each with its defaults.
OBJECTIVES: dict[str, Objective] = {name: stage.make(stage.config()) for name, stage in STAGES.items()}
