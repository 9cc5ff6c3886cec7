"""GGUF's types, decoded and encoded, against llama.cpp's own code."""

from __future__ import annotations

import numpy as np
import pytest

from llama_cpp import dequantize, quantize, type_traits
from meshtune.quantize.gguf import TYPES, decode, encode
from meshtune.quantize.gguf.mixture import Mixture

SIMPLE = ("Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0")
SEARCHED = ("Q4_K", "Q5_K", "Q6_K")


def rows() -> np.ndarray:
    """Normal numbers as of weights, and rows of zeros, of one sign, of one number, tiny ones and round ones."""
    numbers = np.random.default_rng(0).standard_normal((48, 512)).astype(np.float32) * 0.02
    numbers[3] = 0
    numbers[4] *= 1e-3
    numbers[5] = np.abs(numbers[5])
    numbers[6] = -np.abs(numbers[6])
    numbers[7, :256] = 0.5
    numbers[8] = np.round(numbers[8] * 100)
    return numbers


def relative_error(decoded: np.ndarray, numbers: np.ndarray) -> float:
    return float(np.sqrt(np.square(decoded - numbers).sum() / np.square(numbers).sum()))


@pytest.mark.parametrize("name", TYPES)
def test_a_type_has_the_name_and_the_block_that_llama_cpp_gives_it(name: str):
    traits = type_traits(TYPES[name].id)
    assert (TYPES[name].block, TYPES[name].nbytes) == (traits.block, traits.nbytes)
    assert name.lower() == traits.name.decode().lower()


@pytest.mark.parametrize("name", [name for name in TYPES if name not in ("F32", "F64")])
def test_every_type_is_decoded_as_llama_cpp_decodes_it(name: str):
    content = np.random.default_rng(1).integers(0, 256, (16, 512 * TYPES[name].nbytes // TYPES[name].block), np.uint8)
    with np.errstate(all="ignore"):
        ours = decode(name, content)
    theirs = dequantize(TYPES[name].id, content)
    finite = np.isfinite(theirs)
    assert finite.mean() > 0.5
    assert np.array_equal(np.isfinite(ours), finite)
    np.testing.assert_allclose(ours[finite], theirs[finite], rtol=1e-6, atol=0)


@pytest.mark.parametrize("name", SIMPLE)
def test_simple_types_are_encoded_bit_for_bit_as_llama_cpp_encodes_them(name: str):
    encoded = encode(name, rows())
    assert np.array_equal(encoded, quantize(TYPES[name].id, rows(), encoded.shape[1]))


@pytest.mark.parametrize("name", SEARCHED)
def test_the_error_of_a_searched_type_is_llama_cpp_s(name: str):
    numbers = rows()
    encoded = encode(name, numbers)
    theirs = decode(name, quantize(TYPES[name].id, numbers, encoded.shape[1]))
    ours = decode(name, encoded)
    # Sums are made in another order, so that of two candidates of equal error another one may be chosen.
    assert relative_error(ours, numbers) == pytest.approx(relative_error(theirs, numbers), rel=1e-3)
    for row in (3, 4, 5, 6, 7, 8):
        assert np.abs(ours[row] - numbers[row]).max() <= 1.05 * np.abs(theirs[row] - numbers[row]).max() + 1e-12


def test_more_numbers_than_are_encoded_at_once_give_the_same_bytes(monkeypatch: pytest.MonkeyPatch):
    expected = encode("Q4_K", rows())
    monkeypatch.setattr("meshtune.quantize.gguf.ENCODE_NUMBERS", 5 * 512)
    assert np.array_equal(encode("Q4_K", rows()), expected)


def test_q4_k_m_has_more_bits_where_llama_cpp_s_rule_gives_them():
    mixture = Mixture("Q4_K_M", layers=32, tied=False)
    down = [mixture.type_of(f"blk.{layer}.ffn_down.weight", (4096, 11008)) for layer in range(32)]
    assert [layer for layer, kind in enumerate(down) if kind == "Q6_K"] == [
        0, 1, 2, 3, 6, 9, 12, 15, 18, 21, 24, 27, 28, 29, 30, 31,
    ]  # fmt: skip
    assert mixture.type_of("blk.5.attn_v.weight", (1024, 4096)) == "Q4_K"
    assert mixture.type_of("output.weight", (32000, 4096)) == "Q6_K"
    assert mixture.type_of("token_embd.weight", (32000, 4096)) == "Q4_K"
    assert Mixture("Q4_K_M", 32, tied=True).type_of("token_embd.weight", (32000, 4096)) == "Q6_K"
    assert mixture.type_of("blk.0.attn_norm.weight", (4096,)) == "F32"
    assert mixture.type_of("blk.0.ffn_gate_inp.weight", (8, 4096)) == "F32"
    assert Mixture("Q4_K_M", 32, False, experts=8).type_of("blk.5.attn_k.weight", (1024, 4096)) == "Q8_0"


@pytest.mark.parametrize(
    ("file_type", "columns", "kind"),
    [("Q4_K_M", 576, "Q5_0"), ("Q5_K_M", 576, "Q5_1"), ("Q6_K", 576, "Q8_0"), ("Q4_0", 72, "F16"), ("Q8_0", 40, "F16")],
)
def test_rows_that_blocks_do_not_divide_have_a_type_that_fits(file_type: str, columns: int, kind: str):
    assert Mixture(file_type, 32, tied=False).type_of("blk.5.attn_q.weight", (64, columns)) == kind
