"""Chat templates render as in transformers, with a fixed date, and fail with their own messages."""

from __future__ import annotations

import datetime

import pytest

from meshtune.config.data_options import TokenOptions
from meshtune.data.chat import ChatTemplate, as_dicts
from meshtune.data.chat_templates import template_names
from meshtune.data.conversation import Conversation, Message, Origin
from meshtune.data.masks import mask_conversation
from meshtune.data.tokenizer import load_tokenizer
from meshtune.data.tokens import Tokenize
from meshtune.errors import UserError

CHATS = [name for name in template_names() if name != "paligemma"]  # which writes one question and its answer only

ORIGIN = Origin("chat.jsonl", 3)
ADD = {"name": "add", "arguments": {"a": 1, "b": 2}}
CHAT = Conversation(
    (Message("user", "Hi"), Message("assistant", "Hello"), Message("user", "a"), Message("assistant", "b")), ORIGIN
)


@pytest.fixture(scope="module")
def llama(shared):
    return load_tokenizer(shared / "assets/tokenizers/hf-llama3_1")


@pytest.fixture
def stories(shared):
    return load_tokenizer(shared / "assets/models/stories260K")


def test_a_template_writes_a_fixed_date(llama, shared):
    file = shared / "assets/tokenizers/chat_templates/meta-llama-Llama-3.2-3B-Instruct.jinja"
    llama.chat_template = file.read_text()
    chat = ChatTemplate(llama)
    ours = chat.render(as_dicts(CHAT))
    theirs = llama.apply_chat_template(as_dicts(CHAT), tokenize=False)
    today = datetime.date.today().strftime("%d %b %Y")
    assert chat.writes_date
    assert "Today Date: 26 Jul 2024\n" in ours
    assert ours == theirs.replace(today, "26 Jul 2024")


def test_every_part_of_the_date_is_fixed(stories):
    form = "%A %a %d %B %b %m %Y %y %H:%M:%S"
    stories.chat_template = "\n{{ strftime_now('" + form + "') }}|{{ messages[0].content }}"
    want = datetime.datetime(2024, 7, 26, 12).strftime(form)
    assert ChatTemplate(stories).render([{"role": "user", "content": "x"}]) == f"\n{want}|x"


def test_a_tokenizer_without_a_template_names_the_remedy(stories):
    tokenize = Tokenize(stories, TokenOptions(100))
    with pytest.raises(UserError, match=r"no chat template, but the data are conversations[\s\S]*plain"):
        list(tokenize([CHAT]))


@pytest.mark.parametrize(
    ("template", "message"),
    [
        ("{% for m in messages %}{{ m.content }", "not valid Jinja"),
        ("{{ messages[0].content + 1 }}", "can only concatenate str"),
        ("{{ raise_exception('never on Sundays') }}", "never on Sundays"),
        ("{{ nothing.at.all }}", "'nothing' is undefined"),
    ],
)
def test_an_error_has_the_templates_own_message(stories, template, message):
    stories.chat_template = template
    with pytest.raises(UserError, match=message) as error:
        mask_conversation(ChatTemplate(stories), CHAT)
    assert error.value.where == str(ORIGIN)


def test_a_template_that_omits_assistant_turns_is_refused(stories):
    stories.chat_template = "{% for m in messages if m.role == 'user' %}{{ m.content }}{% endfor %}"
    with pytest.raises(UserError, match=r"does not write message 1 \(assistant\)"):
        mask_conversation(ChatTemplate(stories), CHAT)


