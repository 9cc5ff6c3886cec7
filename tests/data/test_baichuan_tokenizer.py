"""Baichuan2's tokenizer from its tokenizer.model: sentencepiece's own ids, its chat format, and the tokens that are
learned."""

from __future__ import annotations

import sys

import pytest

from baichuan_files import TEXTS, train_tokenizer
from meshtune.config.data_options import LossPolicy, TokenOptions
from meshtune.data.chat import ChatTemplate
from meshtune.data.conversation import Conversation, Origin
from meshtune.data.formats import select_format
from meshtune.data.masks import mask_conversation
from meshtune.data.tokenizer import load_tokenizer
from meshtune.data.tokens import Tokenize
from meshtune.errors import UserError


@pytest.fixture(scope="module")
def both(tmp_path_factory):
    folder = tmp_path_factory.mktemp("baichuan") / "tokenizer"
    return train_tokenizer(folder), load_tokenizer(folder)


def test_ids_are_those_of_sentencepiece(both):
    theirs, ours = both
    assert theirs.IdToPiece(195) == "<reserved_106>"
    for text in [*TEXTS, "<reserved_5>".join(TEXTS[:3])]:
        ids = ours(text)["input_ids"]
        assert ids == theirs.Encode(text), text
        assert ours.decode(ids) == theirs.Decode(ids)


def test_a_space_before_every_text_is_kept(tmp_path):
    """The first generation's models have one."""
    theirs = train_tokenizer(tmp_path / "first", dummy_prefix=True, add_bos_token=True)
    ours = load_tokenizer(tmp_path / "first")
    for text in TEXTS[:5]:
        assert ours(text)["input_ids"] == [1, *theirs.Encode(text)]
        assert ours.decode(theirs.Encode(text)) == theirs.Decode(theirs.Encode(text))


CHAT = {
    "id": "77",
    "conversations": [
        {"from": "human", "value": "How many times?"},
        {"from": "gpt", "value": "1234 times."},
        {"from": "human", "value": "今天天气"},
        {"from": "gpt", "value": "很好。"},
    ],
}


def conversation() -> Conversation:
    chosen = select_format("auto", [CHAT], "data.json")
    converted = chosen.convert(CHAT, chosen.resolve({}), {}, Origin("data.json", 1))
    assert isinstance(converted, Conversation)
    return converted


def test_a_conversation_is_what_the_original_reads(both):
    """Its ids before what each says, the end after the last answer, no beginning of text."""
    theirs, ours = both
    turns = [turn["value"] for turn in CHAT["conversations"]]
    expected = []
    for speaker, text in zip([195, 196, 195, 196], turns, strict=True):
        expected += [speaker, *theirs.Encode(text)]
    (example,) = Tokenize(ours, TokenOptions(max_length=512))([conversation()])
    assert example.ids.tolist() == [*expected, 2]
    prompt = ChatTemplate(ours).render(
        [{"role": "system", "content": "Once"}, {"role": "user", "content": "a"}], generation_prompt=True
    )
    ids = ours(prompt, add_special_tokens=False)["input_ids"]
    assert ids == [*theirs.Encode("Once"), 195, *theirs.Encode("a"), 196]


def test_only_the_last_answer_ends_with_the_end_of_text(both):
    """Each answer's words are learned, and </s> where it is written: the original learns it also in the place of the
    next question's first token."""
    theirs, ours = both
    (example,) = Tokenize(ours, TokenOptions(max_length=512))([conversation()])
    answers = [theirs.Encode(CHAT["conversations"][n]["value"]) for n in (1, 3)]
    learned = [int(id_) for id_, weight in zip(example.ids, example.weights, strict=True) if weight]
    assert learned == [*answers[0], *answers[1], 2]
    marked = mask_conversation(ChatTemplate(ours), conversation(), LossPolicy())
    assert (marked.prompts_differ, marked.unended) == (0, 1)


def test_speaker_ids_come_from_the_generation_config(tmp_path):
    train_tokenizer(tmp_path / "other")
    (tmp_path / "other/generation_config.json").write_text('{"user_token_id": 191, "assistant_token_id": 192}')
    tokenizer = load_tokenizer(tmp_path / "other")
    prompt = ChatTemplate(tokenizer).render([{"role": "user", "content": "a"}], generation_prompt=True)
    assert prompt == "<reserved_102>a<reserved_103>"
    assert tokenizer.decode([191, 192], skip_special_tokens=True) == ""
    (tmp_path / "other/chat_template.jinja").write_text("{{ messages[0].content }} as it was trained")
    assert ChatTemplate(load_tokenizer(tmp_path / "other")).render([{"content": "a"}]) == "a as it was trained"


@pytest.mark.parametrize("cut", [0, 1, 1000])
def test_a_damaged_file_is_named(tmp_path, cut):
    train_tokenizer(tmp_path / "cut")
    file = tmp_path / "cut/tokenizer.model"
    file.write_bytes(file.read_bytes()[:cut])
    with pytest.raises(UserError, match="not a complete sentencepiece model"):
        load_tokenizer(tmp_path / "cut")


def test_a_git_lfs_pointer_is_named(tmp_path):
    train_tokenizer(tmp_path / "pointer")
    (tmp_path / "pointer/tokenizer.model").write_text("version https://git-lfs.github.com/spec/v1\noid sha256:4e1c\n")
    with pytest.raises(UserError, match="Git LFS"):
        load_tokenizer(tmp_path / "pointer")


@pytest.mark.parametrize("package", ["sentencepiece", "google.protobuf.message"])
def test_without_sentencepiece_the_extra_is_named(tmp_path, monkeypatch, package):
    train_tokenizer(tmp_path / "model")
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(UserError, match=rf"missing.*{package}") as raised:
        load_tokenizer(tmp_path / "model")
    assert "[sentencepiece]" in (raised.value.fix or "")
