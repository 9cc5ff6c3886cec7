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
ONLINE_STAGES = frozenset({"grpo", "rloo", "online_dpo", "ppo"})  # those that train on completions of their own
PAIR_STAGES = frozenset({"online_dpo"})  # of these, those that compare the two completions of a prompt


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


PolicyLoss = Literal["grpo", "bnpo", "dr_grpo", "dapo", "cispo", "sapo", "luspo", "vespo"]
CLIPPED_LOSSES = ("grpo", "bnpo", "dr_grpo", "dapo", "luspo")
SEQUENCE_LOSSES = ("grpo", "sapo", "luspo")  # whose sums give every completion the same weight, whatever its length
MISSING_EOS = "Subtracted from the reward of a completion that was cut at rollout.max_tokens; null: nothing."
KL_TARGET = "KL divergence from the reference that its weight is steered to, from {coef} on; null: it stays {coef}."
KL_HORIZON = "Completions in which the weight can change by a fifth; with kl_target."
KL_MEAN = "What kl_target is the mean over: tokens, or the sums over completions, as in TRL and LLaMA-Factory."
KlMean = Literal["tokens", "completions"]
TRUNCATED = "Leave completions that were cut at rollout.max_tokens out of the loss; their rewards still count."


@dataclasses.dataclass(frozen=True)
class GrpoConfig:
    """Group relative policy optimisation and its relatives: completions of a prompt, compared by their rewards.

    `loss`: grpo (https://arxiv.org/abs/2402.03300), bnpo, dr_grpo (https://arxiv.org/abs/2503.20783), dapo
    (https://arxiv.org/abs/2503.14476), cispo (https://arxiv.org/abs/2506.13585), sapo
    (https://arxiv.org/abs/2511.20347), luspo or vespo, each as trl has it. `ratio: sequence` is GSPO
    (https://arxiv.org/abs/2507.18071).
    """

    kind: Literal["grpo"] = "grpo"
    loss: PolicyLoss = option("dapo", "grpo: how tokens are clipped and averaged; dapo: over all tokens of an update.")
    ratio: Literal["token", "sequence"] = option(
        "token", "grpo: of probabilities, for every token, or the geometric mean over a completion (GSPO)."
    )
    epsilon: float = option(0.2, "How far the ratio may fall below 1 before it is clipped.", gt=0, lt=1)
    epsilon_high: float | None = option(
        None, "How far it may rise above 1; null: epsilon. cispo: the largest ratio itself.", gt=0
    )
    delta: float | None = option(None, "grpo: largest ratio, also of worse completions; null: none.", gt=1)
    beta: float = option(0.0, "grpo: weight of the KL divergence from the reference in the loss.", ge=0)
    kl_estimator: Literal["k1", "abs", "k2", "k3", "k3+"] = option(
        "k3", "grpo: of the KL divergence; k3+: the value of k3 with the gradient of k2."
    )
    kl_correction: bool = option(True, "grpo: multiply the KL divergence by the ratio, which makes it unbiased.")
    scale: Literal["group", "batch", "none", "tokens"] = option(
        "group",
        "grpo: what advantages are divided by the deviation of; tokens: whitened over all tokens (REINFORCE++).",
    )
    baseline: Literal["group", "none"] = option("group", "grpo: subtract the mean reward of the prompt's completions.")
    normalize_then_sum: bool = option(
        False, "grpo: normalise every reward by itself in its group before they are added (GDPO)."
    )
    mask_truncated_completions: bool = option(False, TRUNCATED)
    off_policy_mask_threshold: float | None = option(
        None, "grpo: leave out worse completions whose mean log-probability has fallen by more; null: none."
    )
    top_entropy_quantile: float = option(
        1.0, "grpo: share of the tokens, those of highest entropy, that the policy's term trains.", gt=0, le=1
    )
    entropy_coef: float = option(0.0, "grpo: weight of the mean entropy, which is added to what is maximised.")
    sapo_temperature_pos: float = option(1.0, "sapo: steepness of the gate, of better completions.", gt=0)
    sapo_temperature_neg: float = option(1.05, "sapo: steepness of the gate, of worse completions.", gt=0)
    vespo_k_pos: float = option(2.0, "vespo: power of the ratio, of better completions.", ge=0)
    vespo_lambda_pos: float = option(3.0, "vespo: decay with the ratio, of better completions.", ge=0)
    vespo_k_neg: float = option(3.0, "vespo: power of the ratio, of worse completions.", ge=0)
    vespo_lambda_neg: float = option(2.0, "vespo: decay with the ratio, of worse completions.", ge=0)

    def __post_init__(self):
        _check_read(self, "loss", self.loss, GRPO_READERS)
        if self.beta == 0:
            _check_read(self, "beta", "0", {"kl_estimator": (), "kl_correction": ()})
        if self.ratio == "sequence" and self.loss not in SEQUENCE_LOSSES:
            reason = (
                "computes a ratio of sequences by itself"
                if self.loss == "vespo"
                else "adds up tokens, so that long completions would weigh more"
            )
            raise UserError(
                f"ratio sequence has no meaning for loss {self.loss}, which {reason}",
                where="stage.ratio",
                fix="use ratio token, or loss grpo (the setup of GSPO's paper)",
            )
        if self.loss == "luspo" and self.ratio == "token":
            raise UserError("loss luspo is one of sequences", where="stage.ratio", fix="use ratio sequence with it")
        if self.loss == "cispo" and (self.epsilon_high is None or self.epsilon_high < 1):
            raise UserError(
                "loss cispo clips the ratio to epsilon_high itself, not to 1 + epsilon_high: it must be 1 or more",
                where="stage.epsilon_high",
                fix="such as epsilon_high: 5.0",
            )
        if self.delta is not None and self.delta <= 1 + self.upper_epsilon:
            raise UserError(
                f"delta caps the ratio where clipping does not, so it must be above {1 + self.upper_epsilon}",
                where="stage.delta",
                fix="such as delta: 2.0",
            )
        if self.baseline == "none" and self.scale in ("group", "batch"):
            raise UserError(
                f"scale {self.scale} divides by the deviation from a baseline, and there is none",
                where="stage.baseline",
                fix="use scale tokens (REINFORCE++) or none, or baseline group",
            )
        if self.normalize_then_sum and (self.scale, self.baseline) != ("group", "group"):
            raise UserError(
                "normalize_then_sum normalises in groups and then over the batch: scale and baseline have no meaning",
                where="stage.normalize_then_sum",
                fix="leave scale and baseline out, or normalize_then_sum",
            )

    @property
    def upper_epsilon(self) -> float:
        """How far the ratio may rise above 1."""
        return self.epsilon if self.epsilon_high is None else self.epsilon_high


