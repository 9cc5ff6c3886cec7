"""Validation loss is one sum over one weight, whatever the batches."""

import jax.numpy as jnp
import numpy as np
import pytest

from meshtune.errors import UserError
from meshtune.objectives.answers import LossSums
from meshtune.train.evaluation.evaluate import evaluate
from model_specs import llama_layer, llama_spec

DENSE = llama_spec(8, 8, llama_layer(8, 2, 2, 4), 1)


def score(trainable, frozen, batch):
    weights = batch["weights"]
    return LossSums(jnp.sum(batch["loss"] * weights), jnp.sum(weights), {"accuracy": jnp.sum(weights)})


def test_the_mean_is_over_weights_not_over_batches():
    """Batches of very different weight: a mean of means would be far off. numpy in float64; 1e-6 for float32 sums."""
    rng = np.random.default_rng(0)
    loss, weights = rng.random((6, 2, 5)).astype("f"), (rng.random((6, 2, 5)) ** 8).astype("f")
    weights[0] *= 100
    expected = np.average(loss.astype("d"), weights=weights.astype("d"))
    for cut in (1, 2, 6):
        batches = [
            {"loss": part, "weights": weight, "tokens": part}
            for part, weight in zip(np.split(loss, cut), np.split(weights, cut), strict=True)
        ]
        evaluation = evaluate(score, DENSE, {}, {}, batches)
        assert evaluation.loss == pytest.approx(expected, rel=1e-6)
        assert evaluation.metrics["accuracy"] == pytest.approx(1.0)


def test_nothing_to_learn_is_an_error():
    batch = {"loss": np.ones((1, 1, 2)), "weights": np.zeros((1, 1, 2)), "tokens": np.ones((1, 1, 2))}
    with pytest.raises(UserError, match="nothing to learn"):
        evaluate(score, DENSE, {}, {}, [batch])
