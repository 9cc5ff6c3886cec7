"""The words of every message are in the rendered text, or the record is an error that says what to do instead."""

from __future__ import annotations

import copy
import dataclasses
import re

import pytest
from transformers import AutoTokenizer

from data.stock_templates import trl_template
from meshtune.config.data_options import LossPolicy, TokenOptions
from meshtune.data.chat import ChatTemplate
from meshtune.data.chat_templates import template_names, template_text
from meshtune.data.conversation import Conversation, Message, Origin, Text
from meshtune.data.dialect import split_reasoning
from meshtune.data.masks import mask_conversation
from meshtune.data.tokens import Tokenize
from meshtune.errors import UserError
from meshtune.evaluate.predict import record_of, record_prompt

CHATS = [name for name in template_names() if name != "paligemma"]  # which writes one question and its answer only

ORIGIN = Origin("chat.jsonl", 4)
SHARED = (
    "HuggingFaceTB-SmolLM3-3B",
    "Qwen-Qwen2.5-7B-Instruct",
    "Qwen-Qwen3-0.6B",
    "google-gemma-2-2b-it",
    "meta-llama-Llama-3.1-8B-Instruct",
    "meta-llama-Llama-3.2-3B-Instruct",
    "mistralai-Mistral-Nemo-Instruct-2407",
)
OF_TRL = ("deepseekv3", "gemma4_v5", "glm4moe", "gptoss", "phi3", "qwen3_5_think", "deepseek_r1_distill", "cohere")
TEMPLATES = [*CHATS, *SHARED, *OF_TRL, "no_system"]
# Phi-3's first, which knows user and assistant alone.
NO_SYSTEM = (
    "{% for m in messages %}{% if m.role == 'user' %}<|user|>\n{{ m.content }}<|end|>\n{% elif m.role == 'assistant' %}"
    "<|assistant|>\n{{ m.content }}<|end|>\n{% endif %}{% endfor %}{% if add_generation_prompt %}<|assistant|>\n"
    "{% endif %}"
)


def user(text):
    return Message("user", text)


def answer(text, **fields):
    return Message("assistant", text, **fields)


SYSTEM = Message("system", "Brevis esto.")
CALL = {"type": "function", "id": "abcdefghi", "function": {"name": "adde", "arguments": {"prior": "unum"}}}
RESULT = Message("tool", "tria sunt", extra=(("tool_call_id", "abcdefghi"),))
PARAMETERS = {"type": "object", "properties": {"prior": {"type": "string", "description": "a number"}}}
TOOL = {"type": "function", "function": {"name": "adde", "description": "Adds.", "parameters": PARAMETERS}}
THOUGHT = (("reasoning_content", "cogito"),)
KINDS = {
    "one turn": (user("quid"), answer("respondeo")),
    "system": (SYSTEM, user("quid"), answer("respondeo")),
    "system, several turns": (SYSTEM, user("quid"), answer("primum"), user("dein"), answer("respondeo")),
    "white space": (user("\n quid  est\n\n"), answer("  respondeo \n bene  ")),
    "tag in an earlier answer": (user("quid"), answer("Scribe </think> in fine."), user("dein"), answer("respondeo")),
    "tag in the last answer": (user("quid"), answer("Scribe </think> in fine.")),
    "both tags in an answer": (user("quid"), answer("Utere <think> et </think> bene."), user("dein"), answer("ita")),
    "tag in a fence": (user("quid"), answer("Scribe:\n```\n</think>\n```\nbene."), user("dein"), answer("ita")),
    "tag in a question": (user("Quid </think> facit?"), answer("respondeo")),
    "tag in a system prompt": (Message("system", "Numquam </think> dic."), user("quid"), answer("respondeo")),
    "reasoning in tags": (user("quid"), answer("<think>\ncogito\n</think>\n\nrespondeo")),
    "reasoning in tags, then a tag": (user("quid"), answer("<think>\ncogito\n</think>\n\nScribe </think> in fine.")),
    "reasoning with its end alone": (user("quid"), answer("cogito.\n</think>\n\nrespondeo")),
    "reasoning in a field": (user("quid"), answer("respondeo", extra=THOUGHT)),
    "reasoning in a field, and a tag": (user("quid"), answer("Scribe </think> in fine.", extra=THOUGHT)),
    "calls": (user("quid"), answer("", tool_calls=(CALL,)), RESULT, answer("respondeo")),
    "system and calls": (SYSTEM, user("quid"), answer("", tool_calls=(CALL,)), RESULT, answer("respondeo")),
    "words and a call": (user("quid"), answer("inspiciam", tool_calls=(CALL,)), RESULT, answer("respondeo")),
}


@pytest.fixture(scope="module")
def tokenizer(shared):
    return AutoTokenizer.from_pretrained(shared / "assets/tokenizers/smollm2")


