"""InternViT and its projector: InternVL 2.5, 3 and 3.5 (https://arxiv.org/abs/2504.10479)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from meshtune.families.config_fields import ConfigFields, read_activation
from meshtune.families.tensors import Stored, TensorMap, one_to_one
from meshtune.families.vision.encoder import convolution, heads_of, leading, patches_of
from meshtune.model.attention import AttentionSpec
from meshtune.model.layer import LayerSpec
from meshtune.model.mlp import MlpSpec
from meshtune.model.norm import NormKind, NormSpec
from meshtune.model.spec import VISION, ModelSpec, stacks_of
from meshtune.model.vision import PatchPositions, ProjectorSpec, VisionSpec

DEFAULTS = {  # of InternVLVisionConfig, which published configs leave out
    "hidden_size": 1024,
    "intermediate_size": 4096,
    "num_hidden_layers": 24,
    "num_attention_heads": 16,
    "image_size": 448,
    "patch_size": 14,
}
NORMS: dict[str, NormKind] = {"layer_norm": "layer", "rms_norm": "rms"}
TOWER, PROJECTOR = "model.vision_tower", "model.multi_modal_projector"
MODULES: dict[str, str | Stored] = {
    "attn_norm": "layernorm_before",
    "mlp_norm": "layernorm_after",
    "attn_scale": leading("lambda_1"),
    "mlp_scale": leading("lambda_2"),
    "attn/q": "attention.q_proj",
    "attn/k": "attention.k_proj",
    "attn/v": "attention.v_proj",
    "attn/o": "attention.projection_layer",
    "attn/q_norm": "attention.q_norm",
    "attn/k_norm": "attention.k_norm",
    "mlp/up": "mlp.fc1",
    "mlp/down": "mlp.fc2",
}


def vision_spec(config: Mapping[str, Any], where: str, text: ModelSpec) -> VisionSpec:
    """InternVLConfig -> VisionSpec."""
    model_fields = ConfigFields(dict(config), where)
    fields = ConfigFields(DEFAULTS | dict(config["vision_config"]), f"{where}, vision_config")
    model_fields.only("vision_feature_layer", -1)
    model_fields.only("vision_feature_select_strategy", "default")
    ratio = model_fields.number("downsample_ratio", 0.5)
    merge = int(1 / ratio)
    if merge * ratio != 1:
        raise model_fields.error(
            "downsample_ratio", f"downsample_ratio is {ratio}, and must be one over a whole number"
        )
    width, eps = fields.integer("hidden_size"), fields.number("layer_norm_eps", 1e-6)
    (heads, head_dim), (side, tile) = heads_of(fields, "num_attention_heads", width), patches_of(fields, merge)
    fields.only("use_absolute_position_embeddings", True)
    fields.only("use_mask_token", False)
    norm = fields.get("norm_type", "layer_norm")
    if norm not in NORMS:
        raise fields.error("norm_type", f"norm_type {norm!r} is not implemented", f"known: {', '.join(NORMS)}")
    attention = AttentionSpec(
        heads,
        heads,
        head_dim,
        qkv_bias=bool(fields.get("attention_bias", False)),
        out_bias=True,
        qk_norm=NormSpec(1e-6) if fields.get("use_qk_norm", False) else None,
        qk_norm_over="vector",
        causal=False,
    )
    mlp = MlpSpec(fields.integer("intermediate_size"), read_activation(fields, default="gelu"), bias=True, gated=False)
    layer = LayerSpec(attention, mlp, NormSpec(eps, NORMS[norm]), layer_scale=True)
    spec = VisionSpec(
        "internvit",
        width,
        stacks_of([layer] * fields.integer("num_hidden_layers")),
        side,
        ProjectorSpec(
            merge,
            norm=NormSpec(1e-5, "layer"),
            hidden=text.embed,
            activation=read_activation(model_fields, "projector_hidden_act", "gelu"),
        ),
        channels=fields.integer("num_channels", 3),
        tile=tile**2,
        class_token=True,
        positions=PatchPositions("learned", tile, tile),
        norm=None if fields.get("use_mean_pooling", True) else NormSpec(eps, "layer"),
    )
    fields.harmless("layer_scale_init_value", "projection_dropout", "hidden_dropout_prob", "attention_dropout")
    fields.finish("InternVLVisionModel")
    return spec


def tensors(spec: ModelSpec) -> list[TensorMap]:
    """The table of InternVLModel's vision_tower and multi_modal_projector."""
    assert spec.vision is not None
    embeddings = f"{TOWER}.embeddings"
    outside: dict[str, str | Stored] = {
        "vision/patches": f"{embeddings}.patch_embeddings.projection",
        "vision/patches/weight": convolution(f"{embeddings}.patch_embeddings.projection", spec.vision),
        "vision/class": leading(f"{embeddings}.cls_token", 2),
        "vision/positions": leading(f"{embeddings}.position_embeddings", 1),
        "vision/norm": f"{TOWER}.layernorm",
        "projector/norm": f"{PROJECTOR}.layer_norm",
        "projector/in": f"{PROJECTOR}.linear_1",
        "projector/out": f"{PROJECTOR}.linear_2",
    }
    return one_to_one(spec, MODULES, outside, f"{TOWER}.encoder.layer", VISION)
