"""The tower and the projector of Gemma 3 (https://arxiv.org/abs/2503.19786): SigLIP's encoder over one large tile,
whose patches are averaged; the tokens of a picture see each other both ways in the decoder."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

from meshtune.families.config_fields import ConfigFields
from meshtune.families.tensors import Shape, Stored, TensorMap, View, one_to_one
from meshtune.families.vision.encoder import MODULES, convolution, encoder_layer, patches_of
from meshtune.model.norm import NormSpec
from meshtune.model.spec import VISION, ModelSpec, stacks_of
from meshtune.model.vision import PatchPositions, ProjectorSpec, VisionSpec

TOWER, PROJECTOR = "model.vision_tower", "model.multi_modal_projector"
SIGLIP = {  # the defaults of SiglipVisionConfig, which published configs leave out
    "hidden_size": 768,
    "intermediate_size": 3072,
    "num_hidden_layers": 12,
    "num_attention_heads": 12,
    "image_size": 224,
    "patch_size": 16,
}


def vision_spec(config: Mapping[str, Any], where: str, text: ModelSpec) -> VisionSpec:
    """Gemma3Config -> VisionSpec."""
    model_fields = ConfigFields(dict(config), where)
    fields = ConfigFields(SIGLIP | dict(config["vision_config"]), f"{where}, vision_config")
    side, tile = patches_of(fields)
    tokens = model_fields.integer("mm_tokens_per_image", 256)
    across = math.isqrt(tokens)
    if across**2 != tokens or tile % across:
        raise model_fields.error(
            "mm_tokens_per_image", f"the {tile} x {tile} patches of a picture do not average to {tokens} in a square"
        )
    spec = siglip_spec(fields, (side, tile))
    norm = NormSpec(fields.number("layer_norm_eps", 1e-6), "rms_offset")
    return dataclasses.replace(
        spec, projector=ProjectorSpec(tile // across, "mean", norm=norm, bias=False), mutual="all"
    )


def siglip_spec(fields: ConfigFields, patches: tuple[int, int]) -> VisionSpec:
    """SiglipVisionConfig -> VisionSpec with a projector of one linear layer; `patches` are those of `patches_of`."""
    layer, (side, tile) = encoder_layer(fields, "gelu_pytorch_tanh", 1e-6), patches
    spec = VisionSpec(
        "siglip",
        fields.integer("hidden_size"),
        stacks_of([layer] * fields.integer("num_hidden_layers")),
        side,
        ProjectorSpec(),
        channels=fields.integer("num_channels", 3),
        tile=tile**2,
        positions=PatchPositions("learned", tile, tile),
        norm=layer.norm,
    )
    fields.only("vision_use_head", False)
    fields.harmless("initializer_range")
    fields.finish("SiglipVisionModel")
    return spec


def tensors(spec: ModelSpec) -> list[TensorMap]:
    """The table of Gemma3Model's vision_tower and multi_modal_projector."""
    projection = f"{PROJECTOR}.mm_input_projection_weight"
    return siglip_tensors(
        spec,
        {
            "projector/norm": f"{PROJECTOR}.mm_soft_emb_norm",
            "projector/out": Stored(projection, projection, _transposed_view),
        },
    )


def siglip_tensors(spec: ModelSpec, projector: dict[str, str | Stored]) -> list[TensorMap]:
    """The table of a SiglipVisionModel under vision_tower, and of the projector's modules."""
    assert spec.vision is not None
    patches = f"{TOWER}.embeddings.patch_embedding"
    outside: dict[str, str | Stored] = {
        "vision/patches": patches,
        "vision/patches/weight": convolution(patches, spec.vision),
        "vision/positions": f"{TOWER}.embeddings.position_embedding",
        "vision/norm": f"{TOWER}.post_layernorm",
    }
    return one_to_one(spec, MODULES, outside | projector, f"{TOWER}.encoder.layers", VISION)


def _transposed_view(shape: Shape) -> View:
    """A tensor [in, out] as [out, in]."""
    return View.identity(shape[::-1]).transpose(1, 0)