@pytest.fixture(scope="module")
def chats(shared, tokenizer):
    """A chat template by its name: one that ships, one of the shared files, or one that TRL keeps."""
    templates = {}

    def chat(name):
        if name not in templates:
            file = shared / f"assets/tokenizers/chat_templates/{name}.jinja"
            with_template = copy.copy(tokenizer)
            if name == "no_system":
                with_template.chat_template = NO_SYSTEM
            elif name in template_names():
                with_template.chat_template = template_text(name)
            else:
                with_template.chat_template = file.read_text() if file.exists() else trl_template(name)
            templates[name] = ChatTemplate(with_template)
        return templates[name]

    return chat


def words_of(conversation, reasoning):
    """The words that a text must have: of every message, of calls, and of reasoning after the last question."""
    parts = []
    for index, message in enumerate(conversation.messages):
        thought, content = split_reasoning(message.content) if message.role == "assistant" else ("", message.content)
        parts += content.split()
        for call in message.tool_calls:
            parts += [call["function"]["name"], "prior", "unum"]
        if index == len(conversation.messages) - 1 and reasoning != "drop":
            parts += [*thought.split(), *dict(message.extra).get("reasoning_content", "").split()]
    return parts


def follow(chat, conversation, policy, fix):
    """Applies the fixes of an error to the conversation: (chat, conversation, policy) of each."""
    match = re.search(r"set model\.chat_template: (\w+)", fix)
    if match:
        yield chat.alternatives[match[1]], conversation, policy
    for choice in re.findall(r"set data\.reasoning: (\w+)", fix):
        yield chat, conversation, dataclasses.replace(policy, reasoning=choice)
    if "first message of the user" in fix:
        first, second, *later = conversation.messages
        merged = user(f"{first.content}\n\n{second.content}")
        yield chat, dataclasses.replace(conversation, messages=(merged, *later)), policy
    if "put <think> before" in fix:
        index = next(n for n, message in enumerate(conversation.messages) if "</think>" in message.content)
        messages = list(conversation.messages)
        messages[index] = answer(f"<think>{messages[index].content}")
        if "<think>" not in conversation.messages[index].content:
            yield chat, dataclasses.replace(conversation, messages=tuple(messages)), policy
    if "leave out the text" in fix:
        messages = tuple(
            dataclasses.replace(message, content="") if message.tool_calls else message
            for message in conversation.messages
        )
        yield chat, dataclasses.replace(conversation, messages=messages), policy


def problem_of(chat, conversation, policy):
    """(the rendered text, None), or ("", the error)."""
    try:
        return mask_conversation(chat, conversation, policy).text, None
    except UserError as error:
        return "", error


@pytest.mark.parametrize("name", [*CHATS, *SHARED, "glm4moe", "deepseekv3", "no_system"])
def test_words_are_written_or_the_record_is_an_error_with_fixes_that_work(chats, name):
    check_every_kind(chats(name), name, LossPolicy())


@pytest.mark.slow
@pytest.mark.parametrize("reasoning", ["template", "inline", "drop"])
@pytest.mark.parametrize("name", TEMPLATES)
def test_words_are_written_by_every_template_wherever_reasoning_goes(chats, name, reasoning):
    check_every_kind(chats(name), name, LossPolicy(reasoning=reasoning))


def check_every_kind(chat, name, policy):
    refused = set()
    for kind, messages in KINDS.items():
        conversation = Conversation(messages, ORIGIN, (TOOL,) if "call" in kind else ())
        text, error = problem_of(chat, conversation, policy)
        if error is None:
            lost = [word for word in words_of(conversation, policy.reasoning) if word not in text]
            assert not lost, (kind, lost, text)
            assert policy.reasoning != "drop" or "cogito" not in text, kind
            continue
        refused.add(kind)
        assert error.where == str(ORIGIN)
        assert re.search(r"message \d|reasoning|tool|role", error.what), (kind, error)
        fixes = list(follow(chat, conversation, policy, error.fix))
        # What has two faults under one template has no one remedy.
        assert fixes or kind == "reasoning in a field, and a tag", (kind, error.fix)
        for fixed in fixes:
            mask_conversation(*fixed)
    assert not refused & {"one turn", "white space", "tag in a question"}
    no_system = name in ("google-gemma-2-2b-it", "mistralai-Mistral-Nemo-Instruct-2407", "no_system")
    assert ("system" in refused) == no_system
    assert ("tag in an earlier answer" in refused) == (name in READ_TAGS)
    if name in template_names():
        assert refused <= {"reasoning in a field", "reasoning in a field, and a tag", "words and a call"}


# Templates that take what is before a </think> for reasoning.
READ_TAGS = {"Qwen-Qwen3-0.6B", "glm4moe", "qwen3_5_think", "deepseekv3", "deepseek_r1_distill"}


def test_a_message_that_only_some_conversations_lose_is_found(tokenizer):
    """Words that occur elsewhere do not hide that theirs are lost."""
    tokenizer = copy.copy(tokenizer)
    tokenizer.chat_template = (
        "{% for m in messages %}{% if loop.index0 != 2 %}{{ m.content }}<|im_end|>\n{% endif %}{% endfor %}"
    )
    chat = ChatTemplate(tokenizer)
    short = Conversation((user("a"), answer("b")), ORIGIN)
    assert mask_conversation(chat, short).text == "a<|im_end|>\nb<|im_end|>\n"
    long = Conversation((user("a b"), answer("b"), user("a"), answer("b")), ORIGIN)
    with pytest.raises(UserError, match=r"does not write message 2 \(user\)"):
        mask_conversation(chat, long)


