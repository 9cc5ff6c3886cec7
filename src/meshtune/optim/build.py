"""Optimizers by name, combined with a schedule and with weight decay by parameter name.

An optimizer is a module and a line in OPTIMIZERS. Gradient clipping is not theirs: the train step computes the global
norm once, reports it and clips by it.

LoRA+: the B of an adapter learns faster than its A (https://arxiv.org/abs/2402.12354).
"""

from __future__ import annotations

import dataclasses
import fnmatch
from collections.abc import Callable, Mapping

import jax
import optax

from meshtune.arrays.spec import PARAMETER_ROLES, ArraySpec
from meshtune.arrays.tree import Tree, named_leaves, path_name
from meshtune.errors import UserError, nearest
from meshtune.lazy import LazyFunction
from meshtune.model.spec import PROJECTOR, VISION, ModelSpec
from meshtune.optim.adam import adam_mini, adamw
from meshtune.optim.config import OptimizerConfig
from meshtune.optim.optimizer import (
    SCHEDULES,
    ChooseByRole,
    Optimizer,
    ParamOptimizer,
    Schedule,
    State,
    by_parameter,
    from_optax,
    make_schedule,
    per_expert,
    refuse_role,
    stochastic,
    to_nearest,
)


def rate_factors(config: OptimizerConfig, parameters: Mapping[str, ArraySpec]) -> dict[str, float]:
    """The factor of the learning rate for each parameter, by path.

    The projector and the tower of a model that sees have their own rates, where `projector_learning_rate` and
    `tower_learning_rate` give them. With `lora_plus_ratio` the rate is multiplied by that ratio for the B of adapters
    and for vectors trained with them, as in peft's create_loraplus_optimizer; with `lora_plus_embedding_rate` the
    trained part of an embedding has that rate. Raises UserError for a rate of parameters that are not trained.
    """
    ratio, embedding = config.lora_plus_ratio, config.lora_plus_embedding_rate
    if ratio is not None and not any(_is_up_projection(array) for array in parameters.values()):
        raise UserError(
            "lora_plus_ratio is the ratio of the learning rates of an adapter's two matrices, and no adapter here has "
            "two",
            where="optimizer.lora_plus_ratio, method",
            fix="use it with method: lora, or leave it out",
        )
    parts = {PROJECTOR: config.projector_learning_rate, VISION: config.tower_learning_rate}
    for part, name in ((PROJECTOR, "projector"), (VISION, "tower")):
        if parts[part] is not None and not any(path.startswith(f"{part}/") for path in parameters):
            raise UserError(
                f"{name}_learning_rate is the learning rate of the {name}, and nothing of a {name} is trained",
                where=f"optimizer.{name}_learning_rate, vision.train",
                fix=f"add {name} to vision.train, or leave {name}_learning_rate out",
            )

    def factor(path: str, array: ArraySpec) -> float:
        rate = parts.get(path.split("/")[0]) or config.learning_rate
        if ratio is not None and array.role == "table" and embedding is not None:
            rate = embedding
        elif ratio is not None and (_is_up_projection(array) or array.role == "vector"):
            rate *= ratio
        return rate / config.learning_rate

    return {path: factor(path, array) for path, array in parameters.items()}


def _is_up_projection(array: ArraySpec) -> bool:
    """Whether it is the B [.., out, rank] of an adapter."""
    return array.role != "vector" and array.axes[-1:] == ("rank",)


__all__ = ["OPTIMIZERS", "Optimizer", "OptimizerConfig", "OptimizerType", "decay_mask", "make_optimizer"]


