"""The optimizer section of a recipe: the core's own options, and which of them go together."""

from __future__ import annotations

import dataclasses
from typing import Annotated

from pydantic import AfterValidator

from meshtune.config.section import refuse_truth_values
from meshtune.optim.config import OptimizerOptions

ADAM = (
    "adamw", "adamw8bit", "adam_mini", "muon", "galore", "apollo", "badam", "schedule_free", "prodigy", "sophia",
)  # fmt: skip
LOW_RANK = ("galore", "apollo")
# Which optimizers (or, of the schedule, which schedules) read a key; those not named are read by all.
READERS: dict[str, tuple[str, ...]] = {
    "beta1": (*ADAM, "lion"),
    "beta2": (*ADAM, "lion"),
    "eps": ADAM,
    "momentum": ("sgd", "muon"),
    "match_rms": ("muon",),
    "rank": LOW_RANK,
    "update_gap": LOW_RANK,
    "scale": LOW_RANK,
    "scaling": ("apollo",),
    "switch_every": ("badam",),
    "block_order": ("badam",),
    "d_coef": ("prodigy",),
    "gamma": ("sophia",),
    "curvature_every": ("sophia",),
}
NOT_IN_BACKWARD = {
    "badam": "it computes the gradient of one layer only in any case",
    "prodigy": "it estimates its rate from the gradients of all parameters together",
    "sophia": "it estimates the curvature of all parameters at once",
}
ONE_RATE = {
    "prodigy": "prodigy estimates one rate for all parameters",
    "sophia": "sophia has one rate for all parameters",
}


def check_all_read(options: OptimizerOptions) -> OptimizerOptions:
    """Raises ValueError for a setting that the chosen optimizer or schedule would ignore."""
    defaults = {field.name: field.default for field in dataclasses.fields(options)}
    if options.warmup_steps is not None and options.warmup_ratio != defaults["warmup_ratio"]:
        raise ValueError("give warmup_ratio or warmup_steps, not both")
    readers_of = {name: (options.name, readers) for name, readers in READERS.items()}
    for name, (chosen, readers) in (readers_of | {"decay_ratio": (options.schedule, ("wsd",))}).items():
        value = getattr(options, name)
        is_default = value == defaults[name] or (name == "momentum" and value == 0)
        if not is_default and chosen not in readers:
            names = " and ".join(filter(None, (", ".join(readers[:-1]), readers[-1])))
            raise ValueError(f"{name} is read by {names} alone, and {chosen} was chosen: leave {name} out")
    return options


def check_possible(options: OptimizerOptions) -> OptimizerOptions:
    """Raises ValueError for options that contradict each other."""
    if options.name == "schedule_free":
        if options.schedule != "constant":
            raise ValueError(
                "schedule_free averages weights instead of decaying the learning rate, and schedule is "
                f"{options.schedule}: use schedule: constant (a warm-up is fine)"
            )
        if options.beta1 == 0:
            raise ValueError("schedule_free interpolates with beta1 between average and iterate: it must be above 0")
    if options.lora_plus_embedding_rate is not None and options.lora_plus_ratio is None:
        raise ValueError("lora_plus_embedding_rate is a part of LoRA+: give lora_plus_ratio too, or leave it out")
    if options.lora_plus_ratio is not None and options.name in ONE_RATE:
        raise ValueError(
            f"lora_plus_ratio gives A and B rates of their own, and {ONE_RATE[options.name]}: use adamw with it, or "
            "leave lora_plus_ratio out"
        )
    if options.in_backward and options.name in NOT_IN_BACKWARD:
        raise ValueError(
            f"in_backward updates a layer as soon as its gradient is computed, which {options.name} cannot: "
            f"{NOT_IN_BACKWARD[options.name]}; leave in_backward out, or use adamw8bit, adafactor or sgd with it"
        )
    if options.in_backward and options.max_grad_norm is not None:
        raise ValueError(
            "max_grad_norm clips by the norm of all gradients, and with in_backward the first is used before the last "
            "is known: set max_grad_norm: null with in_backward (adafactor clips each update by its own size "
            "instead), or leave in_backward out"
        )
    return options


OptimizerSection = Annotated[
    OptimizerOptions,
    refuse_truth_values(OptimizerOptions),
    AfterValidator(check_all_read),
    AfterValidator(check_possible),
]
