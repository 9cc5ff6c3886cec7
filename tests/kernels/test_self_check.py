"""The check of a kernel before its first use: which kernels pass, which are refused, and when it is repeated."""

from __future__ import annotations

import dataclasses

import jax.numpy as jnp
import pytest

from meshtune.errors import UserError
from meshtune.kernels.attention import AttentionInputs, AttentionRequest, Backend, self_check
from meshtune.kernels.attention.blockwise import BLOCKWISE
from meshtune.kernels.attention.direct import DIRECT

REQUEST = AttentionRequest(
    batch=8, q_length=4096, kv_length=4096, heads=4, kv_heads=2, head_dim=16, dtype="bfloat16", platform="cpu",
    scale=0.25, aligned=True,
)  # fmt: skip


def kernel(change=lambda inputs, request: (inputs, request)):
    """Blockwise attention with `change` applied to its inputs and request, and a list of its calls."""
    calls = []

    def run(inputs, request):
        calls.append(request)
        return BLOCKWISE.run(*change(inputs, request))

    return Backend("kernel", run), calls


def test_a_correct_kernel_is_checked_once(tmp_path):
    backend, calls = kernel()
    first = self_check.self_check(REQUEST, backend, tmp_path)
    assert first is not None
    assert not first.cached
    assert 0 < first.error < self_check.ALLOWED["bfloat16"] / 4  # well within the tolerance
    assert "kernel agrees with direct on cpu" in str(first)
    count = len(calls)
    again = self_check.self_check(dataclasses.replace(REQUEST, batch=2, q_length=512, kv_length=512), backend, tmp_path)
    assert again == dataclasses.replace(first, cached=True)
    assert len(calls) == count


def test_another_request_backend_or_source_is_checked_again(tmp_path, monkeypatch):
    checked = []
    monkeypatch.setattr(self_check, "largest_error", lambda request, backend: checked.append(request) or 0.001)
    backend, _ = kernel()
    for _ in range(2):
        self_check.self_check(REQUEST, backend, tmp_path)
    assert len(checked) == 1
    self_check.self_check(dataclasses.replace(REQUEST, window=100), backend, tmp_path)
    self_check.self_check(dataclasses.replace(REQUEST, head_dim=32), backend, tmp_path)
    self_check.self_check(REQUEST, dataclasses.replace(backend, name="another"), tmp_path)
    monkeypatch.setattr(self_check, "_source_digest", lambda: "changed")
    self_check.self_check(REQUEST, backend, tmp_path)
    assert len(checked) == 5


def test_a_kernel_that_does_not_see_the_continued_document_is_an_error(tmp_path):
    request = dataclasses.replace(REQUEST, parents=True)
    correct = self_check.self_check(request, kernel()[0], tmp_path)
    assert correct is not None
    assert correct.error < self_check.ALLOWED["bfloat16"] / 4
    backend, _ = kernel(lambda inputs, request: (inputs._replace(q_parents=None), request))
    with pytest.raises(UserError, match="wrong numbers"):
        self_check.self_check(request, dataclasses.replace(backend, name="blind"), tmp_path)


def with_segments(x, change):
    return x._replace(q_segments=change(x.q_segments), kv_segments=change(x.kv_segments))


WRONG_KERNELS = {
    "the window is one too wide": lambda x, r: (x, dataclasses.replace(r, window=r.window + 1)),
    "a block is NaN": lambda x, r: (x._replace(v=x.v.at[0, 64:128].set(jnp.nan)), r),
    "other documents are seen": lambda x, r: (with_segments(x, lambda s: s.clip(max=1)), r),
    "padding is seen": lambda x, r: (with_segments(x, lambda s: s + 1), r),
    "the soft cap is forgotten": lambda x, r: (x, dataclasses.replace(r, softcap=None)),
    "key heads are mixed up": lambda x, r: (x._replace(k=x.k[:, :, ::-1]), r),
    "the last block is left out": lambda x, r: (x._replace(kv_segments=x.kv_segments.at[:, 384:].set(0)), r),
}
FAST = list(WRONG_KERNELS)[:2]


@pytest.mark.parametrize(
    "name", [name if name in FAST else pytest.param(name, marks=pytest.mark.slow) for name in WRONG_KERNELS]
)
def test_a_wrong_kernel_is_an_error_that_names_the_workaround(name, tmp_path):
    backend, _ = kernel(WRONG_KERNELS[name])
    request = dataclasses.replace(REQUEST, window=50, softcap=2.0)
    with pytest.raises(UserError, match="computes wrong numbers on this cpu") as caught:
        self_check.self_check(request, backend, tmp_path)
    assert "compute.attention=blockwise" in str(caught.value)
    assert not list(tmp_path.iterdir())


def test_backends_of_xlas_own_matmuls_are_not_checked(tmp_path):
    assert self_check.self_check(REQUEST, DIRECT, tmp_path) is None
    assert self_check.self_check(REQUEST, BLOCKWISE, tmp_path) is None


def test_a_request_without_packing_is_checked_without_packing():
    requests = []

    def run(inputs: AttentionInputs, request):
        requests.append(request)
        return BLOCKWISE.run(inputs, request)

    assert (
        self_check.largest_error(
            dataclasses.replace(self_check.small_request(REQUEST), packed=False), Backend("kernel", run)
        )
        < self_check.ALLOWED["bfloat16"]
    )
    assert all(not request.packed for request in requests)
