"""The training objective, as a section of the recipe: one class a stage."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from meshtune.config.section import PathText, Section

Reference = Annotated[
    PathText,
    Field(
        description="What answers are compared with; auto: the base with its adapters off where that is the start, "
        "else cached; base: adapters off; cached: the start's log-probabilities, computed once and kept on disk; or "
        "another model, a directory or hub id, whose log-probabilities are cached."
    ),
]
SftWeight = Annotated[float, Field(ge=0, description="Weight of the chosen answers' cross-entropy, per token.")]
Smoothing = Annotated[float, Field(ge=0, lt=0.5, description="Probability that a pair's label is wrong.")]
Beta = Annotated[float, Field(gt=0)]


class SftStage(Section):
    """Supervised tuning: conversations, or prompts and completions."""

    kind: Literal["sft"] = "sft"
    label_smoothing: float = Field(default=0.0, ge=0, lt=1, description="sft: share of every target spread evenly.")
    neftune_alpha: float | None = Field(
        default=None, gt=0, description="sft: noise on embeddings while training, such as 5; null: none."
    )


class PtStage(Section):
    """Continued pretraining: every token of plain text."""

    kind: Literal["pt"] = "pt"


class RmStage(Section):
    """Reward models: a head of one score, from pairs."""

    kind: Literal["rm"] = "rm"
    centre: float = Field(default=0.0, ge=0, description="rm: weight of the squared sum of a pair's scores.")


class DpoStage(Section):
    """Direct preference optimisation, from pairs and a reference."""

    kind: Literal["dpo"] = "dpo"
    beta: Beta = Field(default=0.1, description="dpo: how strongly the reference holds.")
    loss: Literal["sigmoid", "hinge", "ipo", "robust"] = Field(default="sigmoid", description="dpo: of the margin.")
    label_smoothing: Smoothing = 0.0
    ld_alpha: float | None = Field(
        default=None, ge=0, le=1, description="dpo: weight of tokens beyond the shorter answer's length; null: 1."
    )
    sft_weight: SftWeight = 0.0
    reference: Reference = "auto"


class OrpoStage(Section):
    """Odds ratio preference optimisation, from pairs alone."""

    kind: Literal["orpo"] = "orpo"
    beta: Beta = Field(default=0.1, description="orpo: weight of the odds ratio.")


class SimpoStage(Section):
    """Simple preference optimisation, from pairs alone."""

    kind: Literal["simpo"] = "simpo"
    beta: Beta = Field(default=2.0, description="simpo: scale of the average log-probabilities.")
    gamma: float = Field(default=1.0, ge=0, description="simpo: the margin to win by.")
    label_smoothing: Smoothing = 0.0
    sft_weight: SftWeight = 0.0


class CpoStage(Section):
    """Contrastive preference optimisation, from pairs alone."""

    kind: Literal["cpo"] = "cpo"
    beta: Beta = Field(default=0.1, description="cpo: scale of the log-probabilities.")
    loss: Literal["sigmoid", "hinge", "ipo"] = Field(default="sigmoid", description="cpo: of the margin.")
    label_smoothing: Smoothing = 0.0
    sft_weight: SftWeight = 1.0


class KtoStage(Section):
    """Kahneman-Tversky optimisation, from answers labelled good or bad and a reference."""

    kind: Literal["kto"] = "kto"
    beta: Beta = Field(default=0.1, description="kto: how strongly the reference holds.")
    desirable_weight: float = Field(default=1.0, gt=0, description="kto: weight of answers labelled good.")
    undesirable_weight: float = Field(default=1.0, gt=0, description="kto: weight of answers labelled bad.")
    reference: Reference = "auto"


STAGES = (SftStage, PtStage, RmStage, DpoStage, OrpoStage, SimpoStage, CpoStage, KtoStage)
Stage = Annotated[
    SftStage | PtStage | RmStage | DpoStage | OrpoStage | SimpoStage | CpoStage | KtoStage, Field(discriminator="kind")
]
