"""Streaming text: pieces of whole characters that join to what the tokenizer itself decodes."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoTokenizer

from meshtune.errors import UserError
from meshtune.generate.text import Detokenizer, StopStrings

TEXTS = [
    "Once upon a time, there was a little girl.",
    "  two spaces,\n\n\ttabs and newlines \n",
    "naïve café, Grüße, 你好，世界! 日本語テキスト",
    "emoji 🙂👩‍👩‍👧‍👦🏳️‍🌈 end",
    "don't can't I'm . , ! ? [ ]",
    "",
]


@pytest.fixture(scope="module", params=["stories260K", "smollm2", "hf-qwen3", "hf-llama3_1"])
def tokenizer(request, shared):
    if request.param == "smollm2":
        return AutoTokenizer.from_pretrained(request.getfixturevalue("smollm2"))
    if request.param == "stories260K":
        return AutoTokenizer.from_pretrained(shared / "assets/models/stories260K")
    return AutoTokenizer.from_pretrained(shared / "assets/tokenizers" / request.param)


def pieces(tokenizer, ids, before=(), size=1):
    detokenizer = Detokenizer(tokenizer, before)
    texts = [detokenizer.push(ids[i : i + size]) for i in range(0, len(ids), size)]
    return [*texts, detokenizer.finish()]


def decode_ids(tokenizer, ids):
    return tokenizer.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)


@pytest.mark.parametrize("size", [1, 3])
@pytest.mark.parametrize("text", TEXTS)
def test_pieces_join_to_the_decoded_whole(tokenizer, text, size):
    ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    assert "".join(pieces(tokenizer, ids, size=size)) == decode_ids(tokenizer, ids)


@pytest.mark.parametrize("text", TEXTS)
def test_no_piece_holds_half_a_character(tokenizer, text):
    assert not any("�" in piece for piece in pieces(tokenizer, tokenizer(text)["input_ids"]))


@pytest.mark.parametrize("text", TEXTS)
def test_a_continuation_is_what_follows_the_prompt(tokenizer, text):
    ids = tokenizer(text)["input_ids"]
    for cut in range(1, len(ids)):
        prompt = decode_ids(tokenizer, ids[:cut])
        if prompt and not prompt.endswith("�"):
            assert prompt + "".join(pieces(tokenizer, ids[cut:], ids[:cut])) == decode_ids(tokenizer, ids)


def test_special_tokens_leave_no_trace(tokenizer):
    ids = tokenizer("hello there", add_special_tokens=False)["input_ids"]
    special = tokenizer.eos_token_id
    assert "".join(pieces(tokenizer, [special, *ids, special])) == decode_ids(tokenizer, ids)


def test_broken_bytes_come_out_at_the_end(stories260k):
    tokenizer = AutoTokenizer.from_pretrained(stories260k)
    first_byte = tokenizer.convert_tokens_to_ids("<0xE4>")
    assert pieces(tokenizer, [first_byte]) == ["", "�"]


def test_text_ends_before_a_stop_string():
    ends = StopStrings(["\nUser:", "END"])
    shown = [ends.push(piece) for piece in ["Hello", "\n", "Use", "ful", "\nUs", "er: more", "never"]]
    assert shown == ["Hello", "", "", "\nUseful", "", "", ""]
    assert ends.found
    assert ends.finish() == ""


@settings(max_examples=300, deadline=None)
@given(
    text=st.text("abc", max_size=30),
    strings=st.lists(st.text("abc", min_size=1, max_size=4), max_size=3),
    cuts=st.lists(st.integers(0, 30), max_size=8),
)
def test_stop_strings_cut_the_same_however_text_arrives(text, strings, cuts):
    ends = StopStrings(strings)
    edges = [0, *sorted(min(cut, len(text)) for cut in cuts), len(text)]
    shown = "".join(ends.push(text[a:b]) for a, b in itertools.pairwise(edges)) + ends.finish()
    # The first to be complete ends the text: of two that overlap, the one that is seen first.
    firsts = [at for at in (text.find(string) for string in strings) if at >= 0]
    assert ends.found == bool(firsts)
    assert text.startswith(shown)
    if firsts:
        assert len(shown) >= min(firsts)
        assert not any(string in shown for string in strings)
    else:
        assert shown == text


def test_an_empty_stop_string_is_refused():
    with pytest.raises(UserError, match="empty"):
        StopStrings(["x", ""])
