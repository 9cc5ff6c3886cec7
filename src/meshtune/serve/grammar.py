"""Grammars that answers must follow, compiled by llguidance for a model's tokenizer."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np
from jaxtyping import UInt32

from meshtune.errors import UserError, pip_install
from meshtune.generate.constraint import mask_words

if TYPE_CHECKING:
    import llguidance
    from transformers import PreTrainedTokenizerFast

# Between the parts of a JSON text: nothing, a space, or a new line with its indentation. Any number of them would let a
# model that does not know what to say write spaces up to its limit.
WHITESPACE = r"( |\n[ \t]{0,20})?"
JSON_OBJECT: Mapping[str, Any] = {"type": "object"}


@dataclasses.dataclass(frozen=True)
class LLGrammar:
    """A grammar in llguidance's form, compiled. Implements `generate.constraint.Grammar`."""

    matcher: llguidance.LLMatcher
    words: int
    stop_ids: frozenset[int]

    def start(self) -> LLConstraint:
        """The constraint of an answer that has no token yet."""
        return LLConstraint(self.matcher.deep_copy(), self.words)


class LLConstraint:
    """How far an answer has come in a grammar. Implements `generate.constraint.Constraint`."""

    def __init__(self, matcher: llguidance.LLMatcher, words: int):
        self._matcher, self._words = matcher, words
        self._mask = self._next_mask()

    def mask(self) -> UInt32[np.ndarray, "V/32"]:
        """The tokens that may follow: bit i % 32 of word i // 32 is set where token i may."""
        return self._mask

    def accept(self, token: int) -> None:
        """Advances by a token that the mask allowed. Raises UserError where the grammar has grown too large."""
        self._matcher.consume_token(token)
        self._mask = self._next_mask()

    def _next_mask(self) -> UInt32[np.ndarray, "V/32"]:
        bits = np.frombuffer(self._matcher.compute_bitmask(), np.uint32)
        if self._matcher.is_error():
            raise UserError(f"the grammar cannot be followed on: {_first_line(self._matcher.get_error())}")
        return bits[: self._words]

    @property
    def finished(self) -> bool:
        """Whether the grammar is satisfied and allows nothing more."""
        return self._matcher.is_stopped()


class Grammars:
    """Compiles grammars for one model. `stop_ids` end an answer where its grammar allows it to end."""

    def __init__(self, tokenizer: PreTrainedTokenizerFast, vocab: int, stop_ids: frozenset[int]):
        self._tokenizer, self._vocab, self._stop_ids = tokenizer, vocab, stop_ids

    def json(self, schema: Mapping[str, Any], where: str) -> LLGrammar:
        """A JSON text of a schema. Raises UserError for a schema that cannot be compiled; `where` names it."""
        return self._compiled(json_grammar(schema), where)

    def lark(self, grammar: str, where: str) -> LLGrammar:
        """A text of a grammar in llguidance's dialect of Lark. Raises UserError as `json` does."""
        from llguidance import LLMatcher

        return self._compiled(LLMatcher.grammar_from_lark(grammar), where)

    @property
    def special(self) -> dict[str, int]:
        """The tokens that are no text to a grammar, by their content."""
        added = self._tokenizer.added_tokens_decoder.items()
        return {token.content: id_ for id_, token in added if self._vocabulary.is_special_token(id_)}

    def _compiled(self, grammar: str, where: str) -> LLGrammar:
        from llguidance import LLMatcher

        matcher = LLMatcher(self._vocabulary, grammar, log_level=0)
        if matcher.is_error():
            raise UserError(f"the schema cannot be compiled: {_first_line(matcher.get_error())}", where=where)
        return LLGrammar(matcher, mask_words(self._vocab), self._stop_ids)

    @cached_property
    def _vocabulary(self) -> llguidance.LLTokenizer:
        try:
            from llguidance.hf import from_tokenizer
        except ImportError as problem:
            raise UserError("answers of a given form need llguidance", fix=pip_install("serve")) from problem
        return from_tokenizer(self._tokenizer, n_vocab=self._vocab, eos_token=sorted(self._stop_ids) or None)


def json_grammar(schema: Mapping[str, Any]) -> str:
    """A JSON schema as a grammar of llguidance's."""
    from llguidance import LLMatcher

    return LLMatcher.grammar_from_json_schema(json.dumps(schema), overrides={"whitespace_pattern": WHITESPACE})


def _first_line(message: str) -> str:
    return message.split("\n", 1)[0]
