"""Short convolutions against torch's Conv1d: documents packed in a row, and rows read in parts over a cache."""

from __future__ import annotations

import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest
import torch

from meshtune.errors import UserError
from meshtune.mesh.config import MeshConfig
from meshtune.mesh.layout import abstract_mesh
from meshtune.model.cache import LayerCache
from meshtune.model.gather import layout_for
from meshtune.model.inputs import SequenceInfo
from meshtune.model.layer import LayerSpec
from meshtune.model.norm import NormSpec
from meshtune.model.short_conv import FilterSpec, ShortConvSpec
from model_specs import llama_layer, llama_spec

SPEC = FilterSpec(channels=5, taps=4, bias=True, activation="silu")
RNG = np.random.default_rng(0)
NODE = {"weight": RNG.normal(size=(5, 4)).astype(np.float32), "bias": RNG.normal(size=5).astype(np.float32)}


def by_torch(x):
    """silu(Conv1d(x)) of one document [T, C] in float64."""
    weight, bias = (torch.tensor(NODE[name]).double() for name in ("weight", "bias"))
    padded = torch.nn.functional.pad(torch.tensor(x).double().T, (3, 0))
    y = torch.nn.functional.conv1d(padded[None], weight[:, None], bias, groups=5)[0].T
    return torch.nn.functional.silu(y).numpy()


def rows(segments):
    return SequenceInfo(jnp.zeros_like(segments), segments, {})


def test_documents_in_a_row_are_those_alone():
    lengths = (2, 9, 1, 6)
    x = RNG.normal(size=(1, 20, 5)).astype(np.float32)
    segments = np.repeat([1, 2, 3, 4, 0], (*lengths, 2))[None].astype(np.int32)
    y, _ = SPEC.apply(jnp.asarray(x), NODE, rows(jnp.asarray(segments)), None)
    start = 0
    for length in lengths:
        document = slice(start, start + length)
        np.testing.assert_allclose(y[0, document], by_torch(x[0, document]), atol=1e-6, rtol=0)
        start += length


def test_rows_of_different_lengths_are_read_in_parts():
    """Padding takes no place among the inputs that are kept."""
    lengths, parts = (3, 8), ((2, 5), (1, 1), (0, 1), (0, 1))
    x = RNG.normal(size=(2, 8, 5)).astype(np.float32)
    arrays = {name: jnp.zeros((1, *spec.shape)) for name, spec in SPEC.cache(2, "float32").items()}
    cache, read, outputs = LayerCache(arrays, 0, jnp.zeros(2, jnp.int32)), [0, 0], ([], [])
    for part in parts:
        width = max(part)
        tokens, segments = np.full((2, width, 5), np.float32(7)), np.zeros((2, width), np.int32)
        for row, count in enumerate(part):
            tokens[row, :count], segments[row, :count] = x[row, read[row] : read[row] + count], 1
        y, after = SPEC.apply(jnp.asarray(tokens), NODE, rows(jnp.asarray(segments)), cache)
        assert after is not None
        cache = dataclasses.replace(after, lengths=cache.lengths + jnp.asarray(part))
        for row, count in enumerate(part):
            outputs[row].extend(np.asarray(y[row, :count]))
            read[row] += count
    assert tuple(read) == lengths
    for row, length in enumerate(lengths):
        np.testing.assert_allclose(np.stack(outputs[row]), by_torch(x[row, :length]), atol=1e-6, rtol=0)


def test_a_mesh_with_cp_is_refused_with_the_reason():
    layer = LayerSpec(ShortConvSpec(taps=3, channels=8), llama_layer(16, 2, 2, 4).ffn, NormSpec(1e-5))
    spec = llama_spec(32, 8, layer, 2)
    with pytest.raises(UserError, match="cp=2 cannot split this llama model's short convolutions: each token needs"):
        layout_for(abstract_mesh(MeshConfig(cp=2)), spec)
