"""Ids from remembered words: as the tokenizers library gives them, for every text."""

from __future__ import annotations

import random
import unicodedata

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

from meshtune.data import word_ids
from meshtune.data.ascii_patterns import translate
from meshtune.data.tokenizer import load_tokenizer
from meshtune.data.word_ids import WordIds

BYTE_LEVEL = ("smollm2", "hf-llama3_1", "hf-qwen3")
LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
O200K = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
    r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
# DeepSeek V3's steps: numbers, runs of Chinese and Japanese, and the rest.
DEEPSEEK = (
    r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"
    r"| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
PIECES = [
    "don't",
    "I'LL",
    "'S",
    "12345",
    "x1y",
    " ",
    "  ",
    "\n",
    "\r\n",
    "\t",
    "\v\f",
    "\x1c",
    "\x85",
    "é",
    "日本",
    "ſ",
    "€",
]
PIECES += ["<|im_start|>", "<|im_end|>", "<|eot_id|>", "<|im_", "(a+b)", "_", "A" * 40, "\0", "/", "//\n", "'"]
ASCII_OR_NOT = st.one_of(
    st.text(st.characters(max_codepoint=0x7F)), st.text(), st.lists(st.sampled_from(PIECES)).map("".join)
)
MIXED = st.builds(lambda text, pad: text + pad, ASCII_OR_NOT, st.sampled_from(["", " plain words" * 20]))


@pytest.fixture(scope="module", params=BYTE_LEVEL)
def tokenizer(request, shared):
    return load_tokenizer(shared / "assets/tokenizers" / request.param).backend_tokenizer


def by_the_library(tokenizer: Tokenizer, text: str) -> list[int]:
    return tokenizer.encode(text, add_special_tokens=False).ids


def test_ids_are_the_librarys(tokenizer):
    ids = WordIds(tokenizer)
    assert ids

    @settings(max_examples=300, deadline=None)
    @given(st.lists(MIXED, max_size=4))
    def compare(texts):
        assert [row.tolist() for row in ids(texts)] == [by_the_library(tokenizer, text) for text in texts]

    compare()


@pytest.mark.parametrize("form", [None, "NFC", "NFKC"])
@pytest.mark.parametrize("name", ["gpt2", "llama3", "digits"])
def test_every_character_among_ascii_is_cut_as_in_the_library(name, form):
    tokenizer = byte_level(*KNOWN[name], normalizer=form and getattr(normalizers, form)())
    ids = WordIds(tokenizer)
    characters = [character for character in map(chr, range(0x80, 0x3400)) if unicodedata.category(character) != "Cs"]
    texts = [f"I'll: a{character}b x{character} 12{character}3 '{character} the end\n" for character in characters]
    assert sum(ids._in_ascii(text) is None for text in texts) < len(texts) / 3
    for row, encoding in zip(ids(texts), tokenizer.encode_batch(texts, add_special_tokens=False), strict=True):
        assert row.tolist() == encoding.ids


@pytest.mark.parametrize("expression", [r"\p{M}+|\s+", r"[a-z]+|\s+", r"[é]+|\s+", r"\d+|\s+"])
def test_expressions_that_tell_letters_apart_are_left_to_the_library_beyond_ascii(expression):
    tokenizer = byte_level(split(expression))
    ids = WordIds(tokenizer)
    assert ids
    text = "It is 12\u0663 caf\xe9s e\u0301 and more of it"
    assert ids._in_ascii(text) is None
    assert next(ids([text])).tolist() == by_the_library(tokenizer, text)


def test_real_text_has_the_librarys_ids(tokenizer, shared):
    ids = WordIds(tokenizer)
    files = [
        "llamafactory/alpaca_en_demo.json",
        "llamafactory/alpaca_zh_demo.json",
        "tinystories/tinystories_clean.jsonl",
    ]
    for file in files:
        text = (shared / "assets/data" / file).read_text()[:200_000]
        texts = [text[start : start + 997] for start in range(0, len(text), 997)]
        for row, encoding in zip(ids(texts), tokenizer.encode_batch(texts, add_special_tokens=False), strict=True):
            assert row.tolist() == encoding.ids


def test_words_that_were_forgotten_are_found_again(tokenizer, monkeypatch):
    monkeypatch.setattr(word_ids, "_WORDS", 3)
    text = " ".join(random.Random(0).choices(["the", "fox", "jumped", "over", "it"], k=40))
    assert next(WordIds(tokenizer)([text])).tolist() == by_the_library(tokenizer, text)


def byte_level(*steps, normalizer=None, dropout=None, byte_level_step=None) -> Tokenizer:
    """A tokenizer with a token for every byte, and some for pairs."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    merges = [("a", "b"), ("Ġ", "a"), ("1", "2"), ("'", "s"), ("Ġ", "Ġ")]
    vocabulary = [*alphabet, *(first + second for first, second in merges)]
    model = models.BPE({token: id_ for id_, token in enumerate(vocabulary)}, merges, dropout=dropout)
    tokenizer = Tokenizer(model)
    step = byte_level_step or pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=not steps)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([*steps, step])
    tokenizer.decoder = decoders.ByteLevel()
    if normalizer is not None:
        tokenizer.normalizer = normalizer
    return tokenizer


def split(expression: str, behavior: str = "isolated"):
    return pre_tokenizers.Split(Regex(expression), behavior)


KNOWN = {
    "gpt2": [],
    "llama3": [split(LLAMA3)],
    "o200k": [split(O200K)],
    "deepseek": [split(r"\p{N}{1,3}"), split("[一-龥぀-ゟ゠-ヿ]+"), split(DEEPSEEK)],
    "digits": [pre_tokenizers.Digits(False), split(LLAMA3)],
    "gaps": [split(r"[a-c]+(?=\d)|\.")],
}


@pytest.mark.parametrize("name", KNOWN)
def test_expressions_cut_as_in_the_library(name):
    tokenizer = byte_level(*KNOWN[name])
    ids = WordIds(tokenizer)
    assert ids
    alphabet = st.sampled_from("ab cAB'sSt12 \t\r\n\v\f\x1c\x1f\0.,/_-(){}$^日é")

    @settings(max_examples=300, deadline=None)
    @given(st.text(alphabet, max_size=30))
    def compare(text):
        assert next(ids([text])).tolist() == by_the_library(tokenizer, text)

    compare()


UNKNOWN = {
    "another behaviour": byte_level(split(LLAMA3, "merged_with_previous")),
    "a back reference": byte_level(split(r"(a)\1|\s+")),
    "an anchor": byte_level(split(r"^a|\s+")),
    "a class in a class": byte_level(split(r"[a[bc]]+|\s+")),
    "an intersection of classes": byte_level(split(r"[a-z&&b-d]+|\s+")),
    "a script": byte_level(split(r"\p{Han}+|\s+")),
    "a possessive interval": byte_level(split(r"\d{1,3}+")),
    "a normaliser that changes text": byte_level(normalizer=normalizers.Lowercase()),
    "chance": byte_level(dropout=0.1),
    "a space before the text": byte_level(byte_level_step=pre_tokenizers.ByteLevel(add_prefix_space=True)),
}


@pytest.mark.parametrize("name", UNKNOWN)
def test_what_is_not_known_is_left_to_the_library(name):
    assert not WordIds(UNKNOWN[name])


def test_added_tokens_that_take_in_spaces_are_left_to_the_library():
    tokenizer = byte_level()
    assert WordIds(tokenizer)
    tokenizer.add_special_tokens([AddedToken("<sep>", lstrip=True)])
    assert not WordIds(tokenizer)


def test_bytes_that_the_vocabulary_lacks_are_left_out_as_by_the_library():
    model = models.BPE({"a": 0, "Ġ": 1}, [])
    tokenizer = Tokenizer(model)
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    assert next(WordIds(tokenizer)(["a ba"])).tolist() == by_the_library(tokenizer, "a ba") == [0, 1, 0]


def test_a_tokenizer_that_is_not_of_bytes_is_left_to_the_library(shared):
    assert not WordIds(load_tokenizer(shared / "assets/models/stories260K").backend_tokenizer)


def test_classes_among_ascii_are_those_of_unicode():
    pattern = translate(r"\p{L}|[\p{Nd}]|\P{^Zs}")
    assert pattern is not None
    assert [c for c in map(chr, range(128)) if pattern.fullmatch(c)] == [
        c for c in map(chr, range(128)) if c.isalnum() or c == " "
    ]
