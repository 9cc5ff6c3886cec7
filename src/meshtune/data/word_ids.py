"""Ids of texts from remembered ids of their words: several times as fast as the tokenizers library.

Byte-level tokenizers cut a text at added tokens, then into words by regular expressions, and turn each word into ids,
whatever stands around it. Most words have been seen before. What is not known to be cut as the library cuts it (text
beyond ASCII, other kinds of tokenizers) is left to the library.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from tokenizers.models import BPE

from meshtune.data.ascii_patterns import GPT2, translate
from meshtune.data.token_bytes import CHARACTER_OF

if TYPE_CHECKING:
    from tokenizers import Encoding, Tokenizer

_WORDS, _LONGEST = 1 << 17, 32  # words remembered at most, and characters of such a word
_IDENTITIES = ("NFC", "NFD", "NFKC", "NFKD")  # normalisers that leave ASCII as it is
_PROBE = "<'S 'll don't I'VE 12 3456 7.8e9, a_b-c (x) == {y}; \t\tz \r\n\r\n \n  w   \v\f\0\x1f\x7fQ `~^ &amp;\n\n  "

Cut = Callable[[str], Sequence[str]]


class WordIds:
    """The ids of texts, for a tokenizer whose way of cutting text is known; false for another one.

    The tokens are bytes of the text, in order, without those that the vocabulary lacks.
    """

    def __init__(self, backend: Tokenizer):
        self._backend = backend
        self._memory = _Memory(backend)
        self._tokens: dict[str, bytes] = {}
        added, cuts = _added_tokens(backend), _word_cuts(backend)
        if added is not None and cuts is not None:
            self._tokens = {content: np.int32(id_).tobytes() for content, id_ in added.items()}
        self._added = re.compile(f"({'|'.join(map(re.escape, sorted(self._tokens, key=len, reverse=True))) or '(?!)'})")
        self._cuts = cuts or []
        probe = f"{_PROBE}{''.join(list(self._tokens)[:2])}{_PROBE}"
        self._usable = added is not None and cuts is not None and self._agrees(probe)

    def __bool__(self) -> bool:
        return self._usable

    def __call__(self, texts: Sequence[str]) -> Iterator[np.ndarray]:
        """The ids of each text, int32 [n], as the library gives them without special tokens."""
        pieces = [self._added.split(text) for text in texts]  # text, added token, text, ...
        foreign = [piece for alternating in pieces for piece in alternating[::2] if not piece.isascii()]
        encodings = iter(self._backend.encode_batch_fast(foreign, add_special_tokens=False) if foreign else ())
        for alternating in pieces:
            yield np.frombuffer(b"".join(self._ids(alternating, encodings)), np.int32)

    def _ids(self, alternating: Sequence[str], encodings: Iterator[Encoding]) -> list[bytes]:
        ids: list[bytes] = []
        for index, piece in enumerate(alternating):
            if index % 2:
                ids.append(self._tokens[piece])
            elif piece.isascii():
                ids += map(self._memory.__getitem__, self._pretokens(piece))
            else:
                ids.append(np.asarray(next(encodings).ids, np.int32).tobytes())
        return ids

    def _pretokens(self, text: str) -> Sequence[str]:
        pretokens: Sequence[str] = (text,)
        for cut in self._cuts:
            pretokens = (
                cut(text) if len(pretokens) == 1 else [pretoken for piece in pretokens for pretoken in cut(piece)]
            )
        return pretokens

    def _agrees(self, probe: str) -> bool:
        (ids,) = self([probe])
        return ids.tolist() == self._backend.encode(probe, add_special_tokens=False).ids


class _Memory(dict[str, bytes]):
    """The ids of words, as the bytes of int32, computed by the tokenizer's model where they are not remembered."""

    def __init__(self, backend: Tokenizer):
        super().__init__()
        self._model = backend.model

    def __missing__(self, word: str) -> bytes:
        tokens = self._model.tokenize(word.translate(CHARACTER_OF))
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


def _word_cuts(backend: Tokenizer) -> list[Cut] | None:
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


def _cut(step: Mapping[str, Any]) -> Cut | None:
    match step:
        case {"type": "ByteLevel"}:
            pattern = translate(GPT2)
        case {"type": "Digits", "individual_digits": individual}:
            pattern = re.compile("[0-9]" if individual else "[0-9]+")
        case {"type": "Split", "behavior": "Isolated", "invert": False, "pattern": {"Regex": expression}}:
            pattern = translate(expression)
        case _:
            pattern = None
    if pattern is None:
        return None
    find, split = pattern.findall, re.compile(f"({pattern.pattern})", pattern.flags).split

    def cut(text: str) -> Sequence[str]:
        matches = find(text)
        if sum(map(len, matches)) == len(text):
            return matches
        return split(text) if matches else (text,)

    return cut
