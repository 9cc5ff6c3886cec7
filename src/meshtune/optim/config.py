"""What a recipe can say of an optimizer, as the core's own dataclass."""

from __future__ import annotations

import dataclasses
from typing import Literal

from meshtune.optim.schedules import ScheduleConfig


@dataclasses.dataclass(frozen=True)
class OptimizerConfig:
    """An optimizer and its schedule. Decay is always decoupled; None is each optimizer's own default.

    `no_decay` holds patterns (fnmatch) over paths such as layers/0.0/attn_norm/weight. `state_dtype` None keeps
    moments in each parameter's own dtype; a name keeps them in that dtype. Arithmetic is in float32.
    `fused` updates every layer as soon as the backward pass has its gradient. `seed` is that of random projections
    and block orders. The rest is read by single optimizers: see their modules.
    """

    name: str = "adamw"
    learning_rate: float = 2e-4
    schedule: ScheduleConfig = dataclasses.field(default_factory=ScheduleConfig)
    weight_decay: float = 0.0
    no_decay: tuple[str, ...] = ("*norm*", "*bias")
    beta1: float = 0.9
    beta2: float | None = None
    eps: float = 1e-8
    momentum: float | None = None
    state_dtype: str | None = None
    fused: bool = False
    seed: int = 0
    rank: int = 128
    update_gap: int = 200
    scale: float | None = None
    scaling: Literal["channel", "tensor"] = "channel"
    match_rms: bool = True
    switch_every: int = 50
    block_order: Literal["ascending", "descending", "random"] = "ascending"
    d_coef: float = 1.0
    gamma: float = 0.05
    curvature_every: int = 10
    lora_plus_ratio: float | None = None
    lora_plus_embedding_rate: float | None = None

    @property
    def adam_beta2(self) -> float:
        """The second moment's decay of Adam and its kin."""
        return 0.999 if self.beta2 is None else self.beta2
