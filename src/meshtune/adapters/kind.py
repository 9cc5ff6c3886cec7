"""The interface of a kind of adapter, and the checks that kinds share."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, ClassVar, NamedTuple, Protocol

import jax
from jax.typing import DTypeLike
from jaxtyping import Array, Float, PyTree

from meshtune.adapters.config import LoraConfig
from meshtune.arrays.spec import ArraySpec
from meshtune.arrays.tree import Tree
from meshtune.errors import UserError
from meshtune.quantize.weight import QuantisedWeight

Weight = jax.Array | QuantisedWeight  # of a linear layer: [.., out, in]


class Adapter(Protocol):
    """The trainable arrays of one weight's adapter, a pytree at "<node>/adapter" in `trainable`; stacked layers lead
    all arrays.

    `fixed` are its frozen arrays, at "<node>/fixed" in `frozen`, or its part of the arrays that all adapters share.
    """

    PEFT_TENSORS: ClassVar[dict[str, str]]  # array field -> the tensor that PEFT stores it as

    def apply(
        self,
        x: Float[Array, "*B i"],
        weight: Weight,
        key: Array | None = None,
        out: DTypeLike | None = None,
        fixed: PyTree = None,
    ) -> Float[Array, "*B o"]:
        """The adapted linear layer without its bias, in `out` or x's dtype. `key` turns dropout on."""
        ...

    def in_use(self, gathered: Callable[..., Array], axes: tuple[str, ...]) -> Adapter:
        """Itself, gathered for computing by `gathered(array, *axes)`; `axes` are the weight's, (.., out, in)."""
        ...

    def merge(self, weight: Float[Array, "*L o i"], fixed: PyTree = None) -> Float[Array, "*L o i"]:
        """The weight that is equivalent to weight and adapter, computed in float32, in the weight's dtype."""
        ...


class Original(NamedTuple):
    """A weight [.., out, in] before quantisation, and the root mean square of its inputs on the run's data [.., in], if
    that was measured."""

    weight: jax.Array
    inputs: jax.Array | None = None


class InitializedAdapter(NamedTuple):
    """An adapter with its initial values, the frozen weight that it adapts, and its frozen arrays (or None)."""

    adapter: Adapter
    weight: Weight
    fixed: PyTree = None


class AdapterType(Protocol):
    """An entry of ADAPTERS."""

    PEFT_TENSORS: ClassVar[dict[str, str]]  # those of its adapters
    PEFT_SHARED: ClassVar[dict[str, str]]  # field of the arrays that all adapters share -> PEFT's tensor
    PEFT_READ: ClassVar[frozenset[str]]  # further fields that `options` reads, or that have no effect
    ORIGINAL: ClassVar[bool]  # whether `start` needs the weight before quantisation

    @staticmethod
    def check(config: LoraConfig) -> None:
        """Raises UserError for options that are invalid, or have no meaning with this type of adapter."""

    @staticmethod
    def check_weight(name: str, weight: ArraySpec, config: LoraConfig) -> None:
        """Raises UserError where the HF module `name`, of weight [out, in], cannot have this adapter."""

    @staticmethod
    def abstract(weight: ArraySpec, config: LoraConfig, dtype: str = "float32") -> Adapter:
        """The adapter of a weight [.., out, in], with ArraySpecs for arrays."""
        ...

    @staticmethod
    def fixed(weight: ArraySpec, config: LoraConfig, dtype: str = "float32") -> PyTree:
        """The frozen arrays of that adapter, as ArraySpecs; None if it has none."""
        ...

    @staticmethod
    def shared(weights: list[ArraySpec], config: LoraConfig, dtype: str = "float32") -> PyTree:
        """The frozen arrays that the adapters of all these weights share, a pytree with `start()` and `cut(shape)`; or
        None."""
        ...

    @staticmethod
    def start(
        adapter: Any, config: LoraConfig, keys: jax.Array, weight: Weight, original: Original | None = None
    ) -> InitializedAdapter:
        """An abstract adapter's initial values. `keys` is one key, or one per layer of a stack. Works inside jit.

        `original` is for types with ORIGINAL.
        """
        ...

    @staticmethod
    def derived(adapter: Any, config: LoraConfig, weight: Weight) -> PyTree:
        """The frozen arrays of an adapter from a file that are computed from the base's weight, or None."""
        ...

    @staticmethod
    def exported(trainable: Tree, frozen: Tree, config: LoraConfig) -> tuple[Tree, LoraConfig]:
        """The adapters to write for a run's trees, and the config that describes them."""
        ...

    @staticmethod
    def fields(config: LoraConfig) -> dict[str, object]:
        """The type's fields of an adapter_config.json, without registry.PEFT_FIELDS."""
        ...

    @staticmethod
    def options(fields: Mapping[str, object], where: str) -> dict[str, Any]:
        """The values of LoraConfig for such fields. Raises UserError for values that are not implemented."""
        ...


class AdapterDefaults:
    """Answers of a type of adapter without frozen arrays, whose adapters are written as they are trained."""

    PEFT_SHARED: ClassVar[dict[str, str]] = {}
    ORIGINAL: ClassVar[bool] = False

    @staticmethod
    def fixed(weight: ArraySpec, config: LoraConfig, dtype: str = "float32") -> PyTree:
        return None

    @staticmethod
    def shared(weights: list[ArraySpec], config: LoraConfig, dtype: str = "float32") -> PyTree:
        return None

    @staticmethod
    def derived(adapter: Any, config: LoraConfig, weight: Weight) -> PyTree:
        return None

    @staticmethod
    def exported(trainable: Tree, frozen: Tree, config: LoraConfig) -> tuple[Tree, LoraConfig]:
        return trainable, config


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
