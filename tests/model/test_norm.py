"""Norms against torch and transformers' Gemma norm, float32."""

from __future__ import annotations

from typing import get_args

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from transformers.models.gemma2.modeling_gemma2 import Gemma2RMSNorm
from transformers.models.nemotron.modeling_nemotron import NemotronLayerNorm1P

from meshtune.model.norm import NormKind, NormSpec

WIDTH, EPS = 24, 1e-3


def theirs(kind: str) -> torch.nn.Module:
    match kind:
        case "rms":
            return torch.nn.RMSNorm(WIDTH, eps=EPS)
        case "rms_offset":
            return Gemma2RMSNorm(WIDTH, eps=EPS)
        case "rms_plain":
            return torch.nn.RMSNorm(WIDTH, eps=EPS, elementwise_affine=False)
        case "layer":
            return torch.nn.LayerNorm(WIDTH, eps=EPS)
        case "layer_offset":
            return NemotronLayerNorm1P(WIDTH, eps=EPS)
        case "layer_plain":
            return torch.nn.LayerNorm(WIDTH, eps=EPS, elementwise_affine=False)
        case _:
            return torch.nn.LayerNorm(WIDTH, eps=EPS, bias=False)


@pytest.mark.parametrize("kind", get_args(NormKind))
def test_norms_are_those_of_torch(kind):
    torch.manual_seed(0)
    module, spec = theirs(kind), NormSpec(EPS, kind)
    for parameter in module.parameters():
        torch.nn.init.normal_(parameter)
    node = {name: jnp.asarray(parameter.detach().numpy()) for name, parameter in module.named_parameters()}
    assert {name: leaf.shape for name, leaf in spec.params(WIDTH, "embed").items()} == {
        name: leaf.shape for name, leaf in node.items()
    }
    x = torch.randn(3, 5, WIDTH, requires_grad=True)
    y = module(x)
    y.backward(torch.ones_like(y))
    ours, pull = jax.vjp(lambda x: spec(x, node), jnp.asarray(x.detach().numpy()))
    np.testing.assert_allclose(ours, y.detach().numpy(), rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(pull(jnp.ones_like(ours))[0], x.grad.numpy(), rtol=1e-4, atol=2e-6)


def test_a_norm_starts_as_the_identity_of_normalised_vectors():
    for kind in get_args(NormKind):
        spec = NormSpec(0.0, kind)
        node = {
            name: (jnp.ones if leaf.init == "ones" else jnp.zeros)(leaf.shape)
            for name, leaf in spec.params(4, "embed").items()
        }
        x = jnp.asarray([[1.0, -1.0, 1.0, -1.0]])
        np.testing.assert_allclose(spec(x, node), x, rtol=1e-6)
