"""Templates are checked before anything is asked, and every kind that ships makes records that training reads."""

from __future__ import annotations

import contextlib
import json
import pathlib
from typing import Any

import pytest
from made_documents import TOPICS, page
from teacher_stub import teacher_stub

from meshtune.config.data_recipe import (
    TEMPLATES,
    DataRecipe,
    KindSection,
    load_data_recipe,
    load_template,
    template_names,
)
from meshtune.config.sections import DataSection, SourceSection
from meshtune.data.conversation import Conversation, Pair
from meshtune.data.documents import load_documents
from meshtune.data.pictures.files import PictureFiles
from meshtune.errors import UserError
from meshtune.synth.kinds import Kind, Subject, draw, make_tasks, parse_answer, render
from meshtune.synth.plan import make_plan
from meshtune.synth.run import generate_data
from meshtune.synth.subjects import tool_subjects

pytest.importorskip("jsonschema", reason="the extra synth is not installed")
pytest.importorskip("datasketch", reason="the extra synth is not installed")
WEATHER = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "The weather of a city",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}


def write_sources(folder: pathlib.Path) -> dict[str, Any]:
    """Sources of every kind, as keys of a recipe."""
    from PIL import Image

    (folder / "docs").mkdir()
    for number, (title, text) in enumerate(list(TOPICS.items())[:3]):
        (folder / f"docs/{number}.md").write_text(page(title, text, number))
    rows = [{"messages": [{"role": "user", "content": f"Where is {title}?"}, {"role": "assistant", "content": text}]}
            for title, text in TOPICS.items()]  # fmt: skip
    (folder / "examples.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "tools.json").write_text(json.dumps([WEATHER]))
    (folder / "pictures").mkdir()
    Image.new("RGB", (8, 8), "red").save(folder / "pictures/red.png")
    paths = {"documents": "docs", "examples": "examples.jsonl", "tools": "tools.json", "pictures": "pictures"}
    return {key: str(folder / path) for key, path in paths.items()}


def recipe_of(folder: pathlib.Path, address: str, kinds: object, **keys: Any) -> DataRecipe:
    keys = {"teacher": {"path": address, **keys.pop("teacher", {})}, "kinds": kinds, **keys}
    return load_data_recipe({"output": str(folder / "out"), "documents": str(folder / "docs"), **keys})


@pytest.mark.parametrize("name", template_names())
def test_every_kind_makes_records_that_training_reads(tmp_path: pathlib.Path, name: str):
    template, sources = load_template(name), write_sources(tmp_path)
    options = {"filters": {"duplicates": None}}
    with teacher_stub() as stub:
        if name == "rejected":  # every second answer is too long
            lengths = iter([5, 90] * 20)
            stub.answer = lambda body: "word " * next(lengths) + str(body["seed"])
        output = generate_data(recipe_of(tmp_path, stub.address, [name], **sources, **options))
    file = output / ("pairs.jsonl" if template.gives_pairs else "records.jsonl")
    rows = [json.loads(line) for line in file.read_text().splitlines()]
    section = DataSection(train=[SourceSection(path=str(file))], packing=False)
    samples = load_documents(
        section, seed=0, dataset_type="pairs" if template.gives_pairs else "documents",
        pictures=PictureFiles(str(tmp_path / "cache"), None),
    ).train  # fmt: skip
    assert len(rows) == len(samples) > 0
    for row, sample in zip(rows, samples, strict=True):
        assert row["provenance"]["kind"] == name
        assert row["provenance"]["source"]
        assert isinstance(sample, Pair if template.gives_pairs else Conversation)
    if name == "tools":
        (call,) = samples[0].messages[1].tool_calls  # pyright: ignore[reportAttributeAccessIssue]
        assert call["function"] == {"name": "weather", "arguments": {"city": "Oslo"}}
    if name == "picture":
        assert len(samples[0].pictures) == 1  # pyright: ignore[reportAttributeAccessIssue]
    if name == "turns":
        assert len(samples[0].messages) == 6  # pyright: ignore[reportAttributeAccessIssue]
    if template.gives_pairs:
        for row in rows:
            assert row["chosen"] != row["rejected"]
            assert row["provenance"]["scores"]["chosen"] > row["provenance"]["scores"]["rejected"]
    if name == "rejected":
        assert all(len(row["chosen"][0]["content"].split()) <= 60 < 90 for row in rows)
        assert all(len(row["rejected"][0]["content"].split()) > 60 for row in rows)


def test_calls_with_arguments_that_a_tool_does_not_have_are_dropped(tmp_path: pathlib.Path):
    sources = write_sources(tmp_path)
    with teacher_stub() as stub:
        call = {"name": "weather", "arguments": {"town": 3}}
        stub.answer = lambda body: json.dumps({"request": "Weather?", "calls": [call]})
        with pytest.raises(UserError, match="no record is left; dropped: schema 1"):
            generate_data(recipe_of(tmp_path, stub.address, ["tools"], **sources))
        assert len(stub.requests) == 3  # attempts, each with its own seed
        assert len({request["seed"] for request in stub.requests}) == 3


def changed(tmp_path: pathlib.Path, old: str, new: str, name: str = "qa") -> str:
    """A copied template with a change."""
    text = (TEMPLATES / f"{name}.yaml").read_text()
    assert old in text
    (tmp_path / "mine.yaml").write_text(text.replace(old, new))
    return str(tmp_path / "mine.yaml")


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        ("{{ passage }}", "{{ pasage }}", r"unknown field 'pasage'[\s\S]*did you mean 'passage'"),
        ("item.question", "item.qestion", r"unknown field 'item.qestion'[\s\S]*did you mean 'question'"),
        ("for_each: pairs", "for_each: pair", r"no list 'pair'[\s\S]*did you mean 'pairs'"),
        ("{{ count }}", "{{ count }", "no Jinja template"),
        ("options:", "optoins:", r"did you mean 'options'"),
        ("about: Questions", "abuot: Questions", r"about is missing"),
        ("of: passage", "of: pasage", r"did you mean 'passage'"),
    ],
)
def test_a_template_with_an_unknown_field_is_refused(tmp_path: pathlib.Path, old: str, new: str, words: str):
    with pytest.raises(UserError, match=words):
        Kind(KindSection(template=changed(tmp_path, old, new)))


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        ("type: array", "type: aray", r"no JSON Schema: 'aray'[\s\S]*answer_schema, properties.pairs.type"),
        (
            "question: {type: string}",
            "question: {$ref: '#/$defs/text'}",
            r"refers to '#/\$defs/text'[\s\S]*below \$defs",
        ),
        ("question: {type: string}", "question: {$ref: 'http://host/text'}", "refers to 'http://host/text'"),
    ],
)
def test_a_template_with_an_invalid_schema_is_refused(tmp_path: pathlib.Path, old: str, new: str, words: str):
    with pytest.raises(UserError, match=words):
        Kind(KindSection(template=changed(tmp_path, old, new)))


