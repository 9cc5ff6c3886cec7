"""Tokenises documents, with a loss weight for every token, and cuts those that are longer than a row.

Prompt tokens are those that generation would be given, and the tokens trained on are exactly the answer and its end of
turn: where the tokenizer would merge the last character of a prompt with the first of an answer, the two are tokenised
apart (counted in `TokenCounts.split`). Otherwise the ids are those of `apply_chat_template(tokenize=True)`. Weights
follow positions, never token ids: an end-of-sequence token is trained on even if it doubles as padding.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import re
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from tokenizers.decoders import ByteLevel

from meshtune.config.data_options import TokenOptions
from meshtune.data.chat import ChatTemplate, as_dicts, template_error
from meshtune.data.conversation import Conversation, Document, Origin, Prompt, Text
from meshtune.data.masks import MaskedText, mask_conversation
from meshtune.data.rendered import check_has_place
from meshtune.errors import UserError
from meshtune.lazy import LazyFunction

if TYPE_CHECKING:
    from tokenizers import Encoding
    from transformers import PreTrainedTokenizerFast

    from meshtune.data.pictures.expansion import DocumentPicture
    from meshtune.data.pictures.reader import PictureReader

check_placeholders = LazyFunction("meshtune.data.pictures.expansion:check_placeholders")
expand_document = LazyFunction("meshtune.data.pictures.expansion:expand_document")
expand_prompt = LazyFunction("meshtune.data.pictures.expansion:expand_prompt")
keep_complete = LazyFunction("meshtune.data.pictures.expansion:keep_complete")
write_pictures = LazyFunction("meshtune.data.pictures.expansion:write_pictures")


def positions_by_turns(
    answers: np.ndarray, max_length: int, *, longest: int | None = None, last_turn_first: bool = False
) -> np.ndarray:
    """The positions of a document that are left when prompt and answer of each turn lose their ends, int64 [kept].

    `answers` int [turns, 2] are the first position of each answer and the one after its last; what precedes an answer
    is its prompt. Turns take room in their order, or with `last_turn_first` from the end, until none is left. `longest`
    is the length of the longer answer of a pair, whose two documents keep the same part of their prompt.
    """
    starts = np.concatenate([[0], answers[:-1, 1]])
    turns: Iterable[tuple[int, int, int]] = zip(starts.tolist(), *answers.T.tolist(), strict=True)
    if last_turn_first:
        turns = reversed(list(turns))
    room, positions = max_length, list[np.ndarray]()
    for start, answer, end in turns:
        if room <= 0:
            break
        prompt_length, answer_length = _lengths(answer - start, longest or end - answer, room)
        positions.append(np.arange(start, start + prompt_length))
        positions.append(np.arange(answer, min(answer + answer_length, end)))
        room -= prompt_length + answer_length
    return np.sort(np.concatenate(positions))


def _lengths(prompt: int, answer: int, room: int) -> tuple[int, int]:
    """The tokens that prompt and answer keep. One that is shorter than half the room is left whole."""
    if answer * 2 < room:
        limit = room
    elif prompt * 2 < room:
        limit = room - prompt
    else:
        limit = int(room * (answer / (prompt + answer)))
    answer = min(limit, answer)
    return min(max(room - answer, 0), prompt), answer


class TokenBytes:
    """The bytes of every token of a byte-level tokenizer; of none for other tokenizers."""

    def __init__(self, tokenizer: PreTrainedTokenizerFast):
        backend = tokenizer.backend_tokenizer
        vocabulary = backend.get_vocab() if isinstance(backend.decoder, ByteLevel) else {}
        # A token that does not stand for bytes is no part of any text.
        self._bytes: list[bytes] = [b""] * (max(vocabulary.values(), default=-1) + 1)
        for token, id_ in vocabulary.items():
            self._bytes[id_] = token.translate(_BYTE_OF).encode("latin-1", "ignore")
        for id_, added in tokenizer.added_tokens_decoder.items():
            if id_ < len(self._bytes):
                self._bytes[id_] = added.content.encode()
        self._lengths = np.asarray([len(token) for token in self._bytes], np.int64)

    def __bool__(self) -> bool:
        return bool(self._bytes)

    def ends(self, ids: np.ndarray, text: str) -> np.ndarray | None:
        """The character after each token, int64 [n]; of each part of a split character, the one after the character.

        None unless the tokens' bytes, one after another, are exactly those of the text.
        """
        data = text.encode()
        if b"".join([self._bytes[id_] for id_ in ids.tolist()]) != data:
            return None
        ends = np.cumsum(self._lengths[ids])
        if len(data) == len(text):
            return ends
        begins_character = (np.frombuffer(data, np.uint8) & 0xC0) != 0x80
        return np.cumsum(begins_character)[ends - 1]


def _byte_of() -> dict[int, int]:
    """The byte of each character of a byte-level vocabulary: printable ones of Latin-1 for themselves,
    the others, in order, for those from U+0100 on (GPT-2)."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    unprintable = [byte for byte in range(0x100) if byte not in printable]
    return {byte: byte for byte in printable} | {0x100 + index: byte for index, byte in enumerate(unprintable)}