@pytest.mark.parametrize(
    "messages",
    [
        (user("Repeat: Write </think> at the end."), answer("Write </think> at the end.")),
        (user("How?"), answer("Use </think> here."), user("You said: Use </think> here."), answer("Yes.")),
    ],
)
def test_an_answer_that_another_message_quotes_is_looked_for_by_itself(chats, messages):
    with pytest.raises(UserError, match="for reasoning"):
        mask_conversation(chats("Qwen-Qwen3-0.6B"), Conversation(messages, ORIGIN), LossPolicy())
    conversation = Conversation((user("Say yes."), answer("yes"), user("yes"), answer("yes")), ORIGIN)
    assert mask_conversation(chats("Qwen-Qwen3-0.6B"), conversation, LossPolicy())


def test_a_switch_that_the_template_reads_is_no_lost_word(chats):
    chat = chats("HuggingFaceTB-SmolLM3-3B")
    for switch, mode in (("/no_think", "/no_think"), ("/think", "/think")):
        messages = (Message("system", f"Brevis esto. {switch}"), user("quid"), answer("respondeo"))
        text = mask_conversation(chat, Conversation(messages, ORIGIN)).text
        assert f"Reasoning Mode: {mode}" in text
        assert "Brevis esto." in text
    with pytest.raises(UserError, match="message 0"):
        mask_conversation(chat, Conversation((Message("system", "See docs/thinking."), *messages[1:]), ORIGIN))


@pytest.mark.parametrize(
    ("content", "parts"),
    [
        ("<think>\na\n</think>\n\nb", ("a", "b")),
        ("a\n</think>\n\nb", ("a", "b")),
        ("a.</think>\n\nb", ("a.", "b")),
        ("a\n</think> b", ("a", "b")),
        ("\n</think>\n\nb", ("", "b")),
        ("</think>\n\nb", ("", "b")),
        ("Write </think> here.", ("", "Write </think> here.")),
        ("Write </think>\nhere.", ("", "Write </think>\nhere.")),
        ("Write `</think>`\nhere.", ("", "Write `</think>`\nhere.")),
        ("Code:\n```\n</think>\n```\n", ("", "Code:\n```\n</think>\n```\n")),
        ("Use <think> and\n</think>\nwell.", ("", "Use <think> and\n</think>\nwell.")),
        ("</think> closes it.", ("", "</think> closes it.")),
        ("a</think>b", ("", "a</think>b")),
    ],
)
def test_reasoning_is_told_from_a_mention(content, parts):
    assert split_reasoning(content) == parts


@pytest.mark.parametrize("name", ["Qwen-Qwen3-0.6B", "glm4moe", "qwen3_5_think"])
def test_an_end_of_reasoning_alone_is_written_as_transformers_does(chats, name):
    chat = chats(name)
    content = "2+2 equals 4.\n</think>\n\nThe answer is 4."
    masked = mask_conversation(chat, Conversation((user("2+2?"), answer(content)), ORIGIN))
    messages = [{"role": "user", "content": "2+2?"}, {"role": "assistant", "content": content}]
    assert masked.text.startswith(chat.tokenizer.apply_chat_template(messages, tokenize=False).rstrip("\n"))
    assert "2+2 equals 4." in masked.text


def test_records_that_lose_words_are_left_out_on_request_and_counted(chats):
    tokenizer = chats("no_system").tokenizer
    conversations = [Conversation(KINDS[kind], ORIGIN) for kind in ("system", "one turn")]
    with pytest.raises(UserError, match=r"message 0 \(system\)"):
        list(Tokenize(tokenizer, TokenOptions(100))(conversations))
    tokenize = Tokenize(tokenizer, TokenOptions(100, skip_bad=True))
    assert len(list(tokenize(conversations))) == 1
    assert "message 0 (system)" in tokenize.counts.skipped[0][1]


def test_a_system_prompt_of_the_recipe_has_no_place_before_a_text(tokenizer):
    text = Text("c", ORIGIN, prompt="p", system_prompt="Brevis esto.")
    with pytest.raises(UserError, match=r"data\.system is not written"):
        list(Tokenize(tokenizer, TokenOptions(100))([text]))
    tokenize = Tokenize(tokenizer, TokenOptions(100, skip_bad=True))
    assert list(tokenize([text])) == []
    assert len(tokenize.counts.skipped) == 1


def test_what_is_asked_is_written_in_predictions_too(chats):
    conversation = Conversation(KINDS["system"], ORIGIN)
    with pytest.raises(UserError, match=r"message 0 \(system\)"):
        record_prompt(chats("no_system").tokenizer, record_of(0, conversation))
    # Mistral Nemo's shows a system prompt where the last message is the user's.
    tokenizer = chats("mistralai-Mistral-Nemo-Instruct-2407").tokenizer
    assert "Brevis esto." in tokenizer.decode(record_prompt(tokenizer, record_of(0, conversation)).ids)
