"""Direct preference optimisation (https://arxiv.org/abs/2305.18290) and variants that use a reference model."""

from __future__ import annotations

from jaxtyping import Array

from meshtune.arrays.tree import Tree
from meshtune.model.compute import Compute
from meshtune.model.spec import ModelSpec
from meshtune.objectives.answers import answer_log_probs, reference_log_probs
from meshtune.objectives.config import DpoConfig
from meshtune.objectives.preference import hinge_loss, ipo_loss, preference_score, robust_loss, sigmoid_loss
from meshtune.objectives.score import Batch, Objective, Score


def make(config: DpoConfig) -> Objective:
    """The mean over pairs of a loss on beta times the difference between the answers' log-ratios to the reference."""
    beta, smoothing = config.beta, config.label_smoothing

    def objective(params: Tree, spec: ModelSpec, compute: Compute, batch: Batch, rng: Array | None) -> Score:
        answers = answer_log_probs(params, spec, compute, batch, rng, tail=config.ld_alpha)
        reference = reference_log_probs(params, spec, compute, batch, tail=config.ld_alpha)
        chosen, rejected = answers.first - reference[0], answers.second - reference[1]
        logits = beta * (chosen - rejected)
        match config.loss:
            case "sigmoid":
                losses = sigmoid_loss(logits, smoothing)
            case "hinge":
                losses = hinge_loss(logits)
            case "ipo":
                losses = ipo_loss(chosen / answers.lengths[0] - rejected / answers.lengths[1], beta)
            case "robust":
                losses = robust_loss(logits, smoothing)
        return preference_score(answers, losses, (beta * chosen, beta * rejected), config.sft_weight)

    return objective
