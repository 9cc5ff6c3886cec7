"""Tokens that a tokenizer does not have yet."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import TYPE_CHECKING

from meshtune.errors import UserError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast


@dataclasses.dataclass(frozen=True)
class NewTokens:
    """`ids` of the new tokens, and of each the `pieces` (ids) that its text was cut into before."""

    ids: tuple[int, ...] = ()
    pieces: tuple[tuple[int, ...], ...] = ()

    def padded_vocab(self, vocab: int, multiple: int | None = None) -> int:
        """The rows that an embedding of `vocab` rows needs, a multiple of `multiple`."""
        need = max(vocab, *(one + 1 for one in self.ids)) if self.ids else vocab
        return need if multiple is None else -(-need // multiple) * multiple


def add_tokens(tokenizer: PreTrainedTokenizerFast, plain: Sequence[str], special: Sequence[str]) -> NewTokens:
    """Adds tokens to a tokenizer: plain ones are text, special ones are left out where text is decoded without them.

    Raises UserError for a token that is there already, is given twice, or is empty.
    """
    wanted = [*plain, *special]
    known = tokenizer.get_vocab()
    for number, token in enumerate(wanted):
        where = "model.new_tokens" if number < len(plain) else "model.new_special_tokens"
        if not token.strip():
            raise UserError(f"a new token is {token!r}", where=where, fix="give text that is not blank")
        if token in wanted[:number]:
            raise UserError(f"the new token {token!r} is given twice", where=where, fix="give it once")
        if token in known:
            raise UserError(
                f"{token!r} is a token already, number {known[token]}", where=where, fix="leave it out: it can be used"
            )
    pieces = tuple(tuple(tokenizer(token, add_special_tokens=False)["input_ids"]) for token in wanted)
    tokenizer.add_tokens(list(plain))
    tokenizer.add_tokens(list(special), special_tokens=True)
    ids = tokenizer.convert_tokens_to_ids(wanted) if wanted else []
    return NewTokens(tuple(ids), pieces)  # pyright: ignore[reportArgumentType] - ids, of a list
