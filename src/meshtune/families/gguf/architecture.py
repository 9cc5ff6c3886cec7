"""llama.cpp's architectures: the name, the tensors and the metadata that it gives to a family's models."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, Literal, TypeVar

from meshtune.model.attention import AttentionSpec
from meshtune.model.experts import ExpertsSpec
from meshtune.model.layer import LayerSpec
from meshtune.model.layer_extras import ENTER, LEAVE
from meshtune.model.parallel import ParallelSpec
from meshtune.model.rope import RopeSpec
from meshtune.model.spec import ModelSpec

T = TypeVar("T")
Value = bool | int | float | str | list[Any]
Metadata = Mapping[str, Value]


def integer(metadata: Metadata, key: str) -> int:
    """A number of the file's metadata. Raises KeyError where it is missing, ValueError for anything else."""
    value = metadata[key]
    if not isinstance(value, int):
        raise ValueError(f"{key} is {value!r}, not a whole number")
    return value


# Node of a layer -> the stem of its tensors.
LAYER = {
    "attn_norm": "attn_norm",
    "attn/q": "attn_q",
    "attn/k": "attn_k",
    "attn/v": "attn_v",
    "attn/qkv": "attn_qkv",
    "attn/o": "attn_output",
    "attn/q_norm": "attn_q_norm",
    "attn/k_norm": "attn_k_norm",
    "attn/sinks": "attn_sinks",
    "attn_post_norm": "post_attention_norm",
    "mlp_norm": "ffn_norm",
    "mlp/gate": "ffn_gate",
    "mlp/up": "ffn_up",
    "mlp/gate_up": "ffn_up",
    "mlp/down": "ffn_down",
    "mlp_post_norm": "post_ffw_norm",
    "mlp/router": "ffn_gate_inp",
    "mlp/experts/gate": "ffn_gate_exps",
    "mlp/experts/up": "ffn_up_exps",
    "mlp/experts/down": "ffn_down_exps",
    "mlp/shared/gate": "ffn_gate_shexp",
    "mlp/shared/up": "ffn_up_shexp",
    "mlp/shared/gate_up": "ffn_up_shexp",
    "mlp/shared/down": "ffn_down_shexp",
    "mlp/shared_gate": "ffn_gate_inp_shexp",
    "mlp/latent_in": "ffn_latent_down",
    "mlp/latent_out": "ffn_latent_up",
    "attn/gate": "attn_gate",
    "attn/q_latent": "attn_q_a",
    "attn/q_heads": "attn_q_b",
    "attn/kv_latent": "attn_kv_a_mqa",
    "attn/kv_norm": "attn_kv_a_norm",
    "attn/kv_heads": "attn_kv_b",
    "delta_norm": "attn_norm",
    "delta/qkv": "attn_qkv",
    "delta/qkvz": "attn_qkv",
    "delta/z": "attn_gate",
    "delta/b": "ssm_beta",
    "delta/a": "ssm_alpha",
    "delta/ba": "ssm_ba",
    "delta/filter": "ssm_conv1d",
    "delta/norm": "ssm_norm",
    "delta/out": "ssm_out",
    "mamba_norm": "attn_norm",
    "mamba/in": "ssm_in",
    "mamba/filter": "ssm_conv1d",
    "mamba/norm": "ssm_norm",
    "mamba/out": "ssm_out",
    "conv_norm": "attn_norm",
    "conv/in": "shortconv.in_proj",
    "conv/filter": "shortconv.conv",
    "conv/out": "shortconv.out_proj",
    "parallel_norm": "attn_norm",
    "mlp/norm": "pre_ffw_norm_2",
    "mlp/post_norm": "post_ffw_norm_2",
    "mlp/shared_norm": "ffn_norm",
    "mlp/shared_post_norm": "post_ffw_norm_1",
    "per_layer/gate": "inp_gate",
    "per_layer/out": "proj",
    "per_layer/norm": "post_norm",
    "scalar": "layer_output_scale",
    "streams/router": "altup_router",
    "streams/router_norm": "altup_router_norm",
    "streams/predict": "altup_predict_coef",
    "streams/correct": "altup_correct_coef",
    "streams/scale": "altup_correct_scale",
    "laurel/left": "laurel_l",
    "laurel/right": "laurel_r",
    "laurel/norm": "laurel_post_norm",
}
OUTSIDE = {
    "embed": "token_embd",
    "positions": "position_embd",
    "norm": "output_norm",
    "head": "output",
    "per_layer/table": "per_layer_token_embd",
    "per_layer/projection": "per_layer_model_proj",
    "per_layer/norm": "per_layer_proj_norm",
}
# Node outside the layers that has one array for each number from 1 on -> the tensor that they are stacked in.
STACKED = {ENTER: "altup_proj", LEAVE: "altup_unembd_proj"}
RECURRENT = {"A_log": "ssm_a", "dt_bias": "ssm_dt.bias", "D": "ssm_d"}
# Leaf of a layer -> its tensor, where that is not the node's stem and the name of the leaf.
LEAVES = {
    "mlp/router/correction": "exp_probs_b.bias",
    "mlp/router/scales/scale": "ffn_gate_inp.scale",
    "mlp/router/scales/per_expert_scale": "ffn_down_exps.scale",
    **{f"{mixer}/{leaf}": name for mixer in ("delta", "mamba") for leaf, name in RECURRENT.items()},
}
# Tensors that llama.cpp multiplies without adapters: it loads those of them, and does not apply them.
UNADAPTED = frozenset({"per_layer_model_proj", *STACKED.values(), LAYER["mlp/latent_in"], LAYER["mlp/latent_out"]})
WINDOW = "attention.sliding_window"
QKV = frozenset({"attn/q", "attn/k", "attn/v"})
ALL_BIASES = QKV | {"attn/o", "mlp/gate", "mlp/up", "mlp/down"}


