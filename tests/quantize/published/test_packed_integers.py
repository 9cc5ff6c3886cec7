"""Packed integers and 4-bit floats decode to what the tools that publish them compute, bit for bit."""

from __future__ import annotations

import importlib
import json
from pathlib import Path

import bitsandbytes.functional as bnb
import ml_dtypes  # noqa: F401  (bfloat16 as a numpy dtype)
import numpy as np
import pytest
import torch
from safetensors import safe_open

from meshtune.quantize.published.scheme import Scheme

DATA = Path(__file__).parent / "data"
MODULES = {"gptq": "gptq", "awq": "awq", "compressed-tensors": "compressed_tensors", "bitsandbytes": "bitsandbytes"}
REFERENCES = sorted(file.stem for file in DATA.glob("*.safetensors"))
DTYPES = {
    torch.int32: "I32", torch.int64: "I64", torch.float16: "F16", torch.bfloat16: "BF16", torch.float32: "F32",
    torch.uint8: "U8", torch.int8: "I8",
}  # fmt: skip


class Tensors:
    """The parts of one weight, in memory."""

    def __init__(self, scheme: Scheme, tensors: dict[str, torch.Tensor]):
        roles = {ending.removeprefix("."): role for role, ending in scheme.endings.items()}
        self.tensors = {roles[name]: tensor for name, tensor in tensors.items()}

    def __contains__(self, role):
        return role in self.tensors

    def shape(self, role):
        return tuple(self.tensors[role].shape)

    def dtype(self, role):
        return DTYPES[self.tensors[role].dtype]

    def box(self, role, box):
        return numbers(self.tensors[role])[tuple(slice(*edges) for edges in box)]

    def whole(self, role):
        return numbers(self.tensors[role])


def numbers(tensor: torch.Tensor) -> np.ndarray:
    if tensor.dtype == torch.bfloat16:
        return tensor.view(torch.int16).numpy().view("bfloat16")
    return tensor.numpy()


def scheme_of(config: dict) -> Scheme:
    module = importlib.import_module(f"meshtune.quantize.published.{MODULES[config['quant_method']]}")
    return module.read(config, "config.json")


def reference(name: str) -> tuple[dict, dict[str, torch.Tensor], torch.Tensor]:
    with safe_open(DATA / f"{name}.safetensors", "pt") as file:
        tensors = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118
        config = json.loads(file.metadata()["config"])
    return config, tensors, tensors.pop("expected")


def check_equal(ours: np.ndarray, expected: torch.Tensor, dtype: torch.dtype | None = None) -> None:
    """Equal bit for bit, after the one rounding to the dtype in which the tool computes."""
    rounded = ours.astype(numbers(torch.zeros(1, dtype=dtype or expected.dtype)).dtype)
    np.testing.assert_array_equal(rounded.astype(np.float32), expected.float().numpy())


BOXES = [((0, 64), (0, 96)), ((8, 40), (32, 96)), ((3, 29), (5, 90)), ((63, 64), (95, 96))]


@pytest.mark.parametrize("box", BOXES)
@pytest.mark.parametrize("name", REFERENCES)
def test_boxes_are_the_tools_own_numbers(name, box):
    config, tensors, expected = reference(name)
    scheme = scheme_of(config)
    parts = Tensors(scheme, tensors)
    assert scheme.shape(parts) == (64, 96)
    decoded = scheme.decode(parts, box)
    assert decoded.dtype == np.float32
    check_equal(decoded, expected[tuple(slice(*edges) for edges in box)])


def four_bit(kind, double, dtype, block=64, shape=(48, 96), storage=torch.uint8):
    draw = torch.Generator().manual_seed(3)
    weight = (torch.randn(shape, generator=draw) * 0.05).to(dtype)
    packed, state = bnb.quantize_4bit(
        weight, blocksize=block, quant_type=kind, compress_statistics=double, quant_storage=storage
    )
    tensors = {"weight": packed} | {f"weight.{key}": part for key, part in state.as_dict(packed=True).items()}
    config = {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": kind}
    # As one row: the CPU kernel of bitsandbytes 0.50 misreads blocks that cross rows, which its other kernels do not.
    state.shape = torch.Size((1, weight.numel()))
    return config, tensors, bnb.dequantize_4bit(packed, state).reshape(shape)


@pytest.mark.parametrize("storage", [torch.uint8, torch.bfloat16])
@pytest.mark.parametrize("box", [((0, 48), (0, 96)), ((1, 34), (32, 96)), ((47, 48), (3, 5))])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("double", [False, True])
@pytest.mark.parametrize("kind", ["nf4", "fp4"])
def test_four_bits_of_bitsandbytes(kind, double, dtype, box, storage):
    config, tensors, expected = four_bit(kind, double, dtype, storage=storage)
    scheme = scheme_of(config)
    parts = Tensors(scheme, tensors)
    assert scheme.shape(parts) == (48, 96)
    check_equal(scheme.decode(parts, box), expected[tuple(slice(*edges) for edges in box)])


def test_many_doubly_quantised_blocks():
    config, tensors, expected = four_bit("nf4", True, torch.float32, shape=(700, 96))
    scheme = scheme_of(config)
    check_equal(scheme.decode(Tensors(scheme, tensors), ((300, 700), (0, 96))), expected[300:])


@pytest.mark.parametrize("box", BOXES)
def test_eight_bits_of_bitsandbytes(box):
    weight = torch.randn((64, 96), generator=torch.Generator().manual_seed(0)).half()
    codes, scb, _ = bnb.int8_vectorwise_quant(weight)
    scheme = scheme_of({"quant_method": "bitsandbytes", "load_in_8bit": True})
    parts = Tensors(scheme, {"weight": codes, "SCB": scb, "weight_format": torch.tensor(0, dtype=torch.uint8)})
    assert scheme.shape(parts) == (64, 96)
    expected = bnb.int8_vectorwise_dequant(codes, scb)
    check_equal(scheme.decode(parts, box), expected[tuple(slice(*edges) for edges in box)])
