"""Optimizers by name, put together with a schedule and decay rules by parameter name.

An optimizer is a module and a line in OPTIMIZERS. Gradient clipping is not among what they do: the train step computes
the global norm once, reports it and clips by it.
"""

from __future__ import annotations

import dataclasses
import fnmatch
from collections.abc import Callable
from typing import Any

import jax
import optax

from meshtune.arrays.paths import named_leaves, path_name
from meshtune.arrays.spec import ArraySpec
from meshtune.errors import UserError, nearest
from meshtune.model.spec import ModelSpec
from meshtune.optim.adafactor import adafactor
from meshtune.optim.adam import adamw
from meshtune.optim.adam_mini import adam_mini
from meshtune.optim.adamw8bit import adamw8bit
from meshtune.optim.apollo import apollo
from meshtune.optim.badam import badam
from meshtune.optim.config import OptimizerConfig
from meshtune.optim.galore import galore
from meshtune.optim.lora_plus import rate_factors
from meshtune.optim.muon import muon
from meshtune.optim.optimizer import Optimizer, as_spec, by_parameter, single, whole
from meshtune.optim.prodigy import prodigy
from meshtune.optim.projection import is_narrowed
from meshtune.optim.rule import Rule, Rules, adopted
from meshtune.optim.schedule_free import averages, schedule_free
from meshtune.optim.schedules import SCHEDULES, Schedule, make_schedule
from meshtune.optim.sophia import sophia

__all__ = ["OPTIMIZERS", "Kind", "Optimizer", "OptimizerConfig", "decay_mask", "make_optimizer"]

Tree = Any


@dataclasses.dataclass(frozen=True)
class Kind:
    """A kind of optimizer, by what it needs to see: `rules` of single parameters, or `all` gradients at once.

    `rules(config, spec)` is one rule, or a choice by path; `all(config, schedule, decayed)` a transformation of optax
    whose updates are the changes themselves; `blocks` an optimizer of layers that take turns.
    `shown(config)` gives the function (trainable, state) -> parameters to evaluate, where these are not those trained.
    `narrows` says that it keeps gradients at a rank below the matrices', `curved` that it asks for the curvature.
    """

    rules: Callable[[OptimizerConfig, ModelSpec | None], Rule | Rules] | None = None
    all: Callable[[OptimizerConfig, Schedule, Tree], optax.GradientTransformation] | None = None
    blocks: Callable[..., Optimizer] | None = None
    shown: Callable[[OptimizerConfig], Callable[[Tree, Any], Tree]] | None = None
    narrows: bool = False
    curved: bool = False


def _sgd(config: OptimizerConfig, spec: ModelSpec | None) -> Rule:
    """Heavy-ball momentum without dampening, as in torch."""
    one = optax.trace(decay=config.momentum) if config.momentum else optax.identity()
    return dataclasses.replace(adopted(lambda at: one, config.state_dtype), by_rows=True)


def _lion(config: OptimizerConfig, spec: ModelSpec | None) -> Rule:
    """https://arxiv.org/abs/2302.06675."""
    one = optax.scale_by_lion(b1=config.beta1, b2=0.99 if config.beta2 is None else config.beta2)
    return adopted(lambda at: one, config.state_dtype)


OPTIMIZERS: dict[str, Kind] = {
    "adamw": Kind(lambda config, spec: adamw(config)),
    "adamw8bit": Kind(lambda config, spec: adamw8bit(config)),
    "adam_mini": Kind(adam_mini),
    "muon": Kind(lambda config, spec: muon(config)),
    "galore": Kind(lambda config, spec: galore(config), narrows=True),
    "apollo": Kind(lambda config, spec: apollo(config), narrows=True),
    "badam": Kind(blocks=badam),
    "adafactor": Kind(lambda config, spec: adafactor(config)),
    "lion": Kind(_lion),
    "sgd": Kind(_sgd),
    "schedule_free": Kind(lambda config, spec: schedule_free(config), shown=averages),
    "prodigy": Kind(all=prodigy),
    "sophia": Kind(all=sophia, curved=True),
}


