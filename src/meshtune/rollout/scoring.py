"""Log-probabilities of completions under the trained weights or a reference, by the training program's own numbers."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import jax
import numpy as np

from meshtune.arrays.tree import Tree
from meshtune.model.compute import Compute, compiler_options
from meshtune.model.spec import ModelSpec
from meshtune.objectives.answers import CRITIC, token_log_probs, without_critic
from meshtune.objectives.critic import critic_values

Scores = dict[str, np.ndarray]
Place = Callable[[dict[str, np.ndarray]], Mapping[str, jax.Array | np.ndarray]]


class Scorer:
    """Computes log-probabilities and entropies of the completion tokens in rows, a micro-batch at a time.

    `place` puts a micro-batch [B, T] on the devices. `order` is the order in which it lays out positions, if it
    changes it.
    """

    def __init__(self, spec: ModelSpec, compute: Compute, place: Place, temperature: float, order: np.ndarray | None):
        self._place, self._back = place, None if order is None else np.argsort(order)
        options = None if compute.dtype == "float32" else compiler_options(compute.platform)
        whole = None if compute.layout is None else compute.layout.replicated

        def score(params: Tree, batch: Mapping[str, jax.Array]) -> dict[str, jax.Array]:
            mask, policy = batch["completion"] > 0, without_critic(params)
            scores = token_log_probs(policy, spec, compute, dict(batch), mask, None, temperature, entropies=True)
            assert scores.entropies is not None
            result = {"log_probs": scores.log_probs, "entropies": scores.entropies}
            return result | (
                {"values": critic_values(params, spec, compute, dict(batch), None)} if CRITIC in params else {}
            )

        self._score = jax.jit(score, out_shardings=whole, compiler_options=options)

    def __call__(self, params: Tree, arrays: Mapping[str, np.ndarray], accumulation: int) -> Scores:
        """Float32 [rows, T] of `log_probs` and `entropies`, 0 where no completion token is predicted, and the `values`
        of a critic where there is one."""
        rows, length = arrays["tokens"].shape
        size = rows // accumulation
        names = ("log_probs", "entropies", *(("values",) if CRITIC in params else ()))
        result = {name: np.zeros((rows, length), np.float32) for name in names}
        for start in range(0, rows, size):
            micro = {name: array[start : start + size] for name, array in arrays.items()}
            if not micro["completion"].any():
                break  # rows that hold something come first
            for name, values in jax.device_get(self._score(params, self._place(micro))).items():
                result[name][start : start + size] = values if self._back is None else values[:, self._back]
        return result
