"""Rotations against transformers' own functions: halves, pairs, and a part of a head."""

from __future__ import annotations

import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest
import torch
from transformers.models.cohere.modeling_cohere import apply_rotary_pos_emb as in_pairs
from transformers.models.glm.modeling_glm import apply_rotary_pos_emb as in_pairs_of_a_part
from transformers.models.gpt_neox.modeling_gpt_neox import apply_rotary_pos_emb as in_halves_of_a_part
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb as in_halves

from meshtune.model.compute import Compute
from meshtune.model.decoder import forward, logits
from meshtune.model.inputs import Inputs, inputs_of, sequence_info
from meshtune.model.rope import RopeSpec, angles, rotate
from tiny_models import same_weights, torch_model

HEAD, POSITIONS = 16, np.asarray([[0, 1, 2, 3, 0, 1, 7, 40]], np.int32)


def cos_sin(dim: int, interleaved: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """As transformers' rotary embedding modules give them: twice, one half after the other, or every number twice."""
    inverse = 1.0 / 10000.0 ** (torch.arange(0, dim, 2, dtype=torch.float32) / dim)
    phase = torch.tensor(POSITIONS, dtype=torch.float32)[..., None] * inverse
    both = phase.repeat_interleave(2, dim=-1) if interleaved else torch.cat([phase, phase], dim=-1)
    return both.cos(), both.sin()


@pytest.mark.parametrize(
    ("function", "dim", "interleaved", "doubled"),
    [
        (in_halves, HEAD, False, False),
        (in_halves_of_a_part, 8, False, False),
        (in_pairs, HEAD, True, True),
        (in_pairs_of_a_part, 8, True, False),
    ],
)
def test_heads_are_rotated_as_in_transformers(function, dim, interleaved, doubled):
    torch.manual_seed(0)
    q, k = torch.randn(2, 1, 4, POSITIONS.shape[1], HEAD)  # [B, H, T, h]
    expected, _ = function(q, k, *cos_sin(dim, doubled))
    spec = RopeSpec(10000.0, dim, interleaved=interleaved)
    segments = jnp.asarray([[1, 1, 1, 1, 2, 2, 3, 3]])
    actual = rotate(
        jnp.asarray(q.transpose(1, 2).numpy()),
        *angles(spec, jnp.asarray(POSITIONS), jnp.asarray(POSITIONS), segments),
        interleaved=interleaved,
    )
    np.testing.assert_allclose(actual, expected.transpose(1, 2).numpy(), rtol=1e-5, atol=1e-5)


def test_ropes_of_several_layers_are_told_apart():
    first, second = RopeSpec(1e4, 8), RopeSpec(1e6, 8)
    tokens = jnp.asarray(POSITIONS)
    rows = sequence_info(Inputs(tokens, tokens, jnp.ones_like(tokens)), (first, second))
    assert set(rows.angles) == {first, second}
    assert not np.allclose(rows.angles[first][0], rows.angles[second][0])


def test_rotations_follow_their_own_positions_and_visibility_the_order():
    """Against transformers, whose causal mask goes by the order, with positions that repeat and fall within the
    text."""
    model = torch_model("llama3")
    spec, params = same_weights(model)
    ids = np.random.default_rng(0).integers(0, spec.vocab, (2, 9))
    turns = np.array([[0, 1, 1, 1, 2, 5, 4, 3, 6]] * 2)
    with torch.no_grad():
        mask = torch.triu(torch.full((2, 1, 9, 9), -1e30), 1)
        expected = model(torch.tensor(ids), attention_mask=mask, position_ids=torch.tensor(turns)).logits.numpy()
    order = jnp.tile(jnp.arange(9), (2, 1))
    inputs = inputs_of(
        {"tokens": ids, "positions": order, "segment_ids": jnp.ones_like(order), "rope_positions": jnp.asarray(turns)}
    )
    compute = Compute(attention="direct")
    actual = logits(params, spec, forward(params, spec, compute, inputs).hidden)
    np.testing.assert_allclose(actual, expected, rtol=1e-4, atol=1e-4)  # float32 in two orders of summing
    plain = forward(params, spec, compute, dataclasses.replace(inputs, rope_positions=None)).hidden
    again = forward(params, spec, compute, dataclasses.replace(inputs, rope_positions=order)).hidden
    np.testing.assert_array_equal(plain, again)
    assert not np.allclose(logits(params, spec, plain), actual, atol=1e-2)
