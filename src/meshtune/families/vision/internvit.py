"""InternViT and its projector: InternVL 2.5, 3 and 3.5 (https://arxiv.org/abs/2504.10479)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from meshtune.families.config_fields import ConfigFields, read_activation
from meshtune.families.tensors import Shape, Stored, TensorMap, View, one_to_one
from meshtune.model.attention import AttentionSpec
from meshtune.model.layer import LayerSpec
from meshtune.model.mlp import MlpSpec
from meshtune.model.norm import NormSpec
from meshtune.model.spec import VISION, ModelSpec, stacks_of
from meshtune.model.vision import PatchPositions, ProjectorSpec, VisionSpec

NORMS = {"layer_norm": "layer", "rms_norm": "rms"}
TOWER, PROJECTOR = "model.vision_tower", "model.multi_modal_projector"
MODULES: dict[str, str | Stored] = {
    "attn_norm": "layernorm_before",
    "mlp_norm": "layernorm_after",
    "attn_scale": Stored("lambda_1", "lambda_1", View.identity),
    "mlp_scale": Stored("lambda_2", "lambda_2", View.identity),
    "attn/q": "attention.q_proj",
    "attn/k": "attention.k_proj",
    "attn/v": "attention.v_proj",
    "attn/o": "attention.projection_layer",
    "attn/q_norm": "attention.q_norm",
    "attn/k_norm": "attention.k_norm",
    "mlp/up": "mlp.fc1",
    "mlp/down": "mlp.fc2",
}


def pair(fields: ConfigFields, field: str) -> tuple[int, int]:
    """(height, width) of a field that holds both or one number for both."""
    value = fields.get(field)
    sides = [value, value] if isinstance(value, int) else value
    if not isinstance(sides, list | tuple) or len(sides) != 2 or not all(type(n) is int and n > 0 for n in sides):
        raise fields.error(field, f"{field} is {value!r}, not a size in pixels or a pair of them")
    return sides[0], sides[1]


def vision_spec(config: Mapping[str, Any], where: str) -> VisionSpec:
    """InternVLConfig -> VisionSpec."""
    outer = ConfigFields(dict(config), where)
    fields = ConfigFields(dict(config["vision_config"]), f"{where}, vision_config")
    outer.only("vision_feature_layer", -1)
    outer.only("vision_feature_select_strategy", "default")
    ratio = outer.number("downsample_ratio", 0.5)
    merge = int(1 / ratio)
    if merge * ratio != 1:
        raise outer.error("downsample_ratio", f"downsample_ratio is {ratio}, and must be one over a whole number")
    width, heads = fields.integer("hidden_size"), fields.integer("num_attention_heads")
    if width % heads:
        raise fields.error("hidden_size", f"hidden_size {width} does not divide by {heads} heads")
    eps, (height, breadth), sides = fields.number("layer_norm_eps", 1e-6), pair(fields, "image_size"), None
    sides = pair(fields, "patch_size")
    fields.only("use_absolute_position_embeddings", True)
    fields.only("use_mask_token", False)
    rows, columns = height // sides[0], breadth // sides[1]
    if sides[0] != sides[1] or rows != columns or rows % merge:
        raise fields.error(
            "image_size",
            f"a tile of {height} x {breadth} pixels in patches of {sides[0]} x {sides[1]} is not a square that divides "
            f"into features of {merge} x {merge} patches",
        )
    norm = fields.get("norm_type", "layer_norm")
    if norm not in NORMS:
        raise fields.error("norm_type", f"norm_type {norm!r} is not implemented", f"known: {', '.join(NORMS)}")
    attention = AttentionSpec(
        heads,
        heads,
        width // heads,
        qkv_bias=bool(fields.get("attention_bias", False)),
        out_bias=True,
        qk_norm=NormSpec(1e-6) if fields.get("use_qk_norm", False) else None,
        qk_norm_over="vector",
        causal=False,
    )
    mlp = MlpSpec(fields.integer("intermediate_size"), read_activation(fields, default="gelu"), bias=True, gated=False)
    layer = LayerSpec(attention, mlp, NormSpec(eps, NORMS[norm]), layer_scale=True)
    pooled, layers = fields.get("use_mean_pooling", True), fields.integer("num_hidden_layers")
    text = config["text_config"]
    spec = VisionSpec(
        "internvit",
        width,
        stacks_of([layer] * layers),
        sides[0],
        ProjectorSpec(
            merge,
            norm=NormSpec(1e-5, "layer"),
            hidden=int(text["hidden_size"]),
            activation=read_activation(outer, "projector_hidden_act", "gelu"),
        ),
        channels=fields.integer("num_channels", 3),
        tile=rows * columns,
        class_token=True,
        positions=PatchPositions("learned", rows, columns),
        norm=None if pooled else NormSpec(eps, "layer"),
    )
    fields.harmless("layer_scale_init_value", "projection_dropout", "hidden_dropout_prob", "attention_dropout")
    fields.finish("InternVLVisionModel")
    return spec


def tensors(spec: ModelSpec) -> list[TensorMap]:
    """The table of InternVLModel's vision_tower and multi_modal_projector."""
    assert spec.vision is not None
    return one_to_one(spec, MODULES, outside(spec.vision), f"{TOWER}.encoder.layer", VISION)


def outside(vision: VisionSpec) -> dict[str, str | Stored]:
    """How what is outside of the layers is stored."""
    embeddings = f"{TOWER}.embeddings"
    names = {"vision/class": "cls_token", "vision/positions": "position_embeddings"}
    vectors = {node: f"{embeddings}.{name}" for node, name in names.items()}
    return {
        "vision/patches": f"{embeddings}.patch_embeddings.projection",
        "vision/patches/weight": convolution(f"{embeddings}.patch_embeddings.projection", vision),
        "vision/class": Stored(vectors["vision/class"], vectors["vision/class"], lambda s: leading(s, 2)),
        "vision/positions": Stored(vectors["vision/positions"], vectors["vision/positions"], lambda s: leading(s, 1)),
        "vision/norm": f"{TOWER}.layernorm",
        "projector/norm": f"{PROJECTOR}.layer_norm",
        "projector/in": f"{PROJECTOR}.linear_1",
        "projector/out": f"{PROJECTOR}.linear_2",
    }


def leading(shape: Shape, count: int) -> View:
    """The view of a tensor with `count` dimensions of one element before those of the array."""
    return View.identity((*(1,) * count, *shape)).merge(*shape)


def convolution(module: str, vision: VisionSpec) -> Stored:
    """The weight of a convolution over patches, [D, channels, (frames,) side, side], as one of a linear layer."""
    frames = () if vision.frames == 1 else (vision.frames,)
    inside = (vision.channels, *frames, vision.side, vision.side)
    return Stored(f"{module}.weight", module, lambda shape: View.identity((shape[0], *inside)).merge(*shape))
