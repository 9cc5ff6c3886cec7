"""Documents -> token ids with a loss weight for every token.

The tokens of a prompt are those that generation would be fed, and the tokens learned are exactly the words and the end
of turn: where the tokenizer would merge the last character of a prompt with the first of an answer, both are tokenised
apart (counted in `Counts.split`). Otherwise the ids are those of `apply_chat_template(tokenize=True)`.
Weights follow positions, never token ids: an end-of-sequence token is learned even if it doubles as padding.
"""

from __future__ import annotations

import dataclasses
import itertools
import re
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Literal

import numpy as np

from meshtune.data.chat import ChatTemplate
from meshtune.data.conversation import Conversation, Document, Origin
from meshtune.data.masks import Learn, Marked, mark
from meshtune.errors import UserError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

_BATCH = 256  # documents given to the tokenizer at once: it works on them in parallel


@dataclasses.dataclass(frozen=True)
class Example:
    """A tokenised document: `ids` int32 [n], `weights` float32 [n] of learning each id, and where it came from.

    `value` is a pair's margin, or 1 for an answer labelled good.
    """

    ids: np.ndarray
    weights: np.ndarray
    origin: Origin
    value: float = 0.0


@dataclasses.dataclass(frozen=True)
class TokenOptions:
    """How documents become tokens. `max_length` is the most tokens a document may have."""

    max_length: int
    learn: Learn = dataclasses.field(default_factory=Learn)
    overlong: Literal["truncate", "drop", "error"] = "truncate"
    skip_bad: bool = False


@dataclasses.dataclass
class TokenCounts:
    """What happened on the way. Tokens are ids; `learned` are those with a weight above 0."""

    documents: int = 0
    examples: int = 0
    tokens: int = 0
    learned: int = 0
    truncated: int = 0
    tokens_cut: int = 0
    dropped: int = 0
    nothing_to_learn: int = 0
    nothing_after_truncation: int = 0
    prompts_differ: int = 0
    split: int = 0
    straddling: int = 0
    unended: int = 0
    tools_unseen: int = 0
    double_bos: int = 0
    special_in_text: int = 0
    without_eos: int = 0
    skipped: list[tuple[str, str]] = dataclasses.field(default_factory=list)


