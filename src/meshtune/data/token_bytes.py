"""Where tokens end in a text, from their bytes: without the offsets that tokenizers keep at a fifth of their time."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from tokenizers.decoders import ByteLevel

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast


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