def nothing(_: Any) -> dict[str, Any]:
    """No further fields."""
    return {}


def accepted(_: ModelSpec) -> str | None:
    """Nothing is refused."""
    return None


def always(_: Metadata) -> bool:
    """Every file is meant."""
    return True


def none_unused(_: ModelSpec) -> dict[str, tuple[int, ...]]:
    """Every tensor is used."""
    return {}


def no_factors(_spec: ModelSpec, _path: str, _rows: int) -> tuple[tuple[int, float], ...]:
    """Nothing is multiplied."""
    return ()


@dataclasses.dataclass(frozen=True)
class Architecture:
    """How llama.cpp names and computes the models of one model_type.

    `permuted` says that it rotates pairs of neighbours where the files of transformers have halves: rows of queries and
    keys are in another order. `windows` says that it computes sliding windows as the spec does; elsewhere the context
    that is written is the shortest window, within which a window changes nothing. `biases` are the nodes of a layer
    that may have one, beside norms, and `names` those, or single leaves ("mlp_norm/weight"), whose tensors are not
    called as in LAYER. `normalized` says whether the weights of a token's experts are divided by their sum.
    `refusal(spec)` names what a model has that llama.cpp does not compute, `write(spec)` gives metadata beside the
    usual, without the architecture's name before the keys, and `read(metadata)` the fields of the config for these.
    `config` are fields that the config has in any case, `without` those that it has in no case, and `expects` names
    fields of its experts. With `routed` its files say how tokens are routed, and how many of the first layers have no
    experts. `several_ropes` and `own_scale` say that layers may have different rotary embeddings, and that scores are
    not divided by the root of a head's width alone. `activation` is that of its networks, `norm_field` the config's
    field of a layer norm's epsilon, `named(spec)` are further `names`, and of several model_types of one architecture
    that is read whose `chosen(metadata)` holds. A model with experts is called `mixture_name`, where there is one.
    `own_routing` says that `write` gives the router's keys, `marked_layers` that a layer without heads of keys has no
    attention, `uneven` that `read` knows layers of different sizes, `parted_gate_up` and `parted_qkv` that packed
    projections are written as two or three, `tiled_values` that the value heads of delta nets are in tiled order,
    `latent` that scores are scaled as DeepSeek's are under YaRN, and `rounded_yarn` that its bounds of YaRN are whole
    numbers where the model's are not. `head` says that it knows only heads that are a tensor of their own, so that a
    tied model's embedding is written as its head too, or only heads that are the embedding. `listed` are the leaves of
    layers that are no tensors but keys of the metadata, whose names have no architecture before them: each lists the
    numbers of all layers. `rope(block)` are the rope_parameters that files have as `block`, `factors(spec, path, rows)`
    those of a GgufPart. `unused(spec)` are tensors, with their shapes, without which llama.cpp does not load a file and
    that it computes nothing with: zeros are written, and nothing is read.
    """

    name: str
    class_name: str
    permuted: bool = False
    windows: bool = False
    biases: frozenset[str] = frozenset()
    names: Mapping[str, str] = dataclasses.field(default_factory=dict)
    normalized: bool | None = None
    refusal: Callable[[ModelSpec], str | None] = accepted
    write: Callable[[ModelSpec], dict[str, Any]] = nothing
    read: Callable[[Metadata], dict[str, Any]] = nothing
    config: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    expects: tuple[str, ...] = ()
    without: tuple[str, ...] = ()
    routed: bool = False
    several_ropes: bool = False
    own_scale: bool = False
    activation: str = "silu"
    norm_field: str = "layer_norm_eps"
    named: Callable[[ModelSpec], Mapping[str, str]] = nothing
    chosen: Callable[[Metadata], bool] = always
    mixture_name: str = ""
    own_routing: bool = False
    marked_layers: bool = False
    uneven: bool = False
    parted_gate_up: bool = False
    parted_qkv: bool = False
    tiled_values: bool = False
    latent: bool = False
    rounded_yarn: bool = False
    head: Literal["either", "own", "embedding"] = "either"
    listed: Mapping[str, str] = dataclasses.field(default_factory=dict)
    rope: Callable[[dict[str, Any]], dict[str, Any]] = dict
    factors: Callable[[ModelSpec, str, int], tuple[tuple[int, float], ...]] = no_factors
    unused: Callable[[ModelSpec], Mapping[str, tuple[int, ...]]] = none_unused


