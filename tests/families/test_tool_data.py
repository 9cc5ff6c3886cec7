"""Real data of tool calls train a tiny random model of every family, with a template that writes tools.

That is the stock template of ../shared where a family has one that does, else ours of its tokens. The learned
text is read back by the parser that serves the template: exactly the calls and the answers of the data.
"""

from __future__ import annotations

import io
import json
import re

import pytest
from rich.console import Console

from data.stock_templates import encode_conversation, learned_pieces, stock_text, tokenizer_with
from families.tiny import tiny_model
from meshtune.calls.formats import THINK, Tool, call_format
from meshtune.calls.reader import TaggedReader
from meshtune.config.load import load_recipe
from meshtune.config.sections import DataSection
from meshtune.data.chat import ChatTemplate
from meshtune.data.chat_templates import template_names, template_text
from meshtune.data.conversation import argument_texts
from meshtune.data.documents import load_documents
from meshtune.data.masks import mask_conversation
from meshtune.errors import UserError
from meshtune.families import FAMILIES
from meshtune.train.run import train

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]
RECORDS, STEPS, LENGTH, VOCAB = 8, 3, 1024, 640
TOKENS = re.compile(r"<[|｜][\w▁｜|]+>|<(?:start|end)_of_turn>|<reserved_\d+>|\[/?[A-Z_]+\]")
TEMPLATES = {
    **dict.fromkeys((name for name in FAMILIES if name.startswith("qwen")), "chatml"),
    "llama": "meta-llama-Llama-3.1-8B-Instruct",
    "mistral": "mistralai-Mistral-Nemo-Instruct-2407",
    "qwen2": "Qwen-Qwen2.5-7B-Instruct",
    "qwen3": "Qwen-Qwen3-0.6B",
    "qwen3_moe": "Qwen-Qwen3-0.6B",
    "baichuan": "baichuan2",
    **dict.fromkeys(("deepseek_v2", "deepseek_v3"), "deepseek"),
    **dict.fromkeys(("gemma", "gemma2", "gemma3_text", "gemma3n_text"), "gemma"),
    **dict.fromkeys(("ministral", "ministral3", "mixtral"), "mistral"),
    **dict.fromkeys(("phi3", "phimoe"), "phi3"),
    **dict.fromkeys(("internlm2", "internlm3", "lfm2", "lfm2_moe", "nemotron_h", "smollm3"), "chatml"),
}  # all others: plain


def text_of(name, shared):
    return template_text(name) if name in template_names() else stock_text(name, shared)


def glaive(shared):
    """The section of data that a recipe has, and its conversations: the first records in English and in Chinese."""
    names = [f"glaive_toolcall_{language}_demo" for language in ("en", "zh")]
    section = {
        "registry": str(shared / "assets/data/llamafactory"),
        "train": [{"name": name, "cap": RECORDS} for name in names],
    }
    return section, load_documents(DataSection.model_validate(section), seed=0).train


def read(text, form, tools):
    """(reasoning, content, calls) of an answer, as a server reads them."""
    reader = TaggedReader(THINK, False, form, tools)
    deltas = [*reader.push(text), *reader.finish()]
    calls = [(delta.call.name, json.loads(delta.call.arguments)) for delta in deltas if delta.call]
    return "".join(d.reasoning for d in deltas), "".join(d.content for d in deltas), calls


def decode_piece(tokenizer, piece):
    """Decodes with special tokens unchanged: SentencePiece's decoder makes a blank of ▁ within them too."""
    for token in tokenizer.all_special_tokens:
        piece = piece.replace(token.replace("▁", " "), token)
    return piece


def check(tokenizer, conversation):
    """Checks that every tool and argument is written, and that calls and answers are learned."""
    chat = ChatTemplate(tokenizer)
    text = mask_conversation(chat, conversation).text
    assert all(json.dumps(tool["function"]["name"]) in text for tool in conversation.tools)
    tools = {
        tool["function"]["name"]: Tool(tool["function"]["name"], tool["function"]["parameters"], {})
        for tool in conversation.tools
    }
    form = call_format(tokenizer.chat_template)
    pieces = [
        decode_piece(tokenizer, piece)
        for piece in learned_pieces(tokenizer, encode_conversation(tokenizer, conversation)[0])
    ]
    answers = [message for message in conversation.messages if message.role == "assistant"]
    assert len(pieces) == len(answers)
    end = chat.end_of_turn.head
    assert pieces[-1].endswith(end)
    for piece, answer in zip(pieces, answers, strict=True):
        assert piece.endswith(end) or (tokenizer.chat_template == template_text("baichuan2") and not answer.tool_calls)
        expected = [(call["function"]["name"], call["function"]["arguments"]) for call in answer.tool_calls]
        for _, arguments in expected:
            assert all(any(s in piece for s in spellings) for _, spellings in argument_texts(arguments))
        reasoning, content, calls = read(piece.removesuffix(end), form, tools)
        assert calls == expected
        assert (reasoning.strip(), content.strip()) == ("", answer.content.strip())


@pytest.mark.parametrize("name", FAMILIES)
def test_calls_of_tools_train_every_family(shared, name, tmp_path, monkeypatch):
    monkeypatch.setenv("MESHTUNE_CACHE", str(tmp_path / "cache"))
    template = text_of(TEMPLATES.get(name, "plain"), shared)
    tokenizer = tokenizer_with(template, shared / "assets/models/stories260K")
    tokenizer.add_special_tokens({"additional_special_tokens": sorted(set(TOKENS.findall(template)))})
    section, conversations = glaive(shared)
    assert len(conversations) == 2 * RECORDS
    assert sum(bool(message.tool_calls) for c in conversations for message in c.messages) >= RECORDS
    for conversation in conversations:
        check(tokenizer, conversation)
    learned = {"max_position_embeddings": LENGTH} if name == "gpt2" else {}  # positions that are learned
    model = tiny_model(name, tmp_path, VOCAB, **learned)
    tokenizer.save_pretrained(model)
    assert len(tokenizer) <= VOCAB
    fields = {
        "model": str(model),
        "data": {**section, "max_length": LENGTH},
        "method": {"kind": "lora", "rank": 4},
        "optimizer": {"learning_rate": 1e-3},
        "train": {"steps": STEPS, "batch_size": 2},
        "output": str(tmp_path / "run"),
    }
    result = train(load_recipe(fields), console=Console(file=io.StringIO(), width=200))
    assert result.steps == STEPS
    rows = [json.loads(line) for line in (tmp_path / "run/metrics.jsonl").read_text().splitlines()]
    losses = [row["loss"] for row in rows if row["kind"] == "train"]
    assert len(losses) == STEPS
    assert all(0 < loss < 30 for loss in losses)


@pytest.mark.parametrize("name", ["HuggingFaceTB-SmolLM3-3B", "google-gemma-2-2b-it"])
def test_a_stock_template_that_writes_no_tools_is_an_error(shared, name):
    chat = ChatTemplate(tokenizer_with(stock_text(name, shared), shared / "assets/models/stories260K"))
    calling = next(c for c in glaive(shared)[1] if any(message.tool_calls for message in c.messages))
    with pytest.raises(UserError, match="does not write the assistant's tool calls: search_recipes"):
        mask_conversation(chat, calling)
