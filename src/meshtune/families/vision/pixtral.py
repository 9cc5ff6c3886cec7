"""Pixtral's tower (https://arxiv.org/abs/2410.07073) in Mistral Small 3, Ministral 3 and Devstral: pictures of any
size, whose patches are rotated by row and column, and a projector that merges neighbours."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from meshtune.families.config_fields import ConfigFields, read_activation
from meshtune.families.tensors import Stored, TensorMap, one_to_one
from meshtune.families.vision.encoder import convolution, heads_of, rope_of_places, side_of
from meshtune.model.attention import AttentionSpec
from meshtune.model.layer import LayerSpec
from meshtune.model.mlp import MlpSpec
from meshtune.model.norm import NormSpec
from meshtune.model.spec import VISION, ModelSpec, stacks_of
from meshtune.model.vision import ProjectorSpec, VisionSpec

DEFAULTS = {  # of PixtralVisionConfig, which published configs leave out
    "hidden_size": 1024,
    "intermediate_size": 4096,
    "num_hidden_layers": 24,
    "num_attention_heads": 16,
    "patch_size": 16,
}
TOWER, PROJECTOR = "model.vision_tower", "model.multi_modal_projector"
MODULES: dict[str, str | Stored] = {
    "attn_norm": "attention_norm",
    "mlp_norm": "ffn_norm",
    **{f"attn/{part}": f"attention.{part}_proj" for part in "qkvo"},
    **{f"mlp/{part}": f"feed_forward.{part}_proj" for part in ("gate", "up", "down")},
}


def vision_spec(config: Mapping[str, Any], where: str, text: ModelSpec) -> VisionSpec:
    """Mistral3Config -> VisionSpec."""
    model_fields = ConfigFields(dict(config), where)
    fields = ConfigFields(DEFAULTS | dict(config["vision_config"]), f"{where}, vision_config")
    fields.only("model_type", "pixtral")
    model_fields.only("vision_feature_layer", -1)
    width, side, norm = fields.integer("hidden_size"), side_of(fields, "patch_size"), NormSpec(1e-5)
    heads, head_dim = heads_of(fields, "num_attention_heads", width)
    fields.only("head_dim", head_dim)
    rope = rope_of_places(fields, head_dim, "num_attention_heads", "strided")
    attention = AttentionSpec(heads, heads, head_dim, rope, causal=False)
    layer = LayerSpec(
        attention, MlpSpec(fields.integer("intermediate_size"), read_activation(fields, default="gelu")), norm
    )
    spec = VisionSpec(
        "pixtral",
        width,
        stacks_of([layer] * fields.integer("num_hidden_layers")),
        side,
        ProjectorSpec(
            model_fields.integer("spatial_merge_size", 2),
            "unfold",
            norm=text.norm,
            norm_first=True,
            narrow=True,
            hidden=text.embed,
            activation=read_activation(model_fields, "projector_hidden_act", "gelu"),
            bias=bool(model_fields.get("multimodal_projector_bias", False)),
        ),
        channels=fields.integer("num_channels", 3),
        patch_bias=False,
        rope=rope,
        first_norm=norm,
    )
    fields.harmless("image_size", "initializer_range", "attention_dropout", "vocab_size")
    fields.finish("PixtralVisionModel")
    return spec


def tensors(spec: ModelSpec) -> list[TensorMap]:
    """The table of Mistral3Model's vision_tower and multi_modal_projector."""
    assert spec.vision is not None
    outside: dict[str, str | Stored] = {
        "vision/patches": f"{TOWER}.patch_conv",
        "vision/patches/weight": convolution(f"{TOWER}.patch_conv", spec.vision),
        "vision/first_norm": f"{TOWER}.ln_pre",
        "projector/norm": f"{PROJECTOR}.norm",
        "projector/narrow": f"{PROJECTOR}.patch_merger.merging_layer",
        "projector/in": f"{PROJECTOR}.linear_1",
        "projector/out": f"{PROJECTOR}.linear_2",
    }
    return one_to_one(spec, MODULES, outside, f"{TOWER}.transformer.layers", VISION)
