"""Loading, compared tensor by tensor with what the safetensors library reads of files that transformers wrote."""

from __future__ import annotations

import shutil
from pathlib import Path

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from meshtune.arrays.tree import flatten
from meshtune.families import tensors
from meshtune.model.spec import abstract_params
from meshtune.weights import shards
from meshtune.weights.load import load_params, load_spec
from model_specs import split_stacks

BF16 = np.dtype(ml_dtypes.bfloat16)


def stored_tensors(directory: Path) -> dict[str, np.ndarray]:
    tensors: dict[str, np.ndarray] = {}
    for file in directory.glob("*.safetensors"):
        tensors |= load_file(file)
    return tensors


def assert_equal_to_files(params, spec, directory: Path, dtype, files=None) -> None:
    """Every tensor is, bit for bit, what the file holds cast to the dtype by numpy."""
    flat, files = flatten(params), files or stored_tensors(directory)
    abstract = flatten(abstract_params(spec))
    assert {path: leaf.shape for path, leaf in flat.items()} == {path: a.shape for path, a in abstract.items()}
    for entry in tensors(spec):
        leaf = flat[entry.path][entry.index]
        assert leaf.dtype == dtype
        assert np.asarray(leaf).tobytes() == files[entry.name].astype(dtype).tobytes(), entry.name
    assert {entry.name for entry in tensors(spec)} == set(files)


@pytest.mark.parametrize("family", ["llama", "llama-tied", "qwen3"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_params_equal_the_files_of_every_family(make_model, family, dtype):
    directory = make_model(family, dtype, max_shard_size=20_000)
    assert len(list(directory.glob("*.safetensors"))) > 3
    spec, config = load_spec(directory)
    assert spec.dtype == dtype
    assert config["model_type"] == spec.family
    assert_equal_to_files(load_params(directory, spec), spec, directory, jnp.dtype(dtype))


@pytest.mark.parametrize(
    ("stored_dtype", "dtype"), [("bfloat16", "float32"), ("float32", "bfloat16"), ("float16", "float32")]
)
def test_weights_are_cast_to_the_dtype_asked_for(make_model, stored_dtype, dtype):
    directory = make_model("llama", stored_dtype)
    spec, _ = load_spec(directory, dtype)
    assert_equal_to_files(load_params(directory, spec), spec, directory, jnp.dtype(dtype))


@pytest.mark.parametrize("stored_as", [np.float64, ml_dtypes.float8_e4m3fn])
def test_other_floating_dtypes_are_read_too(make_model, stored_as):
    directory = make_model("llama")
    tensors = {name: tensor.astype(stored_as) for name, tensor in stored_tensors(directory).items()}
    save_file(tensors, directory / "model.safetensors")
    spec, _ = load_spec(directory, "float32")
    assert_equal_to_files(load_params(directory, spec), spec, directory, jnp.float32, tensors)


def test_a_single_file_equals_its_shards(make_model, tmp_path):
    single, many = make_model("qwen3"), make_model("qwen3", max_shard_size=15_000)
    spec, _ = load_spec(single)
    pairs = zip(jax.tree.leaves(load_params(single, spec)), jax.tree.leaves(load_params(many, spec)), strict=True)
    assert all(bool(jnp.array_equal(a, b)) for a, b in pairs)


def test_numbered_shards_without_an_index_are_read(make_model):
    directory = make_model("llama", max_shard_size=20_000)
    (directory / "model.safetensors.index.json").unlink()
    spec, _ = load_spec(directory)
    assert_equal_to_files(load_params(directory, spec), spec, directory, jnp.float32)


def test_stacks_may_be_split_anywhere(make_model):
    directory = make_model("llama")
    spec = split_stacks(load_spec(directory)[0], 3)
    assert_equal_to_files(load_params(directory, spec), spec, directory, jnp.float32)


def test_tensors_larger_than_a_block_are_read_in_blocks(make_model, monkeypatch):
    directory = make_model("llama")
    monkeypatch.setattr(shards, "BLOCK_BYTES", 1000)
    spec, _ = load_spec(directory)
    assert_equal_to_files(load_params(directory, spec), spec, directory, jnp.float32)


def test_loaded_params_may_be_donated(make_model):
    """A buffer that something else also held would be overwritten, or overwrite, when donated."""
    directory = make_model("llama")
    spec, _ = load_spec(directory)
    files = stored_tensors(directory)
    double = jax.jit(lambda tree: jax.tree.map(lambda x: x * 2, tree), donate_argnums=0)
    params, second = load_params(directory, spec), load_params(directory, spec)
    params = double(double(params))
    got = np.asarray(params["embed"]["weight"])
    np.testing.assert_array_equal(got, 4 * files["model.embed_tokens.weight"])
    assert_equal_to_files(second, spec, directory, jnp.float32)


def test_dtype_comes_from_the_tensors_where_the_config_says_nothing(make_model, edit_config):
    directory = make_model("llama", "bfloat16")
    edit_config(directory, dtype=None)
    assert load_spec(directory)[0].dtype == "bfloat16"


def test_progress_ends_at_the_total(make_model):
    directory = make_model("llama")
    spec, _ = load_spec(directory)
    reports: list[tuple[int, int]] = []
    load_params(directory, spec, progress=lambda done, total: reports.append((done, total)))
    total = sum(tensor.nbytes for tensor in stored_tensors(directory).values())
    assert reports[-1] == (total, total)
    assert [done for done, _ in reports] == sorted({done for done, _ in reports})


def test_a_written_out_copy_of_a_tied_head_is_accepted(make_model):
    directory = make_model("llama-tied")
    tensors = stored_tensors(directory)
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].copy()
    tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = np.ones(6, np.float32)
    save_file(tensors, directory / "model.safetensors")
    spec, _ = load_spec(directory)
    assert "head" not in load_params(directory, spec)


def test_no_pickle_is_opened(make_model, tmp_path):
    """A pickle next to the weights, that would leave a mark if it were ever loaded, is not."""
    directory = shutil.copytree(make_model("llama"), tmp_path / "model")
    mark = tmp_path / "owned"
    poison = b"cposix\nsystem\n(S'touch " + str(mark).encode() + b"'\ntR."
    for name in ("pytorch_model.bin", "model.pt", "optimizer.pth", "x.pkl"):
        (directory / name).write_bytes(poison)
    spec, _ = load_spec(directory)
    assert_equal_to_files(load_params(directory, spec), spec, directory, jnp.float32)
    assert not mark.exists()
