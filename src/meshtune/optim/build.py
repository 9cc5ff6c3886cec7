"""Optimizers: optax's, put together as the papers and torch put them, with decay rules by parameter name.

Gradient clipping is not in the chain: the train step computes the global norm once, reports it and clips by it.
"""

from __future__ import annotations

import dataclasses
import fnmatch
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax

from meshtune.errors import UserError, nearest
from meshtune.optim.adafactor import scale_by_adafactor
from meshtune.optim.paths import path_name
from meshtune.optim.schedules import SCHEDULES, Schedule, ScheduleConfig, make_schedule

Tree = Any


@dataclasses.dataclass(frozen=True)
class OptimizerConfig:
    """An optimizer and its schedule. `beta2` None is 0.999 (adamw) or 0.99 (lion); decay is always decoupled.

    `no_decay` holds patterns (fnmatch) over paths such as layers/0.0/attn_norm/weight. `state_dtype` None keeps the
    state in each parameter's own dtype; a name keeps it in that dtype, with the arithmetic in float32.
    """

    name: str = "adamw"
    learning_rate: float = 2e-4
    schedule: ScheduleConfig = dataclasses.field(default_factory=ScheduleConfig)
    weight_decay: float = 0.0
    no_decay: tuple[str, ...] = ("*norm*", "*bias")
    beta1: float = 0.9
    beta2: float | None = None
    eps: float = 1e-8
    momentum: float = 0.0
    state_dtype: str | None = None


def _adamw(config: OptimizerConfig) -> optax.GradientTransformation:
    """https://arxiv.org/abs/1711.05101; eps outside the square root of the bias-corrected moment, as in torch."""
    b2 = 0.999 if config.beta2 is None else config.beta2
    return optax.scale_by_adam(b1=config.beta1, b2=b2, eps=config.eps)


def _sgd(config: OptimizerConfig) -> optax.GradientTransformation:
    """Heavy-ball momentum without dampening, as in torch."""
    return optax.trace(decay=config.momentum) if config.momentum else optax.identity()


def _adafactor(config: OptimizerConfig) -> optax.GradientTransformation:
    """https://arxiv.org/abs/1804.04235 with the learning rate as given (no relative step, no parameter scale)."""
    return scale_by_adafactor()


def _lion(config: OptimizerConfig) -> optax.GradientTransformation:
    """https://arxiv.org/abs/2302.06675."""
    b2 = 0.99 if config.beta2 is None else config.beta2
    return optax.scale_by_lion(b1=config.beta1, b2=b2)


OPTIMIZERS: dict[str, Callable[[OptimizerConfig], optax.GradientTransformation]] = {
    "adamw": _adamw,
    "sgd": _sgd,
    "adafactor": _adafactor,
    "lion": _lion,
}


def make_optimizer(
    config: OptimizerConfig, total_steps: int, trainable: Tree
) -> tuple[optax.GradientTransformation, Schedule]:
    """(the transformation, the schedule) for a run of `total_steps` updates of the tree `trainable`.

    The transformation's updates are to be added to the parameters (`optax.apply_updates`). `trainable` is read for its
    paths and dtypes alone and may be abstract.

    Raises: UserError for an optimizer or schedule that does not exist.
    """
    for kind, name, known in (("optimizer", config.name, OPTIMIZERS), ("schedule", config.schedule.name, SCHEDULES)):
        if name not in known:
            raise UserError(
                f"there is no {kind} '{name}'", fix=f"{nearest(name, known)}choose one of {', '.join(known)}"
            )
    schedule = make_schedule(config.schedule, config.learning_rate, total_steps)
    parts = [OPTIMIZERS[config.name](config)]
    if config.weight_decay:
        parts.append(optax.add_decayed_weights(config.weight_decay, mask=decay_mask(config.no_decay, trainable)))
    parts.append(optax.scale_by_learning_rate(schedule))
    chain = optax.chain(*parts)
    if config.state_dtype is not None:
        chain = _in_float32(chain, jnp.dtype(config.state_dtype))
    return chain, schedule


def decay_mask(no_decay: tuple[str, ...], trainable: Tree) -> Tree:
    """A tree of bools: whether weight decay applies to each leaf."""
    return jax.tree_util.tree_map_with_path(
        lambda path, _: not any(fnmatch.fnmatchcase(path_name(path), pattern) for pattern in no_decay), trainable
    )


def _in_float32(inner: optax.GradientTransformation, state_dtype: jnp.dtype) -> optax.GradientTransformation:
    """Computes in float32 whatever the parameters' dtype, and keeps floating state of any shape in `state_dtype`."""

    def cast(tree: Tree, dtype: Any) -> Tree:
        return jax.tree.map(lambda x: x.astype(dtype) if jnp.issubdtype(x.dtype, jnp.floating) else x, tree)

    def init(params):
        return cast(inner.init(cast(params, jnp.float32)), state_dtype)

    def update(updates, state, params=None):
        wide = None if params is None else cast(params, jnp.float32)
        updates, state = inner.update(cast(updates, jnp.float32), cast(state, jnp.float32), wide)
        return updates, cast(state, state_dtype)

    return optax.GradientTransformation(init, update)
