"""How llama.cpp describes the models of one model_type, and what a spec says of attention, experts and layers."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, Literal, TypeVar

from meshtune.model.attention import AttentionSpec
from meshtune.model.experts import ExpertsSpec
from meshtune.model.layer import LayerSpec
from meshtune.model.rope import RopeSpec
from meshtune.model.spec import ModelSpec

T = TypeVar("T")
Value = bool | int | float | str | list[Any]
Metadata = Mapping[str, Value]

WINDOW = "attention.sliding_window"
SHARED_WIDTH = "expert_shared_feed_forward_length"
QKV = frozenset({"attn/q", "attn/k", "attn/v"})
ALL_BIASES = QKV | {"attn/o", "mlp/gate", "mlp/up", "mlp/down"}
GATING = {"softmax": 1, "sigmoid": 2}


def no_fields(_: Any) -> dict[str, Any]:
    """No further fields."""
    return {}


def accept_any(_: ModelSpec) -> str | None:
    """Nothing is refused."""
    return None


def always(_: Metadata) -> bool:
    """Every file is meant."""
    return True


@dataclasses.dataclass(frozen=True)
class Architecture:
    """Describes how llama.cpp names and computes the models of one model_type.

    `refusal(spec)` names what a model has that llama.cpp does not compute. `write(spec)` gives metadata that is
    added to the usual, without the architecture's name before the keys; `read(metadata)` gives the fields of the config
    for it, and `without` are fields that the config never has. Of several model_types of one architecture, a file is
    read as the one whose `chosen(metadata)` holds.
    """

    name: str
    class_name: str
    # Rotates pairs of neighbours where transformers has halves: rows of queries and keys are in another order.
    permuted: bool = False
    # Computes sliding windows as the spec does. Elsewhere the context that is written is the shortest window, within
    # which a window changes nothing.
    windows: bool = False
    biases: frozenset[str] = frozenset()  # nodes of a layer that may have one; norms always may
    normalized: bool | None = None  # the weights of a token's experts are divided by their sum
    refusal: Callable[[ModelSpec], str | None] = accept_any
    write: Callable[[ModelSpec], dict[str, Any]] = no_fields
    read: Callable[[Metadata], dict[str, Any]] = no_fields
    without: tuple[str, ...] = ()
    chosen: Callable[[Metadata], bool] = always
    routed: bool = False  # files say how tokens are routed, and how many of the first layers have no experts
    own_routing: bool = False  # `write` gives the router's keys
    several_ropes: bool = False  # layers may have different rotary embeddings
    own_scale: bool = False  # scores may be scaled by another number than the root of a head's width
    activation: str = "silu"
    marked_layers: bool = False  # a layer without heads of keys has no attention
    uneven: bool = False  # `read` knows layers of different sizes
    parted_gate_up: bool = False  # packed projections are written as two tensors
    tiled_values: bool = False  # value heads of delta nets are in tiled order
    latent: bool = False  # scores are scaled as DeepSeek's are under YaRN
    rounded_yarn: bool = False  # its bounds of YaRN are whole numbers where the model's are not
    # Knows only heads that are a tensor of their own, so that a tied embedding is written twice; or only tied ones.
    head: Literal["either", "own", "embedding"] = "either"
    # Tensors, with their shapes, that llama.cpp does not load a file without and does not use: written as zeros.
    unused: Callable[[ModelSpec], Mapping[str, tuple[int, ...]]] = no_fields


def integer(metadata: Metadata, key: str) -> int:
    """A number of the file's metadata. Raises KeyError where it is missing, ValueError for anything else."""
    value = metadata[key]
    if not isinstance(value, int):
        raise ValueError(f"{key} is {value!r}, not a whole number")
    return value


def attentions(spec: ModelSpec) -> list[AttentionSpec]:
    """The attention of every kind of layer that has it."""
    return [kind.mixer for kind in spec.layer_kinds if isinstance(kind.mixer, AttentionSpec)]


