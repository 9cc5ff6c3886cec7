"""Parameters of an engine: after a replacement they are those of a new engine, bit for bit; laid out for decoding, the
same model."""

from __future__ import annotations

import dataclasses
import json
import os
import socket
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import peft
import pytest
import torch
from transformers import AutoModelForCausalLM

from compiling import FASTER
from families.case import load_case
from families.cases import BY_NAME
from generate.replacement_cases import answers, scale_params
from meshtune.adapters.lora import LoRA
from meshtune.arrays.tree import Tree, flatten, unflatten
from meshtune.costs.decoding import fits_copy
from meshtune.errors import UserError
from meshtune.generate import programs
from meshtune.generate.api import load, load_variants
from meshtune.generate.engine import Engine
from meshtune.generate.request import Generation, Sampling
from meshtune.generate.scheduler import Scheduler
from meshtune.generate.weights import decode_layout, decodes_from_copy
from meshtune.model.compute import Compute
from meshtune.model.decoder import forward, logits
from meshtune.model.inputs import Inputs
from meshtune.model.linear import TiledWeight
from meshtune.quantize.config import QuantizeConfig
from meshtune.quantize.weight import QuantisedWeight
from meshtune.runs.sources import find

PROMPT = np.random.default_rng(0).integers(1, 90, 24).tolist()


def changed(params: Tree) -> Tree:
    """Other parameters of the same form."""
    return jax.tree.map(lambda leaf: leaf * 1.07 if jnp.issubdtype(leaf.dtype, jnp.floating) else leaf, params)


def finish(scheduler: Scheduler) -> None:
    while not scheduler.idle:
        scheduler.step()


def answer(scheduler: Scheduler, engine: Engine, prompt: list[int], **options: Any) -> Generation:
    options = {"max_tokens": 12, "stop_ids": [], "alternatives": 3} | options
    generation = scheduler.submit(engine.request(prompt, **options))
    finish(scheduler)
    return generation


def prompt_tokens(monkeypatch) -> list[int]:
    """The number of prompt tokens that each later call reads."""
    counts: list[int] = []

    def count(*args, original=programs.read, **options):
        counts.append(int(np.sum(options["count"])))
        return original(*args, **options)

    monkeypatch.setattr(programs, "read", count)
    return counts


@pytest.mark.parametrize(
    "name",
    ["deepseek_v2", "qwen3_5", *(pytest.param(name, marks=pytest.mark.slow) for name in ("qwen3", "gemma2", "mamba2"))],
)
def test_logits_are_those_of_stacked_weights(name):
    """float32: sums of another order, so 2e-5 of the largest logit."""
    spec, params = load_case(BY_NAME[name])
    tokens = jnp.asarray(np.random.default_rng(0).integers(0, spec.vocab, (2, 7)), jnp.int32)
    inputs = Inputs(tokens, jnp.broadcast_to(jnp.arange(7), (2, 7)), jnp.ones((2, 7), jnp.int32))
    by_layer = decode_layout(params, spec)
    assert all(isinstance(node, tuple) for node in by_layer["layers"].values())
    held = jax.tree.leaves(by_layer, is_leaf=lambda leaf: isinstance(leaf, TiledWeight))
    assert sum(isinstance(leaf, TiledWeight) for leaf in held) > spec.layers

    @jax.jit
    def scores(params):
        return logits(params, spec, forward(params, spec, Compute(), inputs).hidden)

    expected = np.asarray(scores(params))
    np.testing.assert_allclose(scores(by_layer), expected, rtol=0, atol=2e-5 * np.abs(expected).max())


