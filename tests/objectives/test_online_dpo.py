"""Online DPO against trl's own training step: rewards, choice, loss and the gradients of a whole model.

The rows are those that a rollout makes, with prompts repeated and shared. Both sides are float32, and margins of size 1
are differences of sums of size 30: 1e-5 of the loss, and 2e-5 of the norm of each leaf's gradient. The reference is
another model, so that no margin is 0.
"""

from __future__ import annotations

import collections
import copy
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from trl.experimental.online_dpo import OnlineDPOTrainer

from meshtune.config.load import load_recipe
from meshtune.errors import UserError
from meshtune.model.compute import Compute
from meshtune.objectives.answers import metric_means
from meshtune.objectives.stages import STAGES
from meshtune.rollout.advantages import rollout_tokens
from meshtune.rollout.batch import completion_rows, online_arrays
from meshtune.rollout.generate import Completion
from tiny_models import check_gradient, same_weights, torch_model

END, PAD, PENALTY = 7, 0, 1.5
PROMPT_LENGTHS, LENGTHS = (3, 1, 4), (5, 7, 2, 6, 4, 1)  # two completions of each prompt
# The penalty turns the first pair round and leaves the third as it is; the second is equal.
REWARDS = np.array([[0.2], [1.0], [0.7], [0.7], [-0.5], [1.4]])
TRUNCATED = (1, 5)


def recipe_of(loss="sigmoid", **sections):
    fields = {"model": "m", "data": {"train": "d.jsonl", "max_length": 16}, "output": "o"}
    fields |= {"stage": {"kind": "online_dpo", "loss": loss, "beta": 0.3, "missing_eos_penalty": PENALTY}}
    fields |= {"rollout": {"prompts": 3, "samples": 2, "max_tokens": 8, "temperature": 0.7}}
    return load_recipe(fields | {"rewards": [{"kind": "length", "target": 4}]} | sections)


@pytest.fixture(scope="module")
def drawn():
    """(torch model, another as reference, prompts, completions)."""
    rng = np.random.default_rng(0)
    model = torch_model("llama3")
    reference = copy.deepcopy(model)
    with torch.no_grad():
        for parameter in reference.parameters():
            parameter.add_(0.02 * torch.from_numpy(rng.normal(size=parameter.shape)).float())
    prompts = [rng.integers(8, 97, n).tolist() for n in PROMPT_LENGTHS]
    completions = [rng.integers(8, 97, n).tolist() for n in LENGTHS]
    for number, ids in enumerate(completions):
        if number not in TRUNCATED:
            ids[-1] = END
    return model, reference, prompts, completions


