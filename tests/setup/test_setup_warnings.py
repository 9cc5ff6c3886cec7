"""Warnings of a run before its first update, and its validation loss."""

from __future__ import annotations

import math
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from meshtune.arrays.tree import merge
from meshtune.config.load import load_recipe
from meshtune.model.compute import Compute
from meshtune.optim.optimizer import make_schedule
from meshtune.setup.choices import optimizer_of, precision_of
from meshtune.setup.stage import evaluation_objective_of, objective_of
from meshtune.train.run_setup import baseline_warning, warm_up_warning
from tiny_models import same_weights, torch_model


def recipe(*changes: str):
    return load_recipe({"model": "m", "data": {"train": "d.jsonl"}, "output": "o"}, changes)


@pytest.mark.parametrize("total", [1, 2, 3, 10, 11, 40, 1000])
def test_a_first_update_at_rate_zero_is_named_in_short_runs_and_the_way_out_ends_it(total):
    rate = make_schedule(optimizer_of(recipe(), precision_of(recipe(), "float32", "cpu")[0]), total)(0)
    warned = bool(warm_up_warning(recipe(), total))
    assert warned == (1 < total <= 10)
    if warned or total == 1000:
        config = optimizer_of(recipe("optimizer.warmup_ratio=0.03"), precision_of(recipe(), "float32", "cpu")[0])
        assert float(make_schedule(config, total)(0)) == 0.0
        assert float(rate) == 0.0
    way_out = recipe("optimizer.warmup_steps=0")
    assert warm_up_warning(way_out, total) == []
    config = optimizer_of(way_out, precision_of(way_out, "float32", "cpu")[0])
    assert float(make_schedule(config, total)(0)) > 0


@pytest.mark.parametrize(
    ("rows", "samples", "expected"),
    [(1, 8, True), (2, 8, False), (1, 16, False), (1, 15, True)],  # of 8 rows
)
def test_a_kto_micro_batch_of_one_answer_is_warned_of(rows, samples, expected):
    data = types.SimpleNamespace(report=types.SimpleNamespace(samples=samples, rows=8))
    kto = recipe("stage=kto", "train.batch_size=4", f"train.micro_batch={rows}")
    assert bool(baseline_warning(kto, data, rows)) == expected  # pyright: ignore[reportArgumentType]
    assert baseline_warning(recipe(), data, rows) == []  # pyright: ignore[reportArgumentType]


@pytest.mark.slow
def test_validation_takes_the_plain_loss_of_every_target():
    """-log p, by log-softmax of the logits, whatever the training loss is made of."""
    from meshtune.model.decoder import forward, logits
    from meshtune.model.inputs import Inputs

    spec, params = same_weights(torch_model("qwen3_bias_window"))
    tokens = np.random.default_rng(0).integers(1, 97, (2, 9)).astype(np.int32)
    batch = {
        "tokens": jnp.asarray(tokens[:, :-1]),
        "targets": jnp.asarray(tokens[:, 1:]),
        "positions": jnp.tile(jnp.arange(8), (2, 1)),
        "segment_ids": jnp.ones((2, 8), jnp.int32),
        "weights": jnp.ones((2, 8)),
    }
    compute = Compute(loss_chunk=8)

    def loss(objective):
        score = objective(merge(params, {}), spec, compute, batch, None)
        return float(score.loss / score.weight)

    hidden = forward(params, spec, compute, Inputs(batch["tokens"], batch["positions"], batch["segment_ids"]))[0]
    log_probs = jax.nn.log_softmax(logits(params, spec, hidden).astype(jnp.float32))
    plain = -float(jnp.take_along_axis(log_probs, batch["targets"][..., None], axis=-1).mean())
    for changes in ((), ("stage.label_smoothing=0.2",), ("stage.loss=dft",)):
        chosen = recipe("stage.kind=sft", *changes)
        assert math.isclose(loss(evaluation_objective_of(chosen)), plain, rel_tol=1e-5)
        assert math.isclose(loss(objective_of(chosen)), plain, rel_tol=1e-5) == (not changes)
