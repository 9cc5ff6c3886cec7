"""Schedule-free AdamW (https://arxiv.org/abs/2405.15682), optax's implementation, applied to every parameter.

Trained are y, where gradients are taken; evaluated and exported is x, the average of z, which follows from y and z.
"""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
import optax
from optax.contrib import schedule_free as optax_schedule_free

from meshtune.arrays.tree import Tree, named_leaves
from meshtune.optim.adam import second_decay
from meshtune.optim.config import OptimizerConfig
from meshtune.optim.optimizer import PARAM_STATE, ParamOptimizer, State, UpdateContext, from_optax


def schedule_free(config: OptimizerConfig) -> ParamOptimizer:
    """State: z and the second moment in the parameter's shape, and the weight of the average so far."""

    def make(context: UpdateContext) -> optax.GradientTransformation:
        adam = optax.chain(
            optax.scale_by_rms(second_decay(config), config.eps, eps_in_sqrt=False, bias_correction=True),
            optax.add_decayed_weights(context.decay),
            optax.scale_by_learning_rate(context.rate),
        )
        return optax_schedule_free(adam, context.rate, b1=config.beta1)

    return from_optax(make, config.state_dtype, final=True)


def averaged_params(config: OptimizerConfig) -> Callable[[Tree, State], Tree]:
    """(trainable, state) -> x, the parameters to evaluate and to export, in the dtypes of the trainable ones."""

    def eval_params(trainable: Tree, state: State) -> Tree:
        averages = []
        for path, y in named_leaves(trainable):
            z = state[PARAM_STATE][path].z.astype(jnp.float32)
            averages.append(((y.astype(jnp.float32) - (1 - config.beta1) * z) / config.beta1).astype(y.dtype))
        return jax.tree.unflatten(jax.tree.structure(trainable), averages)

    return jax.jit(eval_params)
