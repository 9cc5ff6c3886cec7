"""Patterns of strangers: those that people use are taken, those that may take for ever are not."""

from __future__ import annotations

import pytest

from meshtune.patterns import pattern_problem

# Of peft's documentation, of Unsloth's and of our own files.
USUAL = [
    r".*\.(q|k|v|o)_proj",
    r"^model\.layers\.(?:[0-9]|1[0-9])\.self_attn\.(q_proj|v_proj)$",
    r"(?:.*?(?:language|text).*?(?:self_attn|mlp).*?(?:q_proj|k_proj).*?)|(?:\bmodel\.layers\.[\d]{1,}\.(?:mlp))",
    r"(?!((model)(\.|$))).*",
    r"(.*\.)?layers\.\d+\.mlp",
    "q_proj",
]


@pytest.mark.parametrize("pattern", USUAL)
def test_usual_patterns_are_taken(pattern: str):
    assert pattern_problem(pattern) is None


@pytest.mark.parametrize(
    "pattern", ["(a+)+$", "(a|a)*b", "(.*)*x", "((a*)b?)+", ".*" * 20, "(" * 5000, "a" * 20_000, "["]
)
def test_patterns_that_may_take_for_ever_are_not(pattern: str):
    assert pattern_problem(pattern)
