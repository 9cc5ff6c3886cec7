"""Ids of texts from remembered ids of their words: several times as fast as the tokenizers library.

Byte-level tokenizers cut a text at added tokens, then into words by regular expressions, and turn each word into ids,
whatever stands around it. Most words have been seen before. What is not known to be cut as the library cuts it (other
kinds of tokenizers, some characters), and text that is mostly beyond ASCII, is left to the library.
"""

from __future__ import annotations

import itertools
import json
import re
import unicodedata
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from tokenizers.models import BPE

from meshtune.data.ascii_patterns import GPT2, translate
from meshtune.data.character_classes import UNKNOWN, CharacterClasses, stand_for_all
from meshtune.data.token_bytes import CHARACTER_OF

if TYPE_CHECKING:
    from tokenizers import Encoding, Tokenizer

_WORDS, _LONGEST = 1 << 17, 32  # words remembered at most, and characters of such a word
_IDENTITIES = ("NFC", "NFD", "NFKC", "NFKD")  # normalisers that leave ASCII as it is
_PROBE = "<'S 'll don't I'VE 12 3456 7.8e9, a_b-c (x) == {y}; \t\tz \r\n\r\n \n  w   \v\f\0\x1f\x7fQ `~^ &amp;\n\n  "
_PROBE += "caf\xe9s\u2019s it\u2019s \u2014 \u201cx\u201d \xbd2 \u0663 \u3000\xa0\u2028 na\xefve\xe9 fa\xe7ade"

_FOREIGN = re.compile(r"[^\x00-\x7f]+")
_MOSTLY_ASCII = 1.3  # bytes of a character, up to which most words of a text occur often