_BYTE_OF = _byte_of()


_PLACEHOLDER = re.compile(r"\{\{\s*[A-Za-z_]\w*\s*\}\}")  # {{name}}, which was to be replaced
_BATCH = 256  # documents given to the tokenizer at once, which works on them in parallel


@dataclasses.dataclass(frozen=True)
class Example:
    """A tokenised document: `ids` int32 [n], and `weights` float32 [n], the loss weight of predicting each id.

    `value` is the margin of a pair, or 1 for an answer labelled good. `extra` are bytes that a stage keeps with the
    document, such as the columns of its record that a reward reads.
    """

    ids: np.ndarray
    weights: np.ndarray
    origin: Origin
    value: float = 0.0
    extra: bytes = b""


class Tokenised(NamedTuple):
    """`ids` int32 [n] and `weights` float32 [n] of a text, `answers` int64 [turns, 2], the first position of each
    answer and the one after its last, and its pictures."""

    ids: np.ndarray
    weights: np.ndarray
    answers: np.ndarray
    pictures: Sequence[DocumentPicture] = ()

    @property
    def last_answer(self) -> int:
        """The length of the last answer."""
        return int(self.answers[-1, 1] - self.answers[-1, 0]) if len(self.answers) else 0


@dataclasses.dataclass
class TokenCounts:
    """Counts of tokenised documents.

    `examples` are documents that were kept, `tokens` their ids and `trained_tokens` those with a weight above 0. The
    fields below `tokens_cut` count documents; reasons to leave one out come first, then warnings about those kept.
    `pictures` and `patches` are those of kept documents, `pictures_cut` what truncation took. `first` says where the
    first document of a count is, and which part of it was counted.
    """

    documents: int = 0
    examples: int = 0
    tokens: int = 0
    trained_tokens: int = 0
    truncated: int = 0
    tokens_cut: int = 0
    dropped: int = 0
    nothing_to_train: int = 0
    nothing_after_truncation: int = 0
    prompts_differ: int = 0
    split: int = 0
    straddling: int = 0
    unended: int = 0
    double_bos: int = 0
    special_in_text: int = 0
    placeholders: int = 0
    without_eos: int = 0
    pictures: int = 0
    patches: int = 0
    pictures_cut: int = 0
    skipped: list[tuple[str, str]] = dataclasses.field(default_factory=list)
    first: dict[str, str] = dataclasses.field(default_factory=dict)

    def count(self, name: str, origin: Origin, detail: str = "", *, number: int = 1) -> None:
        """Adds `number` to the count `name`, and remembers where the first is."""
        if number:
            setattr(self, name, getattr(self, name) + number)
            self.first.setdefault(name, f"{origin}{detail}")


