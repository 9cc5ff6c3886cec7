"""What a GGUF file of a model holds: metadata, and for every part of a parameter the tensor it lies in, and how."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import numpy as np

from meshtune.arrays.tree import flatten, stack_path
from meshtune.errors import UserError
from meshtune.families.gguf.architecture import (
    LAYER,
    LEAVES,
    OUTSIDE,
    STACKED,
    Architecture,
    attention,
    attentions,
    experts,
    layer_heads,
    rope_of,
    windows,
)
from meshtune.families.gguf.arrangement import arranged
from meshtune.families.gguf.part import GgufKey, GgufPart
from meshtune.families.gguf.registry import ABSENT, ARCHITECTURES
from meshtune.families.gguf.rope import rope_metadata, rope_tensors
from meshtune.families.gguf.routing import routing_metadata, routing_refusal
from meshtune.families.tensors import Shape, View
from meshtune.model.experts import ExpertsSpec
from meshtune.model.mlp import MlpSpec
from meshtune.model.spec import ModelSpec, abstract_params

LIMITED = ("streams/predict", "streams/correct")  # whose numbers count up to the coefficients' limit
TABLE = "per_layer/table"
WITHOUT = "leave out --gguf and name a folder in --to: it is written as safetensors, for transformers, vLLM and SGLang"


@dataclasses.dataclass(frozen=True)
class GgufLayout:
    """A model as llama.cpp has it: metadata without the tokenizer's, the parts of parameters in the order in which they
    are written, tensors that are computed from the spec, and the keys of the metadata that list parameters."""

    architecture: Architecture
    metadata: Mapping[str, Any]
    parts: tuple[GgufPart, ...]
    computed: Mapping[str, np.ndarray]
    keys: tuple[GgufKey, ...] = ()

    @property
    def shapes(self) -> dict[str, Shape]:
        """The shape of every tensor that parameters are written as."""
        return {part.name: part.tensor_shape for part in self.parts}


def gguf_layout(spec: ModelSpec) -> GgufLayout:
    """How a model is written. Raises UserError for one that llama.cpp does not compute, and says why."""
    architecture = _architecture(spec)
    rope = rope_of(spec)
    try:
        if reason := _refusal(spec, architecture):
            raise ValueError(reason)
        fields = usual_metadata(spec, architecture) | (
            {} if rope is None else rope_metadata(rope, architecture.latent, architecture.rounded_yarn)
        )
        fields |= architecture.write(spec)
        fields = {key: value for key, value in fields.items() if value is not None}
        parts = _parts(spec, architecture)
    except ValueError as error:
        raise UserError(
            f"llama.cpp's '{architecture.name}' does not compute this {spec.family} model: {error}",
            where="--gguf",
            fix=WITHOUT,
        ) from error
    metadata = {f"{architecture.name}.{key}": value for key, value in fields.items()}
    computed = {name: np.broadcast_to(np.float32(0), shape) for name, shape in architecture.unused(spec).items()}
    computed |= {} if rope is None else rope_tensors(rope)
    return GgufLayout(architecture, metadata, tuple(parts), computed, _keys(spec, architecture))


def _architecture(spec: ModelSpec) -> Architecture:
    if spec.family in ARCHITECTURES:
        architecture = ARCHITECTURES[spec.family]
        mixture = architecture.mixture_name if experts(spec) else ""
        return dataclasses.replace(architecture, name=mixture) if mixture else architecture
    absent = ABSENT.get(spec.family, "Meshtune does not write it as GGUF")
    raise UserError(
        f"a model of type '{spec.family}' cannot be written as GGUF: {absent}",
        where="--gguf",
        fix=f"{WITHOUT}; `meshtune families --markdown` names the types that are written as GGUF",
    )


def _refusal(spec: ModelSpec, architecture: Architecture) -> str | None:
    """What a model has that the architecture has not; None where there is nothing."""
    if spec.scored:
        return "it is a reward model"
    block = experts(spec)
    if block is not None and architecture.routed:
        if reason := routing_refusal(spec, block, architecture.latent):
            return reason
    elif block is not None and not architecture.own_routing:
        if block.router.normalize != architecture.normalized:
            return f"norm_topk_prob is {block.router.normalize}"
        if any(layer.ffn is not None and layer.ffn != block for layer in spec.layer_kinds):
            return "layers without experts between those that have them"
    mixers = attentions(spec)
    if architecture.name != "olmo" and any(mixer.clip is not None for mixer in mixers):
        return "queries, keys and values are clipped (clip_qkv)"
    if not architecture.own_scale and any(mixer.scale not in (None, mixer.head_dim**-0.5) for mixer in mixers):
        return "scores are scaled by another number than the root of a head's width"
    if not architecture.several_ropes and len(spec.ropes) > 1:
        return "layers with different rotary embeddings"
    networks = {block.activation for block in spec.blocks if isinstance(block, MlpSpec | ExpertsSpec)}
    if networks - {architecture.activation}:
        return f"an activation '{', '.join(sorted(networks))}' (hidden_act)"
    if architecture.head == "embedding" and not spec.tied:
        return "its head is not its embedding"
    if spec.head_bias != ("head" in architecture.biases):
        return "its head has a bias" if spec.head_bias else "its head has no bias"
    return architecture.refusal(spec)


def usual_metadata(spec: ModelSpec, architecture: Architecture) -> dict[str, Any]:
    """The keys that most architectures have, without the architecture's name before them."""
    block = experts(spec)
    width = next((ffn.width for ffn in spec.blocks if isinstance(ffn, MlpSpec)), None)
    fields: dict[str, Any] = {
        "context_length": _context(spec, architecture),
        "embedding_length": spec.embed,
        "block_count": spec.layers,
        "feed_forward_length": width if width is not None else (block.width if block else 0),
        **_heads(spec, architecture),
        "vocab_size": spec.vocab,
    }
    kind = "layer_norm_epsilon" if spec.norm.kind.startswith("layer") else "layer_norm_rms_epsilon"
    fields[f"attention.{kind}"] = spec.norm.eps
    if block is not None:
        fields |= {"expert_count": block.router.experts, "expert_used_count": block.router.top_k}
        fields["expert_feed_forward_length"] = block.width
        if architecture.routed:
            fields |= routing_metadata(spec, block)
    if any(layer.placement == "parallel_shared" for layer in spec.layer_kinds):
        fields["use_parallel_residual"] = True
    return fields