class WordIds:
    """The ids of texts, for a tokenizer whose way of cutting text is known; false for another one.

    The tokens are bytes of the text, in order, without those that the vocabulary lacks.
    """

    def __init__(self, backend: Tokenizer):
        self._backend = backend
        self._memory = _Memory(backend)
        self._tokens: dict[str, bytes] = {}
        added, cuts = _added_tokens(backend), _word_cuts(backend)
        self._classes, self._normalization = None, None
        if added is not None and cuts is not None:
            self._tokens = {content: np.int32(id_).tobytes() for content, id_ in added.items()}
            expressions = [cut.expression for cut in cuts]
            self._classes = CharacterClasses(expressions) if stand_for_all(expressions) else None
            self._normalization = None if backend.normalizer is None else _state(backend.normalizer)["type"]
        self._added = re.compile(f"({'|'.join(map(re.escape, sorted(self._tokens, key=len, reverse=True))) or '(?!)'})")
        self._cuts = cuts or []
        probe = f"{_PROBE}{''.join(list(self._tokens)[:2])}{_PROBE}"
        self._usable = added is not None and cuts is not None and self._agrees(probe)

    def __bool__(self) -> bool:
        return self._usable

    def __call__(self, texts: Sequence[str]) -> Iterator[np.ndarray]:
        """The ids of each text, int32 [n], as the library gives them without special tokens."""
        pieces = [self._added.split(text) for text in texts]  # text, added token, text, ...
        in_ascii = [[self._in_ascii(piece) for piece in alternating[::2]] for alternating in pieces]
        foreign = [
            piece
            for alternating, representatives in zip(pieces, in_ascii, strict=True)
            for piece, representative in zip(alternating[::2], representatives, strict=True)
            if representative is None
        ]
        encodings = iter(self._backend.encode_batch_fast(foreign, add_special_tokens=False) if foreign else ())
        for alternating, representatives in zip(pieces, in_ascii, strict=True):
            yield np.frombuffer(b"".join(self._ids(alternating, representatives, encodings)), np.int32)

    def _ids(
        self, alternating: Sequence[str], representatives: Sequence[str | None], encodings: Iterator[Encoding]
    ) -> list[bytes]:
        ids: list[bytes] = []
        for index, piece in enumerate(alternating):
            if index % 2:
                ids.append(self._tokens[piece])
            elif (representative := representatives[index // 2]) is not None:
                ids += map(self._memory.__getitem__, self._pretokens(piece, representative))
            else:
                ids.append(np.asarray(next(encodings).ids, np.int32).tobytes())
        return ids

    def _in_ascii(self, text: str) -> str | None:
        """A text of ASCII that is cut at the same characters; None if there is none, or if it would take longer."""
        if text.isascii():
            return text
        if self._classes is None or len(text.encode()) > _MOSTLY_ASCII * len(text):
            return None
        if self._normalization is not None and not unicodedata.is_normalized(self._normalization, text):
            return None
        representative = _FOREIGN.sub(lambda match: self._class(match[0]), text)
        return None if UNKNOWN in representative else representative

    def _class(self, characters: str) -> str:
        assert self._classes is not None
        return "".join(map(self._classes.__getitem__, characters))

    def _pretokens(self, text: str, representative: str) -> Sequence[str]:
        pretokens: Sequence[str] = (representative,)
        for cut in self._cuts:
            pretokens = [pretoken for piece in pretokens for pretoken in cut(piece)]
        if representative is text:
            return pretokens
        ends = itertools.accumulate(map(len, pretokens), initial=0)
        return [text[start:end] for start, end in itertools.pairwise(ends)]

    def _agrees(self, probe: str) -> bool:
        (ids,) = self([probe])
        return ids.tolist() == self._backend.encode(probe, add_special_tokens=False).ids


class _Memory(dict[str, bytes]):
    """The ids of words, as the bytes of int32, computed by the tokenizer's model where they are not remembered."""

    def __init__(self, backend: Tokenizer):
        super().__init__()
        self._model = backend.model

    def __missing__(self, word: str) -> bytes:
        tokens = self._model.tokenize(word.encode().decode("latin-1").translate(CHARACTER_OF))
        ids = np.asarray([token.id for token in tokens], np.int32).tobytes()
        if len(word) <= _LONGEST:
            if len(self) >= _WORDS:
                self.clear()
            self[word] = ids
        return ids


def _added_tokens(backend: Tokenizer) -> Mapping[str, int] | None:
    """The id of each added token; None where they are matches in another way than by their content, longest first."""
    added = backend.get_added_tokens_decoder()
    by_normalisation = {token.normalized for token in added.values()}
    normalised_text = True in by_normalisation and backend.normalizer is not None
    if len(by_normalisation) > 1 or normalised_text or backend.encode_special_tokens:
        return None
    if any(token.lstrip or token.rstrip or token.single_word or not token.content for token in added.values()):
        return None
    return {token.content: id_ for id_, token in added.items()}


def _word_cuts(backend: Tokenizer) -> list[_Cut] | None:
    """The ways, one after another, in which an ASCII text is cut into words; None where they are not known."""
    model = backend.model
    if not isinstance(model, BPE) or backend.pre_tokenizer is None:
        return None
    # Chance; and tokens that stand for bytes which the vocabulary lacks, which are otherwise left out.
    if model.dropout or model.byte_fallback or model.unk_token is not None:
        return None
    if backend.normalizer is not None and _state(backend.normalizer)["type"] not in _IDENTITIES:
        return None
    state = _state(backend.pre_tokenizer)
    steps = state["pretokenizers"] if state["type"] == "Sequence" else [state]
    if [step["type"] == "ByteLevel" for step in steps] != [False] * (len(steps) - 1) + [True]:
        return None
    cuts = [_cut(step) for step in steps if step["type"] != "ByteLevel" or step.get("use_regex", True)]
    return None if steps[-1]["add_prefix_space"] or None in cuts else [cut for cut in cuts if cut is not None]


def _state(component: Any) -> dict[str, Any]:
    return json.loads(component.__getstate__())


def _cut(step: Mapping[str, Any]) -> _Cut | None:
    match step:
        case {"type": "ByteLevel"}:
            expression = GPT2
        case {"type": "Digits", "individual_digits": individual}:
            expression = r"\p{N}" if individual else r"\p{N}+"
        case {"type": "Split", "behavior": "Isolated", "invert": False, "pattern": {"Regex": str(expression)}}:
            pass
        case _:
            return None
    pattern = translate(expression)
    return None if pattern is None else _Cut(expression, pattern)


class _Cut:
    """Cuts ASCII text into the matches of a pattern, and what is between them."""

    def __init__(self, expression: str, pattern: re.Pattern[str]):
        self.expression = expression
        self._find, self._split = pattern.findall, re.compile(f"({pattern.pattern})", pattern.flags).split

    def __call__(self, text: str) -> Sequence[str]:
        matches = self._find(text)
        if sum(map(len, matches)) == len(text):
            return matches
        return self._split(text) if matches else (text,)
