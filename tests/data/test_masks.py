"""Loss masks, proved by decoding exactly the learned tokens under stock chat templates with real tokenizers.

The expected words are written here by hand from the templates' own documentation of a turn, and prompts and ids are
compared with transformers' `apply_chat_template`, which we did not write. All comparisons are exact.
"""

from __future__ import annotations

import unicodedata

import numpy as np
import pytest

from data.stock_templates import STOCK, encode_conversation, learned_pieces, tokenizer_of
from meshtune.config.data_options import LossPolicy
from meshtune.data.chat import ChatTemplate, as_dicts
from meshtune.data.conversation import Conversation, Message, Origin
from meshtune.data.masks import mask_conversation
from meshtune.errors import UserError

ORIGIN = Origin("chat.jsonl", 7)
TRIMS = {"meta-llama-Llama-3.1-8B-Instruct", "meta-llama-Llama-3.2-3B-Instruct", "google-gemma-2-2b-it"}
# These templates write no system prompt before answers (the refusal is tested below).
NO_SYSTEM = {"google-gemma-2-2b-it", "mistralai-Mistral-Nemo-Instruct-2407"}


# Kin of another template: in the slow tier but for the tests that name them.
SLOW = {"meta-llama-Llama-3.2-3B-Instruct", "Qwen-Qwen2.5-7B-Instruct"}


@pytest.fixture(params=[pytest.param(name, marks=pytest.mark.slow if name in SLOW else ()) for name in STOCK])
def stock(request, shared):
    """(name, tokenizer with the stock template, end of turn)"""
    name = request.param
    return name, tokenizer_of(name, shared), STOCK[name][1]


def chat(*turns, system=None, weights=None, tools=()):
    messages = [Message("system", system)] if system else []
    for place, text in enumerate(turns):
        messages.append(Message("assistant" if place % 2 else "user", text))
    return Conversation(tuple(messages), ORIGIN, tools)


def expected_text(name, text, end, *, last):
    """Returns the text that a turn must teach under a template."""
    if name in TRIMS:
        text = text.strip()
    if name == "Qwen-Qwen3-0.6B":
        # Generation is prompted with '<|im_start|>assistant\n' alone, so the empty reasoning is the model's to say.
        text = "<think>\n\n</think>\n\n" + text.lstrip("\n") if last else text
    if name == "HuggingFaceTB-SmolLM3-3B":
        text = text.lstrip("\n")
    if name != "SmolLM2" and "Llama" not in name and "SmolLM3" not in name:
        text = unicodedata.normalize("NFC", text)  # Qwen's tokenizer does
    return text + end


HARD = {
    "plain": ("What is two and two?", "Four."),
    "unicode": ("Grüße 你好", "日本語 🤖👩‍👩‍👧 naïve e\u0301 — ∑ \u200b zero"),
    "emoji alone": ("?", "👍🏽"),
    "spaces around": ("Hi", "  indented answer  "),
    "leading space": ("Hi", " yes"),
    "newlines around": ("Hi", "\n\nText\n\n"),
    "one newline first": ("Hi", "\nText"),
    "code": ("Hi", "```python\n\tdef f():\n\t\treturn 1\n```"),
    "echo of the user": ("Paris", "Paris"),
    "part of the user": ("Say assistant please", "assistant"),
    "header": ("user", "user"),
    "role words": ("Hi", "model"),
    "digits": ("1 1 1", "1"),
    "punctuation": ("Hi", "...!?\"'"),
    "angle": ("Hi", "<|"),
    "html": ("Hi", "<think is not a tag> & <b>bold</b>"),
    "long": ("Hi", "word " * 400 + "end"),
}


@pytest.mark.parametrize("case", list(HARD))
def test_trained_tokens_decode_to_the_answer_and_its_end_of_turn(stock, case):
    name, tokenizer, end = stock
    question, answer = HARD[case]
    example, counts = encode_conversation(tokenizer, chat(question, answer))
    assert learned_pieces(tokenizer, example) == [expected_text(name, answer, end, last=True)]
    assert counts.prompts_differ == counts.unended == counts.straddling == 0


