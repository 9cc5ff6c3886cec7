"""Greedy decoding under continuous batching is transformers' token for token, for every kind of block; float32."""

from __future__ import annotations

import jax
import numpy as np
import pytest
import torch

from families.case import Case, load_case, torch_model
from families.cases import BY_NAME, CASES
from meshtune.generate.engine import Engine
from meshtune.model.compute import Compute

torch.set_num_threads(1)

ROWS = 3
LENGTHS = (5, 26, 11, 3, 24, 31, 8)
SHARED = 20  # tokens of its prompt that the fifth request has from the second, whose row still decodes


def prompts_of(vocab: int) -> list[list[int]]:
    rng = np.random.default_rng(7)
    prompts = [rng.integers(1, vocab, length).tolist() for length in LENGTHS]
    prompts[4][:SHARED] = prompts[1][:SHARED]
    return prompts


def transformers_greedy(case: Case, prompts: list[list[int]], tokens: list[int]) -> list[list[int]]:
    """Continues each prompt by itself with transformers' generate."""
    model = torch_model(case)
    model.generation_config.eos_token_id = None
    answers = []
    for prompt, count in zip(prompts, tokens, strict=True):
        ids = model.generate(  # pyright: ignore[reportCallIssue]
            torch.tensor([prompt]),
            attention_mask=torch.ones(1, len(prompt)),
            max_new_tokens=count,
            do_sample=False,
            pad_token_id=0,
        )
        answers.append(ids[0, len(prompt) :].tolist())
    return answers


def check_continuous_batching(case: Case) -> None:
    """Seven requests over three rows, which join while others decode and leave at different times; the third is
    cancelled after its first tokens, and its row goes to another one."""
    spec, params = load_case(case)
    engine = Engine(params, spec, Compute())
    prompts = prompts_of(spec.vocab)
    tokens = [case.generated - 3 * (number % 3) for number in range(len(prompts))]
    scheduler = engine.scheduler(rows=ROWS)
    generations, joined = [], []
    for number, (prompt, count) in enumerate(zip(prompts, tokens, strict=True)):
        generations.append(scheduler.submit(engine.request(prompt, max_tokens=count, stop_ids=[])))
        if number == 3:
            assert generations[2].ids
            scheduler.cancel(generations[2])
        scheduler.step(2)
        joined.append(sum(g.finish_reason is None and bool(g.ids) for g in generations))
    while not scheduler.idle:
        scheduler.step(5)
    assert max(joined) == ROWS
    assert generations[2].finish_reason == "cancelled"
    expected = transformers_greedy(case, prompts, tokens)
    for number, generation in enumerate(generations):
        length = len(generation.ids) if number == 2 else tokens[number]
        assert generation.ids == expected[number][:length], f"{case.name}, request {number}"


FAST = ("nemotron_h",)  # attention and states; the slow tier has the others


@pytest.mark.parametrize("case", [BY_NAME[name] for name in FAST], ids=lambda case: case.name)
def test_requests_that_join_and_leave_continue_as_in_transformers(case: Case):
    check_continuous_batching(case)


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize(
    "case", [case for case in CASES if not case.variant and case.name not in FAST], ids=lambda case: case.name
)
def test_requests_of_every_family_continue_as_in_transformers(case: Case):
    check_continuous_batching(case)
    jax.clear_caches()  # a process has room for the programs of some fifty families (conftest.MAPPED_REGIONS)