class Tokenize:
    """Turns documents into examples, and counts. Iterating is lazy: memory stays at one batch of documents."""

    def __init__(self, tokenizer: PreTrainedTokenizerFast, options: TokenOptions):
        self.tokenizer, self.options, self.counts = tokenizer, options, TokenCounts()
        self._backend = tokenizer.backend_tokenizer
        self._backend.no_truncation()  # a tokenizer.json may ask for both
        self._backend.no_padding()
        self._chat: ChatTemplate | None = None
        self._tails: dict[str, list[int]] = {}
        added = tokenizer.added_tokens_decoder
        self._special = np.zeros(len(tokenizer) + 1, bool)
        self._special[[id_ for id_ in added if id_ < len(self._special)]] = True
        specials = sorted((token.content for token in added.values() if token.special), key=len, reverse=True)
        self._specials = re.compile("|".join(map(re.escape, specials)) or "(?!)")
        bare = tokenizer("a", add_special_tokens=False)["input_ids"]
        dressed = tokenizer("a")["input_ids"]
        begins = dressed[:1] if dressed[:1] == [tokenizer.bos_token_id] != bare[:1] else []
        self._begin = np.asarray(begins, np.int32)

    @property
    def chat(self) -> ChatTemplate:
        """The tokenizer's chat template. Raises UserError if it has none."""
        if self._chat is None:
            self._chat = ChatTemplate(self.tokenizer)
        return self._chat

    @property
    def met_conversations(self) -> bool:
        """Whether any document so far was a conversation."""
        return self._chat is not None

    def __call__(self, documents: Iterable[Document]) -> Iterator[Example]:
        """Examples of the documents that have something to learn, in order.

        Raises UserError, naming the record, if a template cannot render it (unless bad records are skipped), or if it
        is too long and that is an error.
        """
        return (example for example in self.each(documents) if example is not None)

    def each(self, documents: Iterable[Document]) -> Iterator[Example | None]:
        """As calling does, with None for every document that has nothing to learn."""
        remaining = iter(documents)
        while batch := list(itertools.islice(remaining, _BATCH)):
            self.counts.documents += len(batch)
            marked = [(document, self._marked(document)) for document in batch]
            encoded = self._encode([one for _, one in marked if one is not None])
            for document, one in marked:
                if one is None:
                    yield None
                else:
                    ids, weights = next(encoded)
                    yield self._fitted(*self._dressed(document, ids, weights), document.origin)

    def _marked(self, document: Document) -> Marked | None:
        counts = self.counts
        if not isinstance(document, Conversation):
            text = document.prompt + document.text
            counts.special_in_text += self._specials.search(text) is not None
            return Marked(
                text, ((len(document.prompt), len(text), 1.0),), rest=float(self.options.learn.train_on_prompt)
            )
        try:
            marked = mark(self.chat, document, self.options.learn)
        except UserError as problem:
            if not self.options.skip_bad or problem.where != str(document.origin):
                raise
            counts.skipped.append((str(document.origin), problem.what))
            return None
        counts.prompts_differ += marked.prompts_differ
        counts.unended += marked.unended
        counts.tools_unseen += marked.tools_unseen
        counts.special_in_text += any(self._specials.search(message.content) for message in document.messages)
        return marked

    def _encode(self, marked: list[Marked]) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        """ids int32 and weights float32 of each text, without any token that the text does not hold."""
        encodings = self._backend.encode_batch([one.text for one in marked], add_special_tokens=False)
        for one, encoding in zip(marked, encodings, strict=True):
            ids = np.asarray(encoding.ids, np.int32)
            if not len(ids):
                yield ids, np.zeros(0, np.float32)
                continue
            offsets = np.asarray(encoding.offsets, np.int64)
            # Tokens tile the text, so a token begins where the one before it ends: byte-level tokenizers may leave
            # white space out of the offsets, and give every part of a split character the whole character's.
            ends = np.maximum.accumulate(offsets[:, 1])
            weights = np.full(len(ids), one.rest, np.float32)
            clean = True
            for start, end, weight in one.spans:
                first, last = np.searchsorted(ends, [start, end], side="right")
                clean &= (first == 0 or ends[first - 1] == start) and (last == 0 or ends[last - 1] == end)
                clean &= self._as_prompted(one.text, ids, ends, start, int(first))
                if last < len(ids) and offsets[last, 0] < end:
                    last += 1
                weights[first:last] = weight
            yield (ids, weights) if clean else self._apart(one, ids, weights)

    def _as_prompted(self, text: str, ids: np.ndarray, ends: np.ndarray, start: int, first: int) -> bool:
        """Whether the tokens before `first` are those of the prompt alone: a tokenizer may look at what follows."""
        special = np.flatnonzero(self._special[np.minimum(ids[:first], len(self._special) - 1)])
        after = int(special[-1]) + 1 if len(special) else 0  # special tokens part the text: only the tail can differ
        tail = text[ends[after - 1] if after else 0 : start]
        if not tail:
            return first == after
        if (expected := self._tails.get(tail)) is None:
            expected = self._backend.encode(tail, add_special_tokens=False).ids
            if len(tail) < 64:
                if len(self._tails) > 4096:
                    self._tails.clear()
                self._tails[tail] = expected
        return expected == ids[after:first].tolist()

    def _apart(self, one: Marked, ids: np.ndarray, weights: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """The text tokenised in pieces, at the edges of its spans; together where the tokenizer cannot do pieces."""
        edges = sorted({0, len(one.text), *(edge for start, end, _ in one.spans for edge in (start, end))})
        weight_at = {start: weight for start, _, weight in one.spans}
        pieces = self._backend.encode_batch(
            [one.text[start:end] for start, end in itertools.pairwise(edges)], add_special_tokens=False
        )
        split = np.asarray([id_ for piece in pieces for id_ in piece.ids], np.int32)
        lengths = [len(piece.ids) for piece in pieces]
        each = np.asarray([weight_at.get(start, one.rest) for start in edges[:-1]], np.float32)
        if np.array_equal(split, ids):
            return ids, np.repeat(each, lengths)
        if self._backend.decode(split.tolist(), skip_special_tokens=False) != self._backend.decode(
            ids.tolist(), skip_special_tokens=False
        ):
            # Such as SentencePiece, which puts a space before every piece. The token across the edge is learned.
            self.counts.straddling += 1
            return ids, weights
        self.counts.split += 1
        return split, np.repeat(each, lengths)

    def _dressed(self, document: Document, ids: np.ndarray, weights: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Plain text gets the tokenizer's beginning and an end; a conversation's template owns its special tokens."""
        begin, end = self.tokenizer.bos_token_id, self.tokenizer.eos_token_id
        if isinstance(document, Conversation):
            self.counts.double_bos += begin is not None and ids[:2].tolist() == [begin, begin]
            return ids, weights
        if len(self._begin) and not np.array_equal(ids[:1], self._begin):
            ids, weights = np.concatenate([self._begin, ids]), np.concatenate([[0], weights])
        if end is None:
            self.counts.without_eos += 1
        elif ids[-1:].tolist() != [end]:
            ids, weights = np.concatenate([ids, [end]]), np.concatenate([weights, [1]])
        return ids.astype(np.int32), weights.astype(np.float32)

    def _fitted(self, ids: np.ndarray, weights: np.ndarray, origin: Origin) -> Example | None:
        counts, most = self.counts, self.options.max_length
        if not np.any(weights[1:]):  # the first token is never predicted
            counts.nothing_to_learn += 1
            return None
        if len(ids) > most:
            if self.options.overlong == "error":
                raise UserError(
                    f"a document of {len(ids)} tokens, more than max_length {most}",
                    where=str(origin),
                    fix="raise data.max_length, or set data.overlong to truncate or drop",
                )
            if self.options.overlong == "drop":
                counts.dropped += 1
                counts.tokens_cut += len(ids)
                return None
            counts.truncated += 1
            counts.tokens_cut += len(ids) - most
            ids, weights = ids[:most], weights[:most]
            if not np.any(weights[1:]):
                counts.nothing_after_truncation += 1
                return None
        counts.examples += 1
        counts.tokens += len(ids)
        counts.learned += int(np.count_nonzero(weights[1:]))
        return Example(ids, weights, origin)
