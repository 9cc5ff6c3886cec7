"""The chat templates that ship with Meshtune write tools, calls and results of real data, and the server reads them."""

from __future__ import annotations

import itertools
import json

import pytest
import transformers

from data.stock_templates import stock_text, tokenizer_with
from meshtune.calls.formats import Tool, call_format
from meshtune.calls.reader import TaggedReader
from meshtune.config.data_options import LossPolicy
from meshtune.config.sections import DataSection
from meshtune.data.chat import ChatTemplate
from meshtune.data.chat_templates import suggested_template, template_names, template_text
from meshtune.data.conversation import Conversation, Message, Origin, argument_texts
from meshtune.data.dialect import id_of_length
from meshtune.data.documents import load_documents
from meshtune.data.masks import mask_conversation
from meshtune.data.tokenizer import load_tokenizer
from meshtune.errors import UserError
from meshtune.generate.text import chat_text

CHATS = [name for name in template_names() if name != "paligemma"]  # which writes one question and its answer only

ORIGIN = Origin("calls.json", 2)
STOCK = ["meta-llama-Llama-3.1-8B-Instruct", "Qwen-Qwen2.5-7B-Instruct", "Qwen-Qwen3-0.6B"]
STOCK += ["mistralai-Mistral-Nemo-Instruct-2407"]


def glaive(shared, language, count):
    """Conversations of a public file of calls, `count` of them with and as many without."""
    section = {
        "registry": str(shared / "assets/data/llamafactory"),
        "train": {"name": f"glaive_toolcall_{language}_demo"},
    }
    documents = load_documents(DataSection.model_validate(section), seed=0).train
    assert len(documents) == 300
    calling = [any(message.tool_calls for message in document.messages) for document in documents]
    return [
        documents[index]
        for want in (True, False)
        for index in itertools.islice((n for n, calls in enumerate(calling) if calls == want), count)
    ]


@pytest.fixture(scope="module")
def conversations(shared):
    return [*glaive(shared, "en", 8), *glaive(shared, "zh", 8)]


@pytest.fixture(scope="module")
def whole_files(shared):
    return [*glaive(shared, "en", 300), *glaive(shared, "zh", 300)]


def trained_texts(chat, conversation, policy=LossPolicy()):
    masked = mask_conversation(chat, conversation, policy)
    return [masked.text[start:end] for start, end, weight in masked.spans if weight]


def check(chat, conversation):
    """Checks that each turn of the assistant is learned, with its calls, and neither tools nor results."""
    texts = trained_texts(chat, conversation)
    turns = [message for message in conversation.messages if message.role == "assistant"]
    assert len(texts) == len(turns)
    for text, message in zip(texts, turns, strict=True):
        assert message.content.strip() in text
        for call in message.tool_calls:
            assert call["function"]["name"] in text
            assert json.dumps(call["function"]["arguments"], ensure_ascii=False) in text
    for result in (message.content for message in conversation.messages if message.role == "tool"):
        assert not any(result in text for text in texts)


@pytest.mark.parametrize("name", CHATS)
def test_shipped_templates_train_on_the_calls_of_real_data(shared, whole_files, name):
    chat = ChatTemplate(load_tokenizer(shared / "assets/models/stories260K", name))
    assert len(whole_files) == 600
    for conversation in whole_files:
        check(chat, conversation)


@pytest.mark.parametrize("name", STOCK)
def test_stock_templates_train_on_the_calls_of_real_data(shared, conversations, name):
    chat = ChatTemplate(tokenizer_with(stock_text(name, shared), shared / "assets/models/stories260K"))
    for conversation in conversations:
        check(chat, conversation)


@pytest.mark.parametrize("name", ["gptoss", "glm4moe", "gemma4_v5", "lfm2_v2"])
def test_templates_that_trl_keeps_train_on_the_calls_of_real_data(shared, conversations, name):
    chat = ChatTemplate(tokenizer_with(stock_text(name, shared), shared / "assets/models/stories260K"))
    for conversation in conversations:
        texts = "".join(trained_texts(chat, conversation))
        for message in conversation.messages:
            for call in message.tool_calls:
                for _, spellings in argument_texts(call["function"]["arguments"]):
                    assert any(spelling in texts for spelling in spellings)