def test_a_tool_s_schema_is_checked_and_may_refer_to_its_own_definitions(tmp_path: pathlib.Path):
    file = tmp_path / "tools.json"
    place = {"type": "object", "properties": {"city": {"$ref": "#/$defs/City"}}, "$defs": {"City": {"enum": ["Oslo"]}}}
    file.write_text(json.dumps([WEATHER, {"name": "map", "parameters": place}]))
    subject = tool_subjects(str(file))[0]
    schema = Kind(KindSection(template="tools")).schema(subject)
    for city, fits in (("Oslo", True), ("Rome", False)):
        call = {"request": "A map", "calls": [{"name": "map", "arguments": {"city": city}}]}
        with contextlib.nullcontext() if fits else pytest.raises(ValueError, match="calls"):
            assert parse_answer(json.dumps(call), schema or {}) == call
    place["$defs"] = {}
    file.write_text(json.dumps([WEATHER, {"name": "map", "parameters": place}]))
    with pytest.raises(UserError, match=r"refers to '#/\$defs/City'[\s\S]*tools.json, tool 1 \(map\), parameters"):
        tool_subjects(str(file))


def test_a_template_is_printed_a_shipped_one_and_a_copy_alike(
    tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]
):
    from meshtune.cli.data import template

    template("qa")
    shown = capsys.readouterr().out
    (tmp_path / "mine.yaml").write_text(shown)
    template(str(tmp_path / "mine.yaml"))
    assert capsys.readouterr().out == shown == (TEMPLATES / "qa.yaml").read_text()
    with pytest.raises(UserError, match="no such template"):
        template(str(tmp_path / "none.yaml"))