# Which losses read an option; those not named are read by all.
GRPO_READERS: dict[str, tuple[str, ...]] = {
    "epsilon": CLIPPED_LOSSES,
    "epsilon_high": (*CLIPPED_LOSSES, "cispo"),
    "delta": CLIPPED_LOSSES,
    "top_entropy_quantile": (*CLIPPED_LOSSES, "cispo", "sapo"),  # vespo's policy_weights are in its ratio
    **dict.fromkeys(("sapo_temperature_pos", "sapo_temperature_neg"), ("sapo",)),
    **dict.fromkeys(("vespo_k_pos", "vespo_lambda_pos", "vespo_k_neg", "vespo_lambda_neg"), ("vespo",)),
}


def _check_read(options: GrpoConfig, key: str, value: str, readers: dict[str, tuple[str, ...]]) -> None:
    """Raises UserError for an option that would be ignored, because the `value` of option `key` is not a reader."""
    for field in dataclasses.fields(options):
        if getattr(options, field.name) != field.default and value not in readers.get(field.name, (value,)):
            names = readers[field.name]
            instead = f"use {key} {' or '.join(names)}, or " if names else f"give {key}, or "
            raise UserError(
                f"{field.name} has no meaning for {key} {value}",
                where=f"stage.{field.name}",
                fix=f"{instead}leave {field.name} out",
            )


def _check_kl_target(options: RlooConfig | PpoConfig, coef: str, start: float) -> None:
    """Raises UserError for a target that nothing is steered to, and for options of a target without one."""
    if options.kl_target is not None and start == 0:
        raise UserError(
            f"kl_target multiplies {coef} after every rollout, and {coef} 0 stays 0",
            where=f"stage.{coef}",
            fix=f"such as {coef}: 0.05, or leave kl_target out",
        )
    for field in dataclasses.fields(options):
        given = field.name in ("kl_horizon", "kl_mean") and getattr(options, field.name) != field.default
        if given and options.kl_target is None:
            raise UserError(
                f"{field.name} has no meaning without kl_target",
                where=f"stage.{field.name}",
                fix=f"give kl_target, or leave {field.name} out",
            )


@dataclasses.dataclass(frozen=True)
class RlooConfig:
    """REINFORCE with the mean reward of a prompt's other completions as baseline (https://arxiv.org/abs/2402.14740)."""

    kind: Literal["rloo"] = "rloo"
    epsilon: float = option(0.2, "How far the ratio may fall below 1 before it is clipped.", gt=0, lt=1)
    epsilon_high: float | None = option(None, "rloo: how far it may rise above 1; null: epsilon.", gt=0)
    beta: float = option(0.05, "rloo: weight of the KL divergence from the reference, subtracted from rewards.", ge=0)
    kl_target: float | None = option(None, KL_TARGET.format(coef="beta"), gt=0)
    kl_horizon: float = option(10000, KL_HORIZON, gt=0)
    kl_mean: KlMean = option("tokens", KL_MEAN)
    reward_clip_range: tuple[float, float] | None = option(None, "rloo: bounds of a reward, [-1, 1]; null: none.")
    normalize_advantages: bool = option(False, "rloo: divide advantages by their deviation over the rollout.")
    mask_truncated_completions: bool = option(False, TRUNCATED)

    def __post_init__(self):
        if self.reward_clip_range is not None and self.reward_clip_range[0] >= self.reward_clip_range[1]:
            raise UserError(
                f"reward_clip_range {list(self.reward_clip_range)} is empty",
                where="stage.reward_clip_range",
                fix="give the lower bound first, such as [-1, 1]",
            )
        _check_kl_target(self, "beta", self.beta)

    @property
    def upper_epsilon(self) -> float:
        """How far the ratio may rise above 1."""
        return self.epsilon if self.epsilon_high is None else self.epsilon_high


