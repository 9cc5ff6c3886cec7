"""SigLIP 2's tower for pictures of any size (https://arxiv.org/abs/2502.14786), in LFM2-VL with a projector of two
linear layers."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from meshtune.families.config_fields import ConfigFields, read_activation
from meshtune.families.tensors import Stored, TensorMap, one_to_one
from meshtune.families.vision.encoder import MODULES, encoder_layer, patches_by_channel, side_of
from meshtune.model.norm import NormSpec
from meshtune.model.spec import VISION, ModelSpec, stacks_of
from meshtune.model.vision import PatchPositions, ProjectorSpec, VisionSpec

DEFAULTS = {  # of Siglip2VisionConfig, which published configs leave out
    "hidden_size": 768,
    "intermediate_size": 3072,
    "num_hidden_layers": 12,
    "num_attention_heads": 12,
    "patch_size": 16,
    "vision_use_head": True,
}
TOWER, PROJECTOR = "model.vision_tower", "model.multi_modal_projector"


def vision_spec(config: Mapping[str, Any], where: str, text: ModelSpec) -> VisionSpec:
    """Lfm2VlConfig -> VisionSpec."""
    model_fields = ConfigFields(dict(config), where)
    fields = ConfigFields(DEFAULTS | dict(config["vision_config"]), f"{where}, vision_config")
    fields.only("vision_use_head", False)
    entries = fields.integer("num_patches", 256)
    if math.isqrt(entries) ** 2 != entries:
        raise fields.error("num_patches", f"num_patches is {entries}, which is no square")
    layer = encoder_layer(fields, "gelu_pytorch_tanh", 1e-6)
    spec = VisionSpec(
        "siglip2",
        fields.integer("hidden_size"),
        stacks_of([layer] * fields.integer("num_hidden_layers")),
        side_of(fields, "patch_size"),
        ProjectorSpec(
            model_fields.integer("downsample_factor", 2),
            norm=NormSpec(1e-5, "layer") if model_fields.get("projector_use_layernorm", True) else None,
            hidden=model_fields.integer("projector_hidden_size", 2560),
            activation=read_activation(model_fields, "projector_hidden_act", "gelu"),
            bias=bool(model_fields.get("projector_bias", True)),
        ),
        channels=fields.integer("num_channels", 3),
        positions=PatchPositions("linear", math.isqrt(entries), math.isqrt(entries)),
        norm=layer.norm,
    )
    fields.harmless("attention_dropout", "initializer_range", "projection_dim")
    fields.finish("Siglip2VisionModel")
    return spec


def tensors(spec: ModelSpec) -> list[TensorMap]:
    """The table of Lfm2VlModel's vision_tower and multi_modal_projector."""
    assert spec.vision is not None
    patches = f"{TOWER}.embeddings.patch_embedding"
    outside: dict[str, str | Stored] = {
        "vision/patches": patches,
        "vision/patches/weight": patches_by_channel(patches, spec.vision),
        "vision/positions": f"{TOWER}.embeddings.position_embedding",
        "vision/norm": f"{TOWER}.post_layernorm",
        "projector/norm": f"{PROJECTOR}.layer_norm",
        "projector/in": f"{PROJECTOR}.linear_1",
        "projector/out": f"{PROJECTOR}.linear_2",
    }
    return one_to_one(spec, MODULES, outside, f"{TOWER}.encoder.layers", VISION)
