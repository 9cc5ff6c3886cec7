"""GPT-2's files as they were published, and its table of learned positions."""

from __future__ import annotations

import pathlib
import shutil

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from families.case import directory, load_case
from families.cases import BY_NAME
from meshtune.adapters.targets import modules
from meshtune.arrays.tree import flatten
from meshtune.config.recipe import Recipe
from meshtune.errors import UserError
from meshtune.families import module_names, tensors
from meshtune.families.tensors import View
from meshtune.setup.machine import this_machine
from meshtune.setup.run import resolve_run
from meshtune.weights.export import export_model
from meshtune.weights.load import load_params, load_spec

CASE = BY_NAME["gpt2"]


@pytest.fixture
def published_files(tmp_path: pathlib.Path) -> pathlib.Path:
    """The files as openai-community/gpt2 has them: names without "transformer.", and buffers with the causal mask."""
    folder = tmp_path / "gpt2"
    shutil.copytree(directory(CASE), folder)
    saved = load_file(folder / "model.safetensors")
    bare = {name.removeprefix("transformer."): array for name, array in saved.items()}
    masks = {f"h.{layer}.attn.bias": np.tril(np.ones((1, 1, 192, 192), np.float32)) for layer in range(4)}
    save_file(bare | masks, folder / "model.safetensors", {"format": "pt"})
    return folder


def test_files_of_the_base_model_alone_are_read_and_written_with_their_names(published_files, tmp_path):
    spec, _ = load_spec(published_files, "float32")
    params = load_params(published_files, spec)
    _, expected = load_case(CASE)
    for path, array in flatten(expected).items():
        np.testing.assert_array_equal(flatten(params)[path], array, err_msg=path)
    out = export_model(params, spec, published_files, tmp_path / "out").path
    original, written = (load_file(folder / "model.safetensors") for folder in (published_files, out))
    assert written.keys() == {name for name in original if not name.endswith(".attn.bias")}
    for name, array in written.items():
        np.testing.assert_array_equal(array, original[name], err_msg=name)


def test_modules_have_the_names_of_transformers_whatever_the_files_say(published_files):
    spec, _ = load_spec(published_files, "float32")
    assert {entry.name.partition(".")[0] for entry in tensors(spec)} == {"wte", "wpe", "h", "ln_f"}
    assert module_names(spec) == module_names(load_case(CASE)[0])


def test_weights_of_its_linear_layers_are_transposed():
    among = modules(load_case(CASE)[0])
    transposed = {name.rpartition(".")[2] for name, module in among.items() if module.transposed}
    assert transposed == {"c_attn", "c_proj", "c_fc"}


def test_rows_of_a_transposed_matrix_are_rearranged_as_columns_of_the_tensor():
    heads, size, embed, rank = 4, 3, 5, 2
    view = View.identity((embed, 3 * heads * size)).split(embed, 3, heads, size).transpose(2, 1, 3, 0)
    view = view.merge(3 * heads * size, embed)
    weight = np.arange(embed * 3 * heads * size).reshape(embed, -1)
    b = np.arange(3 * heads * size * rank).reshape(-1, rank)
    rows = view.of_rows(rank)
    assert view.rows_dimension == 1
    order = rows.read(np.arange(3 * heads * size)[:, None].repeat(rank, 1))[:, 0]
    np.testing.assert_array_equal(view.read(weight), weight.T[order])
    np.testing.assert_array_equal(rows.read(b), b[order])


def test_documents_longer_than_the_table_of_positions_are_refused():
    fields = {"model": str(directory(CASE)), "output": "out", "method": "full"}
    recipe = Recipe.model_validate({**fields, "data": {"train": "x", "max_length": 193}})
    with pytest.raises(UserError, match=r"(?s)193 tokens need as many positions.*set data.max_length to 192 or less"):
        resolve_run(recipe, this_machine())
