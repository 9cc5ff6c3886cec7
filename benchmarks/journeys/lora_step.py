"""One piece of work for a trace: one LoRA update of a small Llama by AdamW, accumulated over two micro-batches.

Only the step is traced: its first call, which enters all the Python that later calls have compiled. See README.md.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from forward import CONFIG

from meshtune.adapters.config import LoraConfig
from meshtune.adapters.method import abstract, prepare
from meshtune.families import model_spec
from meshtune.model.compute import Compute
from meshtune.model.spec import init_params
from meshtune.objectives.sft import sft_objective
from meshtune.optim.build import make_optimizer
from meshtune.optim.config import OptimizerConfig
from meshtune.train.step.build import make_train_step
from meshtune.train.step.state import init_state

METHOD = LoraConfig(rank=4, targets=("all-linear",))
SPEC = model_spec(dict(CONFIG))
MODEL = prepare(METHOD, SPEC, init_params(SPEC, jax.random.key(0)), jax.random.key(1))
OPTIMIZER, _ = make_optimizer(OptimizerConfig(), 10, abstract(METHOD, SPEC).trainable, SPEC)
STEP = make_train_step(sft_objective, MODEL.spec, Compute(), OPTIMIZER, max_grad_norm=1.0)
STATE = init_state(MODEL.trainable, OPTIMIZER)
TOKENS = jnp.arange(32, dtype=jnp.int32).reshape(2, 2, 8)
ONES = jnp.ones_like(TOKENS)
BATCH = {
    "tokens": TOKENS, "targets": TOKENS + 1, "positions": jnp.broadcast_to(jnp.arange(8), TOKENS.shape),
    "segment_ids": ONES, "weights": ONES.astype(jnp.float32),
}  # fmt: skip


def work() -> dict[str, jax.Array]:
    """One update."""
    return STEP(STATE, MODEL.frozen, BATCH, jnp.int32(0))[1]
