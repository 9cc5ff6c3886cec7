"""Tokens of text and prompts, ends that are learned though they are padding elsewhere, and documents too long."""

from __future__ import annotations

import numpy as np
import pytest

from meshtune.config.data_options import LossPolicy, TokenOptions
from meshtune.data.conversation import Conversation, Message, Origin, Text
from meshtune.data.tokenizer import load_tokenizer
from meshtune.data.tokens import Tokenize
from meshtune.errors import UserError


@pytest.fixture(scope="module")
def smol(shared):
    return load_tokenizer(shared / "assets/tokenizers/smollm2")


@pytest.fixture(scope="module")
def stories(shared):
    return load_tokenizer(shared / "assets/models/stories260K")


@pytest.fixture(scope="module")
def llama(shared):
    return load_tokenizer(shared / "assets/tokenizers/hf-llama3_1")


def path(record=0):
    return Origin("data.jsonl", record)


def run(tokenizer, documents, max_length=1000, **options):
    tokenize = Tokenize(tokenizer, TokenOptions(max_length, **options))
    return list(tokenize(documents)), tokenize.counts


def chat(answer="four", question="2+2?", record=0):
    return Conversation((Message("user", question), Message("assistant", answer)), path(record))


def test_text_gets_the_tokenizers_bos_and_always_an_eos(smol, stories, llama):
    for tokenizer, begins in ((smol, False), (stories, True), (llama, True)):
        (example,), _ = run(tokenizer, [Text("Once upon a time", path())])
        ids = tokenizer("Once upon a time")["input_ids"]
        assert example.ids.tolist() == [*ids, tokenizer.eos_token_id]
        assert (ids[0] == tokenizer.bos_token_id) == begins
        assert (example.weights[1:] == 1).all()


def test_bos_and_eos_are_not_doubled(llama):
    text = f"{llama.bos_token}Once{llama.eos_token}"
    (example,), _ = run(llama, [Text(text, path())])
    assert example.ids.tolist() == llama("Once")["input_ids"] + [llama.eos_token_id]


def test_eos_is_trained_on_even_if_it_is_the_padding_token(smol):
    assert smol.pad_token_id == smol.eos_token_id
    for document in (Text("Once", path()), chat()):
        (example,), _ = run(smol, [document])
        last = np.flatnonzero(example.ids == smol.eos_token_id)[-1]
        assert example.weights[last] == 1


def test_completions_are_trained_on_and_prompts_are_not(smol, stories):
    for tokenizer in (smol, stories):
        (example,), _ = run(tokenizer, [Text(" Paris is it.", path(), prompt="The capital of France?")])
        prompt = tokenizer("The capital of France?")["input_ids"]
        assert example.ids[: len(prompt)].tolist() == prompt
        assert (example.weights[: len(prompt)] == 0).all()
        assert (example.weights[len(prompt) :] == 1).all()
        learned = tokenizer.decode(example.ids[len(prompt) :].tolist(), skip_special_tokens=True)
        assert learned.strip() == "Paris is it."


def test_prompts_that_would_merge_with_completions_are_tokenised_apart(smol):
    """'Hel' and 'lo', where the tokenizer alone would see 'Hello'; the prompt is what generation is fed."""
    (example,), counts = run(smol, [Text("lo", path(), prompt="Hel")])
    assert example.ids.tolist() == [*smol("Hel")["input_ids"], *smol("lo")["input_ids"], smol.eos_token_id]
    assert smol("Hello")["input_ids"] != smol("Hel")["input_ids"] + smol("lo")["input_ids"]
    assert counts.split == 1


def test_prompts_are_tokenised_without_looking_ahead(smol):
    """GPT-2's pattern gives a run of newlines at the end of a text one token, before a word one each."""
    (example,), counts = run(smol, [Text("Answer", path(), prompt="Question?\n\n")])
    prompt = smol("Question?\n\n")["input_ids"]
    assert smol("Question?\n\nAnswer")["input_ids"][: len(prompt)] != prompt
    assert example.ids[: len(prompt)].tolist() == prompt
    assert counts.split == 1


def test_a_token_across_the_edge_is_trained_on_where_text_cannot_be_split(stories):
    (example,), counts = run(stories, [Text("e day", path(), prompt="Onc")])
    ids = stories("Once day")["input_ids"]
    assert example.ids.tolist() == [*ids, stories.eos_token_id]
    assert counts.straddling == 1
    learned = stories.decode(example.ids[example.weights > 0].tolist(), skip_special_tokens=True)
    assert "e day" in learned


