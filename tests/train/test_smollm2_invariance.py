"""On the real SmolLM2, in float32, how LoRA's step is computed changes neither losses nor gradients."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from meshtune.adapters.config import LoraConfig
from meshtune.adapters.method import prepare
from meshtune.arrays.tree import flatten
from meshtune.model.compute import Compute
from meshtune.objectives.sft import sft_objective
from meshtune.optim.optax_global import from_optax_global
from meshtune.train.step.build import make_train_step
from meshtune.train.step.state import init_state
from meshtune.weights.load import load_params, load_spec

pytestmark = pytest.mark.slow
LENGTH = 48
STEPS = 30
KEYS = ("tokens", "targets", "positions", "segment_ids")


def sgd(rate):
    """optax's own, so that nothing but the step is under test."""
    return from_optax_global(optax.sgd(rate), lambda count: jnp.float32(rate))


def rows(per_row: int) -> dict[str, np.ndarray]:
    """The same eight documents, `per_row` of them side by side in each row; the first third is not learned."""
    rng = np.random.default_rng(3)
    batch = {key: np.zeros((8 // per_row, LENGTH * per_row), np.int32) for key in KEYS}
    batch["weights"] = np.zeros((8 // per_row, LENGTH * per_row), np.float32)
    used = np.zeros(8, int)
    for number in range(8):
        n, row = int(rng.integers(20, LENGTH)), number // per_row
        ids = rng.integers(1000, 1200, n + 1)
        span = np.s_[row, used[row] : used[row] + n]
        batch["tokens"][span], batch["targets"][span], batch["positions"][span] = ids[:-1], ids[1:], np.arange(n)
        batch["segment_ids"][span], batch["weights"][span] = number % per_row + 1, np.arange(n) >= n // 3
        used[row] += n
    return batch


def run_steps(smollm2, batch, accumulation: int, compute: Compute) -> tuple[list[float], dict]:
    """Losses of thirty SGD steps and the adapters after them."""
    spec, _ = load_spec(smollm2, "float32")
    prepared = prepare(LoraConfig(rank=4), spec, load_params(smollm2, spec), jax.random.key(0))
    optimizer = sgd(0.05)
    step = make_train_step(sft_objective, prepared.spec, compute, optimizer, max_grad_norm=1.0)
    state = init_state(prepared.trainable, optimizer)
    arrays = {key: jnp.asarray(value.reshape(accumulation, -1, value.shape[-1])) for key, value in batch.items()}
    losses = []
    for _ in range(STEPS):
        state, metrics = step(state, prepared.frozen, arrays, jnp.int32(0))
        losses.append(float(metrics["loss"]))
    return losses, flatten(state.trainable)


@pytest.fixture(scope="module")
def plain(smollm2):
    return run_steps(smollm2, rows(1), 1, Compute(attention="direct", loss_chunk=LENGTH))


@pytest.mark.parametrize(
    ("per_row", "accumulation", "compute"),
    [
        (1, 4, Compute(attention="direct")),
        (4, 1, Compute(attention="direct")),
        (4, 2, Compute(attention="blockwise", loss_chunk=16)),
        (1, 1, Compute(attention="direct", remat="full")),
        (1, 1, Compute(attention="direct", scan=False)),
    ],
    ids=["accumulated", "packed", "packed-blockwise-chunked", "rematerialised", "unrolled"],
)
def test_losses_and_adapters_do_not_depend_on_how_they_are_computed(smollm2, plain, per_row, accumulation, compute):
    """float32 sums in other orders through 30 layers: 1e-4 of the loss of each of thirty updates. Adapters to 3e-3 of
    their largest entry, since gradients of single entries are small differences of large sums and each update starts
    from the differences of the last (after three updates 1e-3 is kept); on average 1e-4."""
    result = run_steps(smollm2, rows(per_row), accumulation, compute)
    np.testing.assert_allclose(result[0], plain[0], rtol=1e-4)
    assert plain[0][-1] < plain[0][0]
    for path, adapter in plain[1].items():
        for ours, theirs in zip(jax.tree.leaves(result[1][path]), jax.tree.leaves(adapter), strict=True):
            largest = float(jnp.abs(theirs).max())
            difference = np.abs(np.asarray(ours) - np.asarray(theirs))
            assert difference.max() <= 3e-3 * largest, path
            assert difference.mean() <= 1e-4 * largest, path