def test_an_unknown_kind_names_the_nearest():
    with pytest.raises(UserError, match=r"no template 'sumary'[\s\S]*did you mean 'summary'"):
        Kind(KindSection(template="sumary"))
    with pytest.raises(UserError, match=r"no option 'cuont'[\s\S]*did you mean 'count'"):
        Kind(KindSection(template="qa", options={"cuont": 2}))


def test_a_template_cannot_reach_what_is_outside_of_it(tmp_path: pathlib.Path):
    kind = Kind(KindSection(template=changed(tmp_path, "{{ passage }}", "{{ passage.__class__.__mro__ }}")))
    subject = Subject("passage", "a", "b", "c", {"passage": "text", "heading": ""})
    with pytest.raises(UserError, match="cannot be filled"):
        render(kind.template.prompt or "", kind.variables(subject, 1))


def test_options_of_a_list_are_drawn_by_the_seed():
    kind = Kind(KindSection(template="rewrite", options={"role": ["a pirate", "a judge"]}))
    subject = Subject("example", "a", "b", "c", {"question": "q", "answer": "a", "conversation": ""})
    roles = [kind.variables(subject, seed)["role"] for seed in range(40)]
    assert set(roles) == {"a pirate", "a judge"}
    assert roles == [kind.variables(subject, seed)["role"] for seed in range(40)]


def test_tasks_depend_on_the_seed_and_not_on_the_order_of_subjects():
    kinds = [Kind(KindSection(template="qa", repeat=2)), Kind(KindSection(template="summary", share=0.5))]
    subjects = [Subject("passage", f"{n}", "p", f"{n}", {"passage": "text", "heading": ""}) for n in range(100)]

    def names(subjects: list[Subject], seed: int) -> list[tuple[str, int, bool]]:
        tasks = make_tasks(kinds, subjects, seed=seed, held_out=0.1, limit=None)
        return [(task.name, task.seed, task.held_out) for task in tasks]

    first = names(subjects, 0)
    assert first == names(subjects[::-1], 0)
    assert first != names(subjects, 1)
    assert 230 < len(first) < 270  # 200 of qa, and about half of 100
    assert len({seed for _, seed, _ in first}) == len(first)
    assert len({name.partition(" of ")[2] for name, _, out in first if out}) == 10
    assert draw(0, "a") == draw(0, "a") != draw(0, "b")


def test_an_answer_may_be_in_a_block_of_code_and_must_have_the_schema():
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
    assert parse_answer('Sure!\n```json\n{"a": 1}\n```\n', schema) == {"a": 1}
    for text, words in (("{", "no JSON"), ('{"a": "x"}', "a: 'x' is not of type"), ("[]", "is not of type 'object'")):
        with pytest.raises(ValueError, match=words):
            parse_answer(text, schema)


def test_a_kind_without_its_sources_is_refused(tmp_path: pathlib.Path):
    write_sources(tmp_path)
    with pytest.raises(UserError, match=r"tools makes records of tools[\s\S]*give tools"):
        make_plan(recipe_of(tmp_path, "http://127.0.0.1:9/v1", ["tools"], teacher={"model": "m"}))