def test_adapters_are_merged_into_the_copy():
    """Of every matrix of the layers a LoRA of rank 3, one with the product that it started from; tolerance as above."""
    spec, params = load_case(BY_NAME["qwen3"])
    generator = np.random.default_rng(1)

    def lora(weight) -> LoRA:
        layers, out, into = weight.shape
        a, b = (generator.normal(0, 0.2, shape).astype("f") for shape in ((layers, 3, into), (layers, out, 3)))
        return LoRA(jnp.asarray(a), jnp.asarray(b), scale=1.5, dropout=0.1)

    layers = flatten(params["layers"])
    matrices = [path for path, leaf in layers.items() if path.endswith("/weight") and leaf.ndim == 3]
    adapters = {path.replace("weight", "adapter"): lora(layers[path]) for path in matrices}
    adapters[matrices[0].replace("weight", "fixed")] = lora(layers[matrices[0]])
    adapted = params | {"layers": unflatten(layers | adapters)}
    copy = decode_layout(adapted, spec)
    assert not any(isinstance(x, LoRA) for x in jax.tree.leaves(copy, is_leaf=lambda leaf: isinstance(leaf, LoRA)))
    tokens = jnp.asarray(generator.integers(0, spec.vocab, (2, 7)), jnp.int32)
    inputs = Inputs(tokens, jnp.broadcast_to(jnp.arange(7), (2, 7)), jnp.ones((2, 7), jnp.int32))

    @jax.jit
    def scores(params):
        return logits(params, spec, forward(params, spec, Compute(), inputs).hidden)

    expected, without = np.asarray(scores(adapted)), np.asarray(scores(params))
    tolerance = 2e-5 * np.abs(expected).max()
    assert np.abs(expected - without).max() > 100 * tolerance
    np.testing.assert_allclose(scores(copy), expected, rtol=0, atol=tolerance)


def test_a_resident_engine_decodes_from_the_copy_and_says_the_same(monkeypatch):
    spec, params = load_case(BY_NAME["qwen3"])
    assert not decodes_from_copy(params, Compute()), "small weights stay as they are"
    monkeypatch.setattr("meshtune.generate.weights.LEAST_COPIED", 0)
    engine, plain = Engine(params, spec, Compute(), resident=True), Engine(params, spec, Compute())
    prompts = [[1, 2, 3], [4, 5], [6]]
    assert engine.generate(prompts, max_tokens=12) == plain.generate(prompts, max_tokens=12)
    nodes = engine.weights.decoding["layers"].values()
    assert all(isinstance(node, tuple) for node in nodes)
    assert not decodes_from_copy(jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), params), Compute())


@pytest.mark.parametrize("quantised", [False, True])
def test_layers_apart_compute_the_same_bits(quantised, monkeypatch):
    """As a GPU with room for them decodes: the same arrays, of a LoRA and of codes too, over stacked caches."""
    spec, params = load_case(BY_NAME["qwen3"])
    if quantised:
        leaves = flatten(params)
        matrices = [path for path in leaves if path.startswith("layers/") and leaves[path].ndim == 3]
        config = QuantizeConfig("nf4", 8)
        params = unflatten(leaves | {path: QuantisedWeight.quantise(leaves[path], config) for path in matrices})
    monkeypatch.setattr("meshtune.generate.weights._platform", lambda compute: "cuda")
    monkeypatch.setattr("meshtune.costs.decoding.LEAST_COPIED", 0)
    assert isinstance(Engine(params, spec, Compute(), resident=True).weights.decoding["layers"]["0.0"], dict), "unknown"
    monkeypatch.setattr("meshtune.generate.weights.free_bytes", lambda: 1 << 30)
    engine, plain = Engine(params, spec, Compute(), resident=True), Engine(params, spec, Compute())
    assert not engine.weights.by_layer
    assert all(isinstance(node, tuple) for node in engine.weights.decoding["layers"].values())
    for node, stacked in zip(engine.weights.decoding["layers"].values(), params["layers"].values(), strict=True):
        for number, layer in enumerate(node):
            jax.tree.map(lambda ours, all, n=number: np.testing.assert_array_equal(ours, all[n]), layer, stacked)
    prompts = [[1, 2, 3], [4, 5], [6]]
    assert engine.generate(prompts, max_tokens=12) == plain.generate(prompts, max_tokens=12)


