"""Sampling against transformers' logits processors, on random logits; masks must be exactly equal."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from transformers import (
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from meshtune.errors import UserError
from meshtune.generate.programs import Counts, compiled_form, next_token, process_logits
from meshtune.generate.request import Sampling

ROWS, VOCAB = 5, 1009
LOGITS = np.random.default_rng(0).normal(scale=3, size=(ROWS, VOCAB)).astype(np.float32)
PROMPT = np.random.default_rng(1).integers(0, VOCAB, (ROWS, 40))


def ours(sampling: Sampling, logits: np.ndarray = LOGITS) -> np.ndarray:
    switches, knobs = compiled_form([sampling] * ROWS)
    prompted = np.zeros((ROWS, VOCAB), bool)
    np.put_along_axis(prompted, PROMPT, True, axis=1)
    counts = Counts(jnp.asarray(prompted), jnp.zeros((ROWS, VOCAB), jnp.int32))
    return np.asarray(jax.jit(process_logits, static_argnums=2)(jnp.asarray(logits), counts, switches, knobs))


def theirs(*processors, logits: np.ndarray = LOGITS) -> np.ndarray:
    scores = torch.tensor(logits)
    for processor in processors:
        scores = processor(torch.tensor(PROMPT), scores)
    return scores.numpy()


def check(actual: np.ndarray, expected: np.ndarray):
    """The same tokens ruled out, the rest equal to float32 rounding."""
    np.testing.assert_array_equal(np.isneginf(actual), np.isneginf(expected))
    np.testing.assert_allclose(actual, expected, rtol=1e-6)


# Temperature is on in each: at temperature 0 text is greedy, and only the repetition penalty applies.
@pytest.mark.parametrize("penalty", [0.7, 1.3, 5.0])
def test_repetition_penalty(penalty):
    check(ours(Sampling(repetition_penalty=penalty)), theirs(RepetitionPenaltyLogitsProcessor(penalty)))


@pytest.mark.parametrize("temperature", [0.1, 0.7, 1.0, 3.5])
def test_temperature(temperature):
    check(ours(Sampling(temperature=temperature)), theirs(TemperatureLogitsWarper(temperature)))


@pytest.mark.parametrize("k", [1, 2, 50, VOCAB - 1, VOCAB, 5 * VOCAB])
def test_top_k(k):
    check(ours(Sampling(temperature=1.0, top_k=k)), theirs(TopKLogitsWarper(k)))


def test_top_k_keeps_ties_as_transformers_does():
    rounded = np.round(LOGITS)
    actual = ours(Sampling(temperature=1.0, top_k=20), rounded)
    assert (np.isfinite(actual).sum(-1) > 20).any()
    check(actual, theirs(TopKLogitsWarper(20), logits=rounded))


@pytest.mark.parametrize("p", [1e-9, 0.1, 0.5, 0.9, 0.95, 0.999])
def test_top_p(p):
    check(ours(Sampling(temperature=1.0, top_p=p)), theirs(TopPLogitsWarper(p)))


@pytest.mark.parametrize("p", [0.01, 0.05, 0.3, 1.0])
def test_min_p(p):
    check(ours(Sampling(temperature=1.0, min_p=p)), theirs(MinPLogitsWarper(p)))


@pytest.mark.parametrize(
    ("temperature", "k", "p", "m", "penalty"), [(0.7, 50, 0.9, 0.02, 1.2), (1.5, 200, 0.5, 0.1, 0.8)]
)
def test_all_in_transformers_order(temperature, k, p, m, penalty):
    actual = ours(Sampling(temperature=temperature, top_k=k, top_p=p, min_p=m, repetition_penalty=penalty))
    chain = [RepetitionPenaltyLogitsProcessor(penalty), TemperatureLogitsWarper(temperature)]
    check(actual, theirs(*chain, TopKLogitsWarper(k), TopPLogitsWarper(p), MinPLogitsWarper(m)))


def draw(sampling: Sampling, logits: np.ndarray, positions: np.ndarray) -> np.ndarray:
    rows, vocab = logits.shape
    switches, knobs = compiled_form([dataclasses.replace(sampling, seed=sampling.seed + n) for n in range(rows)])
    counts = Counts(jnp.zeros((rows, vocab), bool), jnp.zeros((rows, vocab), jnp.int32))
    return np.asarray(next_token(jnp.asarray(logits), counts, jnp.asarray(positions), switches, knobs))


def test_greedy_takes_the_likeliest():
    np.testing.assert_array_equal(draw(Sampling(), LOGITS, np.arange(ROWS)), LOGITS.argmax(-1))


def test_draws_follow_the_probabilities():
    """20,000 draws of 4 tokens: each share within 5 standard errors of its softmax probability."""
    n, logits = 20_000, np.log(np.array([0.5, 0.3, 0.15, 0.05], np.float32))
    drawn = draw(Sampling(temperature=1.0, seed=3), np.tile(logits, (n, 1)), np.arange(n))
    share = np.bincount(drawn, minlength=4) / n
    expected = np.exp(logits)
    assert (np.abs(share - expected) < 5 * np.sqrt(expected * (1 - expected) / n)).all(), share


def test_draws_depend_on_seed_and_position_alone():
    together = draw(Sampling(temperature=1.0, seed=7), np.tile(LOGITS[:1], (ROWS, 1)), np.full(ROWS, 12))
    for row in range(ROWS):
        alone = draw(Sampling(temperature=1.0, seed=7 + row), LOGITS[:1], np.array([12]))
        assert alone[0] == together[row]
    assert len(set(together)) > 1


@pytest.mark.parametrize(
    "wrong",
    [
        {"temperature": -0.1},
        {"temperature": float("nan")},
        {"temperature": float("inf")},
        {"top_k": -1},
        {"top_k": 2.5},
        {"top_p": 0.0},
        {"top_p": 1.01},
        {"min_p": -0.1},
        {"min_p": 1.5},
        {"repetition_penalty": 0.0},
        {"seed": -1},
        {"seed": 2**31},
    ],
)
def test_numbers_out_of_range_are_refused(wrong):
    (name,) = wrong
    with pytest.raises(UserError, match=name):
        Sampling(**wrong)
