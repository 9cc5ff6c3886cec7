"""Adds tokens to a tokenizer."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import TYPE_CHECKING

from meshtune.errors import UserError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast


@dataclasses.dataclass(frozen=True)
class NewTokens:
    """The ids of new tokens, and for each the ids that its text was tokenised to before (`pieces`)."""

    ids: tuple[int, ...] = ()
    pieces: tuple[tuple[int, ...], ...] = ()

    def padded_vocab(self, vocab: int, multiple: int | None = None) -> int:
        """The size that an embedding of `vocab` tokens needs with the new ones, rounded up to a multiple."""
        size = max(vocab, *(id_ + 1 for id_ in self.ids)) if self.ids else vocab
        return size if multiple is None else -(-size // multiple) * multiple


def add_tokens(tokenizer: PreTrainedTokenizerFast, plain: Sequence[str], special: Sequence[str]) -> NewTokens:
    """Adds tokens to a tokenizer: plain ones are text; special ones can be left out when decoding.

    Raises UserError for a token that exists already, is given twice, or is blank.
    """
    tokens = [*plain, *special]
    known = tokenizer.get_vocab()
    for index, token in enumerate(tokens):
        where = "model.new_tokens" if index < len(plain) else "model.new_special_tokens"
        if not token.strip():
            raise UserError(f"a new token is {token!r}", where=where, fix="give text that is not blank")
        if token in tokens[:index]:
            raise UserError(f"the new token {token!r} is given twice", where=where, fix="give it once")
        if token in known:
            raise UserError(
                f"{token!r} is a token already, with id {known[token]}", where=where, fix="leave it out: it can be used"
            )
    pieces = tuple(tuple(tokenizer(token, add_special_tokens=False)["input_ids"]) for token in tokens)
    tokenizer.add_tokens(list(plain))
    tokenizer.add_tokens(list(special), special_tokens=True)
    ids = tokenizer.convert_tokens_to_ids(tokens) if tokens else []
    return NewTokens(tuple(ids), pieces)  # pyright: ignore[reportArgumentType] - a list of ids
