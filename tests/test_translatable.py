"""Text with its template: printing, writing and comparing use the English text, and nothing of it is lost."""

from __future__ import annotations

import copy
import json
import pickle

from meshtune.translatable import Translatable, join_parts, template_of


def test_a_text_is_its_english():
    reason = Translatable("not {backend}: {reason}", backend="splash", reason=Translatable("for {chip}", chip="{x}"))
    assert reason == "not splash: for {x}"
    assert json.dumps({"reason": reason}) == '{"reason": "not splash: for {x}"}'
    assert template_of(reason) == {
        "template": "not {backend}: {reason}",
        "values": {"backend": "splash", "reason": {"template": "for {chip}", "values": {"chip": "{x}"}}},
    }


def test_a_copy_keeps_the_template():
    text = Translatable("{count} of {whole}", count=2, whole="{3}")
    for copied in (copy.deepcopy(text), copy.copy(text), pickle.loads(pickle.dumps(text))):
        assert copied == "2 of {3}"
        assert template_of(copied) == template_of(text)


def test_parts_are_listed():
    assert join_parts([]) == ""
    assert join_parts(["a"]) == "a"
    assert join_parts([Translatable("{n} routers", n=2), "head", "norm"]) == "2 routers, head, norm"
    assert template_of("2 routers") == "2 routers"