@dataclasses.dataclass(frozen=True)
class OptimizerType:
    """An entry of OPTIMIZERS; one of its first three fields is given, by what an update needs to see.

    `by_parameter(config)` updates parameters independently, all alike (which must be right for every role) or chosen by
    role; `by_gradients(config, schedule, decayed)` is an optax transformation of all gradients whose updates are the
    changes themselves; `by_block` trains layers in turns.
    `eval_params(config)` gives the function (trainable, state) -> parameters to evaluate, where these are not the
    trainable ones. `projects` says that gradients are projected to a low rank, `needs_hessian` that an update is given
    the curvature.
    """

    by_parameter: Callable[[OptimizerConfig], ParamOptimizer | ChooseByRole] | None = None
    by_gradients: Callable[[OptimizerConfig, Schedule, Tree], optax.GradientTransformation] | None = None
    by_block: Callable[[OptimizerConfig, Schedule, Tree, ModelSpec, dict[str, float]], Optimizer] | None = None
    eval_params: Callable[[OptimizerConfig], Callable[[Tree, State], Tree]] | None = None
    projects: bool = False
    needs_hessian: bool = False


def _sgd(config: OptimizerConfig) -> ParamOptimizer:
    """Heavy-ball momentum without dampening, as in torch."""
    transformation = optax.trace(decay=config.momentum) if config.momentum else optax.identity()
    return dataclasses.replace(from_optax(lambda context: transformation, config.state_dtype), by_rows=True)


def _lion(config: OptimizerConfig) -> ParamOptimizer:
    """https://arxiv.org/abs/2302.06675."""
    transformation = optax.scale_by_lion(b1=config.beta1, b2=0.99 if config.beta2 is None else config.beta2)
    return from_optax(lambda context: transformation, config.state_dtype)


OPTIMIZERS: dict[str, OptimizerType] = {
    "adamw": OptimizerType(adamw),
    "adamw8bit": OptimizerType(LazyFunction("meshtune.optim.adamw8bit:adamw8bit")),
    "adam_mini": OptimizerType(adam_mini),
    "muon": OptimizerType(LazyFunction("meshtune.optim.muon:muon")),
    "galore": OptimizerType(LazyFunction("meshtune.optim.galore:galore"), projects=True),
    "apollo": OptimizerType(LazyFunction("meshtune.optim.apollo:apollo"), projects=True),
    "badam": OptimizerType(by_block=LazyFunction("meshtune.optim.blocks:badam")),
    "adafactor": OptimizerType(LazyFunction("meshtune.optim.adafactor:adafactor")),
    "lion": OptimizerType(_lion),
    "sgd": OptimizerType(_sgd),
    "schedule_free": OptimizerType(
        LazyFunction("meshtune.optim.schedule_free:schedule_free"),
        eval_params=LazyFunction("meshtune.optim.schedule_free:averaged_params"),
    ),
    "prodigy": OptimizerType(by_gradients=LazyFunction("meshtune.optim.prodigy:prodigy")),
    "sophia": OptimizerType(by_gradients=LazyFunction("meshtune.optim.sophia:sophia"), needs_hessian=True),
}
is_projected = LazyFunction("meshtune.optim.galore:is_projected")
from_optax_global = LazyFunction("meshtune.optim.optax_global:from_optax_global")


