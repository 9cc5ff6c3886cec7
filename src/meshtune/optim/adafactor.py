"""Adafactor (https://arxiv.org/abs/1804.04235) with the learning rate as given: no relative step, no parameter scale.

It is optax's own, applied to every layer by itself: statistics of a stack are never factored across layers, and an
update is clipped by its own RMS.
"""

from __future__ import annotations

import optax

from meshtune.optim.config import OptimizerConfig
from meshtune.optim.rule import Rule, adopted

DECAY_RATE = 0.8  # second moments decay by 1 - t^-0.8, the paper's schedule
CLIP_RMS = 1.0  # an update's root mean square is at most this before the learning rate
FACTOR_FROM = 128  # parameters with two dimensions of at least this many are factored; LoRA's thin ones are kept whole


def adafactor(config: OptimizerConfig) -> Rule:
    """Gradients divided by (factored) second moments, then clipped by RMS."""
    one = optax.chain(
        optax.scale_by_factored_rms(decay_rate=DECAY_RATE, min_dim_size_to_factor=FACTOR_FROM, epsilon=1e-30),
        optax.clip_by_block_rms(CLIP_RMS),
    )
    return adopted(lambda at: one, config.state_dtype)
