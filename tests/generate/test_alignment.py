"""The bytes and places of tokens in their text, for every kind of tokenizer: joined, they are the text."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from transformers import AutoTokenizer, GPT2Tokenizer, LlamaTokenizer, PreTrainedTokenizerBase, PreTrainedTokenizerFast

from meshtune.generate.text import Alignment, Detokenizer, Place, TokenBytes, special_ids

TEXTS = [
    "Once upon a time, there was a little girl.",
    "  two spaces,\n\n\ttabs and newlines \n",
    "naïve café, Grüße, 你好，世界! 日本語テキスト",
    "a 😀 b, 👩‍👩‍👧‍👦🏳️‍🌈 end语",
    "語😀é",
    "don't . , ! ?",
    "",
]
CORPUS = [*TEXTS, "the dog and the cat went to the park to play with a ball"] * 20
FOLDERS = ["hf-qwen3", "hf-llama3_1", "smollm2"]
TRAINED = ["unigram", "unigram with bytes", "wordpiece"]


def train_tokenizer(kind: str) -> PreTrainedTokenizerBase:
    """A tokenizer of a kind that no folder has."""
    special = ["<unk>", "<s>", "</s>"]
    if kind == "wordpiece":
        tokenizer = Tokenizer(models.WordPiece(unk_token="<unk>"))
        tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.Whitespace(), decoders.WordPiece(cleanup=False)
        tokenizer.train_from_iterator(CORPUS, trainers.WordPieceTrainer(vocab_size=300, special_tokens=special))
    else:
        tokenizer = Tokenizer(models.Unigram())
        tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")
        trainer = trainers.UnigramTrainer(vocab_size=120, special_tokens=special, unk_token="<unk>")
        tokenizer.train_from_iterator([text for text in CORPUS if kind == "unigram" or text.isascii()], trainer)
        tokenizer.decoder = decoders.Metaspace(prepend_scheme="first")
        if kind == "unigram with bytes":
            vocab = [(f"<0x{byte:02X}>", -20.0) for byte in range(256)]
            known = sorted(tokenizer.get_vocab().items(), key=lambda item: item[1])
            pairs = [(token, -float(n)) for n, (token, _) in enumerate(known)]
            tokenizer.model = models.Unigram([*pairs, *vocab], unk_id=0, byte_fallback=True)
            tokenizer.pre_tokenizer = None  # pyright: ignore[reportAttributeAccessIssue]
            tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
            steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
            tokenizer.decoder = decoders.Sequence(steps)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="<unk>", bos_token="<s>", eos_token="</s>")


@pytest.fixture(scope="module", params=[*FOLDERS, "stories260K", "gpt2", "llama2", *TRAINED])
def tokenizer(request, shared) -> PreTrainedTokenizerBase:
    if request.param in TRAINED:
        return train_tokenizer(request.param)
    if request.param == "stories260K":
        return AutoTokenizer.from_pretrained(shared / "assets/models/stories260K")
    folder = shared / "assets/tokenizers" / request.param
    if request.param == "gpt2":
        return GPT2Tokenizer(vocab=str(folder / "vocab.json"), merges=str(folder / "merges.txt"))
    if request.param == "llama2":
        return LlamaTokenizer.from_pretrained(folder)
    return AutoTokenizer.from_pretrained(folder)


def align_ids(tokenizer, ids: list[int], before: list[int] | None = None) -> tuple[str, list[Place]]:
    decoder = Detokenizer(tokenizer, before or ())
    alignment = Alignment(decoder, TokenBytes(tokenizer), special_ids(tokenizer), before is not None)
    parts = [*(alignment.push(id_) for id_ in ids), alignment.finish()]
    return "".join(text for text, _ in parts), [place for _, places in parts for place in places]


def check(text: str, places: list[Place]) -> None:
    """The bytes are the text's, and each token's offset is the character that its first byte is of."""
    assert b"".join(place.content or b"" for place in places) == text.encode()
    position = 0
    for place in places:
        before = text.encode()[:position].decode("utf-8", "ignore")
        if place.content:
            assert place.offset == len(before)
        assert 0 <= place.offset <= len(text)
        position += len(place.content or b"")


@pytest.mark.parametrize("text", TEXTS)
def test_bytes_join_to_the_text_and_offsets_point_into_it(tokenizer, text):
    ids = tokenizer(text)["input_ids"]
    shown, places = align_ids(tokenizer, ids)
    assert shown == tokenizer.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)
    assert len(places) == len(ids)
    check(shown, places)
    for id_, place in zip(ids, places, strict=True):
        assert (place.content is None) == (id_ in special_ids(tokenizer))


@pytest.mark.parametrize("text", TEXTS[:3])
def test_a_continuation_has_its_spaces(tokenizer, text):
    ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    for cut in range(1, len(ids)):
        shown, places = align_ids(tokenizer, ids[cut:], ids[:cut])
        before, _ = align_ids(tokenizer, ids[:cut])
        if before.endswith("�"):  # within a character, which the continuation shows whole
            assert (before.rstrip("�") + shown).endswith(text[-5:])
        else:
            assert before + shown == align_ids(tokenizer, ids)[0]
            check(shown, places)


@settings(max_examples=30, deadline=None)
@given(data=st.data())
def test_any_ids_have_places_in_order(tokenizer, data):
    """Bytes that are no text included: each token has its own, and offsets never go back or out of the text."""
    ids = data.draw(st.lists(st.integers(0, len(tokenizer) - 1), max_size=40))
    shown, places = align_ids(tokenizer, ids)
    assert len(places) == len(ids)
    offsets = [place.offset for place in places]
    assert offsets == sorted(offsets)
    assert all(0 <= offset <= len(shown) for offset in offsets)
    if "�" not in shown:
        check(shown, places)


def test_bytes_that_are_no_text_are_not_held_back_for_ever(shared):
    """A text that has only such bytes would be decoded again with each token."""
    tokenizer = AutoTokenizer.from_pretrained(shared / "assets/models/stories260K")
    byte = tokenizer.convert_tokens_to_ids("<0xF0>")
    decoder = Detokenizer(tokenizer)
    assert sum(map(len, (decoder.push([byte]) for _ in range(100)))) > 70
    assert decoder.unshown < 20
