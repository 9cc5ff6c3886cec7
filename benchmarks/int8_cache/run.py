"""A cache in int8 beside one in the dtype of the computation: log-probabilities of texts, and greedy answers.

    python benchmarks/int8_cache/run.py MODEL_DIR TEXT [TEXT ...] [--tokens 256] [--new 128] [--json result.json]

The first `tokens` tokens of each TEXT (a file) are read over either cache: the difference of the log-probability of
every token, and whether the likeliest token is the same. Then both answer the first 32, 64, ... tokens of each text
greedily with `new` tokens. Memory is counted from the arrays of a scheduler's rows.
"""

from __future__ import annotations

import argparse
import json
import pathlib
import platform
import statistics
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import meshtune
from meshtune.generate.api import Model
from meshtune.model.decoder import forward, logits
from meshtune.model.inputs import Inputs
from meshtune.model.model_cache import init_cache

PROMPTS = (32, 64, 128)


def log_probabilities(model: Model, ids: list[int]) -> np.ndarray:
    """[T - 1, V], in float32, of the tokens after each one, read over the model's cache."""

    def scores(params: Any, tokens: jax.Array) -> jax.Array:
        places = jnp.arange(tokens.shape[1], dtype=jnp.int32)[None]
        cache = init_cache(model.spec, 1, len(ids), model.compute.dtype, cache=model.compute.cache)
        hidden = forward(
            params, model.spec, model.compute, Inputs(tokens, places, jnp.ones_like(tokens)), cache=cache
        ).hidden
        return jax.nn.log_softmax(logits(params, model.spec, hidden), axis=-1)[0, :-1]

    return np.asarray(jax.jit(scores)(model.params, jnp.asarray([ids], jnp.int32)))


def compared(plain: Model, coded: Model, ids: list[int]) -> tuple[np.ndarray, np.ndarray]:
    """(differences of the tokens' log-probabilities, whether the likeliest tokens agree), [T - 1] each."""
    before, after = (log_probabilities(model, ids) for model in (plain, coded))
    places = np.arange(len(ids) - 1)
    return (after - before)[places, ids[1:]], before.argmax(-1) == after.argmax(-1)


def agreement(first: list[int], second: list[int]) -> int:
    """The number of tokens before the first that differs."""
    return next((n for n, (a, b) in enumerate(zip(first, second, strict=False)) if a != b), len(first))


def answers(model: Model, prompts: list[list[int]], new: int) -> tuple[list[list[int]], int]:
    """Greedy answers, and the bytes of the cache behind them."""
    scheduler = model.engine.scheduler(rows=len(prompts))
    generations = [scheduler.submit(model.engine.request(prompt, max_tokens=new, stop_ids=[])) for prompt in prompts]
    while not scheduler.idle:
        scheduler.step()
    size = sum(leaf.nbytes for leaf in jax.tree.leaves(scheduler._rows.layers))
    return [generation.ids for generation in generations], size


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("model")
    options.add_argument("texts", nargs="+", type=pathlib.Path)
    options.add_argument("--tokens", type=int, default=256)
    options.add_argument("--new", type=int, default=128)
    options.add_argument("--json")
    asked = options.parse_args()
    plain, coded = meshtune.load(asked.model), meshtune.load(asked.model, cache="int8")
    texts = [plain.tokenizer.encode(path.read_text())[: asked.tokens] for path in asked.texts]
    pairs = [compared(plain, coded, ids) for ids in texts]
    difference = np.concatenate([pair[0] for pair in pairs])
    same = np.concatenate([pair[1] for pair in pairs])
    prompts = [ids[:length] for ids in texts for length in PROMPTS if length <= len(ids)]
    (ours, plain_bytes), (theirs, coded_bytes) = (answers(model, prompts, asked.new) for model in (plain, coded))
    lengths = [agreement(a, b) for a, b in zip(ours, theirs, strict=True)]
    result = {
        "versions": {"jax": jax.__version__, "meshtune": meshtune.__version__, "machine": platform.machine()},
        "model": pathlib.Path(asked.model).name,
        "dtype": plain.compute.dtype,
        "tokens": len(difference),
        "log_probability_difference_mean": float(np.abs(difference).mean()),
        "log_probability_difference_max": float(np.abs(difference).max()),
        "log_probability_difference_signed_mean": float(difference.mean()),
        "likeliest_token_agrees": float(same.mean()),
        "answers": len(prompts),
        "new_tokens": asked.new,
        "answers_equal": sum(length == asked.new for length in lengths),
        "tokens_before_the_first_difference": lengths,
        "tokens_before_the_first_difference_median": statistics.median(lengths),
        "cache_bytes": plain_bytes,
        "cache_bytes_int8": coded_bytes,
        "share": coded_bytes / plain_bytes,
    }
    text = json.dumps(result, indent=2)
    print(text)
    if asked.json:
        pathlib.Path(asked.json).write_text(text + "\n")


if __name__ == "__main__":
    main()
