"""Interfaces of a training method, and of the modules that it chooses among."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import TYPE_CHECKING, Literal, Protocol

if TYPE_CHECKING:
    from meshtune.adapters.config import LoraConfig


class Modules(Protocol):
    """A model's modules, by Hugging Face name, as a method chooses among them (adapters.model_modules)."""

    def every(self, *, routers: bool) -> list[str]:
        """All modules, a tied matrix once, with or without the routers of experts."""
        ...

    def named(self, patterns: tuple[str, ...], where: str) -> list[str]:
        """The modules that names and patterns select. Raises UserError for one that selects none."""
        ...

    def of_layers(self, first: int | None, last: int | None, patterns: tuple[str, ...]) -> list[str]:
        """The modules of the first or last layers without routers, or those that patterns select there. Raises
        UserError for more layers than there are, and for a pattern that selects nothing."""
        ...

    def of_new_layers(self, blocks: int) -> list[str]:
        """The modules of the layers that were added."""
        ...

    def with_score(self, names: list[str]) -> list[str]:
        """The modules with a reward model's score, through which nothing could learn if it stayed random."""
        ...

    def adapted(self, config: LoraConfig) -> list[str]:
        """The modules that have adapters. Raises UserError where they cannot."""
        ...

    def check_disjoint(self, adapted: list[str], trained: list[str]) -> None:
        """Raises UserError for a module that is to have an adapter and to be trained in full."""
        ...


@dataclasses.dataclass(frozen=True)
class Selection:
    """The Hugging Face modules that have adapters, with the config of each, and those that are trained in full."""

    adapted: Mapping[str, LoraConfig]
    trained: list[str]


@dataclasses.dataclass(frozen=True)
class VisionTraining:
    """The parts of a model that sees which are trained in full beside what a method trains in its language model, and
    whether the language model is frozen whatever the method says."""

    train: tuple[Literal["projector", "tower"], ...]
    freeze_language: bool


@dataclasses.dataclass(frozen=True)
class Method:
    """A training method. Its answers are those of one that trains weights of the base themselves, without adapters."""

    kind: str

    def resolved(self) -> Method:
        """The method of a run, before its base has decided the rest of an adapter's config."""
        return self

    def choose(self, modules: Modules) -> Selection:
        """Chooses the parameters that the method trains. Raises UserError for modules that the model does not have."""
        raise AssertionError(f"method {self.kind} chooses no parameters: its class has no `choose`")

    def with_token_rows(self, rows: tuple[int, ...]) -> Method:
        """The method that also trains these rows of the embedding and of an untied head."""
        return self

    @property
    def adapters(self) -> LoraConfig | None:
        """The config of the adapters; None for methods without."""
        return None

    @property
    def description(self) -> str:
        """The method as the banner shows it."""
        return self.kind

    @property
    def trains_base(self) -> bool:
        """Whether weights of the base change, so that they can neither be quantised nor serve as a reference."""
        return True

    @property
    def trains_token_rows(self) -> bool:
        """Whether the embeddings of new tokens are trained."""
        return False

    @property
    def reference_obstacle(self) -> str | None:
        """Why the model without its adapters is not the one that the run started from; None where it is."""
        return "weights of the base are trained themselves"

    @property
    def draws(self) -> bool:
        """Whether a step needs random numbers."""
        return False

    @property
    def resumes(self) -> str | None:
        """The path of the adapter that training continues."""
        return None

    @property
    def added_layers(self) -> int:
        """The number of layers that are added to the model."""
        return 0

    @property
    def changes_base(self) -> bool:
        """Whether the adapters' start changes the base, which the run then keeps in base/."""
        return False

    @property
    def calibration_rows(self) -> int:
        """Rows of the training data on which the inputs of weights are measured before the start."""
        return 0