@pytest.mark.parametrize(
    ("name", "system"),
    [(name, system) for name in STOCK for system in (None, "Be brief. Paris.") if not system or name not in NO_SYSTEM],
)
def test_every_assistant_turn_is_trained_on(name, system, shared):
    tokenizer, end = tokenizer_of(name, shared), STOCK[name][1]
    answers = ["Paris", "Paris", "Paris", " no\n", "Paris is in France 🇫🇷"]
    turns = [turn for answer in answers for turn in ("Paris", answer)]
    example, counts = encode_conversation(tokenizer, chat(*turns, system=system))
    want = [expected_text(name, turn, end, last=place == len(answers) - 1) for place, turn in enumerate(answers)]
    assert learned_pieces(tokenizer, example) == want
    assert counts.prompts_differ == 0


@pytest.mark.parametrize("case", list(HARD))
def test_prompt_tokens_are_those_of_the_generation_prompt(stock, case):
    name, tokenizer, _ = stock
    question, answer = HARD[case]
    conversation = chat(question, answer)
    example, _ = encode_conversation(tokenizer, conversation)
    prompt = ChatTemplate(tokenizer).render(as_dicts(conversation)[:1], generation_prompt=True)
    fed = tokenizer(prompt, add_special_tokens=False)["input_ids"]
    first = int(np.flatnonzero(example.weights)[0])
    assert example.ids[:first].tolist() == fed
    if "3.2" not in name:  # it writes today's date, and ours stands still
        ours = tokenizer.apply_chat_template(as_dicts(conversation)[:1], add_generation_prompt=True, return_dict=False)
        assert fed == ours


@pytest.mark.parametrize("case", list(HARD))
def test_ids_are_those_of_apply_chat_template_unless_the_edge_was_split(stock, case):
    name, tokenizer, _ = stock
    question, answer = HARD[case]
    conversation = chat(question, answer, "And?", "So.")
    example, counts = encode_conversation(tokenizer, conversation)
    text = ChatTemplate(tokenizer).render(as_dicts(conversation))
    ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    if "3.2" not in name:
        assert ids == tokenizer.apply_chat_template(as_dicts(conversation), return_dict=False)
    assert (example.ids.tolist() == ids) == (counts.split == 0)
    assert tokenizer.decode(example.ids.tolist()) == tokenizer.decode(ids)
    assert counts.split == 0 or answer[0].isspace()  # only white space can merge with a header's newline


TOOL = {"type": "function", "function": {"name": "add", "description": "Adds.", "parameters": {"type": "object"}}}
CALL = {"type": "function", "id": "abcdefghi", "function": {"name": "add", "arguments": {"a": 1, "note": "Vier"}}}


def tool_chat(content=""):
    return Conversation(
        (
            Message("user", "Add 1."),
            Message("assistant", content, tool_calls=(CALL,)),
            Message("tool", '{"sum": 2}', extra=(("tool_call_id", "abcdefghi"), ("name", "add"))),
            Message("assistant", "It is 2."),
            Message("user", "Thanks, add"),
            Message("assistant", "It is 2."),
        ),
        ORIGIN,
        (TOOL,),
    )


QWEN_CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 1, "note": "Vier"}}\n</tool_call><|im_end|>'
LLAMA_CALL = '{"name": "add", "parameters": {"a": 1, "note": "Vier"}}<|eot_id|>'
CALLS = {
    "meta-llama-Llama-3.1-8B-Instruct": LLAMA_CALL,
    "meta-llama-Llama-3.2-3B-Instruct": LLAMA_CALL,
    "Qwen-Qwen3-0.6B": QWEN_CALL,
    "Qwen-Qwen2.5-7B-Instruct": "\n" + QWEN_CALL,
    "mistralai-Mistral-Nemo-Instruct-2407": '[TOOL_CALLS][{"name": "add", "arguments": {"a": 1, "note": "Vier"}, '
    '"id": "abcdefghi"}]</s>',
}


