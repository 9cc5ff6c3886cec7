"""Chat templates of strangers: bounded in time and memory, and otherwise what transformers renders."""

from __future__ import annotations

import copy
import pathlib
import resource
import time

import pytest
from transformers.utils import chat_template_utils

import meshtune
from meshtune.data import template_environment
from meshtune.data.chat import ChatTemplate
from meshtune.data.chat_templates import template_names, template_text
from meshtune.data.tokenizer import load_tokenizer
from meshtune.errors import UserError

CHATS = [name for name in template_names() if name != "paligemma"]  # which writes one question and its answer only

ENDLESS = [
    "{% for i in range(99999) %}{% for j in range(99999) %}{{ 1 }}{% endfor %}{% endfor %}",
    "{% for i in range(99999) %}{% for j in range(99999) if false %}{% endfor %}{% endfor %}",
    "{% macro f(n) %}{{ f(n-1) if n else '' }}{{ f(n-1) if n else '' }}{% endmacro %}{{ f(60) }}",
]
DOUBLED = "{{% set ns = namespace(x={start}) %}}{{% for i in range(60) %}}{{% set ns.x = {step} %}}{{% endfor %}}{end}"
HUGE = [
    "{{ 'a' * 10**10 }}",
    "{{ 10 ** 99999 }}",
    "{{ '%1000000000d' % 1 }}",
    "{{ '%*d' % (10**9, 1) }}",
    "{{ '%09999999999d'|format(1) }}",
    "{{ '{:>1000000000}'.format(1) }}",
    "{{ '{:{w}}'.format(1, w=10**9) }}",
    "{{ 'a'.ljust(10**9) }}",
    "{{ 'a'.zfill(10**9) }}",
    "{{ '\t'.expandtabs(10**9) }}",
    "{{ (5).to_bytes(10**10, 'big') }}",
    "{{ 'a'|center(10**9) }}",
    "{% filter center(10**9) %}x{% endfilter %}",
    "{{ ['a']|map('center', 10**9)|join }}",
    "{{ 'a\nb'|indent(10**9) }}",
    "{{ [1]|tojson(indent=10**9) }}",
    "{{ range(99999)|batch(10**9, 'x')|list }}",
    "{{ (''|attr('ljust'))(10**9) }}",
    "{% set x = '{0}'*100000 %}{{ x.format('a'*100000) }}",
    "{% set x = '%s'*100000 %}{{ x|format('a') }}",
    "{{ ('a'*100000).join('b'*100000) }}",
    "{{ ('a'*100000).replace('a', 'b'*100000) }}",
    "{{ 'aaaa'|replace('a','b'*100000)|replace('b','c'*100000) }}",
    "{% set x %}{{ 'a'*200000000 }}{% endset %}{{ x }}{{ x }}",
    "{% set a = 'x'*20000000 %}{% set ns = namespace(x=[]) %}{% for i in range(99) %}"
    "{% set ns.x = ns.x + [a[1:]] %}{% endfor %}",
    DOUBLED.format(start="'a'", step="ns.x + ns.x", end=""),
    DOUBLED.format(start="'a'", step="ns.x ~ ns.x", end=""),
    DOUBLED.format(start="'a'", step="ns.x.replace('a', 'aa')", end=""),
    DOUBLED.format(start="9", step="ns.x * ns.x", end=""),
    DOUBLED.format(start="['a']", step="ns.x + ns.x", end=""),
    DOUBLED.format(start="['a']", step="[ns.x, ns.x]", end="{{ ns.x == ns.x }}"),
    DOUBLED.format(start="{'a': 1}", step="{'a': ns.x, 'b': ns.x}", end="{{ ns.x|tojson }}"),
    DOUBLED.format(start="(1,)", step="(ns.x, ns.x)", end="{{ {ns.x: 1} }}"),
    DOUBLED.format(start="dict(a=1)", step="dict(a=ns.x, b=ns.x)", end="{{ ns.x }}"),
    DOUBLED.format(start="1", step="namespace(a=ns.x, b=ns.x)", end="{{ ns.x }}"),
]
WRONG = [
    "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
    "{% for i in [[1]] recursive %}{{ loop([[1]]) }}{% endfor %}",
    "{{ 'a'.encode('utf-16').decode('x') }}",
    "{{ " + "(" * 3000 + "1" + ")" * 3000 + " }}",
    "{% if 1 %}" * 200 + "{% endif %}" * 200,
    "".join(f"{{% for i{n} in [1] %}}" for n in range(60)) + "{% endfor %}" * 60,
    "{{ " + "9" * 6000 + " }}",
    "{{ 1 / 0 }}",
    "{{ 10.0 ** 400 }}",
    "{{ 1e400|int }}",
    "{{ messages.foo.bar }}",
    "{{ ''.__class__.__mro__ }}",
    "{{ messages.append(1) }}",
    "{% include 'x' %}",
    "{{ lipsum(n=10**6) }}",
    "{% for",
    " " * (1 << 21),
]
CHAT = [
    {"role": "user", "content": "What is 2 + 2?"},
    {"role": "assistant", "content": "4\n"},
    {"role": "user", "content": "And then?"},
    {"role": "assistant", "content": "ünï ✓"},
]


