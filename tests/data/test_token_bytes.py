"""Where tokens end, by their bytes: as the tokenizers library's own offsets say."""

from __future__ import annotations

import random
import unicodedata

import numpy as np
import pytest

from meshtune.data.tokenizer import load_tokenizer
from meshtune.data.tokens import TokenBytes

BYTE_LEVEL = ("smollm2", "hf-llama3_1", "hf-qwen3")
PIECES = (
    "Ünïcödé",
    "日本語",
    "👩‍👩‍👧",
    " \n\n ",
    "\t",
    "don't",
    "1234",
    "e\u0301",
    "<|im_start|>",
    "\u2028",
    "ﬁ",
    "\x00",
    "नमस्ते",
)


def texts():
    rng = random.Random(0)
    for _ in range(200):
        pieces = (rng.choice([*PIECES, "the", "fox "]) for _ in range(rng.randrange(1, 12)))
        yield rng.choice(["", " "]).join(pieces)


@pytest.mark.parametrize("name", BYTE_LEVEL)
def test_ends_are_those_of_the_offsets(shared, name: str):
    tokenizer = load_tokenizer(shared / "assets/tokenizers" / name)
    token_bytes, unlike = TokenBytes(tokenizer), 0
    for text in texts():
        encoding = tokenizer.backend_tokenizer.encode(text, add_special_tokens=False)
        ends = token_bytes.ends(np.asarray(encoding.ids, np.int32), text)
        if ends is None:
            unlike += 1
            assert unicodedata.normalize("NFC", text) != text  # which Qwen's tokenizer writes in its place
            continue
        assert ends[-1] == len(text)
        # Offsets leave out white space at the edges of a token: they end no later, and what is between them is white.
        for (_, end), ours in zip(encoding.offsets, ends, strict=True):
            assert end <= ours
            assert not text[end:ours].strip()
    assert (unlike > 0) == (name == "hf-qwen3")


def test_a_tokenizer_that_is_not_of_bytes_has_none(shared):
    assert not TokenBytes(load_tokenizer(shared / "assets/models/stories260K"))


def test_another_text_is_noticed(shared):
    tokenizer = load_tokenizer(shared / "assets/tokenizers/smollm2")
    token_bytes = TokenBytes(tokenizer)
    ids = np.asarray(tokenizer("Hello world")["input_ids"])
    np.testing.assert_array_equal(token_bytes.ends(ids, "Hello world"), [5, 11])
    assert token_bytes.ends(ids, "Hello World") is None