def test_a_copy_is_made_where_it_leaves_room_and_gives_way_to_caches(monkeypatch):
    assert fits_copy(14e9, 40e9)
    assert not fits_copy(14e9, 27e9)
    assert not fits_copy(1e6, 80e9), "small weights stay as they are"
    spec, params = load_case(BY_NAME["qwen3"])
    monkeypatch.setattr("meshtune.generate.weights._platform", lambda compute: "cuda")
    monkeypatch.setattr("meshtune.costs.decoding.LEAST_COPIED", 0)
    free = 1 << 30
    monkeypatch.setattr("meshtune.generate.weights.free_bytes", lambda: free)
    engine, plain = Engine(params, spec, Compute(), resident=True), Engine(params, spec, Compute())
    prompts, apart = [[1, 2, 3], [4, 5]], list[bool]()
    for size in (1 << 30, 1 << 10):
        free = size
        assert engine.generate(prompts, max_tokens=12) == plain.generate(prompts, max_tokens=12)
        apart.append(isinstance(engine.weights.decoding["layers"]["0.0"], tuple))
    assert apart == [True, False]


# Keys and values, and slow: windows, latents, recurrent states.
MEMORIES = ["qwen3", *(pytest.param(kind, marks=pytest.mark.slow) for kind in ("gemma2", "deepseek_v2", "qwen3_5"))]


@pytest.mark.parametrize("kind", MEMORIES)
def test_caches_by_layer_hold_what_stacked_ones_do(kind: str, monkeypatch):
    """Five requests over three rows: prompts that begin alike, are read in pieces, and a cache that grows."""
    spec, params = load_case(BY_NAME[kind])
    for name, value in {
        "generate.weights.LEAST_COPIED": 0,
        "generate.weights.CPU_TOKENS": 32,
        "generate.rows.PADDING": 8,
        "generate.rows.SHORTEST_PIECE": 8,
        "generate.rows.ROOM": 4,
        "model.model_cache.FEWEST_SLOTS": 32,
    }.items():
        monkeypatch.setattr(f"meshtune.{name}", value)
    beginning = np.random.default_rng(4).integers(0, spec.vocab, 25).tolist()
    prompts = [[*beginning[:length], n] for n, length in enumerate((25, 3, 20, 18, 25))]

    def answers(*, resident: bool) -> list[list[int]]:
        engine = Engine(params, spec, Compute(), resident=resident)
        scheduler = engine.scheduler(rows=3)
        generations = [scheduler.submit(engine.request(prompt, max_tokens=20, stop_ids=[])) for prompt in prompts]
        while not scheduler.idle:
            scheduler.step(7)
        forms = {type(node) for node in scheduler._caches.layers.values()}
        assert forms == ({tuple} if resident else {dict})
        return [generation.ids for generation in generations]

    assert answers(resident=True) == answers(resident=False)


# Both layouts, and a head with a norm; slow: windows, latents, recurrent states, LongRoPE.
KINDS = [("qwen3", True), ("mistral", False)]
SLOW_KINDS = [(kind, False) for kind in ("gemma2", "deepseek_v2", "qwen3_5", "mamba2", "phi3_longrope")]


