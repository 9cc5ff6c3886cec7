"""The interface of grammars that limit which tokens may follow; an engine does not know how grammars are written."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np
from jaxtyping import UInt32

WORD = 32  # tokens whose bits are in one word of a mask


class Constraint(Protocol):
    """How far one answer has come in a grammar. It is advanced token by token, in the order of the answer."""

    def mask(self) -> UInt32[np.ndarray, "V/32"]:
        """The tokens that may follow: bit i % 32 of word i // 32 is set where token i may."""
        ...

    def accept(self, token: int) -> None:
        """Advances by a token that the mask allowed. Raises UserError where the grammar can be followed no further."""
        ...

    @property
    def finished(self) -> bool:
        """Whether the grammar is satisfied and allows nothing more."""
        ...


class Grammar(Protocol):
    """A grammar that answers must follow. Several answers may follow it at once."""

    def start(self) -> Constraint:
        """The constraint of an answer that has no token yet."""
        ...


def mask_words(vocab: int) -> int:
    """Words of a mask over `vocab` tokens."""
    return -(-vocab // WORD)


def packed_masks(constraints: Sequence[Constraint | None], vocab: int) -> UInt32[np.ndarray, "B V/32"]:
    """The mask of every row; all tokens where a row has no constraint. No row has one: a mask of no words."""
    if not any(constraint is not None for constraint in constraints):
        return np.zeros((len(constraints), 0), np.uint32)
    masks = np.full((len(constraints), mask_words(vocab)), 0xFFFFFFFF, np.uint32)
    for row, constraint in zip(masks, constraints, strict=True):
        if constraint is not None:
            row[:] = constraint.mask()
    return masks
