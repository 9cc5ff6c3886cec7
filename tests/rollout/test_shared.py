"""Prompts that a row holds once: plans of rows, and the model's results beside those of repeated prompts and of
transformers for the unpacked text."""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import meshtune.kernels.attention.blocks as blocks
from families.case import VOCAB, load_case, torch_logits, torch_model
from families.cases import BY_NAME
from meshtune.config.sections import RolloutSection
from meshtune.data.prompts import rollout_row_length
from meshtune.families.balancing import with_aux_loss
from meshtune.model.compute import Compute
from meshtune.model.decoder import forward, logits
from meshtune.model.inputs import inputs_of
from meshtune.rollout.shared import Placement, fill_shared_rows, plan_shared_rows, shared_prompts_obstacle

ROW = 48
PROMPTS, COMPLETIONS = (13, 1, 8), ((6, 1, 9, 5), (3, 7), (8, 2, 4))


def random_groups():
    random = np.random.default_rng(0)
    prompts = [random.integers(1, VOCAB, n).tolist() for n in PROMPTS]
    return prompts, [[random.integers(1, VOCAB, n).tolist() for n in lengths] for lengths in COMPLETIONS]


def repeated_rows(prompts, completions):
    """The same groups with a prompt before every completion, as many as fit a row, in rows without parents."""
    alone = [(prompt, [ids]) for prompt, group in zip(prompts, completions, strict=True) for ids in group]
    rows, places = [[]], []
    for prompt, [ids] in alone:
        length = len(prompt) + len(ids) - 1
        if sum(len(tokens) for tokens, _ in rows[-1]) + length > ROW:
            rows.append([])
        start = sum(len(tokens) for tokens, _ in rows[-1])
        rows[-1].append(([*prompt, *ids][:-1], [*prompt, *ids][1:]))
        places.append((len(rows) - 1, start + len(prompt) - 1, start + length))
    arrays = {name: np.zeros((len(rows), ROW), np.int32) for name in ("tokens", "targets", "positions", "segment_ids")}
    for number, row in enumerate(rows):
        start = 0
        for segment, (tokens, targets) in enumerate(row, 1):
            span = slice(start, start := start + len(tokens))
            arrays["tokens"][number, span], arrays["targets"][number, span] = tokens, targets
            arrays["positions"][number, span] = np.arange(len(tokens))
            arrays["segment_ids"][number, span] = segment
    return arrays | {"parent_ids": np.zeros_like(arrays["tokens"])}, places


def with_weights(arrays, places):
    """The arrays with another weight on every completion token: the same for the same token of the same completion."""
    random, weights = np.random.default_rng(1), np.zeros(arrays["tokens"].shape, np.float32)
    for row, start, stop in places:
        weights[row, start:stop] = random.uniform(0.5, 1.5, stop - start)
    return {name: jnp.asarray(x) for name, x in (arrays | {"weights": weights}).items()}


@functools.partial(jax.jit, static_argnums=(1, 2), compiler_options={"xla_backend_optimization_level": 0})
def scores_and_gradients(params, spec, compute, batch):
    """(logits [B, T, V], log-probabilities of targets [B, T], gradients of their weighted sum)."""

    def loss(params):
        of_vocab = logits(params, spec, forward(params, spec, compute, inputs_of(batch)).hidden)
        of_targets = jnp.take_along_axis(jax.nn.log_softmax(of_vocab), batch["targets"][..., None], -1)[..., 0]
        return jnp.sum(batch["weights"] * of_targets), (of_vocab, of_targets)

    (_, results), grads = jax.value_and_grad(loss, has_aux=True)(params)
    return *results, grads


FAST = [
    ("llama3", {"attention": "direct"}),
    ("gemma2", {"attention": "blockwise"}),
]
SLOW = [
    ("gpt_oss", {"attention": "blockwise"}),
    ("llama3", {"attention": "blockwise", "attention_chunk": 16, "mlp_chunk": 16}),
    ("llama_bias", {"attention": "blockwise"}),
    ("gemma2", {"attention": "direct"}),
    ("gemma3_text", {"attention": "direct"}),
    ("deepseek_v3", {"attention": "direct"}),
    ("gemma3_text", {"attention": "blockwise"}),
    ("gpt_oss", {"attention": "direct"}),
    ("qwen3_moe", {"attention": "direct"}),
    ("mixtral", {"attention": "blockwise"}),
    ("deepseek_v3", {"attention": "blockwise"}),
    ("deepseek_v2", {"attention": "direct"}),
    ("llama4", {"attention": "blockwise"}),
]


