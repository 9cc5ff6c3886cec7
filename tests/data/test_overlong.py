"""Documents that are cut turn by turn keep what LLaMA-Factory keeps (tests/train/test_peer_trainers.py runs it)."""

from __future__ import annotations

import numpy as np
import pytest
from transformers import AutoTokenizer

from meshtune.config.data_options import LossPolicy, TokenOptions
from meshtune.data.conversation import Conversation, Message, Origin, Pair, Text
from meshtune.data.loader import tokenise_pairs
from meshtune.data.tokens import Tokenize, positions_by_turns

# (prompt, answer, room) -> what infer_seqlen of llamafactory 0.9.5 returned for them.
CUTS = {
    (10, 5, 20): (10, 5), (100, 5, 20): (15, 5), (5, 100, 20): (5, 15), (100, 100, 20): (10, 10),
    (100, 50, 20): (14, 6), (12, 9, 20): (11, 9), (0, 30, 20): (0, 20), (30, 10, 20): (15, 5), (30, 9, 20): (11, 9),
    (9, 30, 20): (9, 11), (10, 30, 20): (5, 15), (1000, 300, 512): (394, 118), (64, 64, 1): (1, 0),
}  # fmt: skip


@pytest.mark.parametrize(("lengths", "expected"), CUTS.items())
def test_a_turn_keeps_what_llama_factory_keeps(lengths, expected):
    prompt, answer, room = lengths
    positions = positions_by_turns(np.array([[prompt, prompt + answer]]), room)
    assert positions.tolist() == [*range(expected[0]), *range(prompt, prompt + expected[1])]


def test_turns_take_room_in_their_order_or_from_the_end():
    answers = np.array([[4, 8], [12, 20]])  # prompts of 4 and 4 tokens, answers of 4 and 8
    assert positions_by_turns(answers, 14).tolist() == [*range(8), 8, 9, 12, 13, 14, 15]
    assert positions_by_turns(answers, 8).tolist() == list(range(8))
    assert positions_by_turns(answers, 14, last_turn_first=True).tolist() == [0, 4, *range(8, 20)]


def test_the_documents_of_a_pair_keep_the_same_part_of_their_prompt():
    answers = np.array([[10, 14]])
    assert positions_by_turns(answers, 15, longest=12).tolist() == [*range(7), *range(10, 14)]


@pytest.fixture(scope="module")
def smol(shared):
    return AutoTokenizer.from_pretrained(str(shared / "assets/tokenizers/smollm2"))


def conversation(*contents: str) -> Conversation:
    roles = ("user", "assistant") * (len(contents) // 2)
    messages = tuple(Message(role, content) for role, content in zip(roles, contents, strict=True))
    return Conversation(messages, Origin("chats.jsonl", 0))


def run(tokenizer, documents, max_length, **policy):
    tokenize = Tokenize(tokenizer, TokenOptions(max_length, LossPolicy(**policy), overlong="turns"))
    return list(tokenize(documents)), tokenize.counts


def test_prompt_and_answer_are_both_cut(smol):
    document = conversation("red " * 100, "blue " * 100)
    ((full,), _), ((cut,), counts) = run(smol, [document], 1000), run(smol, [document], 60)
    learned = full.weights > 0
    prompt, answer = int(learned.argmax()), int(learned.sum())
    answer_length = int(60 * answer / (prompt + answer))
    np.testing.assert_array_equal(
        cut.ids, [*full.ids[: 60 - answer_length], *full.ids[prompt : prompt + answer_length]]
    )
    np.testing.assert_array_equal(cut.weights, [0] * (60 - answer_length) + [1] * answer_length)
    assert (counts.truncated, counts.tokens_cut) == (1, len(full.ids) - 60)


def test_the_last_turn_is_whole_where_it_alone_is_trained_on(smol):
    document = conversation("red " * 100, "blue " * 100, "one?", "two")
    (cut,), _ = run(smol, [document], 80, last_turn_only=True)
    assert len(cut.ids) == 80
    text = smol.decode(cut.ids.tolist())
    assert "one?" in text
    assert "blue" in text
    assert smol.decode(cut.ids[cut.weights > 0].tolist()) == "two<|im_end|>"


def test_text_is_cut_at_its_end(smol):
    (cut,), _ = run(smol, [Text("red " * 100, Origin("texts.jsonl", 0))], 30)
    assert cut.ids.tolist() == smol("red " * 100)["input_ids"][:30]


def test_a_pair_is_cut_alike(smol):
    chosen, rejected = conversation("red " * 50, "blue " * 60), conversation("red " * 50, "no")
    tokenize = Tokenize(smol, TokenOptions(90, LossPolicy(last_turn_only=True), overlong="turns"))
    first, second = tokenise_pairs(tokenize, [Pair(chosen, rejected, 0.0)])
    prompts = [side.ids[side.weights == 0].tolist() for side in (first, second)]
    assert prompts[0] == prompts[1]
    assert len(first.ids) == 90
    assert tokenize.counts.truncated == 2
