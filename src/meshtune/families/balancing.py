"""Whether models have mixtures of experts, how files store these, and what balances the load of experts in training.

Nothing here needs the mixtures themselves, which models without experts never import.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection
from typing import Any

from meshtune.errors import UserError
from meshtune.model.layer import LayerSpec
from meshtune.model.spec import ModelSpec


def is_sparse(layer: LayerSpec) -> bool:
    """Whether the feed-forward network of a layer is a mixture of experts, which ep splits."""
    return layer.ffn is not None and any(divisor.axis == "ep" for divisor in layer.ffn.divisors())


def has_experts(spec: ModelSpec) -> bool:
    """Whether any layer of a model is a mixture of experts."""
    return any(map(is_sparse, spec.layer_kinds))


def with_aux_loss(spec: ModelSpec, coefficient: float | None) -> ModelSpec:
    """The model with the load-balancing loss of its experts. Raises UserError for a model without experts."""
    if coefficient is None:
        return spec
    if not has_experts(spec):
        raise UserError(
            f"this {spec.family} model is dense: it has no experts whose load could be balanced",
            where="model.router_aux_loss",
            fix="leave model.router_aux_loss out",
        )
    return _with_ffn(spec, is_sparse, aux_loss=coefficient)


def with_bias_update_rate(spec: ModelSpec, rate: float | None) -> ModelSpec:
    """The model whose routers' correction biases every update moves by `rate`.

    Raises UserError for a model whose routers have no such bias.
    """
    if not rate:
        return spec

    def has_bias(layer: LayerSpec) -> bool:
        ffn: Any = layer.ffn
        return is_sparse(layer) and ffn.router.correction

    if not any(map(has_bias, spec.layer_kinds)):
        raise UserError(
            f"no router of this {spec.family} model has a correction bias that the load of its experts could move",
            where="model.router_bias_update_rate",
            fix="leave model.router_bias_update_rate out"
            + ("; model.router_aux_loss balances the load through the loss" if has_experts(spec) else ""),
        )
    return _with_ffn(spec, has_bias, bias_update_rate=rate)


def without_balancing(spec: ModelSpec) -> ModelSpec:
    """The model without what balances the load of its experts in training alone: its config need not say that."""
    return _with_ffn(spec, is_sparse, aux_loss=0.0, bias_update_rate=0.0)


def _with_ffn(spec: ModelSpec, chosen: Callable[[LayerSpec], bool], **fields: float) -> ModelSpec:
    """The model with other fields of the feed-forward networks of the chosen layers."""

    def change_layer(layer: LayerSpec) -> LayerSpec:
        ffn: Any = layer.ffn
        return dataclasses.replace(layer, ffn=dataclasses.replace(ffn, **fields)) if chosen(layer) else layer

    stacks = (dataclasses.replace(stack, pattern=tuple(map(change_layer, stack.pattern))) for stack in spec.stacks)
    return dataclasses.replace(spec, stacks=tuple(stacks))


def stored_as(
    spec: ModelSpec, names: Collection[str], expected: tuple[Collection[str], Collection[str]], where: str
) -> ModelSpec:
    """The spec with `fused_experts` as the tensors in `names` are.

    `expected` are the names of the model's tensors with an expert's matrices by themselves, and fused.
    Raises UserError where there are tensors of both kinds.
    """
    single, fused = (set(names).intersection(first) - set(second) for first, second in (expected, expected[::-1]))
    if single and fused:
        raise UserError(
            f"the experts are there twice: as '{min(fused)}', which holds all of a layer, and one by one, such as "
            f"'{min(single)}'",
            where=where,
            fix="files of two checkpoints are mixed: download or save the model again into an empty folder",
        )
    return dataclasses.replace(spec, fused_experts=bool(fused))
