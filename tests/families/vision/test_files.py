"""Configs and files of models that see, as transformers writes them and as they were published, and what is refused."""

from __future__ import annotations

import json
import pathlib
import re
import shutil
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from families.case import directory
from families.vision.cases import (
    CASES,
    GEMMA3,
    GEMMA4_UNIFIED,
    INTERNVL,
    LLAVA,
    MISTRAL3,
    PALIGEMMA,
    PALIGEMMA2,
    QWEN2_VL,
    QWEN3_VL_MOE,
)
from families.vision.sights import VisionCase, load
from meshtune.adapters.config import LoraConfig
from meshtune.adapters.method import abstract
from meshtune.arrays.tree import flatten
from meshtune.data.pictures.families import FAMILIES
from meshtune.errors import UserError
from meshtune.families import module_names
from meshtune.families.composite import tower_names
from meshtune.families.vision import TOWERS
from meshtune.json_text import read_json
from meshtune.weights.export import export_model
from meshtune.weights.load import load_params, load_spec

WEIGHTS = "model.safetensors"


def test_every_tower_has_a_reader_of_its_pictures():
    assert TOWERS.keys() == FAMILIES.keys()


def copy_model(case: VisionCase, tmp_path: pathlib.Path) -> pathlib.Path:
    return pathlib.Path(shutil.copytree(directory(case.case), tmp_path / "model"))


def change_config(model: pathlib.Path, change: Callable[[dict[str, Any]], None]) -> None:
    config = read_json(model / "config.json")
    change(config)
    (model / "config.json").write_text(json.dumps(config))


def since(name: str) -> str:
    """The name of a module in memory, for one in files of before transformers 4.52."""
    if name.startswith("language_model."):
        return name.replace("language_model.model.", "model.language_model.").replace(
            "language_model.lm_head", "lm_head"
        )
    return f"model.{name}" if name.startswith(("vision_tower.", "multi_modal_projector.")) else name


def with_vision_model(name: str) -> str:
    return name.replace("vision_tower.", "vision_tower.vision_model.")


def plain(name: str) -> str:
    """The name in published files of Qwen2-VL."""
    return name.replace("model.language_model.", "model.").replace("model.visual.", "visual.")


def in_memory(name: str) -> str:
    """The name in memory, for one in published files of Gemma 4 12B."""
    name = name.replace("embed_vision.embedding_projection", "embed_vision.multimodal_embedder.embedding_projection")
    return name.replace("vision_embedder.", "embed_vision.")


@pytest.mark.parametrize(
    ("case", "renamed"),
    [
        (INTERNVL, since),
        (GEMMA3, since),
        (GEMMA3, with_vision_model),
        (PALIGEMMA2, since),
        (PALIGEMMA2, with_vision_model),
        (GEMMA4_UNIFIED, in_memory),
        (LLAVA, with_vision_model),
        (QWEN2_VL, plain),
        (MISTRAL3, since),
    ],
    ids=lambda value: value.name if isinstance(value, VisionCase) else value.__name__,
)
def test_every_layout_of_names_is_read_and_written_as_it_came(
    case: VisionCase, renamed: Callable[[str], str], tmp_path: pathlib.Path
):
    """Modules are named as in memory, whatever the files say."""
    spec, params = load(case)
    model = copy_model(case, tmp_path)
    tensors = {renamed(name): array for name, array in load_file(model / WEIGHTS).items()}
    save_file(tensors, model / WEIGHTS)
    other, _ = load_spec(model, "float32", vision=True)
    assert module_names(other) == module_names(spec)
    read = load_params(model, other)
    assert all(jax.tree.map(np.array_equal, flatten(read), flatten(params)).values())
    written = load_file(export_model(read, other, model, tmp_path / "out").path / WEIGHTS)
    assert written.keys() == tensors.keys()
    assert all(np.array_equal(written[name], array) for name, array in tensors.items())


def test_published_configs_of_qwen2_vl_have_the_fields_of_the_text_model_outside(tmp_path: pathlib.Path):
    model = copy_model(QWEN2_VL, tmp_path)

    def flatten_text(config: dict[str, Any]) -> None:
        text = config.pop("text_config")
        rope = text.pop("rope_parameters")
        sections = {"type": "mrope", "mrope_section": rope["mrope_section"]}
        config |= {name: value for name, value in text.items() if name != "model_type"}
        config |= {"rope_theta": rope["rope_theta"], "rope_scaling": sections}

    change_config(model, flatten_text)
    assert load_spec(model, "float32", vision=True)[0] == load_spec(directory(QWEN2_VL.case), "float32", vision=True)[0]


def test_published_configs_of_paligemma_leave_out_what_is_gemmas_default(tmp_path: pathlib.Path):
    """And have fields of the processor, and of transformers before 4.42."""
    model = copy_model(PALIGEMMA, tmp_path)

    def publish(config: dict[str, Any]) -> None:
        text, vision = config["text_config"], config["vision_config"]
        for name in ("max_position_embeddings", "use_bidirectional_attention", "attention_bias", "hidden_act"):
            text.pop(name, None)
        text["num_image_tokens"] = vision["num_image_tokens"] = 16
        vision |= {"projection_dim": 32, "projector_hidden_act": "gelu_fast"}
        config |= {"_vocab_size": 97, "vocab_size": 96, "hidden_size": 2048, "ignore_index": -100}

    change_config(model, publish)
    published, _ = load_spec(model, "float32", vision=True)
    spec, params = load(PALIGEMMA)
    assert (published.vision, published.max_length) == (spec.vision, 8192)
    read = load_params(model, published)
    assert all(jax.tree.map(np.array_equal, flatten(read), flatten(params)).values())


