"""On the real SmolLM2, tuned in full, AdamW with state in 8 bits learns what AdamW with float32 state does."""

from __future__ import annotations

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from transformers import AutoTokenizer

from meshtune.adapters.config import FullConfig
from meshtune.adapters.method import abstract, prepare
from meshtune.model.compute import Compute
from meshtune.objectives.sft import sft_objective
from meshtune.optim.build import OptimizerConfig, make_optimizer
from meshtune.train.step.build import make_eval_step, make_train_step
from meshtune.train.step.state import init_state
from meshtune.weights.load import load_params, load_spec

pytestmark = pytest.mark.slow
ROWS, LENGTH, BATCHES, EPOCHS = 2, 64, 6, 4


def batches(shared, smollm2) -> list[dict[str, np.ndarray]]:
    """Answers of LLaMA-Factory's demo data, [1, ROWS, LENGTH] tokens each; the last is held out."""
    records = json.loads((shared / "assets/data/llamafactory/alpaca_en_demo.json").read_text())
    tokenizer = AutoTokenizer.from_pretrained(smollm2)
    ids = np.array(tokenizer("\n".join(record["output"] for record in records[:200]))["input_ids"], np.int32)
    rows = []
    for number in range(BATCHES + 1):
        part = ids[number * ROWS * LENGTH :][: ROWS * LENGTH + 1]
        shape = (1, ROWS, LENGTH)
        batch = {"tokens": part[:-1].reshape(shape), "targets": part[1:].reshape(shape)}
        batch["positions"] = np.broadcast_to(np.arange(LENGTH, dtype=np.int32), shape)
        batch["segment_ids"], batch["weights"] = np.ones(shape, np.int32), np.ones(shape, np.float32)
        rows.append(batch)
    return rows


def tune_model(smollm2, data, name: str) -> tuple[list[float], float]:
    """(losses of every update, loss on the held-out batch in the end)."""
    spec, _ = load_spec(smollm2, "float32")
    prepared = prepare(FullConfig(), spec, load_params(smollm2, spec), jax.random.key(0))
    config = OptimizerConfig(name, 5e-5, "cosine", warmup_steps=2, weight_decay=0.01)
    optimizer, _ = make_optimizer(config, EPOCHS * BATCHES, abstract(FullConfig(), spec).trainable, prepared.spec)
    compute = Compute(loss_chunk=LENGTH)
    step = make_train_step(sft_objective, prepared.spec, compute, optimizer, max_grad_norm=1.0)
    state, losses = init_state(prepared.trainable, optimizer), []
    for number in range(EPOCHS * BATCHES):
        state, metrics = step(state, prepared.frozen, data[number % BATCHES], jnp.int32(0))
        losses.append(float(metrics["loss"]))
    held_out = {key: jnp.asarray(value[0]) for key, value in data[-1].items()}
    score = make_eval_step(sft_objective, prepared.spec, compute)(state.trainable, prepared.frozen, held_out)
    return losses, float(score.loss / score.weight)


@pytest.mark.timeout(3600)
def test_final_losses_are_within_one_percent(shared, smollm2):
    """The mean loss of the last pass over the data, and that on unseen text; the first has fallen a lot."""
    data = batches(shared, smollm2)
    full, short = (tune_model(smollm2, data, name) for name in ("adamw", "adamw8bit"))
    first, last, last_short = np.mean(full[0][:BATCHES]), np.mean(full[0][-BATCHES:]), np.mean(short[0][-BATCHES:])
    print(
        f"passes: first {first:.4f}, last {last:.4f}, in 8 bits {last_short:.4f}; held out {full[1]:.4f} {short[1]:.4f}"
    )
    assert last < 0.8 * first
    assert abs(last_short / last - 1) < 0.01
    assert abs(short[1] / full[1] - 1) < 0.01
