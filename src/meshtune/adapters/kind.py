"""What a kind of adapter is. A new kind is one module that has what is listed here, and one line in ADAPTERS."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar, NamedTuple, Protocol

import jax
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from meshtune.adapters.config import LoraConfig
from meshtune.arrays.spec import ArraySpec


class Adapter(Protocol):
    """What is trained beside one weight, a pytree, at "<node>/adapter" in `trainable`; stacked layers lead all arrays.

    `fixed` is what it reads and nobody trains, at "<node>/fixed" in `frozen`, or its cut of what all adapters share.
    """

    PEFT_TENSORS: ClassVar[dict[str, str]]  # array field -> the tensor that PEFT stores it as

    def apply(
        self,
        x: Float[Array, "*B i"],
        weight: Any,
        key: Array | None = None,
        out: DTypeLike | None = None,
        fixed: Any = None,
    ) -> Float[Array, "*B o"]:
        """The adapted linear layer without its bias, in `out` or x's dtype. `key` turns dropout on."""
        ...

    def in_use(self, gathered: Callable[..., Any], axes: tuple[str, str]) -> Any:
        """Itself, laid out for computing by `gathered(array, *axes)`; `axes` are the weight's, (out, in)."""
        ...

    def merge(self, weight: Float[Array, "*L o i"], fixed: Any = None) -> Float[Array, "*L o i"]:
        """The one weight that does what weight and adapter do, computed in float32, in the weight's dtype."""
        ...


class Original(NamedTuple):
    """A weight [.., out, in] as it was before it was quantised, and how large each of its inputs is on the run's data
    [.., in], where that was measured."""

    weight: Any
    inputs: Any = None


class Started(NamedTuple):
    """An adapter where training begins, the weight that stays frozen under it, and what it reads beside (or None)."""

    adapter: Any
    weight: Any
    fixed: Any = None


class Kind(Protocol):
    """An entry of ADAPTERS."""

    PEFT_TENSORS: ClassVar[dict[str, str]]  # those of its adapters
    PEFT_SHARED: ClassVar[dict[str, str]]  # array field of what they share -> PEFT's tensor
    PEFT_FIELDS: ClassVar[dict[str, Any]]  # what marks the kind in an adapter_config.json
    PEFT_READ: ClassVar[frozenset[str]]  # the fields beside those that `options` reads, or that change nothing
    ORIGINAL: ClassVar[bool]  # whether `start` must see the weight as it was before it was quantised

    @staticmethod
    def check(config: LoraConfig) -> None:
        """Raises UserError for options that cannot be, or that have no meaning with this kind."""

    @staticmethod
    def check_weight(name: str, weight: ArraySpec, config: LoraConfig) -> None:
        """Raises UserError where the adapter of the HF module `name`, of weight [out, in], cannot be."""

    @staticmethod
    def abstract(weight: ArraySpec, config: LoraConfig, dtype: str = "float32") -> Any:
        """The adapter of a weight [.., out, in], with ArraySpecs for arrays."""
        ...

    @staticmethod
    def fixed(weight: ArraySpec, config: LoraConfig, dtype: str = "float32") -> Any:
        """What that adapter reads and nobody trains, with ArraySpecs for arrays; None where there is nothing."""
        ...

    @staticmethod
    def shared(weights: list[ArraySpec], config: LoraConfig, dtype: str = "float32") -> Any:
        """What the adapters of all these weights read in common, a pytree with `start()` and `cut(shape)`; or None."""
        ...

    @staticmethod
    def start(
        adapter: Any, config: LoraConfig, keys: jax.Array, weight: Any, original: Original | None = None
    ) -> Started:
        """The beginning of an abstract adapter. `keys` is one key, or one a layer of a stack. Works inside jit.

        `original` is for kinds with ORIGINAL.
        """
        ...

    @staticmethod
    def derived(adapter: Any, config: LoraConfig, weight: Any) -> Any:
        """What an adapter from a file reads beside it that is made of the base's weight, or None."""
        ...

    @staticmethod
    def exported(trainable: Any, frozen: Any, config: LoraConfig) -> tuple[Any, LoraConfig]:
        """The trees of a run as adapters that are written, and the config that describes these."""
        ...

    @staticmethod
    def fields(config: LoraConfig) -> dict[str, Any]:
        """The kind's own fields of an adapter_config.json, PEFT_FIELDS apart."""
        ...

    @staticmethod
    def options(fields: dict[str, Any], where: str) -> dict[str, Any]:
        """What such fields say, as LoraConfig's own. Raises UserError for what is not implemented."""
        ...
