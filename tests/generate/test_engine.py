"""The engine against transformers' generate and against text filed long ago; float32 everywhere."""

from __future__ import annotations

import dataclasses
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, MistralConfig

from meshtune.errors import UserError
from meshtune.families import model_spec
from meshtune.generate.engine import Engine
from meshtune.generate.programs import length_bucket
from meshtune.generate.request import Sampling
from meshtune.model.compute import Compute
from meshtune.model.spec import init_params
from meshtune.weights.load import load_params, load_spec

torch.set_num_threads(1)  # the cores are shared, and torch's threads spin while they wait for each other


def engine_of(directory, **compute) -> Engine:
    spec, config = load_spec(directory, "float32")
    return Engine(load_params(directory, spec), spec, Compute(**compute), frozenset({config["eos_token_id"]}))


@pytest.fixture(scope="module")
def stories(stories260k) -> Engine:
    return engine_of(stories260k)


@pytest.fixture(scope="module")
def golden(stories260k) -> list[int]:
    return json.loads((stories260k / "golden_greedy_200.json").read_text())["token_ids"]


def test_greedy_text_is_the_golden_one(stories, golden):
    (actual,) = stories.generate([golden[:1]], max_tokens=200)
    assert actual == golden[1:]


def test_unrolled_layers_give_the_golden_text(stories, golden):
    unrolled = Engine(stories.weights, stories.spec, Compute(scan=False), stories.stop_ids)
    (actual,) = unrolled.generate([golden[:1]], max_tokens=60)
    assert actual == golden[1:61]


def test_prompts_of_different_lengths_do_not_disturb_each_other(stories, golden):
    cuts = [1, 5, 16, 17, 31]
    actual = stories.generate([golden[:cut] for cut in cuts], max_tokens=100)
    assert actual == [golden[cut : cut + 100] for cut in cuts]