@pytest.fixture(scope="module")
def tokenizer():
    return load_tokenizer(str(pathlib.Path(meshtune.__file__).parent / "quickstart/model"))


def failure(tokenizer, text: str) -> str:
    tokenizer = copy.copy(tokenizer)
    tokenizer.chat_template = text
    with pytest.raises(UserError) as caught:
        _ = ChatTemplate(tokenizer).end_of_turn
    return str(caught.value)


@pytest.mark.parametrize("text", ENDLESS)
def test_a_template_that_would_not_end_is_stopped(tokenizer, text, monkeypatch):
    monkeypatch.setattr(template_environment, "SECONDS", 0.2)
    started = time.process_time()
    assert "takes more than" in failure(tokenizer, text)
    assert time.process_time() - started < 3


@pytest.mark.parametrize("text", HUGE, ids=range(len(HUGE)))
def test_a_template_that_would_fill_memory_is_stopped(tokenizer, text, monkeypatch):
    monkeypatch.setattr(template_environment, "CHARACTERS", 30_000_000)
    monkeypatch.setattr(template_environment._BUDGET, "characters", 30_000_000)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    assert "fix: set model.chat_template to another template" in failure(tokenizer, text)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 300_000  # KiB


@pytest.mark.parametrize("text", WRONG, ids=range(len(WRONG)))
def test_every_failure_of_a_template_is_a_sentence(tokenizer, text):
    assert "the chat template" in failure(tokenizer, text)


@pytest.mark.parametrize("name", CHATS)
def test_what_is_rendered_is_what_transformers_renders(tokenizer, name):
    tokenizer = copy.copy(tokenizer)
    tokenizer.chat_template = template_text(name)
    for prompt in (False, True):
        theirs = chat_template_utils._compile_jinja_template(ChatTemplate(tokenizer)._without_tools.text).render(
            messages=CHAT, tools=None, documents=None, add_generation_prompt=prompt, **tokenizer.special_tokens_map
        )
        assert ChatTemplate(tokenizer).render(CHAT, generation_prompt=prompt) == theirs


def test_a_very_long_conversation_may_take_more(tokenizer, monkeypatch):
    """The bound grows with the rendered text, where a template goes over every message again and again."""
    monkeypatch.setattr(template_environment, "CHARACTERS", 100_000)
    tokenizer = copy.copy(tokenizer)
    tokenizer.chat_template = "{% for m in messages %}{{ m.content.strip() + '\n' }}{% endfor %}"
    chat = [{"role": "user", "content": "x" * 100_000}] * 3
    assert len(ChatTemplate(tokenizer).render(chat)) == 300_003
