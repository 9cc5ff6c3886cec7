"""Warns of updates that are rounded away: steps of bfloat16 weights below half a unit in the last place."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np

from meshtune.arrays.spec import ArraySpec
from meshtune.arrays.tree import Tree, named_leaves
from meshtune.model.gather import to_device

UPDATES = 3  # that are watched together: the first one alone leaves some weights as they are, such as an adapter's A
FULL_RATE = 0.5  # of the peak: during a warm-up even updates that will be large enough later are lost
LEAST = 0.5  # the share of weights that changes where updates are large enough
SAMPLE = 2**20  # numbers of a parameter that are compared


@dataclasses.dataclass
class LostUpdates:
    """Compares a sample of the trained weights narrower than float32 before and after the first updates at full rate.

    `abstract` are the ArraySpecs of the trainable tree, `rates` the learning rate of every update. Matrices alone are
    compared: rows of an embedding whose tokens do not occur, and experts that are not used, have no gradient.
    """

    abstract: Tree
    rates: np.ndarray
    start: int

    def __post_init__(self) -> None:
        narrow = {path: array for path, array in named_leaves(self.abstract) if _is_narrow(array)}
        matrices = {path for path, array in narrow.items() if array.role == "matrix"}
        self._dtype = next((array.dtype for array in narrow.values()), "")
        self._compared = frozenset(matrices or narrow)
        full = np.flatnonzero(self.rates[self.start :] >= FULL_RATE * self.rates.max(initial=0.0))
        self._first = self.start + int(full[0]) if len(full) else len(self.rates)
        self._last = min(self._first + UPDATES, len(self.rates))
        self._before: list[jax.Array] | None = None

    def before(self, trainable: Tree, done: int) -> None:
        """Keeps a sample of the weights where the updates to watch begin; `done` updates were made."""
        if done == self._first and self._compared and self._last - self._first > 1:
            self._before = jax.jit(self._sample)(trainable)

    def after(self, trainable: Tree, done: int) -> str | None:
        """A warning after the last update to watch, if most of its weights are what they were."""
        if self._before is None or done != self._last:
            return None
        share = float(jax.jit(self._share_changed)(self._before, trainable))
        self._before = None
        if share >= LEAST:
            return None
        rate = self.rates[self._first]
        return (
            f"warning: only {100 * share:.2g}% of the weights in {self._dtype} changed in updates {self._first + 1} to "
            f"{self._last}: at a rate of {rate:.2g} most updates are rounded away. Set compute.precision=mixed "
            "(float32 weights), or optimizer.stochastic_rounding=true (no more memory), or a higher learning rate"
        )

    def _sample(self, trainable: Tree) -> list[jax.Array]:
        leaves = [leaf for path, leaf in named_leaves(trainable) if path in self._compared]
        return [to_device(leaf[tuple(slice(0, size) for size in _sample_shape(leaf.shape))]) for leaf in leaves]

    def _share_changed(self, before: list[jax.Array], trainable: Tree) -> jax.Array:
        pairs = zip(before, self._sample(trainable), strict=True)
        return sum((jnp.sum(old != new, dtype=jnp.float32) for old, new in pairs), jnp.float32(0)) / sum(
            leaf.size for leaf in before
        )


def _is_narrow(array: ArraySpec) -> bool:
    return jnp.issubdtype(array.dtype, jnp.floating) and jnp.dtype(array.dtype).itemsize < 4


def _sample_shape(shape: tuple[int, ...]) -> tuple[int, ...]:
    """The shape of the first rows of a matrix, or of each layer's, that have at most SAMPLE numbers together."""
    if len(shape) < 2:
        return shape
    leading = int(np.prod(shape[:-2])) * shape[-1]
    return (*shape[:-2], max(1, min(shape[-2], SAMPLE // leading)), shape[-1])