def make_optimizer(
    config: OptimizerConfig, total_steps: int, trainable: Tree, spec: ModelSpec | None = None
) -> tuple[Optimizer, Schedule]:
    """(the optimizer, its schedule) for a run of `total_steps` updates of the tree `trainable`.

    `trainable` holds ArraySpecs; `spec` is the model's, needed by optimizers that train its layers in turns.

    Raises UserError for an optimizer or schedule that does not exist, for options that an optimizer cannot honour, and
    for a parameter whose role it has no rule for.
    """
    for option, name, known in (("optimizer", config.name, OPTIMIZERS), ("schedule", config.schedule, SCHEDULES)):
        if name not in known:
            raise UserError(
                f"there is no {option} '{name}'", fix=f"{nearest(name, known)}choose one of {', '.join(known)}"
            )
    chosen = OPTIMIZERS[config.name]
    schedule = make_schedule(config, total_steps)
    decayed = decay_mask(config.no_decay, trainable)
    decay = {path: config.weight_decay if yes else 0.0 for path, yes in named_leaves(decayed)}
    parameters = dict(named_leaves(trainable))
    for path, array in parameters.items():
        if array.role not in PARAMETER_ROLES:
            raise refuse_role(config.name, path, array)
    _check_options(config, chosen)
    rounding = stochastic(config.seed) if config.stochastic_rounding else to_nearest
    if chosen.by_block is not None:
        assert spec is not None, "the layers to train in turns are the model's"
        return chosen.by_block(config, schedule, trainable, spec, decay), schedule
    if chosen.by_gradients is not None:
        optimizer = from_optax_global(chosen.by_gradients(config, schedule, decayed), schedule, config.state_dtype)
        stacked = frozenset(path for path, array in parameters.items() if array.is_stacked)
        optimizer = dataclasses.replace(optimizer, stacked=stacked, rounding=rounding)
        return dataclasses.replace(optimizer, needs_hessian=chosen.needs_hessian), schedule
    assert chosen.by_parameter is not None
    if chosen.projects:
        _check_rank(config, parameters)
    optimizers = _choose(chosen.by_parameter(config), parameters)
    factors = rate_factors(config, parameters) if config.own_rates else None
    optimizer = by_parameter(optimizers, parameters, schedule, decay, factors, rounding)
    if chosen.eval_params is not None:
        optimizer = dataclasses.replace(optimizer, eval_params=chosen.eval_params(config))
    return dataclasses.replace(optimizer, in_backward=config.in_backward), schedule


def decay_mask(no_decay: tuple[str, ...], trainable: Tree) -> Tree:
    """A tree of bools: whether weight decay applies to each leaf."""
    return jax.tree_util.tree_map_with_path(
        lambda path, _: not any(fnmatch.fnmatchcase(path_name(path), pattern) for pattern in no_decay), trainable
    )


def _choose(optimizer: ParamOptimizer | ChooseByRole, parameters: Mapping[str, ArraySpec]) -> dict[str, ParamOptimizer]:
    """The optimizer of each parameter by path; each expert is a separate matrix."""
    chosen = {}
    for path, array in parameters.items():
        layer = array.layer
        if layer.role == "experts":
            layer = dataclasses.replace(layer, shape=layer.shape[1:], axes=layer.axes[1:])
        chosen[path] = optimizer if isinstance(optimizer, ParamOptimizer) else optimizer(path, layer)
        if layer.role == "experts":
            chosen[path] = per_expert(chosen[path])
    return chosen


def _check_options(config: OptimizerConfig, chosen: OptimizerType) -> None:
    if config.in_backward and chosen.by_parameter is None:
        raise UserError(
            f"in_backward updates each layer as soon as its gradient is computed, and {config.name} "
            + ("needs all gradients at once" if chosen.by_gradients else "has the gradient of one layer alone already"),
            where="optimizer.in_backward",
            fix="leave in_backward out, or use adamw8bit, adafactor or sgd with it",
        )
    for option in config.own_rates if chosen.by_parameter is None else ():
        raise UserError(
            f"{option} gives parameters their own rates, and {config.name} "
            + ("has one rate for all" if chosen.by_gradients else "trains whole layers in turns, not adapters"),
            where=f"optimizer.{option}",
            fix="use adamw with it, or leave it out",
        )


def _check_rank(config: OptimizerConfig, parameters: Mapping[str, ArraySpec]) -> None:
    if any("/adapter/" in path for path in parameters):
        raise UserError(
            f"{config.name} projects the gradients of whole matrices to a low rank, which those of adapters have "
            "already",
            where="optimizer.name, method",
            fix=f"use method: full or freeze with {config.name}, or optimizer.name=adamw with the adapters",
        )
    matrices = [array.layer for array in parameters.values() if array.role in ("matrix", "experts")]
    if matrices and not any(is_projected(array, config.rank) for array in matrices):
        largest = max(min(array.shape[-2:]) for array in matrices)
        raise UserError(
            f"rank {config.rank} is not below the dimensions of any matrix that is trained (the widest has {largest})",
            where="optimizer.rank",
            fix=f"give a rank below {largest}, such as {max(1, largest // 4)}",
        )