def make_optimizer(
    config: OptimizerConfig, total_steps: int, trainable: Tree, spec: ModelSpec | None = None
) -> tuple[Optimizer, Schedule]:
    """(the optimizer, its schedule) for a run of `total_steps` updates of the tree `trainable`.

    `trainable` is read for its paths, shapes and dtypes alone and may be abstract; `spec` is the model's, for methods
    that follow its heads and layers.

    Raises: UserError for an optimizer or schedule that does not exist, and for what an optimizer cannot do.
    """
    for kind, name, known in (("optimizer", config.name, OPTIMIZERS), ("schedule", config.schedule, SCHEDULES)):
        if name not in known:
            raise UserError(
                f"there is no {kind} '{name}'", fix=f"{nearest(name, known)}choose one of {', '.join(known)}"
            )
    chosen = OPTIMIZERS[config.name]
    schedule = make_schedule(config, total_steps)
    decayed = decay_mask(config.no_decay, trainable)
    decay = {path: config.weight_decay if yes else 0.0 for path, yes in named_leaves(decayed)}
    if config.in_backward and chosen.rules is None:
        raise UserError(
            f"in_backward updates each layer as soon as its gradient is computed, and {config.name} "
            + ("needs all gradients at once" if chosen.all else "has the gradient of one layer alone already"),
            where="optimizer.in_backward",
            fix="leave in_backward out, or use adamw8bit, adafactor or sgd with it",
        )
    if config.lora_plus_ratio is not None and chosen.rules is None:
        raise UserError(
            f"lora_plus_ratio gives parameters their own rates, and {config.name} "
            + ("has one rate for all" if chosen.all else "trains whole layers in turns, not adapters"),
            where="optimizer.lora_plus_ratio",
            fix="use adamw with it, or leave it out",
        )
    if chosen.blocks is not None:
        assert spec is not None, "whose turn it is depends on the model's layers"
        return chosen.blocks(config, schedule, trainable, spec, decay), schedule
    if chosen.all is not None:
        made = whole(chosen.all(config, schedule, decayed), schedule, config.state_dtype)
        return dataclasses.replace(made, curved=chosen.curved), schedule
    assert chosen.rules is not None
    parameters = {path: single(path, as_spec(leaf)) for path, leaf in named_leaves(trainable)}
    if chosen.narrows:
        _check_narrowed(config, parameters)
    rules = _each(chosen.rules(config, spec), parameters)
    factors = None if config.lora_plus_ratio is None else rate_factors(config, parameters)
    made = dataclasses.replace(by_parameter(rules, schedule, decay, factors), fused=config.in_backward)
    return (made if chosen.shown is None else dataclasses.replace(made, shown=chosen.shown(config))), schedule


def decay_mask(no_decay: tuple[str, ...], trainable: Tree) -> Tree:
    """A tree of bools: whether weight decay applies to each leaf."""
    return jax.tree_util.tree_map_with_path(
        lambda path, _: not any(fnmatch.fnmatchcase(path_name(path), pattern) for pattern in no_decay), trainable
    )


def _each(rules: Rule | Rules, parameters: dict[str, ArraySpec]) -> dict[str, Rule]:
    return {path: rules if isinstance(rules, Rule) else rules(path, array) for path, array in parameters.items()}


def _check_narrowed(config: OptimizerConfig, parameters: dict[str, ArraySpec]) -> None:
    if any("/adapter/" in path for path in parameters):
        raise UserError(
            f"{config.name} makes the gradients of whole matrices narrow, and adapters are narrow already",
            where="optimizer.name, method",
            fix=f"use method: full or freeze with {config.name}, or optimizer.name=adamw with the adapters",
        )
    matrices = {
        path: array for path, array in parameters.items() if len(array.shape) == 2 and path.startswith("layers/")
    }
    if matrices and not any(is_narrowed(path, array, config.rank) for path, array in matrices.items()):
        largest = max(min(array.shape) for array in matrices.values())
        raise UserError(
            f"rank {config.rank} is not below the dimensions of any matrix that is trained (the widest has {largest})",
            where="optimizer.rank",
            fix=f"give a rank below {largest}, such as {max(1, largest // 4)}",
        )