def attentions(spec: ModelSpec) -> list[AttentionSpec]:
    """The attention of every kind of layer that has it, alone or beside another mixer."""
    mixers = [kind.mixer for kind in spec.layer_kinds if kind.mixer is not None]
    mixers += [part for mixer in mixers if isinstance(mixer, ParallelSpec) for part in mixer.mixers]
    return [mixer for mixer in mixers if isinstance(mixer, AttentionSpec)]


def attention(spec: ModelSpec) -> AttentionSpec:
    """The attention of the first layer that has it, as wide as the whole past where there is such a layer."""
    mixers = attentions(spec)
    return next((mixer for mixer in mixers if mixer.window is None and mixer.rope is not None), mixers[0])


def rope_of(spec: ModelSpec) -> RopeSpec | None:
    """The rotary embedding of that attention, or of latent attention."""
    if attentions(spec):
        return attention(spec).rope
    return next(iter(spec.ropes), None)


def layer_heads(spec: ModelSpec) -> list[int]:
    """The heads of keys of every layer, zero of layers without attention."""
    return by_layer(spec, lambda layer: layer.mixer.kv_heads if isinstance(layer.mixer, AttentionSpec) else 0)


def by_layer(spec: ModelSpec, value: Callable[[LayerSpec], T]) -> list[T]:
    """Something of every layer, in order."""
    values: dict[int, T] = {}
    for _, _, layer, numbers in spec.positions():
        values |= dict.fromkeys(numbers, value(layer))
    return [values[number] for number in sorted(values)]


def experts(spec: ModelSpec) -> ExpertsSpec | None:
    """The experts of the first layer that has them."""
    return next((block for block in spec.blocks if isinstance(block, ExpertsSpec)), None)


def windows(spec: ModelSpec) -> list[int | None]:
    """The sliding window of every kind of layer with attention."""
    return [mixer.window for mixer in attentions(spec)]


def layer_windows(spec: ModelSpec) -> list[int | None]:
    """The sliding window of every layer."""
    return by_layer(spec, lambda layer: layer.mixer.window if isinstance(layer.mixer, AttentionSpec) else None)
