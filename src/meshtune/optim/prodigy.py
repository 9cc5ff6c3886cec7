"""Prodigy: AdamW that estimates its own learning rate (https://arxiv.org/abs/2306.06101), optax's implementation.

The recipe's learning rate is a factor of the estimate, 1 by default. The estimate depends on the gradients of all
parameters together.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import optax
from optax.contrib import prodigy as optax_prodigy

from meshtune.arrays.tree import Tree
from meshtune.optim.adam import second_decay
from meshtune.optim.config import OptimizerConfig
from meshtune.optim.optimizer import Schedule, State

LEAST = 1e-8  # of the factor: at 0, where a warm-up begins, the estimate would be 0 / 0


def prodigy(config: OptimizerConfig, schedule: Schedule, decayed: Tree) -> optax.GradientTransformation:
    """Changes, learning rate and decay included; `decayed` is a tree of bools, whether a parameter is decayed."""
    b1, b2 = config.beta1, second_decay(config)

    def factor(count: jax.typing.ArrayLike) -> jax.Array:
        return jnp.maximum(schedule(count), LEAST)

    inner = optax_prodigy(factor, (b1, b2), eps=config.eps, estim_lr_coef=config.d_coef)

    def update(updates: Tree, state: State, params: Tree | None = None) -> tuple[Tree, State]:
        changes, new = inner.update(updates, state, params)
        if config.weight_decay:
            t = (state.count + 1).astype(jnp.float32)
            rate = state.estim_lr * schedule(state.count) * jnp.sqrt(1 - b2**t) / (1 - b1**t)

            def with_decay(change: jax.Array, parameter: jax.Array, decay: bool) -> jax.Array:
                return change - rate * config.weight_decay * parameter if decay else change

            changes = jax.tree.map(with_decay, changes, params, decayed)
        return changes, new  # pyright: ignore[reportReturnType]

    return optax.GradientTransformation(inner.init, update)  # pyright: ignore[reportArgumentType]
