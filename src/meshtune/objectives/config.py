"""The options of every objective, read by recipes and by the core alike."""

from __future__ import annotations

import dataclasses
from typing import Literal

from meshtune.errors import UserError
from meshtune.options import option

LABELS = "Probability that a pair's label is wrong."
CHOSEN_NLL = "Weight of the chosen answers' cross-entropy."
NLL_MEAN = (
    "What the chosen answers' cross-entropy is averaged over; pairs: each by its own tokens, as in LLaMA-Factory."
)

NllMean = Literal["tokens", "pairs"]
ONLINE_STAGES = frozenset({"grpo", "rloo"})  # those that train on completions of their own


@dataclasses.dataclass(frozen=True)
class SftConfig:
    """Supervised tuning: conversations, or prompts and completions.

    `loss` is nll, or dft (https://arxiv.org/abs/2508.05629), which trains less on what the model finds unlikely.
    `label_smoothing`: https://arxiv.org/abs/1512.00567; `neftune_alpha`: https://arxiv.org/abs/2310.05914.
    """

    kind: Literal["sft"] = "sft"
    loss: Literal["nll", "dft"] = option("nll", "sft: of a token; dft: times its probability.")
    label_smoothing: float = option(0.0, "sft: share of every target spread evenly.", ge=0, lt=1)
    neftune_alpha: float | None = option(None, "sft: noise on embeddings while training, such as 5; null: none.", gt=0)

    def __post_init__(self):
        if not 0 <= self.label_smoothing < 1:
            raise UserError("label_smoothing must be in [0, 1)", where="stage.label_smoothing", fix="such as 0.1")
        if self.loss == "dft" and self.label_smoothing:
            raise UserError(
                "label_smoothing has no meaning for loss dft",
                where="stage.label_smoothing",
                fix="use loss nll, or leave label_smoothing out",
            )


@dataclasses.dataclass(frozen=True)
class PtConfig:
    """Continued pretraining: every token of plain text."""

    kind: Literal["pt"] = "pt"


@dataclasses.dataclass(frozen=True)
class RmConfig:
    """Reward models: a head of one score, from pairs.

    `centre` keeps the scores near zero (https://arxiv.org/abs/2312.09244).
    """

    kind: Literal["rm"] = "rm"
    centre: float = option(0.0, "rm: weight of the squared sum of a pair's scores.", ge=0)


@dataclasses.dataclass(frozen=True)
class DpoConfig:
    """Direct preference optimisation, from pairs and a reference.

    `loss` is sigmoid (with `label_smoothing`: conservative DPO), hinge, ipo (on log-probabilities per token) or robust
    (with `label_smoothing` below 0.5). `ld_alpha`: https://arxiv.org/abs/2409.06411.
    """

    kind: Literal["dpo"] = "dpo"
    beta: float = option(0.1, "dpo: how strongly the reference holds.", gt=0)
    loss: Literal["sigmoid", "hinge", "ipo", "robust"] = option("sigmoid", "dpo: of the margin.")
    label_smoothing: float = option(0.0, LABELS, ge=0, lt=0.5)
    ld_alpha: float | None = option(
        None, "dpo: weight of tokens beyond the shorter answer's length; null: 1.", ge=0, le=1
    )
    sft_weight: float = option(0.0, CHOSEN_NLL, ge=0)
    sft_mean: NllMean = option("tokens", NLL_MEAN)

    def __post_init__(self):
        if self.label_smoothing and self.loss not in ("sigmoid", "robust"):
            raise UserError(
                f"label_smoothing has no meaning for loss {self.loss}",
                where="stage.label_smoothing",
                fix="use loss sigmoid (conservative) or robust, or leave label_smoothing out",
            )
        if not 0 <= self.label_smoothing < 0.5:
            raise UserError("label_smoothing must be in [0, 0.5)", where="stage.label_smoothing", fix="such as 0.1")
        if self.ld_alpha is not None and self.loss == "ipo":
            raise UserError(
                "ipo averages over each answer's tokens, so there is no effect of length that ld_alpha could reduce",
                where="stage.ld_alpha",
                fix="leave ld_alpha out, or use loss sigmoid",
            )


@dataclasses.dataclass(frozen=True)
class OrpoConfig:
    """Odds ratio preference optimisation, from nothing but pairs."""

    kind: Literal["orpo"] = "orpo"
    beta: float = option(0.1, "orpo: weight of the odds ratio.", gt=0)
    sft_mean: NllMean = option("tokens", NLL_MEAN)


@dataclasses.dataclass(frozen=True)
class SimpoConfig:
    """Simple preference optimisation, from nothing but pairs. The paper recommends a gamma / beta near 0.5."""

    kind: Literal["simpo"] = "simpo"
    beta: float = option(2.0, "simpo: scale of the average log-probabilities.", gt=0)
    gamma: float = option(1.0, "simpo: the margin to win by.", ge=0)
    label_smoothing: float = option(0.0, LABELS, ge=0, lt=0.5)
    sft_weight: float = option(0.0, CHOSEN_NLL, ge=0)
    sft_mean: NllMean = option("tokens", NLL_MEAN)


@dataclasses.dataclass(frozen=True)
class CpoConfig:
    """Contrastive preference optimisation, from nothing but pairs.

    `loss` is sigmoid, hinge or ipo (on log-probabilities per token); `sft_weight` weighs the paper's behaviour cloning
    term.
    """

    kind: Literal["cpo"] = "cpo"
    beta: float = option(0.1, "cpo: scale of the log-probabilities.", gt=0)
    loss: Literal["sigmoid", "hinge", "ipo"] = option("sigmoid", "cpo: of the margin.")
    label_smoothing: float = option(0.0, LABELS, ge=0, lt=0.5)
    sft_weight: float = option(1.0, CHOSEN_NLL, ge=0)
    sft_mean: NllMean = option("tokens", NLL_MEAN)

    def __post_init__(self):
        if self.label_smoothing and self.loss != "sigmoid":
            raise UserError(
                f"label_smoothing has no meaning for loss {self.loss}",
                where="stage.label_smoothing",
                fix="use loss sigmoid, or leave label_smoothing out",
            )


@dataclasses.dataclass(frozen=True)
class KtoConfig:
    """Kahneman-Tversky optimisation, from answers labelled good or bad and a reference.

    The paper recommends a ratio (good answers * desirable_weight) / (bad answers * undesirable_weight) between 1 and
    4/3.
    """

    kind: Literal["kto"] = "kto"
    beta: float = option(0.1, "kto: how strongly the reference holds.", gt=0)
    desirable_weight: float = option(1.0, "kto: weight of answers labelled good.", gt=0)
    undesirable_weight: float = option(1.0, "kto: weight of answers labelled bad.", gt=0)
