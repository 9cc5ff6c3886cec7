"""Dynamic scaling of the loss where products are float16, by the rules of torch.amp.GradScaler.

Small gradients would be zero in float16, so the loss is multiplied by a scale before the backward pass and the float32
gradients are divided by it. An update with a gradient that is not finite is skipped, and the scale halved; after
INTERVAL updates without one it is doubled.
"""

from __future__ import annotations

from collections.abc import Mapping

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool

from meshtune.arrays.spec import ArraySpec
from meshtune.arrays.tree import Tree

START, GROWTH, BACKOFF, INTERVAL = 65536.0, 2.0, 0.5, 2000  # GradScaler's defaults
DTYPE = "float16"


# The scale, the updates in a row without an overflow, and the updates that were skipped so far.
FORMS = {"scale": "float32", "good": "int32", "skipped": "int32"}


def abstract_loss_scale(dtype: str) -> Tree:
    """The loss scale as ArraySpecs for activations in `dtype`; empty for those that need none."""
    return {name: ArraySpec((), form, (), "zeros") for name, form in FORMS.items()} if dtype == DTYPE else {}


def initial_loss_scale(dtype: str) -> dict[str, np.ndarray]:
    """The loss scale before the first update; empty where none is needed."""
    values = {"scale": START, "good": 0, "skipped": 0}
    return {name: np.asarray(values[name], form) for name, form in FORMS.items()} if dtype == DTYPE else {}


def next_loss_scale(before: Mapping[str, Array], finite: Bool[Array, ""]) -> dict[str, Array]:
    """The scale after an update whose gradient was `finite`, or not."""
    good = jnp.where(finite, before["good"] + 1, 0)
    grows = good == INTERVAL
    factor = jnp.where(finite, jnp.where(grows, GROWTH, 1.0), BACKOFF)
    return {
        "scale": before["scale"] * factor,
        "good": jnp.where(grows, 0, good),
        "skipped": before["skipped"] + jnp.where(finite, 0, 1),
    }
