"""Grammars that answers must follow, compiled by llguidance for a model's tokenizer."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np
from jaxtyping import UInt32

from meshtune.errors import UserError, pip_install
from meshtune.generate.request import mask_words

if TYPE_CHECKING:
    import llguidance
    from transformers import PreTrainedTokenizerFast

# Between the parts of a JSON text: nothing, a space, or a new line with its indentation. Any number of them would let a
# model that does not know what to say write spaces up to its limit.
WHITESPACE = r"( |\n[ \t]{0,20})?"
MOST_OBJECTS = 2_000  # in the schemas of a request: the time to compile grows with their number's square
ONE_OF = "oneOf constraints are not supported"
JSON_OBJECT: Mapping[str, Any] = {"type": "object"}


@dataclasses.dataclass(frozen=True)
class LLGrammar:
    """A grammar in llguidance's form, compiled. Implements `generate.constraint.Grammar`."""

    matcher: llguidance.LLMatcher
    first: UInt32[np.ndarray, "V/32"]  # the tokens that may begin an answer, which take the longest to compute

    def start(self) -> LLConstraint:
        """The constraint of an answer that has no token yet."""
        return LLConstraint(self.matcher.deep_copy(), self.first)


class LLConstraint:
    """How far an answer has come in a grammar. Implements `generate.constraint.Constraint`."""

    def __init__(self, matcher: llguidance.LLMatcher, first: UInt32[np.ndarray, "V/32"]):
        self._matcher, self._mask = matcher, first

    def mask(self) -> UInt32[np.ndarray, "V/32"]:
        """The tokens that may follow: bit i % 32 of word i // 32 is set where token i may."""
        return self._mask

    def accept(self, token: int) -> None:
        """Advances by a token that the mask allowed. Raises UserError where the grammar has grown too large."""
        with _failures():
            self._matcher.consume_token(token)
        self._mask = _next_mask(self._matcher, len(self._mask))

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
        with _failures(where):
            grammar = json_grammar(schema)
        return self._compiled(grammar, where)

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

        with _failures(where):
            matcher = LLMatcher(self._vocabulary, grammar, log_level=0)
        if matcher.is_error():
            message = _first_line(matcher.get_error())
            fix = "write anyOf in its place, or forms of which a value can fit one alone" if ONE_OF in message else None
            message = ONE_OF if ONE_OF in message else message
            raise UserError(f"the schema cannot be compiled: {message}", where=where, fix=fix)
        return LLGrammar(matcher, _next_mask(matcher, mask_words(self._vocab), where))

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


def check_size(schemas: Sequence[Mapping[str, Any]], where: str) -> None:
    """Raises UserError for schemas that would take too long to compile."""
    count, values = 0, list[Any](schemas)
    while values:
        value = values.pop()
        if isinstance(value, Mapping):
            count += 1
            values += value.values()
        elif isinstance(value, list):
            values += value
    if count > MOST_OBJECTS:
        fix = f"give at most {MOST_OBJECTS}, each property being one"
        raise UserError(f"there are {count} objects in the schema", where=where, fix=fix)


def _next_mask(matcher: llguidance.LLMatcher, length: int, where: str | None = None) -> UInt32[np.ndarray, "V/32"]:
    with _failures(where):
        bits = np.frombuffer(matcher.compute_bitmask(), np.uint32)
    if matcher.is_error():
        raise UserError(f"the schema cannot be followed: {_first_line(matcher.get_error())}", where=where)
    return bits[:length]


@contextlib.contextmanager
def _failures(where: str | None = None) -> Iterator[None]:
    """Names the schema of a request as what llguidance failed on."""
    try:
        yield
    except UserError:
        raise
    except BaseException as problem:  # a panic in Rust is no Exception
        raise UserError(f"the schema cannot be followed: {_first_line(str(problem))}", where=where) from problem


def _first_line(message: str) -> str:
    first, *details = message.split("\n") or [""]
    if first.endswith(":"):  # the reason comes below what is wrong
        first += " " + next((line.removeprefix("error: ") for line in details if line.startswith("error: ")), "")
    return (first if " " in first else f"no text fits it ({first})")[:500]


ANY = r": /(.|\n)*/"


class Lark:
    """A grammar under construction. `special` are the tokens that are no text to the grammar, by their content."""

    def __init__(self, special: Mapping[str, int]):
        self._special, self._rules = special, []
        contents = sorted(special, key=len, reverse=True)
        self._pattern = re.compile("(" + "|".join(map(re.escape, contents)) + ")" if contents else "(?!)")

    def literal(self, text: str) -> str:
        """Exactly this text."""
        parts = [part for part in self._pattern.split(text) if part]
        return " ".join(f"<[{self._special[part]}]>" if part in self._special else _quote_text(part) for part in parts)

    def json(self, schema: Mapping[str, Any]) -> str:
        """A JSON text of a schema."""
        content = {**schema, "x-guidance": {"whitespace_pattern": WHITESPACE}}
        return self._add_rule("json", f": %json {json.dumps(content)}")

    def until(self, end: str) -> str:
        """Any text up to `end`, and `end`."""
        if end in self._special:
            return f"{self._add_rule('text', ANY)} {self.literal(end)}"
        return self._add_rule("text", f"[suffix={_quote_text(end)}]{ANY}")

    def whole(self, start: str) -> str:
        """The grammar whose texts are `start`."""
        return "\n".join([f"start: {start}", *self._rules]) + "\n"

    def _add_rule(self, kind: str, definition: str) -> str:
        name = f"{kind}_{len(self._rules)}"
        self._rules.append(f"{name}{definition}")
        return name


def _quote_text(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)
