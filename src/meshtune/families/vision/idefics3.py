"""The tower and the connector of Idefics 3 (https://arxiv.org/abs/2408.12637) and SmolVLM
(https://arxiv.org/abs/2504.05299): SigLIP's encoder over tiles, and one linear layer."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from meshtune.families.config_fields import ConfigFields
from meshtune.families.tensors import Stored, TensorMap, one_to_one
from meshtune.families.vision.encoder import MODULES, convolution, encoder_layer, patches_of
from meshtune.model.spec import VISION, ModelSpec, stacks_of
from meshtune.model.vision import PatchPositions, ProjectorSpec, VisionSpec

DEFAULTS = {  # of Idefics3VisionConfig, which published configs leave out
    "hidden_size": 1152,
    "intermediate_size": 3072,
    "num_hidden_layers": 12,
    "num_attention_heads": 16,
    "image_size": 224,
    "patch_size": 32,
}
TOWER, CONNECTOR = "model.vision_model", "model.connector.modality_projection.proj"


def vision_spec(config: Mapping[str, Any], where: str, text: ModelSpec) -> VisionSpec:
    """Idefics3Config or SmolVLMConfig -> VisionSpec."""
    merge = ConfigFields(dict(config), where).integer("scale_factor", 2)
    fields = ConfigFields(DEFAULTS | dict(config["vision_config"]), f"{where}, vision_config")
    side, tile = patches_of(fields, merge)
    layer = encoder_layer(fields, "gelu_pytorch_tanh", 1e-6)
    spec = VisionSpec(
        "idefics3",
        fields.integer("hidden_size"),
        stacks_of([layer] * fields.integer("num_hidden_layers")),
        side,
        ProjectorSpec(merge, bias=False),
        channels=fields.integer("num_channels", 3),
        tile=tile**2,
        positions=PatchPositions("bucketed", tile, tile),
        norm=layer.norm,
    )
    # Of published configs: what SigLIP's own class reads, and sizes of tiles, which the picture processor has too.
    fields.harmless("max_image_size", "size", "tie_word_embeddings", "use_base_siglip", "initializer_range")
    fields.finish("Idefics3VisionTransformer", "SmolVLMVisionTransformer")
    return spec


def tensors(spec: ModelSpec) -> list[TensorMap]:
    """The table of the model's vision_model and connector."""
    assert spec.vision is not None
    patches = f"{TOWER}.embeddings.patch_embedding"
    outside: dict[str, str | Stored] = {
        "vision/patches": patches,
        "vision/patches/weight": convolution(patches, spec.vision),
        "vision/positions": f"{TOWER}.embeddings.position_embedding",
        "vision/norm": f"{TOWER}.post_layernorm",
        "projector/out": CONNECTOR,
    }
    return one_to_one(spec, MODULES, outside, f"{TOWER}.encoder.layers", VISION)
