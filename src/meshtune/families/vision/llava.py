"""The tower and the projector of LLaVA 1.5 (https://arxiv.org/abs/2310.03744) and LLaVA-NeXT: CLIP's encoder without
its last layer, and two linear layers; NeXT ends every row of a picture of several tiles with a trained vector."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from meshtune.families.config_fields import ConfigFields, read_activation
from meshtune.families.tensors import Stored, TensorMap, one_to_one
from meshtune.families.vision.encoder import MODULES, convolution, encoder_layer, leading, patches_of
from meshtune.model.spec import VISION, ModelSpec, stacks_of
from meshtune.model.vision import PatchPositions, ProjectorSpec, VisionSpec

TOWER, PROJECTOR = "model.vision_tower", "model.multi_modal_projector"
CLIP = {  # the defaults of CLIPVisionConfig, which published configs leave out
    "hidden_size": 768,
    "intermediate_size": 3072,
    "num_hidden_layers": 12,
    "num_attention_heads": 12,
    "image_size": 224,
    "patch_size": 32,
}


def vision_spec(config: Mapping[str, Any], where: str, text: ModelSpec) -> VisionSpec:
    """LlavaConfig or LlavaNextConfig -> VisionSpec."""
    model_fields = ConfigFields(dict(config), where)
    tower = dict(config["vision_config"])
    if tower.get("model_type", "clip_vision_model") != "clip_vision_model":
        raise model_fields.error("vision_config", f"a tower of type {tower['model_type']!r} is not implemented")
    fields = ConfigFields(CLIP | tower, f"{where}, vision_config")
    model_fields.only("vision_feature_select_strategy", "default")
    chosen, count = model_fields.get("vision_feature_layer", -2), fields.integer("num_hidden_layers")
    if type(chosen) is not int or not 0 < (layers := chosen if chosen >= 0 else count + 1 + chosen) <= count:
        raise model_fields.error("vision_feature_layer", f"vision_feature_layer {chosen!r} is no layer of the {count}")
    layer, (side, tile) = encoder_layer(fields, "quick_gelu", 1e-5), patches_of(fields)
    spec = VisionSpec(
        "clip",
        fields.integer("hidden_size"),
        stacks_of([layer] * layers),
        side,
        ProjectorSpec(
            hidden=text.embed,
            activation=read_activation(model_fields, "projector_hidden_act", "gelu"),
            bias=bool(model_fields.get("multimodal_projector_bias", True)),
        ),
        channels=fields.integer("num_channels", 3),
        patch_bias=False,
        tile=tile**2,
        class_token=True,
        positions=PatchPositions("learned", tile, tile),
        first_norm=dataclasses.replace(layer.norm),
        newline=config["model_type"] == "llava_next",
        partial=layers < count,
    )
    fields.harmless("initializer_factor", "initializer_range", "projection_dim", "vocab_size")
    fields.finish("CLIPVisionModel")
    return spec


def tensors(spec: ModelSpec) -> list[TensorMap]:
    """The table of the model's vision_tower, as far as it is computed, and multi_modal_projector."""
    assert spec.vision is not None
    embeddings, newline = f"{TOWER}.embeddings", "model.image_newline"
    outside: dict[str, str | Stored] = {
        "vision/patches": f"{embeddings}.patch_embedding",
        "vision/patches/weight": convolution(f"{embeddings}.patch_embedding", spec.vision),
        "vision/class": leading(f"{embeddings}.class_embedding"),
        "vision/positions": f"{embeddings}.position_embedding",
        "vision/first_norm": f"{TOWER}.pre_layrnorm",
        "projector/in": f"{PROJECTOR}.linear_1",
        "projector/out": f"{PROJECTOR}.linear_2",
        "projector/newline": leading(newline),
    }
    return one_to_one(spec, MODULES, outside, f"{TOWER}.encoder.layers", VISION)
