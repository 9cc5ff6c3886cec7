"""Which attention backend serves which chip and request, and the reasons given for the choice."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest

from kernels.attention_cases import case
from meshtune.errors import UserError
from meshtune.kernels.attention import BACKENDS, AttentionRequest, Backend, attention, choose_backend
from meshtune.kernels.chips import chip_of


def request_of(platform, chip, **changes):
    fields = {
        "batch": 2, "q_length": 4096, "kv_length": 4096, "heads": 32, "kv_heads": 8, "head_dim": 128,
        "dtype": "bfloat16", "scale": 0.1, "aligned": True,
    }  # fmt: skip
    return AttentionRequest(**fields | changes, platform=platform, chip=chip)


def cpu_request(T, S=None):
    return AttentionRequest(
        1, T, S or T, heads=9, kv_heads=3, head_dim=64, dtype="float32", platform="cpu", scale=0.125
    )


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
def test_the_backend_for_long_packed_rows_depends_on_the_chip(platform, chip, expected):
    assert choose_backend(request_of(platform, chip))[0].name == expected


@pytest.mark.parametrize(
    ("changes", "expected"),
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
def test_the_backend_on_an_h100_depends_on_the_request(changes, expected):
    assert choose_backend(request_of("cuda", "sm_90a", **changes))[0].name == expected


@pytest.mark.parametrize(
    ("T", "S", "name"), [(128, 128, "direct"), (1, 40960, "direct"), (256, 256, "blockwise"), (1024, 1024, "blockwise")]
)
def test_on_a_cpu_direct_is_chosen_for_short_rows_and_decoding(T, S, name):
    backend, reason = choose_backend(cpu_request(T, S))
    assert backend.name == name
    assert reason


@pytest.mark.parametrize(
    ("platform", "chip", "backend"),
    [("cuda", "sm_90a", "triton"), ("rocm", "gfx942", "triton"), ("tpu", "v5e", "blockwise")],
)
def test_rows_without_causality_are_served_but_by_kernels_that_hide_later_tokens(platform, chip, backend):
    request = request_of(platform, chip, causal=False, aligned=False, packed=False)
    assert choose_backend(request)[0].name == backend
    splash = {entry.name: entry for entry in BACKENDS}["splash"].refusal(request_of("tpu", "v5e", causal=False))
    assert "hide later tokens" in str(splash)


@pytest.mark.parametrize("backend", ["cudnn", "splash"])
def test_kernels_without_a_reach_refuse_the_pictures_of_gemma_3(backend):
    platform = ("cuda", "sm_90a") if backend == "cudnn" else ("tpu", "v5e")
    request = request_of(*platform, reaches=True, packed=False)
    assert "later tokens of a picture" in str({entry.name: entry for entry in BACKENDS}[backend].refusal(request))


def test_triton_can_be_forced_for_float32():
    assert choose_backend(request_of("cuda", "sm_90a", dtype="float32"), "triton")[1] == "asked for"


def test_the_choice_lists_the_reasons_against_the_backends_before_it():
    _, reason = choose_backend(request_of("cuda", "sm_90a"))
    assert "not direct: 4096 x 4096 scores" in reason
    assert "splash" not in reason, "of hardware that is not there nothing is said"
    assert "not cudnn: it cannot tell the documents of a packed row apart" in reason


def test_cudnn_refuses_what_it_cannot_compute_and_what_jax_refuses():
    (cudnn,) = (backend for backend in BACKENDS if backend.name == "cudnn")
    rows = {"packed": False}
    assert "soft cap" in (cudnn.refusal(request_of("cuda", "sm_90a", **rows, softcap=30.0)) or "")
    assert "not for rocm" in (cudnn.refusal(request_of("rocm", "gfx942", **rows)) or "")
    assert "float32" in (cudnn.refusal(request_of("cuda", "sm_90a", **rows, dtype="float32")) or "")
    assert "between 4 devices" in (cudnn.refusal(request_of("cuda", "sm_90a", **rows, ring=4)) or "")
    # The machine that runs these tests has no cuDNN, which JAX reports.
    assert "JAX says: cuDNN" in (cudnn.refusal(request_of("cuda", "sm_90a", **rows)) or "")


def test_a_forced_backend_that_cannot_serve_is_an_error_with_every_backends_reason():
    with pytest.raises(UserError, match="triton: its kernels are for NVIDIA and AMD GPUs, not for cpu") as caught:
        choose_backend(request_of("cpu", ""), "triton")
    assert "splash: its kernels are for TPUs" in str(caught.value)
    assert "choose auto, direct, blockwise" in str(caught.value)


def test_a_new_backend_is_one_entry(monkeypatch):
    q, k, v, _, tokens, _ = case("one document")

    def supports(request):
        return "only sees windows" if request.window is None else None

    sevens = Backend("sevens", lambda inputs, request: jnp.full_like(inputs.q, 7.0), supports=supports)
    monkeypatch.setattr("meshtune.kernels.attention.BACKENDS", [sevens, *BACKENDS])
    assert (np.asarray(attention(q, k, v, **tokens, scale=1.0, window=3)) == 7.0).all()
    backend, reason = choose_backend(cpu_request(1024))
    assert backend.name == "blockwise"
    assert "only sees windows" in reason
    with pytest.raises(UserError, match="only sees windows"):
        attention(q, k, v, **tokens, scale=1.0, backend="sevens")


def test_a_request_that_no_backend_serves_is_an_error_with_every_reason(monkeypatch):
    refusing = [
        Backend(name, lambda inputs, request: inputs.q, supports=lambda request, name=name: f"{name} is tired")
        for name in ("first", "second")
    ]
    monkeypatch.setattr("meshtune.kernels.attention.BACKENDS", refusing)
    for name in ("second", "auto"):
        with pytest.raises(UserError) as error:
            choose_backend(cpu_request(8), name)
        assert "first is tired" in str(error.value)
        assert "second is tired" in str(error.value)


def test_an_unknown_backend_is_an_error_with_the_nearest_name():
    with pytest.raises(UserError, match="did you mean 'blockwise'"):
        choose_backend(cpu_request(8), "blokwise")


@pytest.mark.parametrize(
    ("platform", "arch", "vendor", "name", "shared_memory"),
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
def test_chips_are_recognised_by_their_compilers_names(platform, arch, vendor, name, shared_memory):
    chip = chip_of(platform, arch)
    assert (chip.vendor, chip.arch, chip.shared_memory) == (vendor, name, shared_memory)