@pytest.mark.parametrize(
    ("name", "options"), [*FAST, *(pytest.param(*case, marks=pytest.mark.slow) for case in SLOW)], ids=str
)
def test_shared_prompts_equal_repeated_ones_and_transformers(name, options, monkeypatch):
    """float32: sums of some 50 terms in another order. Each log-probability to 1e-5 and 1e-6 of the largest; the
    gradient of every array to 1e-5 of its norm, since random norms and soft caps amplify each rounding through four
    layers (3e-6 is seen in Gemma 3); logits to those of transformers as in test_parity.py."""
    monkeypatch.setattr(blocks, "block_sizes", lambda request: (min(8, request.q_length), min(8, request.kv_length)))
    prompts, completions = random_groups()
    plan = plan_shared_rows(PROMPTS, COMPLETIONS, ROW)
    repeated, places = repeated_rows(prompts, completions)
    shared, spans = fill_shared_rows(prompts, completions, plan + [[]] * (len(repeated["tokens"]) - len(plan)), ROW)
    assert len(plan) < len(repeated["tokens"])
    shared_places = [span[:3] for group in spans for span in group]

    (spec, params), compute = load_case(BY_NAME[name]), Compute(**options)
    assert shared_prompts_obstacle(spec, compute) is None
    of_vocab, actual, grads = scores_and_gradients(params, spec, compute, with_weights(shared, shared_places))
    _, expected, expected_grads = scores_and_gradients(params, spec, compute, with_weights(repeated, places))

    scale = max(float(np.abs(expected[row, start:stop]).max()) for row, start, stop in places)
    for (row, start, stop), (other, other_start, other_stop) in zip(shared_places, places, strict=True):
        np.testing.assert_allclose(
            actual[row, start:stop], expected[other, other_start:other_stop], atol=1e-6 * scale, rtol=1e-5
        )
    for (path, grad), expected_grad in zip(
        jax.tree_util.tree_leaves_with_path(grads), jax.tree.leaves(expected_grads), strict=True
    ):
        error, size = (float(jnp.linalg.norm(x)) for x in (grad - expected_grad, expected_grad))
        assert error <= 1e-5 * size, (path, error / size)

    model = torch_model(BY_NAME[name])
    for group, n in ((0, 2), (1, 0), (2, 0)):
        text = [*prompts[group], *completions[group][n]]
        row, start, stop, _ = spans[group][n]
        reference = torch_logits(model, np.asarray([text]))[0, len(prompts[group]) - 1 : -1]
        largest = float(np.abs(reference).max())
        np.testing.assert_allclose(of_vocab[row, start:stop], reference, atol=max(1e-4, 3e-5 * largest), rtol=1e-4)


def test_filled_rows_predict_every_completion_from_its_branch():
    """Prompts of 3 and 1 tokens: the last one is repeated before each completion, and predicts its first token."""
    prompts, completions = [[1, 2, 3], [9]], [[[4, 5], [6]], [[7, 8]]]
    rows = plan_shared_rows([3, 1], [[2, 1], [2]], 10)
    assert rows == [[Placement(0, (0, 1)), Placement(1, (0,))]]
    arrays, spans = fill_shared_rows(prompts, completions, rows, 10)
    assert {name: array.tolist()[0] for name, array in arrays.items()} == {
        "tokens": [1, 2, 3, 4, 3, 9, 7, 0, 0, 0],
        "targets": [2, 3, 4, 5, 6, 7, 8, 0, 0, 0],
        "positions": [0, 1, 2, 3, 2, 0, 1, 0, 0, 0],
        "segment_ids": [1, 1, 2, 2, 3, 4, 4, 0, 0, 0],
        "parent_ids": [0, 0, 1, 1, 1, 0, 0, 0, 0, 0],
    }
    assert spans == [[(0, 2, 4, 2), (0, 4, 5, 3)], [(0, 5, 7, 4)]]


