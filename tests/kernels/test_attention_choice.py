"""Which attention backend serves which chip, in what order, and what it says where it does not."""

from __future__ import annotations

import pytest

from meshtune.errors import UserError
from meshtune.kernels.attention import BACKENDS, AttentionRequest, choose_backend
from meshtune.kernels.chips import chip_of


def asked(platform, chip, **changes):
    facts = {
        "batch": 2, "q_length": 4096, "kv_length": 4096, "heads": 32, "kv_heads": 8, "head_dim": 128,
        "dtype": "bfloat16", "scale": 0.1, "aligned": True,
    }  # fmt: skip
    return AttentionRequest(**facts | changes, platform=platform, chip=chip)


@pytest.mark.parametrize(
    ("platform", "chip", "expected"),
    [
        ("cuda", "sm_80", "triton"),
        ("cuda", "sm_90a", "triton"),
        ("cuda", "sm_100a", "triton"),
        ("cuda", "sm_89", "triton"),
        ("cuda", "sm_75", "blockwise"),
        ("rocm", "gfx942:sramecc+:xnack-", "triton"),
        ("rocm", "gfx950", "triton"),
        ("rocm", "gfx906", "blockwise"),
        ("gpu", "gfx90a", "triton"),
        ("tpu", "v5e", "splash"),
        ("cpu", "", "blockwise"),
    ],
)
def test_long_packed_rows_by_chip(platform, chip, expected):
    assert choose_backend(asked(platform, chip))[0].name == expected


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({"dtype": "float32"}, "blockwise"),
        ({"head_dim": 512}, "blockwise"),
        ({"head_dim": 80}, "triton"),
        ({"head_dim": 256, "window": 100, "softcap": 50.0}, "triton"),
        ({"aligned": False, "q_length": 512}, "triton"),
        ({"q_length": 100, "kv_length": 100}, "direct"),
        ({"q_length": 1, "aligned": False}, "direct"),
        ({"ring": 4}, "triton"),
    ],
)
def test_other_questions_on_an_h100(change, expected):
    assert choose_backend(asked("cuda", "sm_90a", **change))[0].name == expected


def test_float32_products_may_be_forced():
    assert choose_backend(asked("cuda", "sm_90a", dtype="float32"), "triton")[1] == "asked for"


def test_the_reasons_of_those_passed_over_are_told():
    _, why = choose_backend(asked("cuda", "sm_90a"))
    assert "not direct: 4096 x 4096 scores" in why
    assert "not splash: its kernels are for TPUs, not for cuda" in why
    assert "not cudnn: it cannot tell the documents of a packed row apart" in why


def test_cudnn_refuses_what_it_cannot_do_and_then_what_jax_refuses():
    (cudnn,) = (entry for entry in BACKENDS if entry.name == "cudnn")
    rows = {"packed": False}
    assert "soft cap" in (cudnn.refusal(asked("cuda", "sm_90a", **rows, softcap=30.0)) or "")
    assert "not for rocm" in (cudnn.refusal(asked("rocm", "gfx942", **rows)) or "")
    assert "float32" in (cudnn.refusal(asked("cuda", "sm_90a", **rows, dtype="float32")) or "")
    assert "between 4 devices" in (cudnn.refusal(asked("cuda", "sm_90a", **rows, ring=4)) or "")
    # There is no cuDNN where these tests run, and JAX says so.
    assert "JAX says: cuDNN" in (cudnn.refusal(asked("cuda", "sm_90a", **rows)) or "")


def test_a_forced_backend_that_cannot_serve_raises_with_every_reason():
    with pytest.raises(UserError, match="triton: its kernels are for NVIDIA and AMD GPUs, not for cpu") as caught:
        choose_backend(asked("cpu", ""), "triton")
    assert "splash: its kernels are for TPUs" in str(caught.value)
    assert "choose auto, direct, blockwise" in str(caught.value)


@pytest.mark.parametrize(
    ("platform", "arch", "maker", "name", "shared"),
    [
        ("cuda", "sm_90a", "nvidia", "sm_90", 232448),
        ("cuda", "sm_120a", "nvidia", "sm_120", 101376),
        ("cuda", "sm_999", "nvidia", "sm_999", 101376),
        ("rocm", "gfx942:sramecc+:xnack-", "amd", "gfx942", 65536),
        ("rocm", "gfx950", "amd", "gfx950", 163840),
        ("tpu", "v5p", "tpu", "v5p", 0),
        ("cpu", "", "cpu", "", 0),
    ],
)
def test_chips_by_the_names_their_compilers_know(platform, arch, maker, name, shared):
    chip = chip_of(platform, arch)
    assert (chip.vendor, chip.arch, chip.shared_memory) == (maker, name, shared)
