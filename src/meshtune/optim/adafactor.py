"""Adafactor (https://arxiv.org/abs/1804.04235) with an absolute learning rate: no relative step, no parameter scale.

It is optax's implementation, applied to every layer and every expert separately: statistics of a stack are never
factored across layers, and an update is clipped by its own RMS.
"""

from __future__ import annotations

import optax

from meshtune.optim.config import OptimizerConfig
from meshtune.optim.optimizer import ParamOptimizer, from_optax

DECAY_RATE = 0.8  # second moments decay by 1 - t^-0.8, the paper's schedule
CLIP_RMS = 1.0  # the maximum root mean square of an update before the learning rate
FACTOR_FROM = 128  # matrices with both dimensions at least this large are factored; LoRA's thin ones are not


def adafactor(config: OptimizerConfig) -> ParamOptimizer:
    """Gradients divided by (factored) second moments, then clipped by RMS."""
    transformation = optax.chain(
        optax.scale_by_factored_rms(decay_rate=DECAY_RATE, min_dim_size_to_factor=FACTOR_FROM, epsilon=1e-30),
        optax.clip_by_block_rms(CLIP_RMS),
    )
    return from_optax(lambda context: transformation, config.state_dtype)
