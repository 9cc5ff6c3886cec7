"""Continuous batching: whatever else is in the batch, a request gets the tokens that it gets by itself; float32."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from families.case import Case, load_case, torch_model
from families.cases import BY_NAME
from meshtune.errors import UserError
from meshtune.generate import programs
from meshtune.generate.engine import Engine
from meshtune.generate.request import Generation, QueueFull, Sampling
from meshtune.generate.rows import PADDING, piece_length
from meshtune.generate.scheduler import Scheduler
from meshtune.model.compute import Compute
from meshtune.weights.load import load_params, load_spec


@pytest.fixture(scope="module")
def stories(stories260k) -> Engine:
    spec, config = load_spec(stories260k, "float32")
    return Engine(load_params(stories260k, spec), spec, Compute(), frozenset([int(config["eos_token_id"])]))


@pytest.fixture(scope="module")
def golden(stories260k) -> list[int]:
    return json.loads((stories260k / "golden_greedy_200.json").read_text())["token_ids"]


def run_to_end(scheduler: Scheduler, steps: int = 16) -> None:
    while not scheduler.idle:
        scheduler.step(steps)


def tokens_read(monkeypatch) -> list[int]:
    """The number of prompt tokens that each later call reads."""
    counts: list[int] = []

    def count(*args, original=programs.read, **options):
        counts.append(int(np.sum(options["count"])))
        return original(*args, **options)

    monkeypatch.setattr(programs, "read", count)
    return counts


def test_requests_that_come_and_go_get_what_they_get_alone(stories, golden):
    """Nine requests of different lengths, prompts and sampling over three rows, let in while others decode."""
    sampled = Sampling(temperature=0.9, top_k=30, seed=11)
    cuts = [1, 40, 7, 100, 3, 60, 21, 2, 33]
    requests = [
        stories.request(golden[:cut], sampled if n % 3 == 2 else None, max_tokens=10 + 7 * (n % 4), stop_ids=[])
        for n, cut in enumerate(cuts)
    ]
    scheduler = stories.scheduler(rows=3)
    generations: list[Generation] = []
    for request in requests:
        generations.append(scheduler.submit(request))
        scheduler.step(3)
    run_to_end(scheduler)
    for request, generation in zip(requests, generations, strict=True):
        alone = stories.scheduler(rows=1)
        expected = alone.submit(request)
        run_to_end(alone)
        assert generation.ids == expected.ids
        assert len(generation.ids) == request.max_tokens
        assert generation.finish_reason == "length"


def test_a_cache_that_grows_leaves_every_row_its_request(stories, golden, monkeypatch):
    """Requests that were let in at different times, while a row between them is free; one is still read as it grows."""
    monkeypatch.setattr("meshtune.model.model_cache.FEWEST_SLOTS", 32)
    monkeypatch.setattr("meshtune.generate.rows.ROOM", 4)  # for answers, before the cache has to grow
    samplings = [
        None,
        Sampling(temperature=0.9, seed=5),
        Sampling(frequency_penalty=0.7),
        Sampling(repetition_penalty=1.3),
    ]
    requests = [
        stories.request(golden[start : start + 4], samplings[start % 4], max_tokens=count, stop_ids=[])
        for start, count in enumerate([60, 5, 40, 6, 50])
    ]
    scheduler, generations = stories.scheduler(rows=5), []
    for request in requests:
        generations.append(scheduler.submit(request))
        scheduler.step(2)
    run_to_end(scheduler, 3)
    for request, generation in zip(requests, generations, strict=True):
        alone = stories.scheduler(rows=1)
        expected = alone.submit(request)
        run_to_end(alone)
        assert generation.ids == expected.ids


# Every kind of memory: keys and values with and without a window, latents, convolutions and recurrent states.
KINDS = ("gemma2", "deepseek_v2", "qwen3_5")
SLOW_KINDS = ("qwen3", "lfm2", "mamba2")  # each has memory of one kind only


@pytest.mark.parametrize(
    "case",
    [
        *(pytest.param(BY_NAME[kind], id=kind) for kind in KINDS),
        *(pytest.param(BY_NAME[kind], id=kind, marks=pytest.mark.slow) for kind in SLOW_KINDS),
    ],
)
def test_a_prompt_that_goes_on_is_read_from_where_it_ended(case: Case, monkeypatch):
    """A conversation of three turns in one row, as transformers continues each whole prompt."""
    spec, params = load_case(case)
    engine, model = Engine(params, spec, Compute()), torch_model(case)
    model.generation_config.eos_token_id = None
    scheduler, counts = engine.scheduler(rows=1), tokens_read(monkeypatch)
    prompt = np.random.default_rng(3).integers(0, spec.vocab, 20).tolist()
    for _ in range(3):
        generation = scheduler.submit(engine.request(prompt, max_tokens=6, stop_ids=[]))
        run_to_end(scheduler)
        theirs = model.generate(  # pyright: ignore[reportCallIssue]
            torch.tensor([prompt]),
            attention_mask=torch.ones(1, len(prompt)),
            max_new_tokens=6,
            do_sample=False,
            pad_token_id=0,
        )
        assert generation.ids == theirs[0, len(prompt) :].tolist()
        prompt = [*prompt, *generation.ids, 5, 6, 7]
    assert counts == [19, 3, 3]  # of a later turn: the answer's last token and the new ones, less the last


def test_a_long_prompt_is_read_in_pieces_while_others_decode(stories, golden, monkeypatch):
    """Rows that decode get tokens in every step; what comes after the pieces is what comes after the whole prompt. Two
    rows wait for pieces and one decodes, so that a step reads twice as many."""
    counts = tokens_read(monkeypatch)
    monkeypatch.setattr("meshtune.generate.rows.READ_TOKENS", 16)
    scheduler = stories.scheduler(rows=4, interactive=True)
    first = scheduler.submit(stories.request(golden[:5], max_tokens=60, stop_ids=[]))
    scheduler.step(4)
    prompt = (golden * 2)[:250]
    late = [scheduler.submit(stories.request([*prompt, n], max_tokens=8, stop_ids=[])) for n in (3, 4)]
    for number in range(1, 8):
        scheduler.step(4)
        assert len(first.ids) == 4 + 4 * number
        assert late[0].ids == []
    run_to_end(scheduler)
    assert counts[1:] == [32] * 7 + [26]  # the second one's prompt is the first one's, and copied
    for generation in (first, *late):
        alone = stories.scheduler(rows=1)
        expected = alone.submit(generation.request)
        run_to_end(alone)
        assert generation.ids == expected.ids


def test_pieces_for_a_processor_fill_buckets():
    """Every prompt is read in few pieces of few widths, each of which is computed with few tokens more."""
    widths = set()
    for length in range(1, 1500):
        pieces, unread = [], length
        while unread:
            count, width = piece_length(unread, 256)
            assert 0 < count <= width < count + PADDING
            pieces.append(width)
            unread -= count
        assert len(pieces) <= length // 256 + 2
        widths |= set(pieces)
    assert widths == {32, 64, 128, 256}


def test_prompts_that_begin_alike_are_read_together_and_once(stories, golden, monkeypatch):
    """Three prompts, four requests each: the first prompt, then the ends of the others in one call."""
    counts = tokens_read(monkeypatch)
    scheduler, beginning = stories.scheduler(rows=12), golden[:30]
    prompts = [[*beginning, *golden[start : start + 5]] for start in (40, 60, 80)]
    requests = [stories.request(prompt, max_tokens=4, stop_ids=[]) for prompt in prompts for _ in range(4)]
    generations = [scheduler.submit(request) for request in requests]
    run_to_end(scheduler)
    assert counts == [34, 8]
    for generation in generations:
        alone = stories.scheduler(rows=1)
        expected = alone.submit(generation.request)
        run_to_end(alone)
        assert generation.ids == expected.ids


def test_prompts_are_read_before_anything_is_decoded_where_nobody_waits(stories, golden, monkeypatch):
    """100 tokens at once: every step then decodes all rows, and a batch ends after as few steps as its longest."""
    monkeypatch.setattr("meshtune.generate.rows.READ_TOKENS_IDLE", 100)
    counts, decoded = tokens_read(monkeypatch), list[int]()
    scheduler = stories.scheduler(rows=5)
    prompts = [[n, *golden[:89]] for n in range(3, 8)]
    generations = [scheduler.submit(stories.request(prompt, max_tokens=20, stop_ids=[])) for prompt in prompts]
    while not scheduler.idle:
        decoded.append(len(scheduler.step(10)))
    assert decoded == [5, 5]
    assert sum(counts) == 5 * 89
    assert max(counts) <= 100
    alone = stories.generate(prompts[2:3], max_tokens=20, stop_ids=[])
    assert generations[2].ids == alone[0]


@pytest.mark.parametrize(
    "case", [BY_NAME[kind] for kind in ("gemma2", "deepseek_v2", "qwen3_5", "phi3_longrope")], ids=lambda c: c.name
)
def test_pieces_of_a_prompt_leave_every_kind_of_memory_as_the_whole_does(case: Case, monkeypatch):
    monkeypatch.setattr("meshtune.generate.rows.READ_TOKENS_IDLE", 16)
    spec, params = load_case(case)
    engine, model = Engine(params, spec, Compute()), torch_model(case)
    model.generation_config.eos_token_id = None
    prompt = np.random.default_rng(5).integers(0, spec.vocab, 41).tolist()
    (ours,) = engine.generate([prompt], max_tokens=6, stop_ids=[])
    theirs = model.generate(  # pyright: ignore[reportCallIssue]
        torch.tensor([prompt]),
        attention_mask=torch.ones(1, len(prompt)),
        max_new_tokens=6,
        do_sample=False,
        pad_token_id=0,
    )
    assert ours == theirs[0, len(prompt) :].tolist()


def test_a_prompt_shared_by_several_requests_is_read_once(stories, golden, monkeypatch):
    counts = tokens_read(monkeypatch)
    scheduler = stories.scheduler(rows=8)
    sampled = [scheduler.submit(stories.request(golden[:50], Sampling(1.0, seed=n), max_tokens=20)) for n in range(3)]
    longer = [scheduler.submit(stories.request([*golden[:40], n, 9], max_tokens=20)) for n in (7, 8)]
    run_to_end(scheduler)
    assert sum(counts) == 49 + 2
    for generation in (*sampled, *longer):
        alone = stories.scheduler(rows=1)
        expected = alone.submit(generation.request)
        run_to_end(alone)
        assert generation.ids == expected.ids
    assert len({tuple(generation.ids) for generation in sampled}) == 3


def test_a_request_that_is_cancelled_frees_its_row(stories, golden):
    scheduler = stories.scheduler(rows=1)
    first = scheduler.submit(stories.request(golden[:5], max_tokens=200, stop_ids=[]))
    waiting = scheduler.submit(stories.request(golden[:9], max_tokens=4))
    never = scheduler.submit(stories.request(golden[:9], max_tokens=4))
    scheduler.step(4)
    scheduler.cancel(first)
    scheduler.cancel(never)
    run_to_end(scheduler)
    assert (first.finish_reason, len(first.ids)) == ("cancelled", 4)
    assert (never.finish_reason, never.ids) == ("cancelled", [])
    assert waiting.ids == golden[9:13]
    assert scheduler.running == scheduler.waiting == 0


def test_rows_go_to_clients_in_turn(stories, golden):
    scheduler = stories.scheduler(rows=2)
    greedy = [scheduler.submit(stories.request(golden[:5], max_tokens=4, client="a")) for _ in range(4)]
    patient = scheduler.submit(stories.request(golden[:7], max_tokens=4, client="b"))
    scheduler.step()
    assert [generation.finish_reason is not None for generation in (*greedy, patient)] == [
        True,
        False,
        False,
        False,
        True,
    ]
    run_to_end(scheduler)
    assert all(generation.ids == golden[5:9] for generation in greedy)


def test_a_full_queue_refuses(stories, golden):
    scheduler = stories.scheduler(rows=1, queue=1)
    for _ in range(2):  # one for the row, one for the queue
        scheduler.submit(stories.request(golden[:5]))
    with pytest.raises(QueueFull, match="2 requests wait already"):
        scheduler.submit(stories.request(golden[:5]))


def test_log_probabilities_are_those_of_transformers(stories260k, stories, golden):
    """Of drawn tokens and the five likeliest, whatever the temperature and the penalties; within 1e-4 in float32."""
    scheduler = stories.scheduler(rows=2)
    sampling = Sampling(temperature=1.5, repetition_penalty=1.3, seed=2)
    generation = scheduler.submit(stories.request(golden[:9], sampling, max_tokens=20, stop_ids=[], alternatives=5))
    plain = scheduler.submit(stories.request(golden[:9], max_tokens=20, stop_ids=[]))
    run_to_end(scheduler)
    model = AutoModelForCausalLM.from_pretrained(stories260k, dtype=torch.float32)
    with torch.no_grad():
        scores = model(torch.tensor([golden[:9] + generation.ids])).logits[0, 8:-1].log_softmax(-1)
    for token, row in zip(generation.tokens, scores, strict=True):
        assert token.log_probability == pytest.approx(float(row[token.id]), abs=1e-4)
        values, ids = row.topk(5)
        assert [id_ for id_, _ in token.likeliest] == ids.tolist()
        np.testing.assert_allclose([value for _, value in token.likeliest], values, atol=1e-4)
    assert all(token.log_probability is None for token in plain.tokens)


def test_a_row_that_overflows_ends_alone():
    spec, params = load_case(BY_NAME["mistral"])
    assert not spec.tied
    params |= {"embed": {"weight": params["embed"]["weight"].at[77].set(np.inf)}}
    engine = Engine(params, spec, Compute())
    scheduler = engine.scheduler(rows=2)
    fine = scheduler.submit(engine.request([1, 2, 3], max_tokens=4, stop_ids=range(77, spec.vocab)))
    broken = scheduler.submit(engine.request([1, 2, 77], max_tokens=4))
    run_to_end(scheduler)
    assert fine.finish_reason in ("length", "stop")
    assert broken.finish_reason == "error"
    assert isinstance(broken.error, UserError)
