"""Schedule-free AdamW (https://arxiv.org/abs/2405.15682), optax's own, for every parameter by itself.

What is trained is y, where gradients are taken; what is evaluated and exported is x, the average of z, both of which
come from y and z.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
from optax.contrib import schedule_free as wrapped

from meshtune.arrays.paths import named_leaves
from meshtune.optim.config import OptimizerConfig
from meshtune.optim.optimizer import KEPT
from meshtune.optim.rule import At, Rule, adopted


def schedule_free(config: OptimizerConfig) -> Rule:
    """State: z and the second moment in the parameter's shape, and the weight of the average so far."""

    def make(at: At) -> optax.GradientTransformation:
        adam = optax.chain(
            optax.scale_by_rms(config.adam_beta2, config.eps, eps_in_sqrt=False, bias_correction=True),
            optax.add_decayed_weights(at.decay),
            optax.scale_by_learning_rate(at.rate),
        )
        return wrapped(adam, at.rate, b1=config.beta1)

    return adopted(make, config.state_dtype, final=True)


def averages(config: OptimizerConfig) -> Callable[[Any, Any], Any]:
    """(trainable, state) -> x, the parameters to evaluate and to export, in the dtypes of those trained."""

    def shown(trainable: Any, state: Any) -> Any:
        found = []
        for path, y in named_leaves(trainable):
            z = state[KEPT][path].z.astype(jnp.float32)
            found.append(((y.astype(jnp.float32) - (1 - config.beta1) * z) / config.beta1).astype(y.dtype))
        return jax.tree.unflatten(jax.tree.structure(trainable), found)

    return jax.jit(shown)
