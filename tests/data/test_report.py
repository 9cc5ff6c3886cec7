"""The report: counts that can be checked by hand, and a warning for everything that deserves one."""

from __future__ import annotations

import dataclasses
import json
import pathlib
import re
import shutil

import numpy as np
import pytest
from rich.console import Console

from meshtune.config.data_options import TokenOptions
from meshtune.config.load import load_recipe
from meshtune.data.checking import SkippedRecord
from meshtune.data.conversation import Conversation, Message, Origin, Text
from meshtune.data.inspection import coloured_tokens, render
from meshtune.data.loader import Loader
from meshtune.data.prepare import prepare_data
from meshtune.data.report import TemplateInfo, histogram, make_report
from meshtune.data.store import write_store
from meshtune.data.tokenise import add_counts, count_copies
from meshtune.data.tokenizer import load_tokenizer
from meshtune.data.tokens import Example, TokenCounts, Tokenize
from meshtune.errors import UserError


def report_of(tmp_path, lengths=(10, 20, 30), counts=None, skipped=(), template=None, batch_size=1, **loader):
    examples = [
        Example(np.arange(n, dtype=np.int32), np.ones(n, np.float32), Origin("f", i)) for i, n in enumerate(lengths)
    ]
    store = write_store(tmp_path / "store", examples, dict)
    store.meta = {"copies": count_copies([store.digests], store.column("values"), "documents")}
    prepared = Loader(store, max_length=64, batch_size=batch_size, **loader)
    total = sum(lengths)
    counts = counts or TokenCounts(
        documents=len(lengths), examples=len(lengths), tokens=total, trained_tokens=total - len(lengths)
    )
    report = make_report("train", prepared, counts, max_length=64, template=template)
    return dataclasses.replace(report, skipped=(*skipped, *report.skipped))


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
    ("field", "message"),
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
        ("placeholders", "a placeholder in an answer"),
    ],
)
def test_each_count_has_its_warning(tmp_path, field, message):
    counts = TokenCounts(documents=3, examples=3, tokens=60, trained_tokens=50, **{field: 2})
    (warning,) = report_of(tmp_path, counts=counts).warnings
    assert message in warning
    assert "2" in warning or field == "without_eos"


COUNTED = [field.name for field in dataclasses.fields(TokenCounts)][6:-3]


def test_one_of_anything_is_in_the_singular(tmp_path):
    """No warning of a data set of one document says "1 documents", "1 rows" or "1 records"."""
    counts = TokenCounts(1, 1, 1, 0, 1, 1, **dict.fromkeys(COUNTED, 1))
    skipped = [SkippedRecord("f, record 0", "no answer")]
    report = report_of(tmp_path, (30,), counts=counts, skipped=skipped, batch_size=2)
    report = dataclasses.replace(report, copies=1, max_length=1, row_length=1, steps_per_epoch=1)
    for kind in ("documents", "pairs", "labelled"):
        shown = text_of(render(dataclasses.replace(report, dataset_type=kind)))
        assert not re.findall(r"\b1 (?:\w+ ){0,2}?\w+s (?:are|have|were|follow|contain|begin|each|in all)\b", shown)
        assert not re.search(r"\b1 (documents|answers|records|rows|tokens|conversations|positions|pairs)\b", shown)
    assert len(report.warnings) > 12


def test_a_warning_names_the_first_record_and_what_is_in_it(shared):
    tokenizer = load_tokenizer(shared / "assets/tokenizers/smollm2")
    tokenize = Tokenize(tokenizer, TokenOptions(40))

    def chat(number, question, answer):
        return Conversation((Message("user", question), Message("assistant", answer)), Origin("f.jsonl", number))

    records = [
        chat(0, "q", "a"),
        chat(1, "q", "by <|im_end|>"),
        chat(2, "q", "I am {{ name }}."),
        chat(3, "q " * 50, "a"),
    ]
    records += [chat(4, "{{name}}", "{ {x} }"), Text("{{name}} <|im_start|>", Origin("g.txt", 0))]
    list(tokenize(records))
    assert tokenize.counts.first["special_in_text"] == "f.jsonl, record 1, message 1: <|im_end|>"
    assert tokenize.counts.first["placeholders"] == "f.jsonl, record 2: {{ name }}"
    assert tokenize.counts.first["nothing_after_truncation"] == "f.jsonl, record 3"
    assert (tokenize.counts.special_in_text, tokenize.counts.placeholders) == (2, 1)


