"""Completions and their log-probabilities, beside transformers' logits and its processors of them."""

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM
from transformers.generation.logits_process import MinPLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

from meshtune.config.sections import RolloutSection
from meshtune.errors import UserError
from meshtune.model.compute import Compute
from meshtune.rollout.generate import generate, sample_seed
from meshtune.weights.load import load_params, load_spec

PROMPTS = [[1, 403, 407, 261, 378], [1, 403, 407], [1, 289, 401, 311]]  # the first words of stories


@pytest.fixture(scope="module")
def story(stories260k):
    spec, _ = load_spec(stories260k, "float32")
    return load_params(stories260k, spec), spec


def completions(story, samples=3, prompts=PROMPTS, seed=0, **options):
    params, spec = story
    section = RolloutSection(max_tokens=12, **options)
    return generate(
        params,
        spec,
        Compute(),
        prompts,
        samples,
        section,
        frozenset({2}),
        lambda prompt, sample: sample_seed(seed, 0, prompt, sample),
        [f"prompt {number}" for number in range(len(prompts))],
    )


@pytest.mark.parametrize(
    "options",
    [{"temperature": 0.7}, {"temperature": 1.0}, {"temperature": 0.9, "top_k": 5, "top_p": 0.8}, {"min_p": 0.1}],
    ids=str,
)
def test_log_probabilities_are_those_of_the_distribution_that_was_drawn_from(story, stories260k, options):
    """1e-4: float32 logits of another order of sums; a log-probability without temperature differs by tenths."""
    model = AutoModelForCausalLM.from_pretrained(stories260k, dtype=torch.float32).eval()
    warpers = {"top_k": TopKLogitsWarper, "top_p": TopPLogitsWarper, "min_p": MinPLogitsWarper}
    for prompt, group in zip(PROMPTS, completions(story, **options), strict=True):
        for completion in group:
            ids = torch.tensor([[*prompt, *completion.ids]])
            with torch.no_grad():
                logits = model(ids).logits[0, len(prompt) - 1 : -1] / options.get("temperature", 1.0)
            for name, warper in warpers.items():
                if name in options:
                    logits = warper(options[name])(ids, logits)
            expected = logits.log_softmax(-1).gather(-1, torch.tensor(completion.ids)[:, None])[:, 0]
            np.testing.assert_allclose(completion.log_probs, expected.numpy(), atol=1e-4)


def test_a_completion_depends_on_its_seed_and_on_nothing_beside_it(story):
    every = completions(story)
    texts = [completion.ids for group in every for completion in group]
    assert len(set(map(tuple, texts))) > 6
    assert [c.ids for group in completions(story, rows=2) for c in group] == texts
    assert [c.ids for c in completions(story, prompts=PROMPTS[:1])[0]] == [c.ids for c in every[0]]
    assert [c.ids for group in completions(story, seed=1) for c in group] != texts


def test_completions_end_with_a_stop_id_or_at_max_tokens(story):
    for group in completions(story, temperature=2.0, samples=8):
        for completion in group:
            assert (completion.reason == "stop") == (completion.ids[-1] == 2)
            assert len(completion.ids) == len(completion.log_probs) <= 12
            assert completion.reason == "stop" or len(completion.ids) == 12


def test_a_prompt_that_fills_the_context_is_named(story):
    with pytest.raises(UserError, match="leave no room") as error:
        completions(story, prompts=[PROMPTS[0], PROMPTS[1] * 300])
    assert error.value.where == "prompt 1"
