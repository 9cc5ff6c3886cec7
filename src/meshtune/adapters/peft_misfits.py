"""Errors for the tensors of an adapter's file that do not fit the base or the adapter's config."""

from __future__ import annotations

import pathlib
import re
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING

from meshtune.adapters.registry import ADAPTERS
from meshtune.errors import UserError
from meshtune.model.spec import ModelSpec

if TYPE_CHECKING:
    from meshtune.adapters.peft_config import PeftConfig
    from meshtune.adapters.targets import Module

LAYER = re.compile(r"\.(?:layers|h|blocks)\.(\d+)\.")
OF_EMBEDDINGS = (".lora_embedding_A", ".lora_embedding_B")  # ends of the names that peft gives a LoRA of an embedding


def check_shape(
    name: str, shapes: Mapping[str, tuple[int, ...]], expected: tuple[int, ...], where: str, note: str = ""
) -> None:
    if tuple(shapes[name]) != expected:
        raise UserError(
            f"tensor {name} is {_by(shapes[name])}, but the base needs {_by(expected)}{note}",
            where=where,
            fix="give the base this adapter was trained on (base_model_name_or_path), and its own adapter_config.json",
        )


def check_layers(
    names: Iterable[str], among: Mapping[str, Module], spec: ModelSpec, peft: PeftConfig, where: str
) -> None:
    """Raises UserError for an adapter of a model with another number of layers."""
    if spec.composite is not None:  # whose other parts have layers too
        return
    numbers = {int(match[1]) for name in names if (match := LAYER.search(name))}
    count = max(numbers, default=-1) + 1
    lacking = [m for m in among.values() if m.layer is not None and m.layer >= count and peft.targets_module(m)]
    if count <= spec.layers and not (lacking and numbers == set(range(count)) and count):
        return
    base = peft.fields.get("base_model_name_or_path")
    name = pathlib.PurePath(str(base)).name if base else "another model"
    raise UserError(
        f"this adapter was trained on {name} ({count} layers), and the model has {spec.layers}",
        where=where,
        fix=f"give the base that it was trained on{f', {base}' if base else ''}",
    )


def misfit(name: str, where: str, why: str) -> UserError:
    return UserError(
        f"tensor {name} does not fit: {why}",
        where=where,
        fix="give the base this adapter was trained on; of peft's kinds, "
        + f"{', '.join(sorted(ADAPTERS))} on linear layers is supported",
    )


def missing(name: str, where: str) -> UserError:
    return UserError(
        f"tensor {name} is missing, which the adapter_config.json beside it promises",
        where=where,
        fix="the adapter is only half there: copy or save it again",
    )


def on_embedding(module: str, where: str, *, tied: bool) -> UserError:
    """Says that `module`, an embedding, has a LoRA, and what can be done instead."""
    untied = ", after giving the head a weight of its own" if tied else ""
    return UserError(
        f"the adapter has a LoRA on {module}, and LoRA on an embedding is not supported here",
        where=where,
        fix=f"merge it into its base with peft{untied} and give the result as the model (docs/adapters.md, 'LoRA on "
        "embeddings', has the lines), or train again with the matrices in full: method.train_modules: [embed_tokens, "
        "lm_head]",
    )


def _by(shape: tuple[int, ...]) -> str:
    return " x ".join(str(n) for n in shape)