class Tokenize:
    """Converts documents to examples lazily, holding one batch of documents in memory, and counts what happens."""

    def __init__(
        self, tokenizer: PreTrainedTokenizerFast, options: TokenOptions, pictures: PictureReader | None = None
    ):
        self.tokenizer, self.options, self.counts, self.pictures = tokenizer, options, TokenCounts(), pictures
        if pictures is not None and pictures.prefix and options.policy.train_on_prompt:
            raise UserError(
                "this model reads its prompt both ways, so that predicting its tokens would teach nothing",
                where="data.train_on_prompt",
                fix="leave it out",
            )
        self._backend = tokenizer.backend_tokenizer
        self._backend.no_truncation()  # a tokenizer.json may enable both
        self._backend.no_padding()
        self._token_bytes = TokenBytes(tokenizer)
        self._chat: ChatTemplate | None = None
        self.saw_conversation = False
        self._prompt_ends: dict[str, list[int]] = {}
        added = tokenizer.added_tokens_decoder
        self._is_special = np.zeros(len(tokenizer) + 1, bool)
        self._is_special[[id_ for id_ in added if id_ < len(self._is_special)]] = True
        specials = sorted((token.content for token in added.values() if token.special), key=len, reverse=True)
        self._special_pattern = re.compile("|".join(map(re.escape, specials)) or "(?!)")
        bare = tokenizer("a", add_special_tokens=False)["input_ids"]
        complete = tokenizer("a")["input_ids"]
        begins_with_bos = complete[:1] == [tokenizer.bos_token_id] != bare[:1]
        self._bos = np.asarray(complete[:1] if begins_with_bos else [], np.int32)

    @property
    def chat(self) -> ChatTemplate:
        """The tokenizer's chat template. Raises UserError if it has none."""
        self.saw_conversation = True
        if self._chat is None:
            self._chat = ChatTemplate(self.tokenizer, self.pictures)
        return self._chat

    def start_counts(self) -> None:
        """Counts from 0. `saw_conversation` says whether any document since was a conversation."""
        self.counts, self.saw_conversation = TokenCounts(), False

    def __call__(self, documents: Iterable[Document]) -> Iterator[Example]:
        """Examples of the documents that have something to train on, in order.

        Raises UserError, naming the record, if a template cannot render it (unless such records are skipped), or if it
        is too long and that is an error.
        """
        return (example for example in self.tokenise_each(documents) if example is not None)

    def tokenise_each(self, documents: Iterable[Document], *, sides: int | None = None) -> Iterator[Example | None]:
        """One item per document: its example, or None if it has nothing to train on. Raises as calling does.

        `sides` are the consecutive documents that share a prompt and are compared by their last answer; None:
        documents are not compared, and all their answers count.
        """
        remaining = iter(documents)
        while batch := list(itertools.islice(remaining, _BATCH)):
            self.counts.documents += len(batch)
            masked = [(document, self._mask(document, sides)) for document in batch]
            encoded = self._encode([(document.origin, text) for document, text in masked if text is not None])
            tokenised = [None if text is None else self._finish(document, next(encoded)) for document, text in masked]
            for first in range(0, len(batch), sides or 1):
                group = tokenised[first : first + (sides or 1)]
                longest = max((text.last_answer for text in group if text is not None), default=0) if sides else None
                for document, text in zip(batch[first : first + len(group)], group, strict=True):
                    yield None if text is None else self._fit(text, document.origin, longest)

    def prompts(self, samples: Iterable[Prompt]) -> Iterator[Example]:
        """The examples of prompts, ready for the model's answer; `extra` is a PromptRecord as bytes.

        One of more than `max_length` tokens is left out, or is an error: a prompt without its end asks something else.
        Raises UserError, naming the record, as calling does.
        """
        for sample in samples:
            self.counts.documents += 1
            try:
                ids, written, pictures = self._prompt_ids(sample.document)
            except UserError as problem:
                if not self.options.skip_bad or problem.where != str(sample.origin):
                    raise
                self.counts.skipped.append((str(sample.origin), problem.what))
                continue
            if len(ids) > self.options.max_length:
                if self.options.overlong == "error":
                    raise UserError(
                        f"a prompt of {len(ids)} tokens leaves no room: {self.options.max_length} are left beside the "
                        "answer",
                        where=str(sample.origin),
                        fix="raise data.max_length, lower rollout.max_tokens, or set data.overlong: drop",
                    )
                self.counts.count("dropped", sample.origin)
                self.counts.tokens_cut += len(ids)
                continue
            self.counts.examples += 1
            self.counts.tokens += len(ids)
            extra = {"prompt": written, "columns": json.loads(sample.columns)}
            if pictures:
                extra["pictures"] = json.loads(self._write_pictures(pictures))
            yield Example(
                np.asarray(ids, np.int32),
                np.zeros(len(ids), np.float32),
                sample.origin,
                extra=json.dumps(extra, ensure_ascii=False).encode(),
            )

    def _prompt_ids(
        self, document: Document
    ) -> tuple[Sequence[int] | np.ndarray, str | list[dict[str, object]], Sequence[DocumentPicture]]:
        """The ids of a prompt, the prompt as rewards get it (text or messages), and its pictures."""
        if self.pictures is not None:
            check_placeholders(self.pictures, document)
        if not isinstance(document, Conversation):
            check_has_place(document)
            ids = self._backend.encode(document.text, add_special_tokens=False).ids
            bos = self._bos.tolist()
            return (ids if ids[: len(bos)] == bos else [*bos, *ids]), document.text, ()
        chat = self.chat
        try:
            text = chat.render(
                chat.messages(document), document.tools, generation_prompt=True, options=document.variables
            )
        except chat.failures as problem:
            raise template_error(problem, where=str(document.origin)) from problem
        ids = self._backend.encode(text, add_special_tokens=False).ids
        if self.pictures is None or not document.pictures:
            return ids, as_dicts(document), ()
        ids, pictures = expand_prompt(self.pictures, document, np.asarray(ids))
        return ids, as_dicts(document), pictures

    def _mask(self, document: Document, sides: int | None) -> MaskedText | None:
        """The document's text with loss weights; None where it is left out because of a mistake."""
        try:
            if self.pictures is not None:
                check_placeholders(self.pictures, document)
            return self._mask_text(document) if isinstance(document, Text) else self._mask_chat(document, sides)
        except UserError as problem:
            if not self.options.skip_bad or problem.where != str(document.origin):
                raise
            self.counts.skipped.append((str(document.origin), problem.what))
            return None

    def _mask_chat(self, document: Conversation, sides: int | None) -> MaskedText:
        locate_all = self.options.overlong == "turns" and sides is None
        masked = mask_conversation(self.chat, document, self.options.policy, locate_all=locate_all)
        self.counts.count("prompts_differ", document.origin, number=masked.prompts_differ)
        self.counts.count("unended", document.origin, number=masked.unended)
        for index, message in enumerate(document.messages):
            if special := self._special_pattern.search(message.content):
                self.counts.count("special_in_text", document.origin, f", message {index}: {special[0]}")
                break
        answers = (message.content for message in document.messages if message.role == "assistant")
        if placeholder := next(filter(None, map(_placeholder, answers)), None):
            self.counts.count("placeholders", document.origin, f": {placeholder[0]}")
        return masked

    def _mask_text(self, document: Text) -> MaskedText:
        check_has_place(document)
        text = document.prompt + document.text
        if special := self._special_pattern.search(text):
            self.counts.count("special_in_text", document.origin, f": {special[0]}")
        if document.prompt and (placeholder := _placeholder(document.text)):
            self.counts.count("placeholders", document.origin, f": {placeholder[0]}")
        spans = ((len(document.prompt), len(text), 1.0),)
        return MaskedText(text, spans, default=float(self.options.policy.train_on_prompt), answers=(0,))

    def _encode(self, texts: list[tuple[Origin, MaskedText]]) -> Iterator[Tokenised]:
        """The tokens of each text, without any that is not in the text."""
        encoded = self._ids_and_ends([masked.text for _, masked in texts])
        for (origin, masked), (ids, ends) in zip(texts, encoded, strict=True):
            weights = np.full(len(ids), masked.default, np.float32)
            clean, positions = True, np.zeros((len(masked.spans), 2), np.int64)
            for span, (start, end, weight) in enumerate(masked.spans if len(ids) else ()):
                first, last = np.searchsorted(ends, [start, end], side="right")
                clean &= (first == 0 or ends[first - 1] == start) and (last == 0 or ends[last - 1] == end)
                clean &= self._is_prompts_own(masked.text, ids, ends, start, int(first))
                if last < len(ids) and (ends[last - 1] if last else 0) < end:
                    last += 1
                weights[first:last] = weight
                positions[span] = first, last
            text = Tokenised(ids, weights, positions[list(masked.answers)])
            yield text if clean else self._encode_apart(masked, text, origin)

    def _ids_and_ends(self, texts: list[str]) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        """ids int32 of each text, and the character of the text after each of them.

        Tokens tile the text, so a token begins where the one before it ends.
        """
        if not self._token_bytes:
            yield from map(_with_offsets, self._backend.encode_batch(texts, add_special_tokens=False))
            return
        for text, encoding in zip(texts, self._backend.encode_batch_fast(texts, add_special_tokens=False), strict=True):
            ids = np.asarray(encoding.ids, np.int32)
            ends = self._token_bytes.ends(ids, text)
            if ends is None:  # the tokenizer changed the text, or left some out
                yield _with_offsets(self._backend.encode(text, add_special_tokens=False))
            else:
                yield ids, ends

    def _is_prompts_own(self, text: str, ids: np.ndarray, ends: np.ndarray, start: int, first: int) -> bool:
        """Whether the tokens before `first` are those of the prompt by itself, since a tokenizer may look ahead."""
        special = np.flatnonzero(self._is_special[np.minimum(ids[:first], len(self._is_special) - 1)])
        after = int(special[-1]) + 1 if len(special) else 0  # special tokens split the text: only the end can differ
        prompt_end = text[ends[after - 1] if after else 0 : start]
        if not prompt_end:
            return first == after
        if (expected := self._prompt_ends.get(prompt_end)) is None:
            expected = self._backend.encode(prompt_end, add_special_tokens=False).ids
            if len(prompt_end) < 64:
                if len(self._prompt_ends) > 4096:
                    self._prompt_ends.clear()
                self._prompt_ends[prompt_end] = expected
        return expected == ids[after:first].tolist()

    def _encode_apart(self, masked: MaskedText, text: Tokenised, origin: Origin) -> Tokenised:
        """Tokenises the text in pieces, split at the edges of its spans, unless the pieces would decode to another
        text."""
        edges = sorted({0, len(masked.text), *(edge for start, end, _ in masked.spans for edge in (start, end))})
        weight_at = {start: weight for start, _, weight in masked.spans}
        pieces = self._backend.encode_batch(
            [masked.text[start:end] for start, end in itertools.pairwise(edges)], add_special_tokens=False
        )
        split = np.asarray([id_ for piece in pieces for id_ in piece.ids], np.int32)
        lengths = [len(piece.ids) for piece in pieces]
        piece_weights = np.asarray([weight_at.get(start, masked.default) for start in edges[:-1]], np.float32)
        same_ids = np.array_equal(split, text.ids)
        if not same_ids and self._backend.decode(split.tolist(), skip_special_tokens=False) != self._backend.decode(
            text.ids.tolist(), skip_special_tokens=False
        ):
            # SentencePiece, for one, puts a space before every piece. The token across the edge is trained on.
            self.counts.count("straddling", origin)
            return text
        self.counts.split += not same_ids
        position = dict(zip(edges, np.cumsum([0, *lengths]).tolist(), strict=True))
        spans = [masked.spans[span] for span in masked.answers]
        answers = np.array([(position[start], position[end]) for start, end, _ in spans], np.int64).reshape(-1, 2)
        return Tokenised(split, np.repeat(piece_weights, lengths), answers)

    def _finish(self, document: Document, text: Tokenised) -> Tokenised:
        """Adds the tokenizer's beginning and end to plain text; a conversation's template writes its own."""
        if not isinstance(document, Conversation):
            return self._with_bos_and_eos(text)
        bos = self.tokenizer.bos_token_id
        twice = bos is not None and text.ids[:2].tolist() == [bos, bos]
        self.counts.count("double_bos", document.origin, number=int(twice))
        if self.pictures is None or not document.pictures:
            return text
        return Tokenised(*expand_document(self.pictures, document, *text[:3]))

    def _with_bos_and_eos(self, text: Tokenised) -> Tokenised:
        eos, (ids, weights, answers, _) = self.tokenizer.eos_token_id, text
        if len(self._bos) and not np.array_equal(ids[:1], self._bos):
            ids, weights, answers = np.concatenate([self._bos, ids]), np.concatenate([[0], weights]), answers + 1
        if eos is None:
            self.counts.without_eos += 1
        elif ids[-1:].tolist() != [eos]:
            ids, weights = np.concatenate([ids, [eos]]), np.concatenate([weights, [1]])
            answers = answers + np.array([0, 1])
        return Tokenised(ids.astype(np.int32), weights.astype(np.float32), answers)

    def _fit(self, text: Tokenised, origin: Origin, longest: int | None) -> Example | None:
        """The example, cut to `max_length`; None where nothing is left to train on, or it is dropped. `longest` is the
        length of the longest answer that it is compared with."""
        if not np.any(text.weights[1:]):  # the first token is never predicted
            self.counts.count("nothing_to_train", origin)
            return None
        by_turns = self.options.overlong == "turns" and len(text.answers) > 0
        excess = 0 if longest is None or not by_turns else longest - text.last_answer
        if len(text.ids) + excess > self.options.max_length:
            shorter = self._shorten(text, origin, longest, by_turns)
            return None if shorter is None else self._example(shorter, origin)
        return self._example(text, origin)

    def _example(self, text: Tokenised, origin: Origin) -> Example:
        self.counts.examples += 1
        self.counts.tokens += len(text.ids)
        self.counts.trained_tokens += int(np.count_nonzero(text.weights[1:]))
        extra = self._write_pictures(text.pictures) if text.pictures else b""
        return Example(text.ids, text.weights, origin, extra=extra)

    def _write_pictures(self, pictures: Sequence[DocumentPicture]) -> bytes:
        assert self.pictures is not None, "expand_document made them"
        self.counts.pictures += len(pictures)
        self.counts.patches += sum(self.pictures.layout(*item.picture.size).patches for item in pictures)
        return write_pictures(pictures)

    def _shorten(self, text: Tokenised, origin: Origin, longest: int | None, by_turns: bool) -> Tokenised | None:
        """The part of a document of more than `max_length` that is kept; None where it is left out."""
        counts, max_length, pictures = self.counts, self.options.max_length, text.pictures
        if self.options.overlong == "error":
            raise UserError(
                f"a document of {len(text.ids)} tokens, more than max_length {max_length}",
                where=str(origin),
                fix="raise data.max_length, or set data.overlong to truncate, turns or drop",
            )
        if self.options.overlong == "drop":
            counts.count("dropped", origin)
            counts.tokens_cut += len(text.ids)
            return None
        positions = np.arange(max_length)
        if by_turns:
            last_first = longest is None and self.options.policy.last_turn_only
            positions = positions_by_turns(text.answers, max_length, longest=longest, last_turn_first=last_first)
        counts.count("truncated", origin)
        counts.tokens_cut += len(text.ids) - len(positions)
        if pictures:
            positions, pictures = keep_complete(self.pictures, text.ids, positions, pictures)
            counts.count("pictures_cut", origin, number=len(text.pictures) - len(pictures))
        if not np.any(text.weights[positions][1:]):
            counts.count("nothing_after_truncation", origin)
            return None
        return text._replace(ids=text.ids[positions], weights=text.weights[positions], pictures=pictures)


def _placeholder(answer: str) -> re.Match[str] | None:
    return _PLACEHOLDER.search(answer) if "{{" in answer else None


def _with_offsets(encoding: Encoding) -> tuple[np.ndarray, np.ndarray]:
    ids = np.asarray(encoding.ids, np.int32)
    # A list of tuples becomes an array faster once it is flat.
    flat = itertools.chain.from_iterable(encoding.offsets)
    offsets = np.fromiter(flat, np.int64, 2 * len(ids)).reshape(-1, 2)
    # Byte-level tokenizers may leave white space out of the offsets, and give every part of a split character the whole
    # character's.
    return ids, np.maximum.accumulate(offsets[:, 1])
