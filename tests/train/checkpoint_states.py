"""States and records of a run, functions of their step. Not a test: see test_checkpoint.py."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax

from meshtune.train.checkpoint.checkpoints import Record, versions
from meshtune.train.step.state import TrainState, init_state


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class Pair:
    a: jax.Array
    b: jax.Array


OPTIMIZER = optax.chain(optax.scale_by_adam(), optax.scale_by_learning_rate(lambda count: 0.1 / (1 + count)))


def state_of(step: int, width: int = 5) -> TrainState:
    """Dicts, a registered node, bf16, optax's named tuples; contents a function of `step`."""
    rng = np.random.default_rng(step)
    trainable = {
        "layers": {
            "0.0": {"q": {"adapter": Pair(*(jnp.asarray(rng.normal(size=(3, width)), "float32") for _ in "ab"))}}
        },
        "norm": {"weight": jnp.asarray(rng.normal(size=width), "bfloat16")},
    }
    state = init_state(trainable, OPTIMIZER)
    for _ in range(2):
        gradient = jax.tree.map(lambda x: jnp.asarray(rng.normal(size=x.shape), x.dtype), trainable)
        _, opt_state = OPTIMIZER.update(gradient, state.opt_state, trainable)
        state = TrainState(jnp.int32(step), trainable, opt_state)
    return state


def record_of(step: int, **fields) -> Record:
    return Record(step, 3, {"train": {"steps": 9}}, "base", "sha256:0", "d", versions=versions(), **fields)


def bits(tree) -> list[tuple[str, bytes]]:
    return [(str(leaf.dtype), np.asarray(leaf).tobytes()) for leaf in jax.tree.leaves(tree)]
