"""Models published in 4 and 8 bits: the parameters read from them, and their logits in transformers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import bitsandbytes.functional as bnb
import numpy as np
import pytest
import torch
import transformers
from bitsandbytes.nn import Linear4bit, Linear8bitLt
from safetensors.torch import load_file, save_file

from families.case import Case, directory, our_logits, torch_logits, torch_model
from families.packed_checkpoints import PACKED, is_linear
from families.published_checkpoints import rewritten
from meshtune.arrays.tree import flatten
from meshtune.errors import UserError
from meshtune.families import tensors
from meshtune.quantize.config import QuantizeConfig
from meshtune.quantize.weight import QuantisedWeight
from meshtune.weights.inspect import inspect_model
from meshtune.weights.load import load_params, load_spec

# Rows of 64 and 128 numbers, which blocks of bitsandbytes divide, and fewer outputs than fill words of 32 bits.
CASE = Case("packed_llama", "llama", {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2})


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory):
    folder = tmp_path_factory.mktemp("packed")

    def checkpoint(name: str) -> Path:
        if not (folder / name).exists():
            rewritten(directory(CASE), folder / name, *PACKED[name])
        return folder / name

    return checkpoint


# How far rounding takes the numbers, as a share of the largest of a group.
STEPS = {"gptq_8bit": 1 / 100, "packed_8bit": 1 / 100, "eight_bit": 1 / 100}


@pytest.mark.parametrize("name", PACKED)
def test_weights_are_near_those_that_were_quantised(checkpoints, name: str):
    """The layout is whole: each number is where it was. (That numbers are exact, test_packed_integers proves.)"""
    spec, _ = load_spec(checkpoints(name), "float32")
    params = flatten(load_params(checkpoints(name), spec, quantize=QuantizeConfig("none")))
    full = load_file(directory(CASE) / "model.safetensors")
    for entry in tensors(spec):
        original = full[entry.name].numpy()
        ours = np.asarray(params[entry.path])[entry.index]
        step = STEPS.get(name, 0.2) * np.abs(original).max() if is_linear(entry.name, full[entry.name]) else 0
        assert np.abs(ours - entry.view.read(original)).max() <= step, entry.name
        assert step == 0 or (ours != original).any()


WIDE = {"gptq_act_order"}  # its groups are no runs of a row


@pytest.mark.parametrize("name", PACKED)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_codes_stand_for_the_numbers_that_are_read_wide(checkpoints, name: str, dtype: str):
    spec, _ = load_spec(checkpoints(name), dtype)
    wide = flatten(load_params(checkpoints(name), spec, quantize=QuantizeConfig("none")))
    params = flatten(load_params(checkpoints(name), spec))
    coded = {path for path, leaf in params.items() if isinstance(leaf, QuantisedWeight)}
    assert coded == (set() if name in WIDE else {entry.path for entry in tensors(spec) if "_proj" in entry.name})
    for path in coded:
        numbers = np.asarray(params[path].dequantise(), np.float32)
        # LLM.int8's two products are rounded in another order in float32; all else is equal bit for bit.
        last_bits = 0 if name != "eight_bit" else 2**-7 if dtype == "bfloat16" else 2**-22
        np.testing.assert_allclose(numbers, np.asarray(wide[path], np.float32), rtol=last_bits, err_msg=path)


@pytest.mark.parametrize(
    "options",
    [
        {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4"},
        {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4", "bnb_4bit_use_double_quant": True},
        {"load_in_4bit": True, "bnb_4bit_quant_type": "fp4"},
        {"load_in_8bit": True},
    ],
)
def test_what_transformers_saves_gives_the_logits_of_its_dequantised_weights(tmp_path: Path, options):
    """Dequantised, since on CPUs bitsandbytes computes with 4 bits in bfloat16, and LLM.int8 rounds inputs too."""
    model = transformers.AutoModelForCausalLM.from_pretrained(
        directory(CASE), quantization_config=transformers.BitsAndBytesConfig(**options), dtype=torch.float32
    )
    model.save_pretrained(tmp_path / "model")
    spec, _ = load_spec(tmp_path / "model", "float32")
    tokens = np.random.default_rng(0).integers(0, spec.vocab, (2, 40))
    positions = np.broadcast_to(np.arange(40), (2, 40))
    ours = our_logits(load_params(tmp_path / "model", spec), spec, tokens, positions, np.ones_like(tokens))
    wide = torch_model(CASE)
    for name, module in wide.named_modules():
        quantised = model.get_submodule(name)
        weight: Any = getattr(quantised, "weight", None)
        if isinstance(quantised, Linear4bit):
            module.weight.data = bnb.dequantize_4bit(weight.data, weight.quant_state)
        elif isinstance(quantised, Linear8bitLt):
            module.weight.data = bnb.int8_vectorwise_dequant(weight.data, weight.SCB)
    np.testing.assert_allclose(ours, torch_logits(wide, tokens), atol=1e-4)
    assert set(inspect_model(tmp_path / "model").dtypes) == {"bitsandbytes", "float32"}


def change_checkpoint(checkpoint: Path, folder: Path, change) -> Path:
    stored = load_file(checkpoint / "model.safetensors")
    fields = json.loads((checkpoint / "config.json").read_text())
    change(stored, fields["quantization_config"])
    folder.mkdir()
    save_file(stored, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(fields))
    return folder


DOWN = "model.layers.0.mlp.down_proj"


def group_0(**fields):
    return lambda stored, config: config["config_groups"]["group_0"]["weights"].update(fields)


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("gptq", lambda stored, config: stored.pop(f"{DOWN}.scales"), f"'{DOWN}.scales' is missing"),
        ("gptq", lambda stored, config: config.update(bits=3), "bits is 3, which is not read"),
        ("gptq", lambda stored, config: config.pop("bits"), "bits is missing"),
        ("gptq", lambda stored, config: config.update(group_size=0), "group_size is 0"),
        ("gptq", lambda stored, config: config.update(group_size=16), "its zeros have shape"),
        ("gptq", lambda stored, config: config.update(checkpoint_format="marlin"), "checkpoint_format is 'marlin'"),
        ("gptq", lambda stored, config: config.update(dynamic={"+:.*down": {"bits": 8}}), "a way of their own"),
        ("gptq", lambda stored, config: config.update(unheard=1), "unheard"),
        ("gptq_act_order", lambda stored, config: config.update(desc_act=False), "set desc_act to true"),
        ("gptq", lambda stored, config: stored[f"{DOWN}.g_idx"].add_(99), "g_idx names group"),
        ("awq", lambda stored, config: config.update(version="gemv"), "version is 'gemv'"),
        ("awq", lambda stored, config: config.update(group_size=24), "groups of 24 do not divide its rows of 128"),
        ("awq", lambda stored, config: stored.update({f"{DOWN}.qzeros": torch.zeros(1, 1)}), "dtype F32"),
        ("packed", lambda stored, config: config.update(format="marlin-24"), "format is 'marlin-24'"),
        ("packed", group_0(num_bits=6), "num_bits is 6"),
        ("packed", group_0(strategy="block"), "strategy is 'block'"),
        ("packed", group_0(group_size=48), "groups of 48 do not divide"),
        ("packed", group_0(symmetric=False), f"'{DOWN}.weight_zero_point' is missing"),
        (
            "packed",
            lambda stored, config: config["config_groups"]["group_0"].update(input_activations={"num_bits": 8}),
            "input_activations are quantised too",
        ),
        ("nf4", lambda stored, config: stored.pop(f"{DOWN}.weight.absmax"), f"'{DOWN}.weight.absmax' is missing"),
        ("nf4", lambda stored, config: stored[f"{DOWN}.weight.quant_state.bitsandbytes__nf4"].fill_(65), "malformed"),
        ("nf4", lambda stored, config: config.update(bnb_4bit_quant_type="fp4"), "bitsandbytes__fp4' is missing"),
        ("nf4", lambda stored, config: config.update(load_in_4bit=False), "neither load_in_4bit nor load_in_8bit"),
        ("nf4_double", lambda stored, config: stored.pop(f"{DOWN}.weight.nested_absmax"), "nested_absmax' is missing"),
        ("eight_bit", lambda stored, config: stored[f"{DOWN}.weight_format"].fill_(1), "weight_format is 1"),
        ("eight_bit", lambda stored, config: stored.pop(f"{DOWN}.SCB"), f"'{DOWN}.SCB' is missing"),
    ],
)
def test_what_does_not_fit_is_named(checkpoints, tmp_path: Path, name: str, change, message: str):
    folder = change_checkpoint(checkpoints(name), tmp_path / "bad", change)
    with pytest.raises(UserError) as error:
        load_params(folder, load_spec(folder)[0])
    assert message in str(error.value)
    assert error.value.fix
