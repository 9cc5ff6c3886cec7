"""Adafactor's scaling, layer by layer: optax's own, mapped over the leading axis of stacked parameters.

Without the mapping a stack of layers would be one three-dimensional parameter: its statistics could be factored across
layers, and its updates would be clipped by the RMS of all layers together.
"""

from __future__ import annotations

from typing import Any

import jax
import optax

from meshtune.optim.paths import named_leaves

DECAY_RATE = 0.8  # second moments decay by 1 - t^-0.8, the paper's schedule
CLIP_RMS = 1.0  # an update's root mean square is at most this before the learning rate
FACTOR_FROM = 128  # parameters with two dimensions of at least this many are factored; LoRA's thin ones are kept whole


def scale_by_adafactor() -> optax.GradientTransformation:
    """Gradients divided by (factored) second moments, then clipped by RMS (https://arxiv.org/abs/1804.04235).

    State: a dict from the parameter's path to optax's state of that parameter.
    """
    one = optax.chain(
        optax.scale_by_factored_rms(decay_rate=DECAY_RATE, min_dim_size_to_factor=FACTOR_FROM, epsilon=1e-30),
        optax.clip_by_block_rms(CLIP_RMS),
    )

    def init(params):
        return {name: _mapped(name, one.init)(leaf) for name, leaf in named_leaves(params)}

    def update(updates, state, params=None):
        assert params is not None, "adafactor's statistics are laid out by the parameters"
        new_updates, new_state = [], {}
        for (name, grad), leaf in zip(named_leaves(updates), jax.tree.leaves(params), strict=True):
            scaled, new_state[name] = _mapped(name, one.update)(grad, state[name], leaf)
            new_updates.append(scaled)
        return jax.tree.unflatten(jax.tree.structure(updates), new_updates), new_state

    return optax.GradientTransformation(init, update)


def _mapped(name: str, function: Any) -> Any:
    return jax.vmap(function) if name.startswith("layers/") else function