# What each template that ships with Meshtune makes of a conversation, by the models' published formats.
SHIPPED = {
    "chatml": "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\nHello<|im_end|>\n",
    "llama3": "<s><|start_header_id|>user<|end_header_id|>\n\nHi<|eot_id|>"
    "<|start_header_id|>assistant<|end_header_id|>\n\nHello<|eot_id|>",
    "mistral": "<s>[INST]Hi[/INST]Hello</s>",
    "gemma": "<s><start_of_turn>user\nHi<end_of_turn>\n<start_of_turn>model\nHello<end_of_turn>\n",
    "plain": "<s>User:\nHi\nAssistant:\nHello</s>\n",
    "baichuan2": "<reserved_106>Hi<reserved_107>Hello</s>",
    "phi3": "<|user|>\nHi<|end|>\n<|assistant|>\nHello<|end|>\n",
    "deepseek": "<s><｜User｜>Hi<｜Assistant｜>Hello</s>",
    "alpaca": "<s>### Instruction:\nHi\n\n### Response:\nHello</s>\n\n",
}


@pytest.mark.parametrize("name", CHATS)
def test_shipped_templates_render_and_prompt(shared, name):
    tokenizer = load_tokenizer(shared / "assets/models/stories260K", name)
    chat = ChatTemplate(tokenizer)
    text = chat.render(as_dicts(CHAT)[:2])
    assert text == SHIPPED[name]
    prompt = chat.render(as_dicts(CHAT)[:1], generation_prompt=True)
    assert text.startswith(prompt)
    assert text[len(prompt) :].startswith("Hello" + chat.end_of_turn.head)


CALLS = Conversation(
    (
        Message("system", "Be brief."),
        Message("user", "Add 1 and 2."),
        Message("assistant", "", tool_calls=({"type": "function", "id": "abcdefghi", "function": ADD},)),
        Message("tool", '{"sum": 3}', extra=(("tool_call_id", "abcdefghi"),)),
        Message("assistant", "It is 3."),
    ),
    ORIGIN,
    ({"type": "function", "function": {"name": "add", "description": "Adds.", "parameters": {"type": "object"}}},),
)


@pytest.mark.parametrize(
    ("name", "tokenizer", "official"),
    [
        ("chatml", "hf-qwen3", "Qwen-Qwen2.5-7B-Instruct"),
        ("llama3", "hf-llama3_1", "meta-llama-Llama-3.1-8B-Instruct"),
        ("mistral", "hf-llama3_1", "mistralai-Mistral-Nemo-Instruct-2407"),
    ],
)
def test_shipped_templates_write_tools_as_the_familys_official_template(shared, name, tokenizer, official):
    folder = shared / "assets/tokenizers"
    loaded = load_tokenizer(folder / tokenizer, name)
    ours = ChatTemplate(loaded).render(as_dicts(CALLS), CALLS.tools)
    messages = as_dicts(CALLS)
    if name == "mistral":  # the official one shows the system prompt in the last user message, and only if it is last
        ours, messages = ours.replace("Be brief.\n\n", ""), messages[1:]
    loaded.chat_template = (folder / f"chat_templates/{official}.jinja").read_text()
    assert ours == loaded.apply_chat_template(messages, tools=list(CALLS.tools), tokenize=False)


@pytest.mark.parametrize("name", CHATS)
def test_shipped_templates_write_a_system_prompt_once(shared, name):
    chat = ChatTemplate(load_tokenizer(shared / "assets/models/stories260K", name))
    text = chat.render([{"role": "system", "content": "BRIEF"}, *as_dicts(CHAT)])
    assert text.count("BRIEF") == 1
    assert text.index("BRIEF") < text.index("Hi")


@pytest.mark.parametrize("name", CHATS)
def test_shipped_templates_train_on_every_answer(shared, name):
    tokenizer = load_tokenizer(shared / "assets/models/stories260K", name)
    tokenize = Tokenize(tokenizer, TokenOptions(1000))
    (example,) = tokenize([CHAT])
    end = tokenize.chat.end_of_turn
    learned = tokenizer.decode(example.ids[example.weights > 0].tolist())
    between = "" if name == "baichuan2" else end.head  # its original writes no end between turns
    assert learned.replace(" ", "") == f"Hello{between}b{end.head}"  # SentencePiece decodes a space before words
    assert (end.token is None) == (name in {"chatml", "llama3", "gemma", "phi3"})  # of no such token in this vocabulary