def theirs(loss_type, model, reference, prompts, completions):
    """(loss, statistics) of trl's training step; the gradients are the model's."""
    order = [*range(0, 6, 2), *range(1, 6, 2)]  # trl's halves are the first and the second completions
    ids, mask = np.full((2, 6, max(LENGTHS)), PAD)
    left, left_mask = np.full((2, 6, max(PROMPT_LENGTHS)), PAD)
    for row, n in enumerate(order):
        ids[row, : LENGTHS[n]], mask[row, : LENGTHS[n]] = completions[n], 1
        prompt = prompts[n // 2]
        left[row, -len(prompt) :], left_mask[row, -len(prompt) :] = prompt, 1
    tensors = [torch.tensor(array) for array in (left, left_mask, ids, mask)]
    self = object.__new__(OnlineDPOTrainer)
    vars(self).update(
        args=types.SimpleNamespace(
            use_vllm=False,
            missing_eos_penalty=PENALTY,
            loss_type=loss_type,
            torch_empty_cache_steps=None,
            optim="adamw_torch",
            n_gpu=1,
            gradient_accumulation_steps=1,
        ),
        state=types.SimpleNamespace(epoch=0, global_step=0),
        accelerator=types.SimpleNamespace(gather_for_metrics=lambda x: x, backward=lambda loss, **_: loss.backward()),
        processing_class=types.SimpleNamespace(batch_decode=lambda ids, **_: [""] * len(ids)),
        stats=collections.defaultdict(list),
        _beta=0.3,
        eos_token_ids=[END],
        max_length=64,
        ref_model=reference,
        reward_funcs=[],
        _generate=lambda *_: (*tensors, None),
        _calculate_rewards_from_functions=lambda **_: torch.tensor(REWARDS[order, 0]).float(),
    )
    model.zero_grad()
    loss = self.training_step(model, {"prompt": ["a", "b", "c"]})
    return loss.item(), {name: values[0] for name, values in self.stats.items()}


def reference_values(reference, prompts, completions):
    """transformers' log-probabilities of every completion's tokens."""
    values = []
    for number, ids in enumerate(completions):
        prompt = prompts[number // 2]
        with torch.no_grad():
            distribution = reference(torch.tensor([[*prompt, *ids]])).logits[0].log_softmax(-1).numpy()
        values.append(np.take_along_axis(distribution[len(prompt) - 1 : -1], np.array(ids)[:, None], 1)[:, 0])
    return values


def batch_of(recipe, prompts, completions, computed, *, shared, rewards=REWARDS):
    drawn = [
        Completion(ids, [0.0] * len(ids), "length" if number in TRUNCATED else "stop")
        for number, ids in enumerate(completions)
    ]
    made = rollout_tokens(recipe, drawn, rewards, np.ones(1), np.arange(6) // 2, computed)
    groups = [completions[start : start + 2] for start in range(0, 6, 2)]
    sizes = {"batch": 3, "length": 32, "units": 8}
    rows = completion_rows(prompts, groups, sizes, shared=shared, together=True)
    edges = np.cumsum(LENGTHS)[:-1]
    arrays = rows.arrays | {name: rows.scatter(np.split(values, edges)) for name, values in made.tokens.items()}
    assert sorted(arrays) == sorted(online_arrays(recipe, shared=shared))
    for start in range(0, 6, 2):
        first, second = rows.spans[start : start + 2]
        assert (second.row, second.segment) == (first.row, first.segment + 1)
    return arrays, made


@pytest.mark.parametrize(("loss_type", "shared"), [("sigmoid", False), ("ipo", True)])
def test_a_pairs_loss_and_gradients_equal_trls(loss_type, shared, drawn):
    model, reference, prompts, completions = drawn
    expected, statistics = theirs(loss_type, model, reference, prompts, completions)
    recipe = recipe_of(loss_type)
    computed = {"reference_tokens": reference_values(reference, prompts, completions)}
    arrays, made = batch_of(recipe, prompts, completions, computed, shared=shared)
    assert made.advantages.tolist() == [1, -1, 1, -1, -1, 1]
    spec, params = same_weights(model)
    objective = STAGES["online_dpo"].make(recipe.stage)
    arrays = {name: jnp.asarray(array) for name, array in arrays.items()}

    @jax.jit
    def both(params):
        def loss(params):
            sums = objective(params, spec, Compute(loss_chunk=16, shared_prompts=shared), arrays, None)
            return sums.loss / sums.weight, metric_means(sums)

        return jax.value_and_grad(loss, has_aux=True)(params)

    (loss, metrics), gradient = both(params)
    assert float(loss) == pytest.approx(expected, rel=1e-5)
    for name in set(metrics) & set(statistics):
        # rewards are small differences of log-probabilities of tens, in float32
        assert float(metrics[name]) == pytest.approx(statistics[name], rel=1e-5, abs=1e-6), name
    assert {"logps/chosen", "logps/rejected", "rewards/margins", "rewards/accuracies"} <= set(metrics) & set(statistics)
    check_gradient(gradient, model)


def test_a_pair_that_no_reward_applies_to_is_not_trained_on(drawn):
    _, reference, prompts, completions = drawn
    rewards = REWARDS.copy()
    rewards[3] = np.nan
    computed = {"reference_tokens": reference_values(reference, prompts, completions)}
    arrays, made = batch_of(recipe_of(), prompts, completions, computed, shared=False, rewards=rewards)
    assert made.advantages.tolist() == [1, -1, 0, 0, -1, 1]
    assert np.count_nonzero(arrays["weights"]) == sum(LENGTHS) - LENGTHS[2] - LENGTHS[3]
    assert np.array_equal(arrays["weights"], np.abs(arrays["advantages"]))


@pytest.mark.parametrize(("shared", "lengths"), [(False, [(5, 7), (7, 5), (4, 4)]), (True, [(4, 4)] * 3)])
def test_pairs_stay_together_where_packing_would_part_them(shared, lengths):
    completions = [[[3] * first, [4] * second] for first, second in lengths]

    def parted(together):
        sizes = {"batch": 3, "length": 14, "units": 9}
        spans = completion_rows([[1, 2]] * 3, completions, sizes, shared=shared, together=together).spans
        return [b[::3] != (a.row, a.segment + 1) for a, b in zip(spans[::2], spans[1::2], strict=True)]

    assert any(parted(together=False))
    assert not any(parted(together=True))


def test_a_batch_is_of_pairs_and_other_numbers_of_samples_are_refused():
    recipe = recipe_of()
    assert recipe.train.batch_size == 3
    for rollout, message in (
        ({"samples": 8}, "rollout.samples: 2"),
        ({"samples": 2, "correction": "token_mask"}, "no ratio"),
    ):
        with pytest.raises(UserError, match=message):
            recipe_of(rollout=rollout | {"max_tokens": 8})
