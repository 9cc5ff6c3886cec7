"""The check of a kernel before its first use: what passes, what is refused, and when it runs again."""

from __future__ import annotations

import dataclasses

import jax.numpy as jnp
import pytest

from meshtune.errors import UserError
from meshtune.kernels.attention import AttentionInputs, AttentionRequest, Backend, self_check
from meshtune.kernels.attention.blockwise import BLOCKWISE
from meshtune.kernels.attention.direct import DIRECT

ASKED = AttentionRequest(
    batch=8, q_length=4096, kv_length=4096, heads=4, kv_heads=2, head_dim=16, dtype="bfloat16", platform="cpu",
    scale=0.25, aligned=True,
)  # fmt: skip


def kernel(change=lambda inputs, request: (inputs, request)):
    """A kernel as good as blockwise attention, but for `change`."""
    calls = []

    def run(inputs, request):
        calls.append(request)
        return BLOCKWISE.run(*change(inputs, request))

    return Backend("kernel", run), calls


def test_a_right_kernel_is_checked_once_and_then_known(tmp_path):
    backend, calls = kernel()
    first = self_check.self_check(ASKED, backend, tmp_path)
    assert first is not None
    assert not first.cached
    assert 0 < first.error < self_check.ALLOWED["bfloat16"] / 4  # rounding has room
    assert "kernel agrees with direct on cpu" in str(first)
    count = len(calls)
    again = self_check.self_check(dataclasses.replace(ASKED, batch=2, q_length=512, kv_length=512), backend, tmp_path)
    assert again == dataclasses.replace(first, cached=True)
    assert len(calls) == count


def test_another_kernel_code_or_question_is_checked_again(tmp_path, monkeypatch):
    asked = []
    monkeypatch.setattr(self_check, "largest_error", lambda request, backend: asked.append(request) or 0.001)
    backend, _ = kernel()
    for _ in range(2):
        self_check.self_check(ASKED, backend, tmp_path)
    assert len(asked) == 1
    self_check.self_check(dataclasses.replace(ASKED, window=100), backend, tmp_path)
    self_check.self_check(dataclasses.replace(ASKED, head_dim=32), backend, tmp_path)
    self_check.self_check(ASKED, dataclasses.replace(backend, name="other"), tmp_path)
    monkeypatch.setattr(self_check, "_source_digest", lambda: "changed")
    self_check.self_check(ASKED, backend, tmp_path)
    assert len(asked) == 5


def with_segments(x, change):
    return x._replace(q_segments=change(x.q_segments), kv_segments=change(x.kv_segments))


WRONG = {
    "the window is one too wide": lambda x, r: (x, dataclasses.replace(r, window=r.window + 1)),
    "one block is NaN": lambda x, r: (x._replace(v=x.v.at[0, 64:128].set(jnp.nan)), r),
    "other documents are seen": lambda x, r: (with_segments(x, lambda s: s.clip(max=1)), r),
    "padding is seen": lambda x, r: (with_segments(x, lambda s: s + 1), r),
    "the soft cap is forgotten": lambda x, r: (x, dataclasses.replace(r, softcap=None)),
    "key heads are mixed up": lambda x, r: (x._replace(k=x.k[:, :, ::-1]), r),
    "the last block is left out": lambda x, r: (x._replace(kv_segments=x.kv_segments.at[:, 384:].set(0)), r),
}
FEW = list(WRONG)[:2]


@pytest.mark.parametrize(
    "name", [name if name in FEW else pytest.param(name, marks=pytest.mark.slow) for name in WRONG]
)
def test_a_wrong_kernel_is_an_error_that_names_the_way_around(name, tmp_path):
    backend, _ = kernel(WRONG[name])
    asked = dataclasses.replace(ASKED, window=50, softcap=2.0)
    with pytest.raises(UserError, match="computes wrong numbers on this cpu") as caught:
        self_check.self_check(asked, backend, tmp_path)
    assert "compute.attention=blockwise" in str(caught.value)
    assert not list(tmp_path.iterdir())


def test_products_of_xla_are_not_checked(tmp_path):
    assert self_check.self_check(ASKED, DIRECT, tmp_path) is None
    assert self_check.self_check(ASKED, BLOCKWISE, tmp_path) is None


def test_rows_of_one_document_are_asked_of_what_serves_no_others():
    seen = []

    def run(inputs: AttentionInputs, request):
        seen.append(request)
        return BLOCKWISE.run(inputs, request)

    assert (
        self_check.largest_error(
            dataclasses.replace(self_check.small_request(ASKED), packed=False), Backend("kernel", run)
        )
        < self_check.ALLOWED["bfloat16"]
    )
    assert all(not request.packed for request in seen)