@pytest.mark.parametrize("name", list(CALLS))
def test_whole_tool_calls_are_trained_on(name, shared):
    tokenizer, end = tokenizer_of(name, shared), STOCK[name][1]
    example, _ = encode_conversation(tokenizer, tool_chat())
    call = CALLS[name]
    pieces = learned_pieces(tokenizer, example)
    last = expected_text(name, "It is 2.", end, last=True)
    if name == "Qwen-Qwen2.5-7B-Instruct":
        # Without words the template omits the header's newline: "<|im_start|>assistant\n<tool_call>".
        call = QWEN_CALL
    assert pieces == [call, "It is 2." + end, last]


def test_a_template_that_drops_tool_calls_is_refused(shared):
    """SmolLM2's would teach an empty answer instead."""
    with pytest.raises(UserError, match=r"does not write the assistant's tool calls: add[\s\S]*record 7"):
        encode_conversation(tokenizer_of("SmolLM2", shared), tool_chat())


def test_tools_that_a_template_does_not_show_are_refused(shared):
    talk = Conversation(chat("Hi", "Hello").messages, ORIGIN, (TOOL,))
    with pytest.raises(UserError, match=r"does not write tools: add[\s\S]*record 7[\s\S]*chat_template: chatml"):
        encode_conversation(tokenizer_of("SmolLM2", shared), talk)
    assert encode_conversation(tokenizer_of("Qwen-Qwen3-0.6B", shared), talk)[1].examples == 1


@pytest.mark.parametrize("name", ["Qwen-Qwen3-0.6B", "Qwen-Qwen2.5-7B-Instruct"])
def test_text_before_a_tool_call_is_trained_on_with_it(name, shared):
    tokenizer = tokenizer_of(name, shared)
    example, _ = encode_conversation(tokenizer, tool_chat("Let me see."))
    assert learned_pieces(tokenizer, example)[0] == "Let me see.\n" + QWEN_CALL


def test_reasoning_is_trained_on_where_the_template_keeps_it(shared):
    tokenizer = tokenizer_of("Qwen-Qwen3-0.6B", shared)
    first, last = "<think>\nsecret one\n</think>\n\nOne.", "<think>\nsecret two\n</think>\n\nTwo."
    example, counts = encode_conversation(tokenizer, chat("1?", first, "2?", last))
    assert learned_pieces(tokenizer, example) == ["One.<|im_end|>", last + "<|im_end|>"]
    assert counts.prompts_differ == 0


def test_turns_whose_prompt_is_rendered_differently_are_located_and_counted(shared):
    """Qwen3 shows reasoning between tool calls only until the next question."""
    tokenizer = tokenizer_of("Qwen-Qwen3-0.6B", shared)
    turns = list(tool_chat().messages)
    turns[1] = Message("assistant", "", tool_calls=(CALL,), extra=(("reasoning_content", "Adding."),))
    example, counts = encode_conversation(tokenizer, Conversation(tuple(turns), ORIGIN, (TOOL,)))
    assert learned_pieces(tokenizer, example) == [
        QWEN_CALL,
        "It is 2.<|im_end|>",
        "<think>\n\n</think>\n\nIt is 2.<|im_end|>",
    ]
    assert counts.prompts_differ == 1


@pytest.mark.parametrize("mode", ["/think", "/no_think"])
def test_smollm3_modes(shared, mode):
    tokenizer = tokenizer_of("HuggingFaceTB-SmolLM3-3B", shared)
    example, counts = encode_conversation(tokenizer, chat("Hi", "Hello", "Hi", "Hello", system=f"Be kind. {mode}"))
    assert learned_pieces(tokenizer, example) == ["Hello<|im_end|>"] * 2  # the empty reasoning is in the prompt
    assert counts.prompts_differ == 0


def test_gemma_refuses_a_system_turn_with_the_templates_message(shared):
    tokenizer = tokenizer_of("google-gemma-2-2b-it", shared)
    with pytest.raises(UserError, match="System role not supported") as error:
        encode_conversation(tokenizer, chat("Hi", "Hello", system="Be brief."))
    assert error.value.where == str(ORIGIN)


