"""Weights that are not finite are found while they are read, and named."""

import pathlib
import shutil

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from meshtune.errors import UserError
from meshtune.weights.finite import all_finite, tensors_not_finite
from meshtune.weights.load import load_params, load_spec

NAME = "model.layers.2.mlp.down_proj.weight"


@pytest.mark.parametrize("dtype", [np.float32, np.float16, ml_dtypes.bfloat16, np.float64, ml_dtypes.float8_e5m2])
def test_one_number_among_many_is_found(dtype):
    block = np.random.default_rng(0).normal(size=(700, 1000)).astype(dtype)
    block[0, 0] = ml_dtypes.finfo(dtype).max if np.dtype(dtype).itemsize < 4 else np.finfo(dtype).max
    assert all_finite(block)
    assert all_finite(block[:, ::2])
    for value in (np.nan, np.inf, -np.inf):
        damaged = block.copy()
        damaged[431, 998] = value
        assert not all_finite(damaged)
        assert not all_finite(damaged[:, ::2])


def test_integers_are_finite():
    assert all_finite(np.full(5, 2**31 - 1, np.int32))


@pytest.fixture
def broken(stories260k, tmp_path) -> pathlib.Path:
    """A model with one NaN in one tensor."""
    directory = pathlib.Path(shutil.copytree(stories260k, tmp_path / "broken"))
    (weights,) = directory.glob("*.safetensors")
    tensors = load_file(weights)
    tensors[NAME] = tensors[NAME].copy()
    tensors[NAME][3, 5] = np.nan
    save_file(tensors, weights, metadata={"format": "pt"})
    return directory


def test_loading_names_the_tensor_and_its_file(broken):
    spec, _ = load_spec(broken)
    with pytest.raises(UserError, match=f"tensor '{NAME}' has numbers that are not finite") as caught:
        load_params(broken, spec)
    assert caught.value.where == str(next(broken.glob("*.safetensors")))
    assert caught.value.fix


def test_weights_check_values_reads_them_all(broken, stories260k):
    from typer.testing import CliRunner

    from meshtune.cli.weights import app

    assert tensors_not_finite(stories260k) == {}
    assert list(tensors_not_finite(broken)) == [NAME]
    runner = CliRunner()
    passing = runner.invoke(app, ["check", str(stories260k), "--values"])
    assert "every number is finite" in passing.output
    failing = runner.invoke(app, ["check", str(broken), "--values"])
    assert isinstance(failing.exception, UserError)
    assert NAME in failing.exception.what
    assert runner.invoke(app, ["check", str(broken)]).exit_code == 0