@pytest.mark.parametrize(
    ("kind", "copied"), [*KINDS, *(pytest.param(*kind, marks=pytest.mark.slow) for kind in SLOW_KINDS)]
)
def test_after_a_replacement_answers_are_those_of_a_new_engine(kind: str, copied: bool, monkeypatch):
    """Tokens and log-probabilities bit for bit, by a scheduler that has read the prompt with the old parameters."""
    monkeypatch.setattr("meshtune.generate.weights.LEAST_COPIED", 0 if copied else 1 << 60)
    spec, params = load_case(BY_NAME[kind])
    spec = dataclasses.replace(spec, norm_head=kind == "mistral")
    engine, new = Engine(params, spec, Compute(), resident=True), changed(params)
    scheduler = engine.scheduler(rows=1)
    before = answer(scheduler, engine, PROMPT)
    counts = prompt_tokens(monkeypatch)
    engine.replace_params(new)
    after = answer(scheduler, engine, PROMPT)
    assert counts[0] == len(PROMPT) - 1, "the prompt is read again"
    fresh = Engine(new, spec, Compute(), resident=True)
    assert after.tokens == answer(fresh.scheduler(rows=1), fresh, PROMPT).tokens
    assert after.tokens != before.tokens
    engine.replace_params(params)
    assert answer(scheduler, engine, PROMPT).tokens == before.tokens


def test_a_request_under_way_continues_with_the_new_parameters():
    """Its tokens are the old parameters' up to the replacement; then those that a new engine gives for the same
    text."""
    spec, params = load_case(BY_NAME["qwen3"])
    engine, new = Engine(params, spec, Compute()), changed(params)
    scheduler = engine.scheduler(rows=2)
    options = {"max_tokens": 20, "stop_ids": [], "alternatives": 0}
    generation = scheduler.submit(engine.request(PROMPT, **options))
    drawn = scheduler.submit(engine.request(PROMPT[:9], Sampling(1.0, seed=5, frequency_penalty=0.5), **options))
    scheduler.step(6)
    old = [list(generation.ids), list(drawn.ids)]
    engine.replace_params(new)
    finish(scheduler)
    unchanged, fresh = Engine(params, spec, Compute()), Engine(new, spec, Compute())
    for ids, request in zip(old, (generation, drawn), strict=True):
        assert len(ids) == 6
        before = answer(unchanged.scheduler(rows=1), unchanged, list(request.request.prompt), max_tokens=6)
        assert ids == before.ids or request is drawn
        assert request.ids[:6] == ids
        assert len(request.ids) == 20
    text = [*PROMPT, *old[0]]
    assert generation.ids[6:] == answer(fresh.scheduler(rows=1), fresh, text, max_tokens=14).ids


def test_a_replacement_waits_for_the_step_under_way():
    """The old arrays are deleted at once, as a training step that donates them does, while another thread steps."""
    spec, params = load_case(BY_NAME["qwen3"])
    params = jax.tree.map(jnp.array, params)
    engine = Engine(params, spec, Compute())
    scheduler, problems = engine.scheduler(rows=2), []
    generation = scheduler.submit(engine.request(PROMPT[:4], max_tokens=56, stop_ids=[]))

    def run() -> None:
        try:
            while not scheduler.idle:
                scheduler.step(1)
        except Exception as problem:  # the test fails with it, in its own thread
            problems.append(problem)

    scheduler.step(1)
    thread = threading.Thread(target=run)
    thread.start()
    for _ in range(4):
        old, new = engine.params, changed(engine.params)
        engine.replace_params(new)
        for leaf in jax.tree.leaves(old):
            leaf.delete()
    thread.join(60)
    assert not problems
    assert len(generation.ids) == 56


@pytest.fixture(scope="module")
def adapters(stories260k, tmp_path_factory) -> dict[str, str]:
    folder = tmp_path_factory.mktemp("adapters")
    for seed, name in enumerate(("first", "second")):
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_pretrained(stories260k, dtype=torch.float32)
        config = peft.LoraConfig(r=2, target_modules=["q_proj", "v_proj"], init_lora_weights=False)
        peft.get_peft_model(model, config).save_pretrained(folder / name)
    return {name: str(folder / name) for name in ("first", "second")}