@pytest.mark.slow
@pytest.mark.parametrize("name", [*STOCK, "gptoss", "glm4moe", "gemma4_v5", "lfm2_v2", "qwen3_5_think"])
def test_templates_of_models_train_on_whole_files_of_calls(shared, name):
    """Two records of the Chinese file have a call in garbled text, and a result, which some templates refuse there."""
    chat = ChatTemplate(tokenizer_with(stock_text(name, shared), shared / "assets/models/stories260K"))
    refused = []
    for conversation in [*glaive(shared, "en", 300), *glaive(shared, "zh", 300)]:
        try:
            assert len(trained_texts(chat, conversation)) == sum(
                message.role == "assistant" for message in conversation.messages
            )
        except UserError as error:
            refused.append(str(error.where).rpartition("/")[2])
    garbled = [f"glaive_toolcall_zh_demo.json, record {record}" for record in (197, 293)]
    assert refused == (garbled if "Nemo" in name or name == "gptoss" else [])


def several(content=""):
    calls = [
        ("add", {"a": 1, "note": 'say "ja" <b>'}),
        ("now", {}),
        ("add", {"a": 2.5, "note": "x", "list": ["y", None]}),
    ]
    tools = [
        {"type": "function", "function": {"name": name, "description": "", "parameters": {"type": "object"}}}
        for name in ("add", "now")
    ]
    turns = (
        Message("user", "Add."),
        Message(
            "assistant",
            content,
            tool_calls=tuple(
                {"type": "function", "function": {"name": name, "arguments": arguments}} for name, arguments in calls
            ),
        ),
        *(Message("tool", f"result {n}") for n in range(3)),
        Message("assistant", "Done."),
    )
    return calls, Conversation(turns, ORIGIN, tuple(tools))


@pytest.mark.parametrize("name", CHATS)
def test_the_server_reads_the_calls_that_a_shipped_template_teaches(shared, name):
    """Three calls in one turn come back through the parser that serves models of the template."""
    tokenizer = load_tokenizer(shared / "assets/models/stories260K", name)
    chat = ChatTemplate(tokenizer)
    calls, conversation = several()
    text, answer = trained_texts(chat, conversation)
    end = chat.end_of_turn.head
    assert text.endswith(end)
    form = call_format(template_text(name))
    tools = {name: Tool(name, {"type": "object"}, {}) for name in ("add", "now")}
    reader = TaggedReader(None, False, form, tools)
    deltas = [*reader.push(text.removesuffix(end)), *reader.finish()]
    called = [(delta.call.name, json.loads(delta.call.arguments)) for delta in deltas if delta.call]
    assert called == calls
    assert not any(delta.content for delta in deltas)
    assert answer == "Done." + end


@pytest.mark.parametrize("name", [name for name in CHATS if name != "llama3"])
def test_shipped_templates_write_text_beside_calls(shared, name):
    chat = ChatTemplate(load_tokenizer(shared / "assets/models/stories260K", name))
    first, _ = trained_texts(chat, several("Let me see.")[1])
    assert first.startswith("Let me see.")


@pytest.mark.parametrize("name", CHATS)
def test_shipped_templates_prompt_after_results_as_they_train(shared, name):
    chat = ChatTemplate(load_tokenizer(shared / "assets/models/stories260K", name))
    _, conversation = several()
    messages = chat.messages(conversation)
    prompt = chat.render(messages[:-1], conversation.tools, generation_prompt=True)
    text = chat.render(messages, conversation.tools)
    assert text.startswith(prompt + "Done.")
    assert all(f"result {n}" in prompt for n in range(3))


def test_a_template_that_writes_tools_is_suggested_for_every_tokenizer(shared):
    """The one of the family where the tokenizer has its tokens, else plain, which needs none."""
    smollm2 = shared / "assets/tokenizers/smollm2"
    assert suggested_template(load_tokenizer(smollm2)) == "chatml"
    assert suggested_template(load_tokenizer(smollm2, "chatml")) == "plain"
    assert suggested_template(load_tokenizer(shared / "assets/models/stories260K")) == "plain"
    for name in CHATS:
        dialect = ChatTemplate(load_tokenizer(shared / "assets/models/stories260K", name)).dialect
        assert dialect.writes_tools
        assert dialect.writes_calls
        assert dialect.writes_results


def test_ids_of_a_length_are_kept_or_made_from_the_id():
    assert id_of_length("abcdefgh1", 9) == "abcdefgh1"
    id_ = id_of_length("call_4a1b", 9)
    assert (len(id_), id_.isalnum()) == (9, True)
    assert id_ == id_of_length("call_4a1b", 9) != id_of_length("call_4a1c", 9)