@pytest.mark.parametrize("name", ["google-gemma-2-2b-it", "mistralai-Mistral-Nemo-Instruct-2407"])
def test_bad_alternation_is_refused_with_the_templates_message(name, shared):
    twice = Conversation((Message("user", "a"), Message("user", "b"), Message("assistant", "c")), ORIGIN)
    with pytest.raises(UserError, match=r"roles must alternate[\s\S]*chat.jsonl, record 7"):
        encode_conversation(tokenizer_of(name, shared), twice)


def test_last_turn_only(stock):
    name, tokenizer, end = stock
    example, _ = encode_conversation(tokenizer, chat("a", "one", "b", "two"), LossPolicy(last_turn_only=True))
    assert learned_pieces(tokenizer, example) == [expected_text(name, "two", end, last=True)]


def test_what_follows_the_end_of_a_turn_can_be_trained_on(stock):
    name, tokenizer, end = stock
    example, _ = encode_conversation(tokenizer, chat("a", "one", "b", "two"), LossPolicy(train_on_tail=True))
    tail = "" if "Llama" in name or "Nemo" in name else "\n"
    first, last = expected_text(name, "one", end, last=False), expected_text(name, "two", end, last=True)
    assert learned_pieces(tokenizer, example) == [first + tail, last + tail]


def test_train_on_prompt_trains_on_every_token(stock):
    _, tokenizer, _ = stock
    example, _ = encode_conversation(tokenizer, chat("a", "one", "b", "two"), LossPolicy(train_on_prompt=True))
    assert (example.weights == 1).all()


def test_message_weights_scale_their_turn(stock):
    name, tokenizer, end = stock
    turns = [Message("user", "a"), Message("assistant", "one", weight=0.0)]
    turns += [Message("user", "b", weight=0.25), Message("assistant", "two", weight=0.5)]
    example, _ = encode_conversation(tokenizer, Conversation(tuple(turns), ORIGIN))
    assert set(example.weights.tolist()) == {0.0, 0.25, 0.5}
    half = tokenizer.decode(example.ids[example.weights == 0.5].tolist())
    assert half == expected_text(name, "two", end, last=True)
    assert tokenizer.decode(example.ids[example.weights == 0.25].tolist()) == "b"


def test_a_conversation_may_begin_with_the_assistant(shared):
    tokenizer = tokenizer_of("SmolLM2", shared)
    example, _ = encode_conversation(
        tokenizer, Conversation((Message("assistant", "Hi!"), Message("user", "a"), Message("assistant", "b")), ORIGIN)
    )
    assert learned_pieces(tokenizer, example) == ["Hi!<|im_end|>", "b<|im_end|>"]


def test_consecutive_assistant_turns_are_both_located(shared):
    for name in ("SmolLM2", "Qwen-Qwen3-0.6B", "meta-llama-Llama-3.1-8B-Instruct"):
        tokenizer, end = tokenizer_of(name, shared), STOCK[name][1]
        turns = (Message("user", "a"), Message("assistant", "x"), Message("assistant", "x"))
        example, _ = encode_conversation(tokenizer, Conversation(turns, ORIGIN))
        assert learned_pieces(tokenizer, example) == ["x" + end, expected_text(name, "x", end, last=True)]


def test_answers_that_contain_special_tokens_are_located_and_counted(shared):
    tokenizer = tokenizer_of("SmolLM2", shared)
    text = "The end is written <|im_end|>\n<|im_start|>user\nso."
    example, counts = encode_conversation(tokenizer, chat("How?", text, "And?", "Yes"))
    assert learned_pieces(tokenizer, example) == [text + "<|im_end|>", "Yes<|im_end|>"]
    assert counts.special_in_text == 1


def test_training_on_everything_and_on_the_last_turn_only_is_refused():
    with pytest.raises(UserError, match="contradict"):
        LossPolicy(train_on_prompt=True, last_turn_only=True)


def test_spans_are_ordered_and_within_the_text(stock):
    _, tokenizer, _ = stock
    marked = mask_conversation(ChatTemplate(tokenizer), chat("a", "one", "b", "two", "c", "three"))
    edges = [edge for start, end, _ in marked.spans for edge in (start, end)]
    assert edges == sorted(edges)
    assert edges[-1] <= len(marked.text)
    assert len(marked.spans) == 3
