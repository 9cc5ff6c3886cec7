"""Learning-rate schedules: a share of the peak as a function of the number of updates already made.

The first update is step 0. With warm-up it is made at a rate of zero, the update after `warmup` steps at the peak: the
convention of transformers' `get_scheduler`, whose values these schedules reproduce. `min_lr_ratio` is the share of the
peak at which a decaying schedule ends.
"""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from meshtune.optim.config import OptimizerConfig, share_of

Schedule = Callable[[jax.typing.ArrayLike], Float[Array, ""]]


# Each takes (config, warm-up steps, total steps) and gives the share of the peak after warm-up at a float32 step.
Decay = Callable[[Float[Array, ""]], Float[Array, ""]]


def _linear(config: OptimizerConfig, warmup: int, total: int) -> Decay:
    return lambda step: _floor(config, jnp.maximum(0.0, (total - step) / max(1, total - warmup)))


def _cosine(config: OptimizerConfig, warmup: int, total: int) -> Decay:
    def decay(step):
        progress = jnp.minimum((step - warmup) / max(1, total - warmup), 1.0)
        return _floor(config, 0.5 * (1.0 + jnp.cos(jnp.pi * progress)))

    return decay


def _constant(config: OptimizerConfig, warmup: int, total: int) -> Decay:
    return lambda step: jnp.ones_like(step)


def _wsd(config: OptimizerConfig, warmup: int, total: int) -> Decay:
    """Warm-up, stable, decay (https://arxiv.org/abs/2404.06395), with a cosine as the decay."""
    length = max(1, min(share_of(config.decay_ratio, total), total - warmup))

    def decay(step):
        progress = jnp.clip((step - (total - length)) / length, 0.0, 1.0)
        return _floor(config, 0.5 * (1.0 + jnp.cos(jnp.pi * progress)))

    return decay


def _inverse_sqrt(config: OptimizerConfig, warmup: int, total: int) -> Decay:
    timescale = warmup or 10_000
    shift = timescale - warmup
    return lambda step: jnp.maximum(config.min_lr_ratio, jnp.sqrt(timescale / jnp.maximum(step + shift, 1.0)))


def _floor(config: OptimizerConfig, share: Array) -> Array:
    return config.min_lr_ratio + (1.0 - config.min_lr_ratio) * share


SCHEDULES: dict[str, Callable[[OptimizerConfig, int, int], Decay]] = {
    "linear": _linear,
    "cosine": _cosine,
    "constant": _constant,
    "wsd": _wsd,
    "inverse_sqrt": _inverse_sqrt,
}
# Of these the value at a step does not depend on the length of the run, so that a finished run can go on.
ENDLESS = frozenset({"constant", "inverse_sqrt"})


def make_schedule(config: OptimizerConfig, total: int) -> Schedule:
    """The schedule of a run of `total` updates: int32 step (0 is the first update) -> float32 learning rate."""
    warmup = config.warmup(total)
    decay = SCHEDULES[config.schedule](config, warmup, total)

    def schedule(step: Int[Array, ""] | jax.typing.ArrayLike) -> Float[Array, ""]:
        at = jnp.asarray(step, jnp.float32)
        return config.learning_rate * jnp.where(at < warmup, at / max(1, warmup), decay(at))

    return schedule
