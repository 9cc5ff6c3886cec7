"""The stage section of a recipe: the core's own options of each objective, and the reference of those that have one."""

from __future__ import annotations

import dataclasses
from typing import Annotated

from pydantic import Field

from meshtune.config.section import PathText, refuse_truth_values
from meshtune.objectives.config import (
    CpoConfig,
    DpoConfig,
    KtoConfig,
    OrpoConfig,
    PtConfig,
    RmConfig,
    SftConfig,
    SimpoConfig,
)

Reference = Annotated[
    PathText,
    Field(
        description="What answers are compared with; auto: the base with its adapters off where that is the start, "
        "else cached; base: adapters off; cached: the start's log-probabilities, computed once and kept on disk; or "
        "another model, a directory or hub id, whose log-probabilities are cached."
    ),
]


@dataclasses.dataclass(frozen=True)
class DpoStage(DpoConfig):
    """Direct preference optimisation, from pairs and a reference."""

    reference: Reference = "auto"


@dataclasses.dataclass(frozen=True)
class KtoStage(KtoConfig):
    """Kahneman-Tversky optimisation, from answers labelled good or bad and a reference."""

    reference: Reference = "auto"


STAGES = (SftConfig, PtConfig, RmConfig, DpoStage, OrpoConfig, SimpoConfig, CpoConfig, KtoStage)
StageSection = Annotated[
    Annotated[SftConfig, refuse_truth_values(SftConfig)]
    | Annotated[PtConfig, refuse_truth_values(PtConfig)]
    | Annotated[RmConfig, refuse_truth_values(RmConfig)]
    | Annotated[DpoStage, refuse_truth_values(DpoStage)]
    | Annotated[OrpoConfig, refuse_truth_values(OrpoConfig)]
    | Annotated[SimpoConfig, refuse_truth_values(SimpoConfig)]
    | Annotated[CpoConfig, refuse_truth_values(CpoConfig)]
    | Annotated[KtoStage, refuse_truth_values(KtoStage)],
    Field(discriminator="kind"),
]