def test_plans_hold_every_completion_once_in_rows_that_are_long_enough():
    """Random groups, some longer than a row, some with empty completions. A plan is the same each time, and takes no
    more rows than whole groups, placed one after another with a new row where one does not fit, do."""
    for seed in range(150):
        random = np.random.default_rng(seed)
        row_length = int(random.integers(8, 120))
        prompts = random.integers(1, row_length // 2 + 1, random.integers(1, 9)).tolist()
        completions = [random.integers(0, row_length - n + 2, random.integers(1, 9)).tolist() for n in prompts]
        rows = plan_shared_rows(prompts, completions, row_length)
        assert rows == plan_shared_rows(prompts, completions, row_length)
        placed = [(group, n) for row in rows for group, chosen in row for n in chosen]
        assert sorted(placed) == [(g, n) for g, lengths in enumerate(completions) for n in range(len(lengths))]
        sizes = [sum(prompts[g] - 1 + sum(completions[g][n] for n in chosen) for g, chosen in row) for row in rows]
        assert max(sizes) <= row_length
        assert all(len({group for group, _ in row}) == len(row) for row in rows)
        ids = [[[5] * n for n in lengths] for lengths in completions]
        arrays, spans = fill_shared_rows([[1] * n for n in prompts], ids, rows, row_length)
        assert (arrays["segment_ids"] > 0).sum(1).tolist() == sizes
        assert [[span.stop - span.start for span in group] for group in spans] == completions
        if max(n - 1 + sum(lengths) for n, lengths in zip(prompts, completions, strict=True)) <= row_length:
            assert len(rows) <= _rows_one_after_another(prompts, completions, row_length)


def _rows_one_after_another(prompts, completions, row_length):
    count, used = 1, 0
    for prompt, lengths in zip(prompts, completions, strict=True):
        size = prompt - 1 + sum(lengths)
        if used + size > row_length:
            count, used = count + 1, 0
        used += size
    return count


def test_a_group_is_split_only_where_that_saves_a_row():
    """Three groups of 60 positions in rows of 100: the third finds room beside the first two, in halves."""
    groups = [11] * 3, [[10] * 5] * 3
    rows = plan_shared_rows(*groups, 100)
    assert len(rows) == 2
    assert [sum(10 + 10 * len(chosen) for _, chosen in row) for row in rows] == [100, 90]
    assert len(plan_shared_rows(*groups, 80)) == 3  # 20 positions free in each: no room for a prompt and half a group


def test_a_completion_longer_than_a_row_is_an_error():
    with pytest.raises(ValueError, match="group 1: a prompt and a completion of 4 and 9 tokens for rows of 10"):
        plan_shared_rows([4, 4], [[7], [3, 9]], 10)


def test_models_and_kernels_that_cannot_share_prompts_say_why():
    spec_of = functools.cache(lambda name: load_case(BY_NAME[name])[0])
    for name, reason in (
        ("lfm2", "read tokens in the order of the row"),
        ("falcon_h1", "read tokens in the order of the row"),
        ("rope_dynamic", "'dynamic' depends on the length"),
    ):
        assert reason in str(shared_prompts_obstacle(spec_of(name), Compute()))
    balanced = with_aux_loss(spec_of("mixtral"), 0.01)
    assert "balanced by the number of tokens" in str(shared_prompts_obstacle(balanced, Compute()))
    llama = spec_of("llama3")
    assert shared_prompts_obstacle(llama, Compute()) is None
    assert "one document" in str(shared_prompts_obstacle(llama, Compute(packed=False)))
    splash = Compute(dtype="bfloat16", platform="tpu", attention="splash")
    assert "'splash'" in str(shared_prompts_obstacle(llama, splash))
    assert shared_prompts_obstacle(llama, dataclasses.replace(splash, attention="auto")) is None


@pytest.mark.parametrize("shared", [None, False])
@pytest.mark.parametrize(("longest", "samples", "max_tokens"), [(44, 8, 12), (10, 3, 12), (90, 4, 30), (300, 8, 200)])
@pytest.mark.parametrize("most", [160, 192, 1024, 4096])
def test_rows_are_as_long_as_whole_groups_need(most, longest, samples, max_tokens, shared):
    """The longest completions of the longest prompts take as many rows as in rows of data.max_length, and the rows are
    shorter unless a group is longer than they are."""
    if longest + max_tokens > most:
        pytest.skip("such a prompt is left out")
    rollout = RolloutSection(samples=samples, max_tokens=max_tokens, shared_prompts=shared)
    length = rollout_row_length(longest, rollout, most)
    copies = samples if shared is False else 1
    group, groups = copies * (longest - 1) + samples * max_tokens, 12
    if group > most:
        assert length == most
        return
    # Prompts that are repeated are groups of one completion, placed side by side.
    lengths = [longest] * (groups * copies), [[max_tokens] * (samples // copies)] * (groups * copies)
    counts = [len(plan_shared_rows(*lengths, rows)) for rows in (length, most)]
    assert counts[0] == -(-groups // (most // group))
    assert counts[1] <= counts[0], "rows of whole groups may hold less than rows of parts"
    assert length <= most
    assert length - most // group * group < (16 if most < 1024 else 128)
    assert length % 16 == 0 or length == most