def test_published_files_of_qwen3_vl_have_their_experts_transposed(tmp_path: pathlib.Path):
    spec, params = load(QWEN3_VL_MOE)
    model = copy_model(QWEN3_VL_MOE, tmp_path)
    tensors = load_file(model / WEIGHTS)
    fused = [name for name in tensors if name.endswith(("experts.gate_up_proj", "experts.down_proj"))]
    assert fused
    tensors |= {name: np.ascontiguousarray(tensors[name].swapaxes(1, 2)) for name in fused}
    save_file(tensors, model / WEIGHTS)
    other, _ = load_spec(model, "float32", vision=True)
    assert other != spec
    read = load_params(model, other)
    assert all(jax.tree.map(np.array_equal, flatten(read), flatten(params)).values())
    written = load_file(export_model(read, other, model, tmp_path / "out").path / WEIGHTS)
    assert all(np.array_equal(written[name], array) for name, array in tensors.items())


def test_without_pictures_the_tower_is_no_part_of_the_model():
    spec, _ = load_spec(directory(INTERNVL.case), "float32")
    assert spec.vision is None
    assert not {"vision", "projector"} & load_params(directory(INTERNVL.case), spec).keys()


def set_field(part: str | None, field: str, value: object) -> Callable[[dict[str, Any]], None]:
    def change(config: dict[str, Any]) -> None:
        (config if part is None else config[part])[field] = value

    return change


@pytest.mark.parametrize(
    ("case", "change", "message"),
    [
        (INTERNVL, set_field("vision_config", "window_attention", 3), "a field that Meshtune does not know"),
        (INTERNVL, set_field("vision_config", "use_mask_token", True), "use_mask_token = True is not implemented"),
        (INTERNVL, set_field("vision_config", "image_size", [28, 21]), "sides that differ"),
        (INTERNVL, set_field("vision_config", "hidden_size", 28), "has shape"),
        (INTERNVL, set_field("vision_config", "num_hidden_layers", 3), "is missing"),
        (INTERNVL, set_field(None, "downsample_ratio", 0.3), "one over a whole number"),
        (INTERNVL, set_field(None, "vision_config", None), "vision_config of this internvl is None"),
        (GEMMA3, set_field(None, "mm_tokens_per_image", 9), "do not average to 9"),
        (LLAVA, set_field(None, "vision_feature_layer", -9), "is no layer of the 3"),
        (QWEN2_VL, set_field("vision_config", "hidden_size", 40), "features are 40 wide"),
        (PALIGEMMA2, set_field(None, "projection_dim", 48), "features are 48 wide"),
        (GEMMA4_UNIFIED, set_field("vision_config", "output_proj_dims", 48), "other fields make it 24"),
    ],
)
def test_a_tower_that_is_not_known_or_does_not_fit_is_refused(
    case: VisionCase, change: Callable[[dict[str, Any]], None], message: str, tmp_path: pathlib.Path
):
    model = copy_model(case, tmp_path)
    change_config(model, change)
    with pytest.raises(UserError, match=message):
        load_params(model, load_spec(model, "float32", vision=True)[0])


def test_a_text_model_reads_no_pictures(tmp_path: pathlib.Path):
    model = copy_model(INTERNVL, tmp_path)
    (model / "config.json").write_text(json.dumps(read_json(model / "config.json")["text_config"]))
    with pytest.raises(UserError, match="a model of type 'qwen2' reads no pictures"):
        load_spec(model, "float32", vision=True)


@pytest.mark.parametrize("target", ["patch_embeddings.projection", "cls_token", "model.vision_tower.embeddings.*"])
def test_what_is_no_linear_layer_of_a_tower_has_no_adapter(target: str):
    spec, _ = load(INTERNVL)
    with pytest.raises(UserError, match="is not a linear layer"):
        abstract(LoraConfig(targets=(target,)), spec)


def test_a_name_means_modules_of_the_language_model_where_it_has_them():
    spec, _ = load(INTERNVL)
    roots = [
        {path.partition("/")[0] for path in flatten(abstract(LoraConfig(targets=(name,)), spec).trainable)}
        for name in ("q_proj", "vision_tower.*.q_proj", "projection_layer", "multi_modal_projector")
    ]
    assert roots == [{"layers"}, {"vision"}, {"vision"}, {"projector"}]


@pytest.mark.parametrize("case", [pytest.param(case, id=case.name) for case in CASES if not case.case.variant])
def test_files_with_more_of_a_tower_than_the_config_says_are_refused(case: VisionCase, tmp_path: pathlib.Path):
    """One more layer, but after the one whose features are read; and a bias of a module that has none in the config."""
    spec, _ = load(case)
    assert spec.vision is not None
    read, model = tower_names(spec), copy_model(case, tmp_path)
    tensors = load_file(model / WEIGHTS)
    numbered = re.compile(r"(layers?|blocks)\.(\d+)\.")
    last = max((int(found[2]) for name in read if (found := numbered.search(name))), default=0)
    after = [numbered.sub(rf"\1.{last + 1}.", name) for name in sorted(read) if numbered.search(name)]
    modules = [name.removesuffix(".weight") for name in sorted(read) if name.endswith(".weight")]
    more = [] if spec.vision.partial else after[:1]
    more += [f"{module}.bias" for module in modules if f"{module}.bias" not in read][:1]
    assert more
    for name in more:
        save_file(tensors | {name: np.ones(3, np.float32)}, model / WEIGHTS)
        with pytest.raises(UserError, match="belongs to nothing in the config") as caught:
            load_params(model, spec)
        assert name in caught.value.what
        assert caught.value.fix
