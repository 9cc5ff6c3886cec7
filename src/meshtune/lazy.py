"""Functions and tables by the names of their modules, which are imported when they are first used.

A run imports only the optimizer, adapter, kernels and readers that it uses.
"""

from __future__ import annotations

import dataclasses
import importlib
from collections.abc import Iterator, Mapping
from typing import Any, TypeVar

Key = TypeVar("Key")
Value = TypeVar("Value")


@dataclasses.dataclass(frozen=True)
class LazyFunction:
    """A function as "module:name"; calling it imports the module."""

    target: str

    def load(self) -> Any:
        """Imports the module and returns the function."""
        module, _, name = self.target.partition(":")
        return getattr(importlib.import_module(module), name)

    def __call__(self, *arguments: Any, **options: Any) -> Any:
        return self.load()(*arguments, **options)


class LazyTable(Mapping[Key, Value]):
    """A table whose entries are "module:name"; looking one up imports its module."""

    def __init__(self, targets: Mapping[Key, str]) -> None:
        self.targets = targets

    def __getitem__(self, key: Key) -> Value:
        return LazyFunction(self.targets[key]).load()

    def __iter__(self) -> Iterator[Key]:
        return iter(self.targets)

    def __len__(self) -> int:
        return len(self.targets)
