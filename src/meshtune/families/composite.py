"""Composite checkpoints: a text model with vision towers and the like around it; only the text model is tuned.

The text model is read from `text_config`, its tensors are found by the prefix that they have in the files, and all
other tensors are passed through unchanged, but for those of a tower that reads pictures. The composites that are known
are listed in wrappers.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Iterable, Mapping
from typing import Any

from meshtune.lazy import LazyFunction
from meshtune.model.block import SharedMemory
from meshtune.model.spec import Composite, ModelSpec

TEXT = "text_config"
HEAD = "lm_head.weight"
MTP = "next-token prediction head"
# Of layers that read those of earlier layers. Published files have them, and nothing computes with them.
UNUSED = "unused keys and values"
KEYS_AND_VALUES = tuple(f"self_attn.{name}." for name in ("k_proj", "v_proj", "k_norm", "v_norm"))

# Composites that read prompts both ways, with pictures or without: their text models are not tuned by themselves.
BOTH_WAYS = ("paligemma",)

# (prefix in the text model alone, prefix in the composite): in files of transformers before 4.52, which later versions
# go on writing for the model types of that time, and as its modules are named since.
Prefixes = tuple[tuple[str, str], ...]
BEFORE: Prefixes = (("model.", "language_model.model."), ("lm_head", "language_model.lm_head"))
SINCE: Prefixes = (("model.", "model.language_model."), ("lm_head", "lm_head"))


tower_tensors = LazyFunction("meshtune.families.vision:tensors")
is_wrapper = LazyFunction("meshtune.families.wrappers:is_wrapper")
part_of = LazyFunction("meshtune.families.wrappers:part_of")


def is_composite(config: Mapping[str, Any]) -> bool:
    """Whether a config is of several models, one of which is the text model."""
    return any(isinstance(config.get(name), Mapping) for name in (TEXT, "vision_config"))


def text_config(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """The config of the text model: that inside a composite's, or the config itself."""
    inner = config.get(TEXT)
    return inner if isinstance(inner, Mapping) and is_wrapper(config.get("model_type")) else config


def with_text_fields(config: Mapping[str, Any], fields: Mapping[str, Any]) -> dict[str, Any]:
    """A config with other values for fields of its text model."""
    inner = text_config(config)
    return dict(config) | (dict(fields) if inner is config else {TEXT: {**inner, **fields}})


def replace_prefix(name: str, prefixes: Iterable[tuple[str, str]]) -> str:
    """A name with the first prefix that it has replaced by the other one of the pair."""
    for prefix, replacement in prefixes:
        if name.startswith(prefix):
            return replacement + name.removeprefix(prefix)
    return name


def tensor_name(spec: ModelSpec, name: str) -> str:
    """Returns the name of a text model's tensor in the checkpoint's files."""
    return name if spec.composite is None else replace_prefix(name, spec.composite.tensors)


def module_name(spec: ModelSpec, name: str) -> str:
    """Returns transformers' name of a module, given its name in the plain text model or in files of the older
    layout."""
    if spec.composite is None:
        return name
    return replace_prefix(_own_name(spec.composite, name), spec.composite.modules)


def _own_name(composite: Composite, name: str) -> str:
    """Returns the name in the plain text model, or of a tower's module in memory, given that in the files or in either
    layout."""
    pairs = [(written, own) for own, written in (*composite.tensors, *BEFORE, *SINCE)]
    return replace_prefix(name, sorted(pairs, key=lambda pair: -len(pair[0])))  # "model." begins others


def passed_through(spec: ModelSpec, name: str) -> str | None:
    """The part of the checkpoint that a tensor belongs to, where it is not tuned but passed through; None elsewhere."""
    if spec.vision is not None and name in tower_names(spec):
        return None
    if re.match(r"(model\.)?mtp\.", name):
        return MTP
    layer = re.match(r"model\.layers\.(\d+)\.(.*)", name if spec.composite is None else _own_name(spec.composite, name))
    if layer and spec.layers <= int(layer[1]) < spec.layers + spec.mtp_layers:
        return MTP
    if layer and int(layer[1]) in _readers(spec) and layer[2].startswith(KEYS_AND_VALUES):
        return UNUSED
    return None if spec.composite is None else part_of(spec.composite.model_type, name)


@functools.lru_cache(maxsize=16)
def tower_names(spec: ModelSpec) -> frozenset[str]:
    """The tensors of the tower and the projector that the spec reads."""
    return frozenset(tensor_name(spec, entry.name) for entry in tower_tensors(spec))


@functools.lru_cache(maxsize=16)
def _readers(spec: ModelSpec) -> frozenset[int]:
    """The layers that read the keys and values of earlier ones."""
    return frozenset(
        number
        for _, _, kind, numbers in spec.positions()
        if isinstance(kind.mixer, SharedMemory) and kind.mixer.reads is not None
        for number in numbers
    )
