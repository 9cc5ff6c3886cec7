"""The report: counts that can be checked by hand, and a warning for everything that deserves one."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from rich.console import Console

from meshtune.config.data_options import TokenOptions
from meshtune.data.checked_source import SkippedRecord
from meshtune.data.conversation import Conversation, Message, Origin, Text
from meshtune.data.inspection import coloured_tokens
from meshtune.data.loader import Loader
from meshtune.data.report import TemplateInfo, histogram, make_report, render
from meshtune.data.store import open_or_build
from meshtune.data.tokenizer import load_tokenizer
from meshtune.data.tokens import Example, TokenCounts, Tokenize


def report_of(tmp_path, lengths=(10, 20, 30), counts=None, skipped=(), template=None, batch_size=1, **loader):
    examples = [
        Example(np.arange(n, dtype=np.int32), np.ones(n, np.float32), Origin("f", i)) for i, n in enumerate(lengths)
    ]
    store = open_or_build(repr((lengths, loader)).replace("/", ""), lambda: (examples, dict), tmp_path)
    prepared = Loader(store, max_length=64, batch_size=batch_size, **loader)
    total = sum(lengths)
    counts = counts or TokenCounts(
        documents=len(lengths), examples=len(lengths), tokens=total, trained_tokens=total - len(lengths)
    )
    return make_report("train", prepared, counts, skipped, max_length=64, template=template)


def test_counts_are_those_of_the_rows(tmp_path):
    report = report_of(tmp_path)
    assert (report.rows, report.row_length, report.steps_per_epoch, report.longest) == (1, 64, 1, 30)
    assert report.efficiency == pytest.approx((9 + 19 + 29) / 64)
    assert report.warnings == []
    assert report.notes == []


def test_histogram_bins_hold_everything():
    lengths = np.asarray([1, 2, 3, 4, 7, 8, 1000])
    assert histogram(lengths)[:4] == ((1, 1, 1), (2, 3, 2), (4, 7, 2), (8, 15, 1))
    assert sum(number for *_, number in histogram(lengths)) == len(lengths)


@pytest.mark.parametrize(
    ("field", "words"),
    [
        ("truncated", "are cut at max_length 64"),
        ("nothing_after_truncation", "nothing to train on after truncation"),
        ("dropped", "dropped because they exceed"),
        ("nothing_to_train", "nothing to train on"),
        ("unended", "no end of turn"),
        ("without_eos", "no end-of-sequence token"),
        ("prompts_differ", "differently in generation"),
        ("double_bos", "two beginning-of-sequence"),
        ("straddling", "spans the end of a prompt"),
        ("special_in_text", "special tokens in their own text"),
    ],
)
def test_each_count_has_its_warning(tmp_path, field, words):
    counts = TokenCounts(documents=3, examples=3, tokens=60, trained_tokens=50, **{field: 2})
    (warning,) = report_of(tmp_path, counts=counts).warnings
    assert words in warning
    assert "2" in warning or field == "without_eos"


def test_a_replaced_damaged_store_is_reported(tmp_path):
    report = dataclasses.replace(report_of(tmp_path), cache_damage="the tokenised data in X are damaged")
    assert report.warnings[0] == "the tokenised data in X are damaged; they were made anew"


def test_pairs_are_counted_as_pairs(tmp_path):
    counts = TokenCounts(documents=12, examples=10, tokens=600, trained_tokens=500)
    report = dataclasses.replace(report_of(tmp_path, counts=counts), dataset_type="pairs")
    assert (report.samples, report.samples_left_out, report.noun) == (5, 1, "pairs")
    assert "pairs" in text_of(render(report))


def test_inefficiencies_are_warned_of(tmp_path):
    padded = report_of(tmp_path, (5, 6, 64), packing=False).warnings
    assert any("data.packing=true" in warning for warning in padded)
    assert any("copies of others" in warning for warning in report_of(tmp_path, (30, 30, 30)).warnings)
    assert any("smaller train.batch_size" in warning for warning in report_of(tmp_path, batch_size=8).warnings)
    few = TokenCounts(documents=3, examples=3, tokens=1000, trained_tokens=5)
    assert any("0.5% of the tokens are trained on" in warning for warning in report_of(tmp_path, counts=few).warnings)


def test_skips_are_listed_with_reasons(tmp_path):
    report = report_of(tmp_path, skipped=[SkippedRecord(f"f, record {index}", "no answer") for index in range(12)])
    (warning,) = report.warnings
    assert warning == "12 records were skipped; the first: f, record 0: no answer"
    shown = text_of(render(report))
    assert "skipped f, record 9: no answer" in shown
    assert "and 2 more" in shown


def test_templates_without_an_end_token_or_with_a_date_are_reported(tmp_path):
    report = report_of(tmp_path, template=TemplateInfo("<|im_end|>", False, True))
    assert "not a token" in report.warnings[0]
    assert "26 Jul 2024" in report.notes[0]


def text_of(renderable):
    console = Console(width=160, record=True, file=open("/dev/null", "w"))  # noqa: SIM115
    console.print(renderable)
    return console.export_text()


def test_the_rendered_report_has_the_numbers(tmp_path):
    shown = text_of(render(report_of(tmp_path)))
    for words in ("documents", "packing efficiency", "89.1%", "16 to 31", "95.0% of all"):
        assert words in shown


def test_colours_mark_exactly_the_trained_tokens(shared):
    tokenizer = load_tokenizer(shared / "assets/tokenizers/smollm2")
    conversation = Conversation((Message("user", "héllo 👩‍👧"), Message("assistant", "yes 🤖 sir")), Origin("f", 0))
    (example,) = Tokenize(tokenizer, TokenOptions(100))([conversation])
    text = coloured_tokens(tokenizer, example, 100)
    green = "".join(text.plain[span.start : span.end] for span in text.spans if "green" in str(span.style))
    assert green == "yes 🤖 sir<|im_end|>"
    assert text.plain.replace("↵", "") == tokenizer.decode(example.ids.tolist())
    plain = coloured_tokens(tokenizer, example, 100, brackets=True).plain.replace("·", "")
    assert plain[plain.index("⟦") : plain.index("⟧") + 1] == "⟦yes 🤖 sir<|im_end|>⟧"


def test_only_the_first_tokens_of_long_documents_are_shown(shared):
    tokenizer = load_tokenizer(shared / "assets/models/stories260K")
    (example,) = Tokenize(tokenizer, TokenOptions(1000))([Text("once upon a time " * 40, Origin("f", 0))])
    assert f"... {len(example.ids) - 50} more tokens" in coloured_tokens(tokenizer, example, 50).plain
