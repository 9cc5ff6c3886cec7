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


@pytest.mark.parametrize(
    ("learned", "platform", "rows", "length", "tokens"),
    [
        (1.0, "cpu", 1, 256, 256),  # every position is learned: one chunk
        (0.1, "cpu", 1, 256, 32),  # 25 positions: one chunk of 32, not of 256
        (0.1, "cpu", 16, 256, 128),  # 410 positions: four chunks, the last half empty
        (0.1, "gpu", 1, 256, 256),  # a card reads the head in the time of 256 positions
        (0.1, "gpu", 4, 4096, 256),
    ],
)
def test_where_few_positions_are_learned_chunks_are_shorter(learned, platform, rows, length, tokens):
    chunk, reason = loss_chunk_of(
        load_recipe(RECIPE), spec("llama-3.1-8b"), rows, length, None, learned=learned, platform=platform
    )
    assert chunk * rows == tokens
    assert ("10% of the positions are learned" in str(reason)) == (tokens < 256)
