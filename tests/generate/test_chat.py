"""Chats: the model's input, the turns that are remembered, and what happens when the context is full."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import meshtune
from meshtune.errors import UserError
from meshtune.generate.text import chat_ids, continuation_ids, sample, turn_end

torch.set_num_threads(1)


@pytest.fixture(scope="module")
def model(stories260k):
    return meshtune.load(stories260k, dtype="float32", chat_template="plain")


def test_a_prompt_is_what_transformers_renders(smollm2):
    tokenizer = AutoTokenizer.from_pretrained(smollm2)
    messages = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Hi"},
        {"role": "assistant", "content": "Hello!"},
        {"role": "user", "content": "Who are you?"},
    ]
    expected = tokenizer.apply_chat_template(messages, add_generation_prompt=True)["input_ids"]
    assert chat_ids(tokenizer, messages) == expected
    assert turn_end(tokenizer) == (frozenset({tokenizer.eos_token_id}), ())


def test_a_text_to_continue_does_not_end_with_the_end_token(stories260k):
    tokenizer = AutoTokenizer.from_pretrained(stories260k)
    plain = continuation_ids(tokenizer, "Once upon")
    tokenizer._tokenizer.post_processor = None
    tokenizer.add_bos_token, tokenizer.add_eos_token = True, True
    assert tokenizer("Once upon")["input_ids"][-1] == tokenizer.eos_token_id
    assert continuation_ids(tokenizer, "Once upon") == plain


def test_history_is_what_was_said(model):
    session = model.chat("Tell stories.", max_tokens=12)
    first = session.send("One")
    second = "".join(session.stream("Two"))
    assert session.messages == [
        {"role": "system", "content": "Tell stories."},
        {"role": "user", "content": "One"},
        {"role": "assistant", "content": first},
        {"role": "user", "content": "Two"},
        {"role": "assistant", "content": second},
    ]
    assert second == model.generate(session.messages[:-1], max_tokens=12)
    session.reset()
    assert session.messages == [{"role": "system", "content": "Tell stories."}]
    assert session.send("One") == first


def test_an_interrupted_answer_is_remembered_as_far_as_it_came(model):
    session = model.chat(max_tokens=40)
    answer = session.stream("One")
    piece = next(answer)
    answer.close()
    assert session.messages[-1] == {"role": "assistant", "content": piece}


def test_a_full_context_is_an_error_that_leaves_the_history(model):
    session = model.chat(max_tokens=200)
    session.send("One day")
    before = list(session.messages)
    with pytest.raises(UserError, match="drop_oldest"):
        session.send("word " * 60)
    assert session.messages == before


def test_the_oldest_turns_are_forgotten_and_that_is_said(model):
    notes: list[str] = []
    session = model.chat("Stories.", max_tokens=100, overflow="drop_oldest", notify=notes.append)
    for number in range(6):
        session.send(f"Number {number}: a dog")
    assert notes
    assert "512 tokens is full" in notes[0]
    assert "messages were forgotten" in notes[0]
    assert session.messages[0] == {"role": "system", "content": "Stories."}
    assert session.messages[1]["role"] == "user"
    assert session.messages[1]["content"] != "Number 0: a dog"
    assert session.messages[-2]["content"] == "Number 5: a dog"
    with pytest.raises(UserError, match="the message of"):
        session.send("word " * 500)


def test_a_turn_that_ends_with_words_ends_the_answer(model, monkeypatch):
    """A template whose turns end with text, not with a token: the text is a stop string."""
    greedy = model.generate([{"role": "user", "content": "One"}], max_tokens=30)
    word = greedy.split()[3]
    template = "{% for m in messages %}{{ m['content'] }}{% if m['role'] == 'assistant' %}" + word + "{% endif %}"
    template += "{{ '\n' }}{% endfor %}"
    tokenizer = AutoTokenizer.from_pretrained(model.directory)
    tokenizer.chat_template = template
    assert turn_end(tokenizer) == (frozenset(), (word,))
    with_stop = dataclasses.replace(model, load_tokenizer=lambda: tokenizer)
    assert word not in with_stop.generate([{"role": "user", "content": "One"}], max_tokens=60)


@pytest.mark.parametrize(
    ("messages", "message"),
    [
        ([], "empty"),
        ([{"role": "asistant", "content": "x"}], "did you mean 'assistant'"),
        ([{"role": "user", "content": None}], "words as a string"),
        ([{"role": "user", "content": "x"}, {"role": "assistant", "content": "y"}], "nothing to answer"),
    ],
)
def test_conversations_that_are_none_are_refused(model, messages, message):
    with pytest.raises(UserError, match=message):
        chat_ids(model.tokenizer, messages)


def test_a_tokenizer_without_a_template_cannot_chat(stories260k):
    bare = meshtune.load(stories260k, dtype="float32")
    with pytest.raises(UserError, match="meshtune generate"):
        bare.chat()
    with pytest.raises(UserError, match="chat_template"):
        bare.generate([{"role": "user", "content": "Hi"}])


def test_empty_words_and_unknown_policies_are_refused(model):
    with pytest.raises(UserError, match="empty"):
        model.chat().send("  ")
    with pytest.raises(UserError, match="'forget'"):
        model.chat(overflow="forget")


def test_samples_of_a_run_are_what_the_loaded_model_says(model):
    arguments = (model.params, model.spec, model.compute, model.tokenizer)
    prompts = ["Once upon a time", "The dog"]
    assert sample(*arguments, prompts, chat=False, max_tokens=20) == model.generate(prompts, max_tokens=20)
    chats = [[{"role": "system", "content": "S"}, {"role": "user", "content": prompt}] for prompt in prompts]
    assert sample(*arguments, prompts, chat=True, system="S", max_tokens=20) == model.generate(chats, max_tokens=20)
    assert sample(*arguments, [], chat=True) == []


def test_samples_compile_once_for_changing_parameters(model):
    import jax

    from meshtune.generate import programs

    arguments = (model.spec, model.compute, model.tokenizer, ["Once upon a time", "The dog"])
    first = sample(model.params, *arguments, chat=False, max_tokens=20)
    compiled = programs.read._cache_size(), programs.decode._cache_size()  # pyright: ignore
    changed = jax.tree.map(lambda leaf: leaf * 1.1, model.params)
    assert sample(changed, *arguments, chat=False, max_tokens=20) != first
    assert (programs.read._cache_size(), programs.decode._cache_size()) == compiled  # pyright: ignore


@pytest.mark.slow
def test_smollm2_answers_as_in_transformers(smollm2):
    messages = [{"role": "user", "content": "What is the capital of France?"}]
    model = meshtune.load(smollm2, dtype="float32")
    theirs = AutoModelForCausalLM.from_pretrained(smollm2, dtype=torch.float32).eval()
    ids = model.tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_tensors="pt")["input_ids"]
    output = theirs.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=64, do_sample=False)
    expected = model.tokenizer.decode(output[0, ids.shape[1] :], skip_special_tokens=True)
    assert model.generate(messages, max_tokens=64) == expected
    assert "".join(model.chat().stream(messages[0]["content"])) == expected
