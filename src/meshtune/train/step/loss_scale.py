"""Dynamic scaling of the loss where products are float16, by the rules of torch.amp.GradScaler.

Small gradients would be zero in float16, so the loss is multiplied by a scale before the backward pass and the float32
gradients are divided by it. An update with a gradient that is not finite is skipped, and the scale halved; after
INTERVAL updates without one it is doubled.
"""

from __future__ import annotations

from typing import TypedDict

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from meshtune.arrays.spec import ArraySpec
from meshtune.arrays.tree import Tree

START, GROWTH, BACKOFF, INTERVAL = 65536.0, 2.0, 0.5, 2000  # GradScaler's defaults
DTYPE = "float16"


class LossScale(TypedDict):
    """The scale, the updates in a row without an overflow, and the updates that were skipped so far."""

    scale: Float[Array, ""]
    good: Int[Array, ""]
    skipped: Int[Array, ""]


def abstract_loss_scale(dtype: str) -> Tree:
    """A LossScale of ArraySpecs for activations in `dtype`; empty for those that need none."""
    if dtype != DTYPE:
        return {}
    forms = {"scale": "float32", "good": "int32", "skipped": "int32"}
    return {name: ArraySpec((), form, (), "zeros") for name, form in forms.items()}


def initial_loss_scale(dtype: str) -> dict[str, np.ndarray]:
    """The LossScale before the first update; empty where none is needed."""
    if dtype != DTYPE:
        return {}
    return {"scale": np.float32(START)[()], "good": np.int32(0), "skipped": np.int32(0)}  # pyright: ignore[reportReturnType]


def next_loss_scale(before: LossScale, finite: Bool[Array, ""]) -> LossScale:
    """The scale after an update whose gradient was `finite`, or not."""
    good = jnp.where(finite, before["good"] + 1, 0)
    grows = good == INTERVAL
    factor = jnp.where(finite, jnp.where(grows, GROWTH, 1.0), BACKOFF)
    return {
        "scale": before["scale"] * factor,
        "good": jnp.where(grows, 0, good),
        "skipped": before["skipped"] + jnp.where(finite, 0, 1),
    }
