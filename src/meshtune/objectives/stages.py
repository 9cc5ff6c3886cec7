"""The stages of training: the objective of each, and what data it is computed from.

An objective is a function (params, spec, compute, batch, rng) -> LossSums. Adding one takes a dataclass of its options
in objectives/config.py, a module with `make(options) -> Objective`, a line in STAGES, and a line in config/sections.py,
which makes the options recipe keys.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, Generic, Literal, TypeVar

from meshtune.lazy import LazyFunction
from meshtune.objectives import sft
from meshtune.objectives.answers import Objective
from meshtune.objectives.config import (
    CpoConfig,
    DistillConfig,
    DpoConfig,
    GrpoConfig,
    KtoConfig,
    NllMean,
    OnlineDpoConfig,
    OrpoConfig,
    PpoConfig,
    PtConfig,
    RlooConfig,
    RmConfig,
    SftConfig,
    SimpoConfig,
)

DatasetType = Literal["documents", "pairs", "labelled", "prompts"]
"""What one sample of the data is: a document (text or conversation), a pair of a chosen and a rejected answer to the
same prompt, an answer labelled good or bad, or a prompt that completions are generated for."""


Options = TypeVar("Options")


@dataclasses.dataclass(frozen=True)
class Stage(Generic[Options]):
    """A kind of training.

    `config` is the dataclass of its options and `make(options)` builds its objective; those of prompts take
    the sampler's temperature too, and distillation the teacher's spec. `title` names the stage for
    people. `unit` is what the loss is averaged over, in the singular; `headline` lists the metrics worth showing while
    training, as (metric, label). `needs_reference` says that answers are compared with a reference model;
    `has_score_head` that the model ends in a head of one score instead of one over the vocabulary; `has_critic` that a
    second model is trained in the same step (objectives.critic); `nll_mean(options)`
    is what a cross-entropy of the chosen answers is averaged over, None where the loss has no such term.
    """

    config: type[Options]
    make: Callable[..., Objective]
    title: str
    dataset_type: DatasetType = "documents"
    unit: str = "token"
    headline: tuple[tuple[str, str], ...] = ()
    needs_reference: bool = False
    has_score_head: bool = False
    nll_mean: Callable[[Options], NllMean | None] = lambda options: None
    has_critic: bool = False

    @property
    def unit_segments(self) -> int:
        """The documents of a unit, which are neighbouring segments of one row: those that are compared."""
        return 1 if self.unit in ("token", "completion") else 2


def _sft_mean(options: DpoConfig | SimpoConfig | CpoConfig) -> NllMean | None:
    return options.sft_mean if options.sft_weight > 0 else None


def _preference_stage(
    config: type[Options],
    make: Callable[[Options], Objective],
    title: str,
    *,
    needs_reference: bool = False,
    has_score_head: bool = False,
    nll_mean: Callable[[Options], NllMean | None] = lambda options: None,
) -> Stage[Options]:
    headline = (("rewards/accuracies", "accuracy"), ("rewards/margins", "margin"))
    return Stage(config, make, title, "pairs", "pair", headline, needs_reference, has_score_head, nll_mean)


def _online_stage(
    config: type[Options],
    make: Callable[..., Objective],
    title: str,
    unit: str = "completion",
    *,
    has_critic: bool = False,
) -> Stage[Options]:
    return Stage(config, make, title, "prompts", unit, headline=(("reward", "reward"),), has_critic=has_critic)


STAGES: dict[str, Stage[Any]] = {
    "sft": Stage(SftConfig, sft.make, "SFT"),
    "pt": Stage(PtConfig, lambda options: sft.make(SftConfig()), "pretraining"),
    "rm": _preference_stage(RmConfig, LazyFunction("meshtune.objectives.rm:make"), "reward model", has_score_head=True),
    "dpo": _preference_stage(
        DpoConfig, LazyFunction("meshtune.objectives.preference:dpo"), "DPO", needs_reference=True, nll_mean=_sft_mean
    ),
    "orpo": _preference_stage(
        OrpoConfig,
        LazyFunction("meshtune.objectives.preference:orpo"),
        "ORPO",
        nll_mean=lambda options: options.sft_mean,
    ),
    "simpo": _preference_stage(
        SimpoConfig, LazyFunction("meshtune.objectives.preference:simpo"), "SimPO", nll_mean=_sft_mean
    ),
    "cpo": _preference_stage(CpoConfig, LazyFunction("meshtune.objectives.preference:cpo"), "CPO", nll_mean=_sft_mean),
    "kto": Stage(
        KtoConfig,
        LazyFunction("meshtune.objectives.kto:make"),
        "KTO",
        dataset_type="labelled",
        unit="answer",
        headline=(("rewards/chosen", "chosen reward"), ("rewards/rejected", "rejected reward")),
        needs_reference=True,
    ),
    "distill": Stage(
        DistillConfig,
        LazyFunction("meshtune.objectives.distill:make"),
        "distillation",
        headline=(("agreement", "agreement"),),
    ),
    "grpo": _online_stage(GrpoConfig, LazyFunction("meshtune.objectives.policy:grpo"), "GRPO"),
    "rloo": _online_stage(RlooConfig, LazyFunction("meshtune.objectives.policy:rloo"), "RLOO"),
    "online_dpo": _online_stage(
        OnlineDpoConfig, LazyFunction("meshtune.objectives.policy:online_dpo"), "online DPO", "pair"
    ),
    "ppo": _online_stage(PpoConfig, LazyFunction("meshtune.objectives.policy:ppo"), "PPO", has_critic=True),
}