@pytest.mark.parametrize("steps", [1, 3, 16])
def test_pieces_of_any_size_hold_the_same_tokens(stories, golden, steps):
    pieces = list(stories.run([golden[:3]], max_tokens=50, steps=steps))
    assert len(pieces) == -(-50 // steps)
    assert [token for piece in pieces for token in piece[0]] == golden[3:53]


@pytest.mark.slow
def test_a_cache_that_grows_changes_nothing(stories, golden, monkeypatch):
    monkeypatch.setattr("meshtune.generate.rows.ROOM", 4)
    monkeypatch.setattr("meshtune.model.model_cache.FEWEST_SLOTS", 32)
    (actual,) = stories.generate([golden[:1]], max_tokens=200)
    assert actual == golden[1:]


def test_a_stop_id_ends_its_row_alone(stories, golden):
    stop = golden[20]
    actual = stories.generate([golden[:10], golden[:21]], max_tokens=30, stop_ids=[stop])
    assert actual[0] == golden[10 : golden.index(stop, 10) + 1]
    later = golden[21:51]
    assert actual[1] == (later[: later.index(stop) + 1] if stop in later else later)


def test_a_row_stopped_by_its_reader_stays_silent(stories, golden):
    run = stories.run([golden[:1], golden[:1]], max_tokens=40, steps=4)
    tokens: list[list[int]] = [[], []]
    for number, piece in enumerate(run):
        for row, new in zip(tokens, piece, strict=True):
            row.extend(new)
        if number == 1:
            run.stop(0)
    assert tokens == [golden[1:9], golden[1:41]]


def test_the_context_can_be_filled_to_its_last_token(stories, golden):
    prompt = (golden * 3)[: stories.context - 10]
    (actual,) = stories.generate([prompt], max_tokens=10, stop_ids=[])
    assert len(actual) == 10


SAMPLED = Sampling(temperature=1.2, top_k=40, top_p=0.95, min_p=0.01, repetition_penalty=1.1, seed=5)


def test_the_same_seed_gives_the_same_text_however_it_is_cut(stories, golden):
    full = stories.generate([golden[:4]], SAMPLED, max_tokens=40)
    pieces = stories.run([golden[:4]], SAMPLED, max_tokens=40, steps=3)
    assert [token for piece in pieces for token in piece[0]] == full[0]
    assert stories.generate([golden[:4]], dataclasses.replace(SAMPLED, seed=6), max_tokens=40) != full


def test_row_i_of_a_batch_draws_as_seed_plus_i_does_alone(stories, golden):
    """Scores of a batch and of a row alone differ by rounding; none of these 60 draws is that close."""
    together = stories.generate([golden[:4], golden[:9]], SAMPLED, max_tokens=30)
    alone = stories.generate([golden[:9]], dataclasses.replace(SAMPLED, seed=6), max_tokens=30)
    assert together[1] == alone[0]


def theirs(model, prompt: list[int], tokens: int, **options) -> list[int]:
    output = model.generate(
        torch.tensor([prompt]), max_new_tokens=tokens, do_sample=False, pad_token_id=0, eos_token_id=None, **options
    )
    return output[0, len(prompt) :].tolist()


SMALL = {
    "vocab_size": 101,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "initializer_range": 0.3,
}


def test_a_random_model_with_a_window_and_a_penalty_continues_as_in_transformers(tmp_path):
    """Prompts beyond the window; families without a penalty are compared in tests/families/test_matrix.py."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(MistralConfig(**SMALL, sliding_window=8, head_dim=8)).eval()
    model.save_pretrained(tmp_path)
    spec, _ = load_spec(tmp_path, "float32")
    engine = Engine(load_params(tmp_path, spec), spec, Compute())
    rng = np.random.default_rng(0)
    prompts = [rng.integers(1, 101, n).tolist() for n in (3, 29, 12)]
    answers = engine.generate(prompts, Sampling(repetition_penalty=1.3), max_tokens=40)
    assert answers == [theirs(model, prompt, 40, repetition_penalty=1.3) for prompt in prompts]


def test_lengths_are_rounded_up_by_at_most_a_half():
    lengths = (1, 16, 17, 32, 33, 48, 49, 65, 97, 1000)
    assert [length_bucket(n) for n in lengths] == [16, 16, 32, 32, 48, 48, 64, 96, 128, 1024]
    assert all(n <= length_bucket(n) <= 1.5 * n for n in range(32, 5000))


@pytest.mark.parametrize(
    ("prompts", "options", "message"),
    [
        ([], {}, "no prompt"),
        ([[1], []], {}, "empty"),
        ([[1, 512]], {}, "512 is outside the model's vocabulary of 512"),
        ([[-1]], {}, "-1 is outside"),
        ([[1] * 512], {}, "512 tokens leave no room"),
        ([[1] * 500], {"max_tokens": 13}, "max_tokens = 12 at most"),
        ([[1]], {"max_tokens": 0}, "generates nothing"),
    ],
)
def test_impossible_requests_are_refused(stories, prompts, options, message):
    with pytest.raises(UserError, match=message):
        stories.generate(prompts, **options)


def test_weights_that_are_not_finite_are_refused():
    spec = model_spec(LlamaConfig(**SMALL, architectures=["LlamaForCausalLM"]).to_dict())
    params = init_params(spec, jax.random.key(0))
    params["norm"]["weight"] = params["norm"]["weight"].at[3].set(jnp.nan)
    with pytest.raises(UserError, match="not finite"):
        Engine(params, spec, Compute()).generate([[1, 2]], max_tokens=3)


PROMPTS = [
    "The capital of France is",
    "def fibonacci(n):\n",
    "<|im_start|>user\nWhat is the difference between a crocodile and an alligator?<|im_end|>\n<|im_start|>assistant\n",
    "Ingredients: two eggs, a cup of flour,",
    "Es war einmal",
]


@pytest.mark.slow
def test_smollm2_continues_as_in_transformers(smollm2):
    tokenizer = AutoTokenizer.from_pretrained(smollm2)
    model = AutoModelForCausalLM.from_pretrained(smollm2, dtype=torch.float32).eval()
    prompts = [tokenizer(prompt)["input_ids"] for prompt in PROMPTS]
    engine = engine_of(smollm2)
    together = engine.generate(prompts, max_tokens=64, stop_ids=[])
    for prompt, actual in zip(prompts, together, strict=True):
        assert actual == theirs(model, prompt, 64)
    assert engine.generate(prompts[:1], max_tokens=64, stop_ids=[]) == together[:1]