def test_counts_of_parts_keep_the_first_of_each():
    total, later = TokenCounts(), TokenCounts()
    total.count("dropped", Origin("f", 1))
    later.count("dropped", Origin("f", 5))
    later.count("unended", Origin("f", 6))
    add_counts(total, later)
    assert (total.dropped, total.first) == (2, {"dropped": "f, record 1", "unended": "f, record 6"})


@pytest.mark.parametrize(("repeats", "copies"), [(1, 0), (2, 8)])
def test_copies_are_of_answers_and_pairs_not_of_what_is_made_of_them(shared, tmp_path, repeats, copies):
    """Companions repeat answers to the same question, and prompts repeat, but nothing is a copy."""
    records = [
        {"prompt": f"q{n}", "completion": f"{n} {good}", "label": good} for n in range(4) for good in (True, False)
    ]
    pairs = [{"prompt": f"q{n}", "chosen": "same", "rejected": f"{n} {m}"} for n in range(4) for m in range(2)]
    for stage, lines in (("kto", records), ("dpo", pairs)):
        file = tmp_path / f"{stage}.jsonl"
        file.write_text("\n".join(map(json.dumps, lines * repeats)))
        report = report_of_recipe(shared, tmp_path, f"stage={stage}", f"data.train={file}")
        assert (report.samples, report.copies) == (8 * repeats, copies)
        assert any("copies of others" in warning for warning in report.warnings) == bool(copies)


def report_of_recipe(shared, tmp_path, *overrides):
    model = shared / "assets/tokenizers/smollm2"
    recipe = load_recipe(None, [f"model={model}", f"output={tmp_path}/out", *overrides])
    tokenizer = load_tokenizer(model, recipe.model.chat_template)
    return prepare_data(recipe, tokenizer, cache=tmp_path / "cache").report


def test_a_template_without_an_end_token_says_which_to_set(shared, tmp_path):
    file = tmp_path / "chat.jsonl"
    file.write_text(json.dumps({"instruction": "q", "output": "a", "id": 1}))
    report = report_of_recipe(shared, tmp_path, f"data.train={file}", "model.chat_template=llama3")
    assert "leave model.chat_template out: the tokenizer has its own" in report.warnings[0]
    assert f"fields of {file} that are not read: id" in report.notes
    assert report_of_recipe(shared, tmp_path, f"data.train={file}").template.end_is_token
    model = pathlib.Path(shutil.copytree(shared / "assets/tokenizers/smollm2", tmp_path / "bare"))
    config = json.loads((model / "tokenizer_config.json").read_text())
    config.pop("chat_template", None)
    (model / "tokenizer_config.json").write_text(json.dumps(config))
    (model / "chat_template.jinja").unlink(missing_ok=True)
    bare = report_of_recipe(shared, tmp_path, f"model={model}", f"data.train={file}", "model.chat_template=llama3")
    name = re.search(r"set model\.chat_template: (\w+)", bare.warnings[0])[1]
    set_so = report_of_recipe(shared, tmp_path, f"model={model}", f"data.train={file}", f"model.chat_template={name}")
    assert set_so.template.end_is_token


def test_a_system_prompt_without_a_place_is_an_error(shared, tmp_path):
    file = tmp_path / "text.jsonl"
    file.write_text(json.dumps({"text": "t"}))
    for overrides in (("stage=pt",), ()):
        with pytest.raises(UserError, match="system"):
            report_of_recipe(shared, tmp_path, f"data.train={file}", "data.system=Be brief.", *overrides)


def test_without_colours_tokens_are_separated_within_lines_alone(shared):
    tokenizer = load_tokenizer(shared / "assets/tokenizers/smollm2")
    conversation = Conversation((Message("user", "hi there"), Message("assistant", "yes sir\n\nno")), Origin("f", 0))
    (example,) = Tokenize(tokenizer, TokenOptions(100))([conversation])
    shown = coloured_tokens(tokenizer, example, 100, brackets=True).plain
    assert not [line for line in shown.splitlines() if line.strip("⟦⟧") == "·" or line.startswith("·")]
    assert not shown.endswith("·")
    assert "⟦yes· sir" in shown


def test_a_replaced_damaged_store_is_reported(tmp_path):
    report = dataclasses.replace(report_of(tmp_path), cache_damage="the tokenised data in X are damaged")
    assert report.warnings[0] == "the tokenised data in X are damaged; they were prepared again"


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
    for phrase in ("documents", "packing efficiency", "89.1%", "16 to 31", "95.0% of all"):
        assert phrase in shown


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
