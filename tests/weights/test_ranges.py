"""Numbers that a dtype or a type cannot hold are named, nothing is left behind, and the offered alternative works."""

from __future__ import annotations

import shutil
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from meshtune.errors import UserError
from meshtune.quickstart import MODEL
from meshtune.runs.export import export

NAME = "model.layers.1.mlp.down_proj.weight"


def change_numbers(tmp_path: Path, value: float, dtype: str = "float32", everywhere: bool = False) -> Path:
    """The quickstart's model with a number, or all numbers, of one matrix changed."""
    model = tmp_path / "model"
    shutil.copytree(MODEL, model)
    tensors = load_file(model / "model.safetensors")
    if everywhere:
        tensors[NAME] = tensors[NAME] * np.float32(value)
    else:
        tensors[NAME][0, 0] = value
    save_file({name: tensor.astype(jnp.dtype(dtype)) for name, tensor in tensors.items()}, model / "model.safetensors")
    return model


@pytest.mark.parametrize(("value", "options"), [
    (1e5, {"dtype": "float16"}),
    (1e5, {"gguf": "F16"}),
    (1e7, {"gguf": "Q8_0"}),
    (1e7, {"gguf": "Q4_0"}),
    (float("inf"), {"dtype": "bfloat16"}),
])  # fmt: skip
def test_a_number_beyond_a_dtype_is_named_and_nothing_is_left_behind(tmp_path, value, options):
    model = change_numbers(tmp_path, value)
    dest = tmp_path / ("out.gguf" if "gguf" in options else "out")
    with pytest.raises(UserError) as error:
        export(model, dest, **options)
    assert "defect" not in str(error.value)
    if np.isfinite(value):
        assert ("blk.1.ffn_down.weight" if "gguf" in options else NAME) in error.value.what
        option, offered = ("gguf", "BF16") if "gguf" in options else ("dtype", "bfloat16")
        assert f"--{option} {offered}" in (error.value.fix or "")
        assert sorted(path.name for path in tmp_path.iterdir()) == ["model"]
        assert export(model, dest, **{option: offered}).path == dest
    assert not (tmp_path / "out.failed-verification").exists()


def test_a_tensor_that_is_too_small_for_its_type_is_named(tmp_path):
    model = change_numbers(tmp_path, 1e-12, everywhere=True)
    verdict = export(model, tmp_path / "half.gguf", gguf="F16").verified
    assert "the numbers of blk.1.ffn_down.weight in F16 are too small for their type" in verdict
    assert "100" not in verdict.partition("; but")[0]
    assert "--gguf BF16 keeps them" in verdict
    assert "too small" not in export(model, tmp_path / "brain.gguf", gguf="BF16").verified


@pytest.mark.slow
def test_a_model_that_rounding_changes_is_not_called_a_defect(tmp_path):
    """A matrix whose numbers float16 has not, with a norm that makes them large again."""
    model = tmp_path / "model"
    shutil.copytree(MODEL, model)
    tensors = load_file(model / "model.safetensors")
    tensors["model.layers.1.mlp.up_proj.weight"] *= np.float32(1e-9)
    tensors["model.layers.1.mlp.down_proj.weight"] *= np.float32(1e4)
    tensors["model.layers.1.mlp.gate_proj.weight"] *= np.float32(20)
    tensors["model.layers.1.post_attention_layernorm.weight"] *= np.float32(1e3)
    save_file(tensors, model / "model.safetensors")
    with pytest.raises(UserError, match="rounding the weights to float16 moves this model's logits") as error:
        export(model, tmp_path / "half", dtype="float16")
    assert "--dtype float32" in (error.value.fix or "")
    assert "defect" not in str(error.value)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["model"]
    export(model, tmp_path / "single", dtype="float32")


def test_float32_files_under_a_config_of_bfloat16_keep_their_numbers(tmp_path):
    model = change_numbers(tmp_path, 1.0000001)
    config = (model / "config.json").read_text().replace('"torch_dtype": "float32"', '"torch_dtype": "bfloat16"')
    (model / "config.json").write_text(config)
    export(model, tmp_path / "out", dtype="float32")
    before, after = (load_file(path / "model.safetensors") for path in (model, tmp_path / "out"))
    assert all(np.array_equal(before[name], after[name]) for name in after)