def attention(spec: ModelSpec) -> AttentionSpec:
    """The attention of the first layer that has it, as wide as the whole past where there is such a layer."""
    mixers = attentions(spec)
    return next((mixer for mixer in mixers if mixer.window is None and mixer.rope is not None), mixers[0])


def rope_of(spec: ModelSpec) -> RopeSpec | None:
    """The rotary embedding of that attention, or of latent attention."""
    if attentions(spec):
        return attention(spec).rope
    return next(iter(spec.ropes), None)


def by_layer(spec: ModelSpec, value: Callable[[LayerSpec], T]) -> list[T]:
    """Something of every layer, in order."""
    values: dict[int, T] = {}
    for _, _, layer, numbers in spec.positions():
        values |= dict.fromkeys(numbers, value(layer))
    return [values[number] for number in sorted(values)]


def attended_layers(spec: ModelSpec) -> list[bool]:
    """Whether each layer has attention."""
    return by_layer(spec, lambda layer: isinstance(layer.mixer, AttentionSpec))


def layer_heads(spec: ModelSpec) -> list[int]:
    """The heads of keys of every layer, zero of layers without attention."""
    return by_layer(spec, lambda layer: layer.mixer.kv_heads if isinstance(layer.mixer, AttentionSpec) else 0)


def layer_windows(spec: ModelSpec) -> list[int | None]:
    """The sliding window of every layer."""
    return by_layer(spec, lambda layer: layer.mixer.window if isinstance(layer.mixer, AttentionSpec) else None)


def first_window(spec: ModelSpec) -> int | None:
    """The sliding window of the layers that have one."""
    return next((window for window in layer_windows(spec) if window is not None), None)


def windows_refusal(spec: ModelSpec, period: int) -> str | None:
    """Says so where not every layer of `period`, but the last, has a window, as llama.cpp expects it."""
    expected = [None if (number + 1) % period == 0 else first_window(spec) for number in range(spec.layers)]
    return None if layer_windows(spec) == expected else "layer_types: llama.cpp has another order of windows"


def experts(spec: ModelSpec) -> ExpertsSpec | None:
    """The experts of the first layer that has them."""
    return next((block for block in spec.blocks if isinstance(block, ExpertsSpec)), None)


def shared_width(spec: ModelSpec) -> dict[str, Any]:
    """The key of the width of shared experts, where there are some."""
    block = experts(spec)
    return {} if block is None or block.shared is None else {SHARED_WIDTH: block.shared.width}


def routed_layers(spec: ModelSpec) -> list[bool]:
    """Whether each layer has experts."""
    return by_layer(spec, lambda layer: isinstance(layer.ffn, ExpertsSpec))


def routing_refusal(spec: ModelSpec, block: ExpertsSpec, grouped: bool = False) -> str | None:
    """Names what llama.cpp does not compute of a router, or of the order of layers. `grouped` says that it chooses
    experts in groups, by the sum of a group's two best."""
    router = block.router
    if router.groups > 1 and not (router.group_score == 2 and grouped):
        return "experts are chosen in groups (n_group)"
    if router.scoring not in GATING:
        return f"a router of type '{router.scoring}'"
    routed = routed_layers(spec)
    return None if routed == sorted(routed) else "layers without experts after those that have them"


def routing_metadata(spec: ModelSpec, block: ExpertsSpec) -> dict[str, Any]:
    """The keys of a router and of shared experts."""
    shared = 0 if block.shared is None else block.shared.width // block.width
    groups = {"expert_group_count": block.router.groups, "expert_group_used_count": block.router.top_groups}
    return (groups if block.router.groups > 1 else {}) | {
        "expert_gating_func": GATING[block.router.scoring],
        "expert_weights_norm": block.router.normalize,
        "expert_weights_scale": float(block.router.scale),
        "expert_shared_count": shared,
        "leading_dense_block_count": routed_layers(spec).count(False),
    }