def test_transformers_is_given_what_a_saved_template_needs(shared, tmp_path):
    """A shipped template renders the same from the files that a run saves, without Meshtune."""
    tokenizer = load_tokenizer(shared / "assets/models/stories260K", "gemma")
    tokenizer.save_pretrained(tmp_path)
    _, conversation = several()
    chat = ChatTemplate(tokenizer)
    loaded = transformers.AutoTokenizer.from_pretrained(tmp_path)
    messages = chat.messages(conversation)
    expected = loaded.apply_chat_template(messages, tools=list(conversation.tools), tokenize=False)
    assert mask_conversation(chat, conversation).text == expected


@pytest.mark.parametrize("name", ["Qwen-Qwen3-0.6B", "glm4moe", "gemma4_v5", "plain"])
def test_reasoning_before_real_calls_is_trained_on(shared, name):
    """Of LLaMA-Factory's lists of content: the template's choice after the last question, everywhere if inline."""
    file = shared / "assets/data/llamafactory/reason_tool_use_demo_50.jsonl"
    documents = load_documents(DataSection.model_validate({"train": str(file)}), seed=0).train
    folder = shared / "assets/models/stories260K"
    reasoning = "inline" if name == "plain" else "template"
    tokenizer = load_tokenizer(folder, name) if name == "plain" else tokenizer_with(stock_text(name, shared), folder)
    chat = ChatTemplate(tokenizer)
    for document in documents:
        texts = trained_texts(chat, document, LossPolicy(reasoning=reasoning))
        turns = [message for message in document.messages if message.role == "assistant"]
        question = max(n for n, message in enumerate(document.messages) if message.role == "user")
        for text, message in zip(texts, turns, strict=True):
            written = dict(message.extra)["reasoning_content"].strip() in text
            assert written == (reasoning == "inline" or document.messages.index(message) > question)


@pytest.mark.parametrize("name", ["mistralai-Mistral-Nemo-Instruct-2407", "glm4moe", "gptoss", "gemma4_v5", "plain"])
def test_a_prompt_with_calls_is_the_same_in_use_as_in_training(shared, name):
    """A server or a chat renders earlier calls, with ids as other servers make them, exactly as training did."""
    folder = shared / "assets/models/stories260K"
    tokenizer = load_tokenizer(folder, name) if name == "plain" else tokenizer_with(stock_text(name, shared), folder)
    chat = ChatTemplate(tokenizer)
    _, conversation = several()
    call = {"id": "call_4a1bc0ffee", **conversation.messages[1].tool_calls[0]}
    messages = [
        {"role": "user", "content": "Add."},
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "call_4a1bc0ffee", "content": "3"},
    ]
    turns = (
        Message("user", "Add."),
        Message("assistant", "", tool_calls=(call,)),
        Message("tool", "3", extra=(("tool_call_id", "call_4a1bc0ffee"),)),
        Message("assistant", "Done."),
    )
    masked = mask_conversation(chat, Conversation(turns, ORIGIN, conversation.tools))
    assert masked.text.startswith(chat_text(tokenizer, messages, conversation.tools))


def test_results_of_a_prompt_follow_in_the_order_of_their_calls_as_in_training(shared):
    tokenizer = load_tokenizer(shared / "assets/models/stories260K", "chatml")
    calls = [{"id": id_, "type": "function", "function": {"name": "f", "arguments": {}}} for id_ in ("a", "b")]
    results = [{"role": "tool", "tool_call_id": id_, "content": f"of {id_}"} for id_ in ("a", "b")]
    messages = [{"role": "user", "content": "Add."}, {"role": "assistant", "content": "", "tool_calls": calls}]
    text = chat_text(tokenizer, [*messages, *results])
    assert text.index("of a") < text.index("of b")
    assert chat_text(tokenizer, [*messages, *results[::-1]]) == text


def test_deepseek_is_prompted_with_arguments_as_text(shared):
    tokenizer = tokenizer_with(stock_text("deepseekv3", shared), shared / "assets/models/stories260K")
    _, conversation = several()
    call = conversation.messages[1].tool_calls[0]
    messages = [{"role": "user", "content": "Add."}, {"role": "assistant", "content": "", "tool_calls": [call]}]
    text = chat_text(tokenizer, [*messages, {"role": "tool", "content": "3"}])
    assert '```json\n{"a": 1, "note": "say \\"ja\\" <b>"}\n```' in text
