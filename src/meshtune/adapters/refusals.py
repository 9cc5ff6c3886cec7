"""Errors for options and targets that a type of adapter does not support."""

from __future__ import annotations

import dataclasses

from meshtune.adapters.config import LoraConfig
from meshtune.arrays.spec import ArraySpec
from meshtune.errors import UserError

# Options that only some types of adapter have.
TYPES_OF_OPTION = {
    "svd_iterations": ("pissa", "loftq"),
    "pissa_convert": ("pissa",),
    "loftq_iterations": ("loftq",),
    "loftq_calibration": ("loftq",),
    "oft_block_size": ("oft",),
    "oft_cayley_terms": ("oft",),
    "vera_key": ("vera",),
    "vera_d_initial": ("vera",),
}


def no_options(config: LoraConfig) -> None:
    """Raises UserError where an option of another kind of adapter is given."""
    for field in dataclasses.fields(config):
        kinds = TYPES_OF_OPTION.get(field.name)
        if kinds is not None and config.adapter not in kinds and getattr(config, field.name) != field.default:
            raise UserError(
                f"{field.name} is {getattr(config, field.name)!r}, which has no meaning with adapter {config.adapter}",
                where=f"method.{field.name}",
                fix=f"leave it out, or use method.adapter: {' or '.join(kinds)}",
            )


def without(config: LoraConfig, names: tuple[str, ...], why: str) -> None:
    """Raises UserError where one of these fields is given."""
    for field in dataclasses.fields(config):
        if field.name in names and getattr(config, field.name) != field.default:
            raise UserError(
                f"{field.name} is {getattr(config, field.name)!r}, which has no meaning with adapter {config.adapter}: "
                f"{why}",
                where=f"method.{field.name}",
                fix="leave it out",
            )


def not_of_quantised() -> UserError:
    """Error of PiSSA for a quantised base."""
    return UserError(
        "PiSSA takes the base apart, and this one is quantised: what quantising lost would be among the parts",
        where="method.adapter, quantize",
        fix="use method.adapter: loftq with quantize, or leave quantize out",
    )


def only_of_quantised(name: str) -> UserError:
    """Error of LoftQ for the HF module `name`, which is not quantised."""
    return UserError(
        f"loftq begins at what quantising a weight lost, and {name} is not quantised",
        where="method.targets, quantize",
        fix="leave it out of method.targets, train it in full (method.train_modules), or use method.adapter: lora",
    )


def check_rank(name: str, weight: ArraySpec, config: LoraConfig) -> None:
    """Raises UserError for a rank above the size of a weight [.., out, in], that of the HF module `name`."""
    out, into = weight.shape[-2:]
    if config.rank > min(out, into):
        raise UserError(
            f"rank {config.rank} is above what {name} can use: its weight is {out} x {into}",
            where="method.rank",
            fix=f"give at most {min(out, into)}, or leave {name.rpartition('.')[2]} out of method.targets",
        )