def _context(spec: ModelSpec, architecture: Architecture) -> int:
    context, rope = spec.max_length, rope_of(spec)
    shortest = [window for window in windows(spec) if window is not None]
    if shortest and not architecture.windows:
        context = min(context, *shortest)
    if rope is not None and rope.kind == "dynamic":
        context = min(context, rope.original_length)  # up to which nothing is scaled
    return context


def _heads(spec: ModelSpec, architecture: Architecture) -> dict[str, Any]:
    """The numbers of heads; where layers without attention are marked by none, the keys' of every layer."""
    mixers = attentions(spec)
    if not mixers:
        return {"attention.head_count": 0}
    mixer = attention(spec)
    by_layer: list[int] = layer_heads(spec)
    return {
        "attention.head_count": mixer.heads,
        "attention.head_count_kv": by_layer if architecture.marked_layers else mixer.kv_heads,
        "attention.key_length": mixer.head_dim,
        "attention.value_length": mixer.head_dim,
    }


def _keys(spec: ModelSpec, architecture: Architecture) -> tuple[GgufKey, ...]:
    places = {n: (key, row) for key, _, _, numbers in spec.positions() for row, n in enumerate(numbers)}
    in_order = [places[number] for number in sorted(places)]
    return tuple(
        GgufKey(name, tuple((f"layers/{key}/{leaf}", (row,)) for key, row in in_order))
        for leaf, name in architecture.listed.items()
    )


def _parts(spec: ModelSpec, architecture: Architecture) -> list[GgufPart]:
    numbers = {key: (layer, rows) for key, _, layer, rows in spec.positions()}
    names = {**architecture.names, **architecture.named(spec)}
    ordered: list[tuple[float, GgufPart]] = []
    place = -1.0
    for path, array in flatten(abstract_params(spec)).items():
        node, _, leaf = path.rpartition("/")
        stacked = stack_path(node)
        if stacked is None:
            part = _outside_part(spec, architecture, names, path, array.shape)
            ordered.append((place, part))
            if node == "embed" and spec.tied and architecture.head == "own":
                ordered.append((place, dataclasses.replace(part, name=f"{OUTSIDE['head']}.weight")))
            continue
        place = float(spec.layers)
        layer, rows = numbers[stacked.key]
        inner = stacked.site.removeprefix("parallel/")
        if f"{inner}/{leaf}" in architecture.listed:
            continue
        stem, known = names.get(f"{inner}/{leaf}", LEAVES.get(f"{inner}/{leaf}")), inner in LAYER
        if stem is None and (
            not known or (leaf == "bias" and not inner.endswith("_norm") and inner not in architecture.biases)
        ):
            raise ValueError(f"it has {inner}/{leaf}")
        offset = 1.0 if leaf == "weight" and inner.endswith("_norm") and spec.norm.has_offset else 0.0
        streams = None if layer.extras is None or inner not in LIMITED else layer.extras.streams
        limit = None if streams is None else streams.clip
        for entry in arranged(inner, leaf, array.shape[1:], layer.mixer, architecture):
            tensor = stem or f"{entry.stem or names.get(inner, LAYER[inner])}.{leaf}"
            factors = architecture.factors(spec, f"{inner}/{leaf}", entry.view.tensor[0])
            ordered += [
                (
                    float(number),
                    GgufPart(
                        f"blk.{number}.{tensor}",
                        path,
                        (row,),
                        entry.view,
                        offset,
                        entry.source,
                        entry.exponential,
                        factors,
                        limit=limit,
                    ),
                )
                for row, number in enumerate(rows)
            ]
    return [part for _, part in sorted(ordered, key=lambda entry: entry[0])]


def _outside_part(
    spec: ModelSpec, architecture: Architecture, names: Mapping[str, str], path: str, shape: Shape
) -> GgufPart:
    """That of an array outside the layers."""
    node, _, leaf = path.rpartition("/")
    stack, _, number = node.rpartition("/")
    if stack in STACKED and spec.streams is not None:
        place, count = int(number) - 1, spec.streams.count - 1
        view = View.identity((count, *shape)).slice(0, place, place + 1).merge(*shape)
        return GgufPart(f"{STACKED[stack]}.{leaf}", path, (), view)
    if node not in OUTSIDE:
        raise ValueError(f"it has {path}")
    offset = 1.0 if node == "norm" and leaf == "weight" and spec.norm.has_offset else 0.0
    factors = architecture.factors(spec, path, shape[0])
    # Tokens beyond the table have its first row, and llama.cpp has a row for every token.
    padding = spec.vocab - shape[0] if node == TABLE else 0
    if padding < 0:
        raise ValueError("vocab_size_per_layer_input is larger than vocab_size")
    name = f"{names.get(node, OUTSIDE[node])}.{leaf}"
    unit = node == "head" and spec.norm_head
    return GgufPart(name, path, (), View.identity(shape), offset, factors=factors, padding=padding, unit_rows=unit)