def test_train_on_prompt_includes_prompts(smol):
    (example,), _ = run(smol, [Text(" b", path(), prompt="a")], policy=LossPolicy(train_on_prompt=True))
    assert (example.weights == 1).all()


def test_conversations_get_no_token_that_the_template_does_not_write(llama):
    (example,), counts = run(llama, [chat()])
    assert (example.ids == llama.bos_token_id).sum() == 1
    assert counts.double_bos == 0


def test_a_template_that_begins_twice_is_counted(shared):
    tokenizer = load_tokenizer(shared / "assets/tokenizers/hf-llama3_1")
    tokenizer.chat_template = "{{ bos_token }}" + tokenizer.chat_template
    _, counts = run(tokenizer, [chat()])
    assert counts.double_bos == 1


def test_a_template_without_an_end_is_counted(shared):
    tokenizer = load_tokenizer(shared / "assets/models/stories260K")
    tokenizer.chat_template = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
    tokenizer.chat_template += "{% if add_generation_prompt %}assistant:{% endif %}"
    (example,), counts = run(tokenizer, [chat()])
    assert counts.unended == 1
    assert tokenizer.decode(example.ids[example.weights > 0].tolist()).strip() == "four"


def test_long_documents_are_truncated_and_counted(smol):
    long_answer, long_question = chat("word " * 100), chat("four", "word " * 100, 1)
    examples, counts = run(smol, [long_answer, long_question, chat()], max_length=60)
    assert [len(example.ids) for example in examples][:1] == [60]
    assert len(examples) == 2  # of the long question no answer is left
    assert (counts.truncated, counts.nothing_after_truncation, counts.examples, counts.documents) == (2, 1, 2, 3)
    total = sum(len(example.ids) for example in run(smol, [long_answer, long_question])[0])
    assert counts.tokens_cut == total - 120


def test_long_documents_can_be_dropped(smol):
    examples, counts = run(smol, [chat("word " * 100), chat()], max_length=60, overlong="drop")
    assert len(examples) == 1
    assert counts.dropped == 1


def test_long_documents_can_be_an_error_that_names_the_record(smol):
    with pytest.raises(UserError, match=r"more than max_length 60[\s\S]*data.jsonl, record 8"):
        run(smol, [chat("word " * 100, record=8)], max_length=60, overlong="error")


def test_a_document_of_exactly_max_length_is_whole(smol):
    (example,), _ = run(smol, [chat()])
    for longest, cut in ((len(example.ids), 0), (len(example.ids) - 1, 1)):
        assert run(smol, [chat()], max_length=longest)[1].truncated == cut


def test_documents_without_anything_to_train_on_are_counted(smol):
    silent = Conversation((Message("user", "a"), Message("assistant", "b", weight=0.0)), path())
    examples, counts = run(smol, [silent, chat(), Conversation((Message("user", "a"),), path())])
    assert len(examples) == 1
    assert counts.nothing_to_train == 2


def test_records_that_a_template_refuses_can_be_skipped_and_are_listed(smol, shared):
    tokenizer = load_tokenizer(
        shared / "assets/tokenizers/smollm2",
        str(shared / "assets/tokenizers/chat_templates/google-gemma-2-2b-it.jinja"),
    )
    refused = Conversation((Message("system", "s"), Message("user", "a"), Message("assistant", "b")), path(4))
    examples, counts = run(tokenizer, [refused, chat(record=5)], skip_bad=True)
    assert [example.origin.record for example in examples] == [5]
    ((origin, reason),) = counts.skipped
    assert origin == str(path(4))
    assert "System role not supported" in reason


def test_a_missing_template_is_never_skipped(stories):
    with pytest.raises(UserError, match="no chat template"):
        run(stories, [chat()], skip_bad=True)


def test_truncation_and_padding_in_tokenizer_json_are_ignored(shared):
    tokenizer = load_tokenizer(shared / "assets/tokenizers/smollm2")
    tokenizer.backend_tokenizer.enable_truncation(4)
    tokenizer.backend_tokenizer.enable_padding(length=50)
    (example,), _ = run(tokenizer, [chat("one two three four five six")])
    assert tokenizer.decode(example.ids[example.weights > 0].tolist()) == "one two three four five six<|im_end|>"


def test_order_is_kept_over_many_batches(smol):
    examples, _ = run(smol, [chat(f"number {index}", record=index) for index in range(700)])
    assert [example.origin.record for example in examples] == list(range(700))
    assert all(
        smol.decode(example.ids[example.weights > 0].tolist()) == f"number {example.origin.record}<|im_end|>"
        for example in examples
    )
