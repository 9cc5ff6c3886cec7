"""The check of attention kernels as a run does it: of the kernels chosen for the model's layers, before the first
step."""

from __future__ import annotations

import dataclasses
import types

import pytest

from meshtune.errors import UserError
from meshtune.kernels import attention as package
from meshtune.kernels.attention import Backend
from meshtune.kernels.attention.blockwise import BLOCKWISE
from meshtune.model.compute import Compute
from meshtune.model.spec import Stack
from meshtune.setup.choices import attention_requests, checked_attention
from model_specs import llama_layer, llama_spec

LAYERS = tuple(llama_layer(128, 4, 2, 16, window) for window in (32, 32, None))
SPEC = dataclasses.replace(llama_spec(256, 64, LAYERS[0], 1), stacks=(Stack(LAYERS, 1),))
COMPUTE = Compute("bfloat16", attention="triton", platform="cpu")


@pytest.fixture
def kernel(monkeypatch, tmp_path):
    """Blockwise attention in the place of a kernel; its `wrong` documents see each other."""
    state = types.SimpleNamespace(calls=0, wrong=False)

    def run(inputs, request):
        state.calls += 1
        if state.wrong:
            inputs = inputs._replace(
                q_segments=inputs.q_segments.clip(max=1), kv_segments=inputs.kv_segments.clip(max=1)
            )
        return BLOCKWISE.run(inputs, request)

    backends = [Backend("triton", run) if entry.name == "triton" else entry for entry in package.BACKENDS]
    monkeypatch.setattr(package, "BACKENDS", backends)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return state


def test_each_kind_of_layer_is_asked_for_once():
    assert [request.window for request in attention_requests(COMPUTE, SPEC, 2, 512)] == [None, 32]


def test_a_kernel_is_checked_for_each_kind_of_layer_and_then_known(kernel, tmp_path):
    lines = checked_attention(COMPUTE, SPEC, 2, 512)
    assert all(line.startswith("attention: triton agrees with direct on cpu to ") for line in lines)
    assert len(list((tmp_path / "meshtune" / "attention-checks").iterdir())) == 2
    calls = kernel.calls
    assert all(line.endswith("(as checked before)") for line in checked_attention(COMPUTE, SPEC, 2, 512))
    assert kernel.calls == calls


def test_a_wrong_kernel_stops_the_run(kernel):
    kernel.wrong = True
    with pytest.raises(UserError, match=r"compute\.attention=blockwise"):
        checked_attention(COMPUTE, SPEC, 2, 512)


def test_nothing_is_said_of_xlas_own_products():
    assert checked_attention(Compute("bfloat16", platform="cpu"), SPEC, 2, 512) == []
