"""How many tokens' logits exist at once where the recipe does not say."""

from __future__ import annotations

import pathlib

import pytest

from meshtune.config.load import load_recipe
from meshtune.mesh.config import MeshConfig
from meshtune.mesh.layout import abstract_mesh
from meshtune.model.gather import layout_for
from meshtune.model.spec import ModelSpec
from meshtune.setup.choices import loss_chunk_of
from meshtune.weights.load import load_config, spec_of

HEADLINE = pathlib.Path(__file__).parents[2] / "examples/headline"
RECIPE = HEADLINE / "8b-qlora.yaml"


def spec(name: str) -> ModelSpec:
    folder = HEADLINE / "models" / name
    return spec_of(load_config(folder), folder, "bfloat16")


@pytest.mark.parametrize(
    ("name", "tokens", "mib"),
    [("llama-2-7b", 512, 62), ("llama-3.1-8b", 256, 125), ("gemma-3-27b", 256, 256)],
)
def test_a_device_has_64_mib_of_logits_or_those_of_256_tokens(name, tokens, mib):
    chunk, reason = loss_chunk_of(load_recipe(RECIPE), spec(name), 1, 4096, None)
    assert (chunk, reason) == (tokens, f"auto: {mib} MiB of logits at once on a device")


@pytest.mark.parametrize(("axes", "rows"), [({"fsdp": 8}, 8), ({"dp": 2, "fsdp": 4}, 8), ({"fsdp": 8}, 32), ({}, 4)])
def test_more_devices_do_not_shorten_the_products_of_each(axes, rows):
    """Eight rows on eight devices are one on each, whose head is read once for 256 tokens, not once for 32."""
    model = spec("llama-3.1-8b")
    layout, _ = layout_for(abstract_mesh(MeshConfig(**axes)), model)
    chunk, _ = loss_chunk_of(load_recipe(RECIPE), model, rows, 4096, layout)
    devices = layout.size("dp", "fsdp")
    assert chunk * rows // devices == 256


def test_a_size_that_is_asked_for_is_that_of_all_rows():
    recipe = load_recipe(RECIPE, ["compute.loss_chunk=1024"])
    assert loss_chunk_of(recipe, spec("llama-3.1-8b"), 4, 4096, None) == (256, "asked for")
