"""The options of an optimizer and its schedule, read by recipes and by the core alike."""

from __future__ import annotations

import dataclasses
import math
from typing import Literal

from meshtune.options import option


@dataclasses.dataclass(frozen=True)
class OptimizerOptions:
    """The optimizer and its schedule. Defaults marked 'per method' are 2e-4 for lora and 2e-5 for full and freeze; a
    tenth of these for stages that compare answers."""

    name: Literal[
        "adamw", "adamw8bit", "adam_mini", "muon", "galore", "apollo", "badam", "adafactor", "lion", "sgd",
        "schedule_free", "prodigy", "sophia",
    ] = option(
        "adamw",
        "The optimizer. adamw8bit: 8-bit state; adam_mini: one second moment a block; muon: orthogonalised updates of "
        "matrices; galore, apollo: low-rank state; badam: block-coordinate, one layer at a time; schedule_free: "
        "averages instead of decaying the rate; prodigy: estimates its rate; sophia: preconditioned by the curvature.",
    )  # fmt: skip
    learning_rate: float | None = option(
        None, "Peak learning rate; default per method; prodigy: a factor, 1 by default.", gt=0
    )
    schedule: Literal["linear", "cosine", "constant", "wsd", "inverse_sqrt"] = option(
        "cosine", "Learning-rate schedule after warm-up; wsd (warm-up, stable, decay) stays at the peak, then decays."
    )
    warmup_ratio: float = option(0.03, "Share of the steps spent warming up.", ge=0, lt=1)
    warmup_steps: int | None = option(None, "Steps spent warming up; instead of warmup_ratio.", ge=0)
    min_lr_ratio: float = option(0.0, "The schedule ends at this share of the peak.", ge=0, le=1)
    decay_ratio: float = option(0.2, "wsd: share of the steps spent decaying at the end.", gt=0, le=1)
    weight_decay: float = option(0.0, "Decoupled weight decay.", ge=0)
    no_decay: tuple[str, ...] = option(
        ("*norm*", "*bias", "*/A_log", "*/D"), "Patterns of parameter paths that are never decayed."
    )
    beta1: float = option(0.9, "adamw and its variants, lion: decay of the first moment.", ge=0, lt=1)
    beta2: float | None = option(
        None,
        "adamw and its variants, lion: decay of the second moment; default 0.999, for lion and sophia 0.99.",
        ge=0,
        lt=1,
    )
    eps: float = option(1e-8, "adamw and its variants: added to the root of the second moment.", gt=0)
    momentum: float | None = option(None, "sgd: default 0; muon: default 0.95.", ge=0, lt=1)
    in_backward: bool = option(
        False,
        "Optimizer in backward: update each layer as soon as the backward pass has its gradient, so that the gradient "
        "of the whole model never exists (with sgd: LOMO). For method full or freeze, with one micro-batch and "
        "max_grad_norm null.",
    )
    rank: int = option(128, "galore, apollo: rank of the projected gradient of a matrix.", gt=0)
    update_gap: int = option(200, "galore, apollo: updates between two projections.", gt=0)
    scale: float | None = option(
        None, "galore: factor of its updates, default 0.25; apollo: of their square, default 1.", gt=0
    )
    scaling: Literal["channel", "tensor"] = option(
        "channel", "apollo: a factor for every row or column, or one per matrix (rank 1, scale 128)."
    )
    match_rms: bool = option(
        True,
        "muon: scale updates to the RMS of AdamW's, so that one learning rate serves both; false: the author's own "
        "sqrt(max(1, rows / columns)).",
    )
    switch_every: int = option(50, "badam: updates of a layer before the next layer's turn.", gt=0)
    block_order: Literal["ascending", "descending", "random"] = option(
        "ascending", "badam: the order in which layers take turns."
    )
    d_coef: float = option(1.0, "prodigy: factor of the estimated rate.", gt=0)
    gamma: float = option(0.05, "sophia: factor of the curvature; the larger, the fewer updates are clipped.", gt=0)
    curvature_every: int = option(10, "sophia: updates between estimates of the curvature.", gt=0)
    lora_plus_ratio: float | None = option(
        None, "LoRA+: learning rate of an adapter's B divided by that of its A, such as 16; null: the same rate.", ge=1
    )
    lora_plus_embedding_rate: float | None = option(
        None, "LoRA+: the learning rate of embeddings; default: that of A.", gt=0
    )
    projector_learning_rate: float | None = option(
        None, "Models that see: peak learning rate of what is trained in the projector; null: learning_rate.", gt=0
    )
    tower_learning_rate: float | None = option(
        None, "Models that see: peak learning rate of what is trained in the tower; null: learning_rate.", gt=0
    )
    stochastic_rounding: bool = option(
        False,
        "With compute.precision bfloat16: round trained weights up or down at random, so that on average no update is "
        "lost, however small.",
    )
    max_grad_norm: float | None = option(1.0, "Clip the global gradient norm; null: never.", gt=0)

    @property
    def own_rates(self) -> list[str]:
        """The options that give some parameters a learning rate other than `learning_rate`."""
        names = ("lora_plus_ratio", "projector_learning_rate", "tower_learning_rate")
        return [name for name in names if getattr(self, name) is not None]

    @property
    def layerwise(self) -> bool:
        """Whether the backward pass goes layer by layer, recomputing each layer from its input."""
        return self.in_backward or self.name == "badam"

    def warmup(self, total: int) -> int:
        """Warm-up steps of a run of `total` steps; a ratio never takes the whole run, so that one step also learns."""
        if self.warmup_steps is not None:
            return self.warmup_steps
        return min(share_of(self.warmup_ratio, total), max(total - 1, 0))


@dataclasses.dataclass(frozen=True)
class OptimizerConfig(OptimizerOptions):
    """The options of a run, resolved: the learning rate is a number, and the run's own settings are added.

    Weight decay is decoupled; None is each optimizer's own default. `no_decay` holds patterns (fnmatch) over paths
    such as layers/0.0/attn_norm/weight. `state_dtype` None keeps moments in each parameter's own dtype; a name keeps
    them in that dtype. Arithmetic is in float32. `seed` seeds random projections and block orders.
    """

    learning_rate: float = 2e-4
    warmup_ratio: float = 0.0
    state_dtype: str | None = None
    seed: int = 0


def share_of(ratio: float, total: int) -> int:
    """ceil(ratio * total), not misled by the last bit of the product (0.07 * 100 is 7, not 8)."""
    return math.ceil(round(ratio * total, 6))