def test_an_adapter_is_replaced_and_its_base_is_not_touched(stories260k, adapters):
    """The second adapter's arrays in place of the first one's: answers, logits and scores are the second model's."""
    model, other = (load(stories260k, adapters[name], dtype="float32") for name in adapters)
    model.generate("Once upon a time", max_tokens=8)
    base = {path: leaf for path, leaf in flatten(model.params).items() if not path.endswith("adapter")}
    factors = {path: leaf for path, leaf in flatten(other.params).items() if path.endswith("adapter")}
    model.replace_params(unflatten(base | factors))
    assert all(flatten(model.params)[path] is leaf for path, leaf in base.items())
    assert model.generate("Once upon a time", max_tokens=30) == other.generate("Once upon a time", max_tokens=30)
    ids = model.tokenizer.encode("Once upon a time")
    np.testing.assert_array_equal(model.logits(ids), other.logits(ids))
    assert model.token_log_probabilities(ids) == other.token_log_probabilities(ids)


def test_adapters_that_share_a_batch_are_replaced_together(stories260k, adapters):
    def models(order: list[str]):
        sources = {name: find(str(stories260k), adapters[path]) for name, path in zip(adapters, order, strict=True)}
        return load_variants({"base": find(str(stories260k))} | sources, dtype="float32", share_batch=True)

    served, expected = models(["first", "second"]), models(["second", "first"])
    assert served["base"].engine.weights is served["first"].engine.weights
    scheduler = served["base"].engine.scheduler(rows=3)

    def answers(of: dict[str, Any], scheduler: Scheduler) -> list[Any]:
        return [answer(scheduler, model.engine, PROMPT).tokens for model in of.values()]

    before = answers(served, scheduler)
    served["second"].replace_params(expected["base"].engine.weights.params)
    after = answers(served, scheduler)
    assert after == answers(expected, expected["base"].engine.scheduler(rows=3))
    assert (after[0], after[1] != before[1]) == (before[0], True)
    for name in served:
        np.testing.assert_array_equal(served[name].logits(PROMPT), expected[name].logits(PROMPT))


def test_parameters_of_another_form_are_refused_and_nothing_is_replaced():
    spec, params = load_case(BY_NAME["qwen3"])
    engine = Engine(params, spec, Compute())
    flat = flatten(params)
    path = next(path for path in flat if path.endswith("weight"))
    for wrong in (
        {name: leaf for name, leaf in flat.items() if name != path},
        flat | {"extra/weight": flat[path]},
        flat | {path: flat[path][:1]},
        flat | {path: flat[path].astype(jnp.bfloat16)},
    ):
        with pytest.raises(UserError, match="parameters") as refused:
            engine.replace_params(unflatten(wrong))
        assert "load the model again" in str(refused.value)
    assert engine.params is params
    assert engine.weights.version == 0


@pytest.mark.slow
def test_processes_that_share_a_model_replace_its_parameters_together(stories260k, tmp_path):
    """Process 0 has the new arrays, and announces them: its answers are those of one device; see replacement_cases."""
    model = load(stories260k, dtype="float32")
    expected = [answers(model)]
    model.replace_params(scale_params(model))
    expected.append(answers(model))
    np.savez(tmp_path / "arrays.npz", *jax.tree.leaves(model.params))
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        address = f"localhost:{probe.getsockname()[1]}"
    script = Path(__file__).with_name("replacement_cases.py")
    job = {"JAX_PLATFORMS": "cpu", "MESHTUNE_COORDINATOR": address, "MESHTUNE_PROCESSES": "2", "XLA_FLAGS": FASTER}
    processes = [
        subprocess.Popen(
            [sys.executable, script, stories260k, json.dumps(expected), tmp_path / "arrays.npz"],
            env=os.environ | job | {"MESHTUNE_PROCESS": str(n)},
            stderr=subprocess.PIPE,
            text=True,
        )
        for n in range(2)
    ]
    try:
        errors = [process.communicate(timeout=240)[1] for process in processes]
    finally:
        for process in processes:
            process.kill()
    assert [process.returncode for process in processes] == [0, 0], errors