TEACHER = "teacher"  # where the teacher's parameters are among the step's frozen ones


@dataclasses.dataclass(frozen=True)
class DistillConfig:
    """Distillation: the student learns a teacher's predictions of every token (https://arxiv.org/abs/2306.13649).

    `loss` is reverse_kl, KL(student || teacher); forward_kl, KL(teacher || student); or jsd, the generalised
    Jensen-Shannon divergence, as trl's GKD has them with beta 1, beta 0 and beta between.
    """

    kind: Literal["distill"] = "distill"
    loss: Literal["reverse_kl", "forward_kl", "jsd"] = option(
        "jsd", "distill: reverse_kl seeks the teacher's likeliest answers, forward_kl all of them, jsd both."
    )
    beta: float = option(0.5, "distill: weight of the teacher in the mixture that jsd compares both with.", gt=0, lt=1)
    temperature: float = option(1.0, "distill: divides the logits of both models in the loss.", gt=0)
    on_policy: float = option(
        0.0,
        "distill: share of updates on completions of the student's own; the others are on the data's answers.",
        ge=0,
        le=1,
    )

    def __post_init__(self):
        if self.loss != "jsd" and self.beta != 0.5:
            raise UserError(
                f"beta has no meaning for loss {self.loss}",
                where="stage.beta",
                fix="use loss jsd, or leave beta out",
            )

    @property
    def interpolation(self) -> float:
        """The beta of trl's GKD: 0 is forward KL, 1 reverse KL."""
        return {"forward_kl": 0.0, "reverse_kl": 1.0, "jsd": self.beta}[self.loss]


@dataclasses.dataclass(frozen=True)
class OnlineDpoConfig:
    """Direct preference optimisation on two completions of every prompt (https://arxiv.org/abs/2402.04792).

    The one with the higher reward is chosen, of equal ones the first. `loss` is of sums of log-probabilities, also ipo,
    as in trl's OnlineDPOTrainer.
    """

    kind: Literal["online_dpo"] = "online_dpo"
    beta: float = option(0.1, "online_dpo: how strongly the reference holds.", gt=0)
    loss: Literal["sigmoid", "ipo"] = option("sigmoid", "online_dpo: of the margin.")
    missing_eos_penalty: float | None = option(None, MISSING_EOS, ge=0)


@dataclasses.dataclass(frozen=True)
class PpoConfig:
    """Proximal policy optimisation with a critic (https://arxiv.org/abs/1707.06347, https://arxiv.org/abs/1909.08593).

    The critic is trained in the same step. Advantages are generalised (https://arxiv.org/abs/1506.02438), with the
    divergence from the reference in every token's reward and the completion's reward on its last token, as in verl.
    """

    kind: Literal["ppo"] = "ppo"
    kl_coef: float = option(0.05, "ppo: weight of the KL divergence from the reference, subtracted from rewards.", ge=0)
    kl_target: float | None = option(None, KL_TARGET.format(coef="kl_coef"), gt=0)
    kl_horizon: float = option(10000, KL_HORIZON, gt=0)
    kl_mean: KlMean = option("tokens", KL_MEAN)
    kl_estimator: Literal["k1", "k3"] = option("k1", "ppo: of the KL divergence.")
    cliprange: float = option(0.2, "ppo: how far the ratio may be from 1 before it is clipped.", gt=0, lt=1)
    vf_coef: float = option(0.1, "ppo: weight of the critic's loss.", gt=0)
    cliprange_value: float = option(0.2, "ppo: how far a value may move from the rollout's before it is clipped.", gt=0)
    gamma: float = option(1.0, "ppo: discount of rewards by token.", gt=0, le=1)
    lam: float = option(0.95, "ppo: of advantages; 1: rewards less the value, 0: one token ahead.", ge=0, le=1)
    whiten_rewards: bool = option(False, "ppo: divide the rewards of tokens by their deviation over the rollout.")
    missing_eos_penalty: float | None = option(None, MISSING_EOS, ge=0)

    def __post_init__(self):
        _check_kl_target(self, "kl_coef", self.kl_coef)

    @property
    def epsilon(self) -> float:
        """How far the ratio may fall below 1."""
        return self.cliprange

    @property
    def upper_epsilon(self) -> float:
        """How far the ratio may rise above 1."""
        return self.cliprange
