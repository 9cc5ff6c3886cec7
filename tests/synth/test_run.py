"""The records of a run: the same whatever the order of answers, complete after kill -9, and honest about failures."""

from __future__ import annotations

import json
import os
import pathlib
import random
import signal
import socket
import subprocess
import sys
import threading
import time
from typing import Any

import pytest
from made_documents import TOPICS, page
from teacher_stub import KEY, TeacherStub, answer, half, hang, send, status, teacher_stub, wrong_json

from meshtune.config.data_recipe import DataRecipe, load_data_recipe
from meshtune.errors import UserError
from meshtune.options import Shard
from meshtune.synth import asking, teachers
from meshtune.synth.filters import REFUSAL
from meshtune.synth.plan import make_plan, show_plan
from meshtune.synth.run import generate_data, show_generated

pytest.importorskip("jsonschema", reason="the extra synth is not installed")
pytest.importorskip("datasketch", reason="the extra synth is not installed")


@pytest.fixture(autouse=True)
def short_pauses(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(teachers, "PAUSE", 0.01)


@pytest.fixture
def docs(tmp_path: pathlib.Path) -> pathlib.Path:
    folder = tmp_path / "docs"
    folder.mkdir()
    for number, (title, text) in enumerate(TOPICS.items()):
        (folder / f"{number}.md").write_text(page(title, text, number))
    return folder


def make(docs: pathlib.Path, stub: TeacherStub | str, name: str = "out", **keys: Any) -> DataRecipe:
    """A recipe of qa over `docs`, whose teacher is a stub."""
    address = stub if isinstance(stub, str) else stub.address
    teacher = {"path": address, "model": "stub", "timeout": 1.0, **keys.pop("teacher", {})}
    raw = {"kinds": ["qa"], "documents": str(docs), "output": str(docs.parent / name), **keys}
    return load_data_recipe({**raw, "teacher": teacher})


def rows(folder: pathlib.Path, name: str = "records.jsonl") -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / name).read_text().splitlines()]


def test_records_are_the_same_whatever_the_order_of_answers(docs: pathlib.Path):
    contents = []
    for name, at_once in (("one", 1), ("many", 6)):
        with teacher_stub() as stub:
            wait = random.Random(1)
            if at_once > 1:
                stub.answer = lambda body: (time.sleep(wait.random() / 20), answer(body))[1]  # noqa: B023
            recipe = make(docs, stub, name, teacher={"at_once": at_once, "path": stub.address}, filters={"quality": 3})
            output = generate_data(recipe)
            assert stub.most_running <= at_once
            contents.append([(output / file).read_text() for file in ("records.jsonl", "dropped.jsonl")])
    assert contents[0] == contents[1]
    assert len(contents[0][0].splitlines()) + len(contents[0][1].splitlines()) == 18


def test_another_seed_gives_other_records(docs: pathlib.Path):
    with teacher_stub() as stub:
        first = rows(generate_data(make(docs, stub, "a", seed=0)))
        second = rows(generate_data(make(docs, stub, "b", seed=1)))
    assert len(first) == len(second) == 18
    assert not {json.dumps(row["messages"]) for row in first} & {json.dumps(row["messages"]) for row in second}


def test_provenance_names_source_place_teacher_prompt_and_scores(docs: pathlib.Path):
    with teacher_stub() as stub:
        output = generate_data(make(docs, stub, filters={"quality": 1, "grounded": 1, "agreement": 0.01}))
    for row in rows(output):
        provenance = row["provenance"]
        text = pathlib.Path(provenance["source"]).read_text()
        start, end = map(int, provenance["place"].removeprefix("characters ").split("-"))
        passage = text[start:end]
        body = next(b for b in stub.requests if b["seed"] == provenance["seed"])
        assert passage in body["messages"][-1]["content"]
        assert provenance["teacher"] == "stub"
        assert set(provenance["scores"]) == {"quality", "grounded", "agreement"}
        assert len(provenance["prompt_sha256"]) == 64


COMMAND = [sys.executable, "-m", "meshtune", "data", "generate"]


def write_recipe(docs: pathlib.Path, stub: TeacherStub, name: str, **teacher: Any) -> pathlib.Path:
    file = docs.parent / f"{name}.yaml"
    section = {"path": stub.address, "at_once": 2, **teacher}
    raw = {"teacher": section, "documents": str(docs), "kinds": ["qa", "turns"], "output": str(docs.parent / name)}
    file.write_text(json.dumps(raw))
    return file


@pytest.mark.parametrize("end", [signal.SIGKILL, pytest.param(signal.SIGINT, marks=pytest.mark.slow)])
def test_a_run_goes_on_to_the_record_after_kill_9_and_ctrl_c(docs: pathlib.Path, end: signal.Signals):
    with teacher_stub() as stub:
        reference = generate_data(load_data_recipe(write_recipe(docs, stub, "reference")))
        total = len(stub.requests)
    with teacher_stub(delay=0.3) as stub:
        recipe = write_recipe(docs, stub, "killed")
        process = subprocess.Popen([*COMMAND, str(recipe)], stdout=subprocess.PIPE, text=True)
        while len(stub.requests) < 5 and process.poll() is None:
            time.sleep(0.02)
        os.kill(process.pid, end)
        shown = process.communicate()[0]
        output = docs.parent / "killed"
        file = output / "journal/000000.jsonl.partial"
        journal = file.read_bytes()
        answered = journal.count(b"\n")
        assert 0 < answered < total
        if end == signal.SIGINT:
            assert f"stopped: {answered} answers in the journal; --resume goes on" in shown
        assert not (output / "records.jsonl").exists()
        file.write_bytes(journal + b'[{"request": "half a li')  # the system may have written a part
        stub.delay, before = 0.0, len(stub.requests)
        with pytest.raises(UserError, match=r"not empty[\s\S]*--resume"):
            generate_data(load_data_recipe(recipe))
        generate_data(load_data_recipe(recipe), resume=True)
        assert len(stub.requests) - before == total - answered  # nothing that was answered is asked again
    for name in ("records.jsonl", "dropped.jsonl"):
        assert (output / name).read_bytes() == (reference / name).read_bytes()
    assert len((output / "journal/000000.jsonl").read_text().splitlines()) == total


def repetitive(body: dict[str, Any]) -> str:
    """One of four answers, so that there are near duplicates in all blocks."""
    words = ["rye and spelt", "oats and barley", "wheat and maize", "millet and rice"][body["seed"] % 4]
    return json.dumps({"pairs": [{"question": f"What is {words} for?", "answer": f"The mill grinds {words} at noon."}]})


def test_shards_together_make_the_records_of_one_run(docs: pathlib.Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(asking, "TASKS", 2)
    general = [{"messages": [{"role": "user", "content": f"{n}?"}, {"role": "assistant", "content": f"{n}."}]}
               for n in range(50)]  # fmt: skip
    (docs.parent / "general.jsonl").write_text("".join(json.dumps(row) + "\n" for row in general))
    keys = {
        "mix": {"data": str(docs.parent / "general.jsonl")},
        "held_out": 0.3,
        "kinds": [{"template": "qa", "repeat": 3}],
    }
    with teacher_stub() as stub:
        stub.answer = repetitive
        one = generate_data(make(docs, stub, "one", **keys))
        asked, recipe = len(stub.requests), make(docs, stub, "many", **keys)
        stub.faults = {asked + 4: status(400)}
        generate_data(recipe, shard=Shard(2, 3))
        generate_data(recipe, shard=Shard(2, 3))  # started again, it has nothing left to do
        generate_data(recipe, shard=Shard(1, 3))
        assert not (docs.parent / "many/records.jsonl").exists()
        many = generate_data(recipe, shard=Shard(3, 3))
        assert len(stub.requests) == 2 * asked + 1  # the one that was refused is asked again
        before = (many / "records.jsonl").stat()
        assert generate_data(recipe, shard=Shard(1, 3)) == many
        assert (many / "records.jsonl").stat().st_ino == before.st_ino
    names = ("records.jsonl", "held-out.jsonl", "dropped.jsonl")
    assert [(one / name).read_bytes() for name in names] == [(many / name).read_bytes() for name in names]
    assert (one / "README.md").read_text() == (many / "README.md").read_text().replace("/many", "/one")
    assert json.loads((one / "generated.json").read_text())["dropped"]["duplicates"] > 10


def test_a_budget_cannot_be_shared(docs: pathlib.Path):
    with teacher_stub() as stub:
        with pytest.raises(UserError, match=r"none of them knows[\s\S]*--dry-run"):
            generate_data(make(docs, stub, budget={"tokens": 10**6}), shard=Shard(1, 2))
        assert stub.requests == []


def test_faults_that_pass_leave_no_trace(docs: pathlib.Path, monkeypatch: pytest.MonkeyPatch):
    with teacher_stub() as stub:
        reference = (generate_data(make(docs, stub, "reference")) / "records.jsonl").read_text()
    faults = [status(429, Retry_After="0"), status(500), half, wrong_json, hang, status(503)]
    with teacher_stub() as stub:
        stub.faults = dict(enumerate(faults))
        output = generate_data(make(docs, stub))
        assert len(stub.requests) == 6 + len(faults)
    assert (output / "records.jsonl").read_text() == reference
    assert json.loads((output / "generated.json").read_text())["failed"] == []


def test_retry_after_is_waited_for(docs: pathlib.Path):
    with teacher_stub() as stub:
        stub.faults = {0: status(429, Retry_After="1")}
        start = time.monotonic()
        generate_data(make(docs, stub, limit=1))
        assert 1.0 <= time.monotonic() - start < 10


def test_a_request_that_fails_is_counted_and_asked_again(docs: pathlib.Path):
    with teacher_stub() as stub:
        stub.answer = lambda body: answer(body)
        broken = "The ferry"

        def fails(handler):
            send(handler, 500, {})

        plain = stub.answer
        stub.faults = {}
        recipe = make(docs, stub, teacher={"path": stub.address, "tries": 2, "at_once": 1})
        first = next(n for n, text in enumerate(_order(recipe)) if broken in text)
        stub.faults = {first: fails, first + 1: fails}
        stub.answer = plain
        output = generate_data(recipe)
        report = json.loads((output / "generated.json").read_text())
        assert len(report["failed"]) == 1
        assert "answered 500" in report["failed"][0]
        assert len(rows(output)) == 15
        assert "Requests that failed" in (output / "README.md").read_text()
        asked = len(stub.requests)
        generate_data(recipe, resume=True)
        assert len(stub.requests) == asked + 1
        assert len(rows(output)) == 18


def _order(recipe: DataRecipe) -> list[str]:
    return [str(task.subject.variables["passage"]) for task in make_plan(recipe).tasks]


def test_a_server_that_is_gone_ends_the_run_with_a_way_to_go_on(docs: pathlib.Path):
    with teacher_stub() as stub:
        recipe = make(docs, stub, teacher={"path": stub.address, "tries": 1, "at_once": 1}, kinds=["qa", "turns"])
        stub.faults = dict.fromkeys(range(3, 1000), status(500))
        with pytest.raises(UserError, match=r"5 requests in a row failed[\s\S]*--resume"):
            generate_data(recipe)
        stub.faults = {}
        assert len(rows(generate_data(recipe, resume=True))) == 24


def test_an_address_where_nothing_listens_says_so(docs: pathlib.Path):
    recipe = load_data_recipe(
        {
            "teacher": {"path": "http://127.0.0.1:9/v1", "tries": 2},
            "documents": str(docs),
            "kinds": ["qa"],
            "output": "x",
        }
    )
    with pytest.raises(UserError, match=r"refused \(tried 2 times\)[\s\S]*start it"):
        generate_data(recipe)


def test_a_wrong_or_missing_key_is_said_and_the_key_written_nowhere(
    docs: pathlib.Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    with teacher_stub(key=KEY) as stub:
        with pytest.raises(UserError, match=r"refuses access[\s\S]*set teacher.key to the name"):
            generate_data(make(docs, stub, "none"))
        keyed = {"path": stub.address, "key": "STUB_KEY"}
        monkeypatch.delenv("STUB_KEY", raising=False)
        with pytest.raises(UserError, match=r"STUB_KEY[\s\S]*is not set"):
            generate_data(make(docs, stub, "unset", teacher=keyed))
        monkeypatch.setenv("STUB_KEY", "sk-wrong-key-of-the-test")
        with pytest.raises(UserError, match="STUB_KEY is wrong") as caught:
            generate_data(make(docs, stub, "wrong", teacher=keyed))
        assert "sk-wrong" not in str(caught.value)
        monkeypatch.setenv("STUB_KEY", KEY)
        output = generate_data(make(docs, stub, teacher=keyed))
    assert len(rows(output)) == 18
    written = b"".join(file.read_bytes() for file in docs.parent.rglob("*") if file.is_file())
    assert KEY.encode() not in written
    assert KEY not in capsys.readouterr().out


def test_a_key_is_not_sent_to_where_a_server_points(docs: pathlib.Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("STUB_KEY", KEY)
    with teacher_stub() as other, teacher_stub(key=KEY) as stub:
        stub.faults = {0: status(302, Location=f"{other.address}/chat/completions")}
        with pytest.raises(UserError, match=r"nothing is at this address[\s\S]*302"):
            generate_data(make(docs, stub, teacher={"path": stub.address, "key": "STUB_KEY", "at_once": 1}))
        assert other.requests == []


def test_a_teacher_that_answers_in_another_schema_is_counted(docs: pathlib.Path):
    def other(body: dict[str, Any]) -> str:
        first = body["seed"] % 3 == 0
        return "Here are some questions!" if first else json.dumps({"questions": ["What?"]})

    with teacher_stub() as stub:
        stub.answer = other
        with pytest.raises(UserError, match=r"no record is left; dropped: schema 6[\s\S]*README.md shows examples"):
            generate_data(make(docs, stub, attempts=2))
        assert len(stub.requests) == 12
    reasons = {row["reason"] for row in rows(docs.parent / "out", "dropped.jsonl")}
    assert reasons <= {"no JSON: Expecting value: line 1 column 1 (char 0)", "the answer: 'pairs' is a required property", "the answer: Additional properties are not allowed ('questions' was unexpected)"}  # fmt: skip  # noqa: E501


def test_a_server_without_schemas_is_told_in_the_prompt(docs: pathlib.Path):
    with teacher_stub() as stub:
        stub.answer = lambda body: (
            f"```json\n{json.dumps({'pairs': [{'question': str(body['seed']), 'answer': 'An answer.'}]})}\n```"
        )
        recipe = make(docs, stub, teacher={"path": stub.address, "structured": "none", "extra": {"top_k": 5}})
        assert len(rows(generate_data(recipe))) == 6
        assert all("response_format" not in body and body["top_k"] == 5 for body in stub.requests)
        assert all("JSON of this schema" in body["messages"][-1]["content"] for body in stub.requests)


def test_a_request_that_the_server_refuses_is_dropped(docs: pathlib.Path):
    with teacher_stub() as stub:
        stub.faults = {2: status(400)}
        output = generate_data(make(docs, stub))
    assert len(rows(output)) == 15
    (dropped,) = rows(output, "dropped.jsonl")
    assert dropped["filter"] == "refused request"
    assert "code 400" in dropped["reason"]


def test_a_passage_longer_than_the_context_is_refused_before_anything_is_asked(docs: pathlib.Path):
    with teacher_stub() as stub:
        recipe = make(docs, stub, teacher={"path": stub.address, "context": 1200})
        with pytest.raises(UserError, match=r"context of 1200 tokens[\s\S]*characters 0[\s\S]*passage_words"):
            generate_data(recipe)
        assert stub.requests == []


def test_a_budget_is_not_exceeded_and_ends_at_the_same_task(docs: pathlib.Path):
    ends = []
    for name, at_once in (("one", 1), ("many", 5)):
        with teacher_stub(delay=0.01) as stub:
            teacher = {"path": stub.address, "at_once": at_once, "max_tokens": 100, "price": {"prompt": 1, "answer": 4}}
            recipe = make(docs, stub, name, teacher=teacher, attempts=1, budget={"tokens": 1000})
            output = generate_data(recipe)
            report = json.loads((output / "generated.json").read_text())
            ends.append((output / "records.jsonl").read_text())
            spent = sum(report["tokens"].values())
            assert spent == 150 * len(stub.requests) <= 1000
            assert report["tasks_beyond_budget"] == 6 - len(stub.requests) > 0
            assert report["dollars"] == pytest.approx(len(stub.requests) * (100 + 4 * 50) / 1e6)
            asked = len(stub.requests)
            more = recipe.model_copy(update={"budget": type(recipe.budget)()})
            generate_data(more, resume=True)
            assert len(stub.requests) == 6 > asked
    assert ends[0] == ends[1]


MISTAKES: dict[str, tuple[dict[str, Any], str]] = {
    "language": ({"filters": {"language": "English"}}, r"no code of a language[\s\S]*filters.language[\s\S]*en, es"),
    "evaluation": ({"filters": {"evaluation": "none.jsonl"}}, r"no such file[\s\S]*filters.evaluation, none.jsonl"),
    "mix": ({"mix": {"data": "none.jsonl"}}, r"no such file[\s\S]*mix.data, none.jsonl"),
    "columns": ({"mix": {"data": "other.csv"}}, r"fields are: a, b[\s\S]*mix.data, other.csv[\s\S]*'mix.data=\{path"),
    "rubric": ({"filters": {"quality": {"rubric": "none.yaml"}}}, r"no such rubric[\s\S]*none.yaml"),
    "template": ({"kinds": ["none.yaml"]}, r"no such template[\s\S]*none.yaml[\s\S]*meshtune data template"),
    "key": ({"teacher": {"key": "NO_SUCH_KEY"}}, r"NO_SUCH_KEY[\s\S]*teacher.key[\s\S]*export NO_SUCH_KEY"),
    "judge's key": ({"judge": {"path": "http://host/v1", "key": "NO_SUCH_KEY"}}, r"judge.key[\s\S]*export NO_SUCH_KEY"),
    "model": ({"judge": "./no-model"}, r"'no-model' does not exist"),
    "output": ({"output": "other.csv"}, r"output is a file[\s\S]*other.csv[\s\S]*another output"),
    "output of others": ({"output": "docs"}, r"folder is not empty[\s\S]*docs[\s\S]*another output"),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_is_reported_before_documents_are_read(
    docs: pathlib.Path, name: str, monkeypatch: pytest.MonkeyPatch
):
    keys, words = MISTAKES[name]
    (docs / "0.md").write_bytes(b"\xff")  # which reading it would report
    (docs.parent / "other.csv").write_text("a,b\n1,2\n")
    monkeypatch.chdir(docs.parent)
    with teacher_stub() as stub, pytest.raises(UserError, match=words):
        generate_data(make(docs, stub, **keys))
    assert stub.requests == []


def test_an_address_of_no_host_is_reported_at_once(docs: pathlib.Path, monkeypatch: pytest.MonkeyPatch):
    with pytest.raises(socket.gaierror) as error:
        socket.getaddrinfo("no.invalid", 80)
    if error.value.errno != socket.EAI_NONAME:
        pytest.skip("there is no name server to ask")
    monkeypatch.setattr(teachers, "PAUSE", 1000.0)
    with pytest.raises(UserError, match=r"no host of this name[\s\S]*http://no.invalid/v1[\s\S]*correct teacher.path"):
        generate_data(make(docs, "http://no.invalid/v1"))


def test_a_budget_in_dollars_is_not_exceeded(docs: pathlib.Path):
    with teacher_stub() as stub:
        teacher = {"path": stub.address, "price": {"prompt": 10, "answer": 40}, "max_tokens": 100}
        output = generate_data(make(docs, stub, teacher=teacher, attempts=1, budget={"dollars": 0.015}))
        report = json.loads((output / "generated.json").read_text())
        assert 0 < len(stub.requests) < 6
        assert report["dollars"] == pytest.approx(0.003 * len(stub.requests))
        assert report["dollars"] <= 0.015


def test_a_budget_below_one_request_is_refused(docs: pathlib.Path):
    with teacher_stub() as stub:
        with pytest.raises(UserError, match=r"budget is too small for one request[\s\S]*raise it"):
            generate_data(make(docs, stub, budget={"tokens": 50}))
        assert stub.requests == []


def test_an_output_that_exists_is_refused_or_moved_aside(docs: pathlib.Path):
    with teacher_stub() as stub:
        recipe = make(docs, stub)
        output = generate_data(recipe)
        with pytest.raises(UserError, match="the folder is not empty"):
            generate_data(recipe)
        generate_data(recipe, overwrite=True)
        assert len(stub.requests) == 12
        assert len(list(output.parent.glob("out*"))) == 2
        with pytest.raises(UserError, match="another teacher"):
            generate_data(make(docs, stub, teacher={"path": stub.address, "temperature": 0.1}), resume=True)


def test_changed_filters_ask_for_nothing_again(docs: pathlib.Path):
    with teacher_stub() as stub:
        output = generate_data(make(docs, stub))
        asked = len(stub.requests)
        with pytest.raises(UserError, match="no record is left; dropped: length 18"):
            generate_data(make(docs, stub, filters={"length": {"max_words": 13}}), resume=True)
        assert not (output / "records.jsonl").exists()
        generate_data(make(docs, stub, filters={"length": {"max_words": 14}}), resume=True)
        assert len(stub.requests) == asked
    assert len(rows(output)) == 18


def test_a_source_that_changes_is_noticed(docs: pathlib.Path):
    with teacher_stub() as stub:
        recipe = make(docs, stub)

        def change(body: dict[str, Any]) -> str:
            (docs / "0.md").write_text("# The mill\n\nThe mill was closed.")
            return answer(body)

        stub.answer = change
        output = generate_data(recipe)
        report = json.loads((output / "generated.json").read_text())
        assert report["changed_sources"] == [str(docs / "0.md")]
        assert "changed meanwhile" in (output / "README.md").read_text()
        with pytest.raises(UserError, match=r"source has changed[\s\S]*0.md[\s\S]*restore it"):
            generate_data(recipe, resume=True)


def test_two_generators_cannot_write_one_output(docs: pathlib.Path):
    with teacher_stub(delay=0.3) as stub:
        recipe = make(docs, stub, teacher={"path": stub.address, "at_once": 1})
        thread = threading.Thread(target=generate_data, args=(recipe,))
        thread.start()
        while not stub.requests:
            time.sleep(0.01)
        with pytest.raises(UserError, match=r"(?i)process"):
            generate_data(recipe, resume=True)
        thread.join()
    assert len(rows(docs.parent / "out")) == 18


def test_filters_count_and_show_what_they_drop(docs: pathlib.Path):
    answers = iter(
        [
            "I'm sorry, but I cannot help with that.",
            "The mill grinds rye and spelt every day of the week.",
            "The mill grinds rye and spelt every day of the week.",
            "Die Mühle mahlt Roggen und Dinkel an jedem Tag der Woche.",
            "Yes.",
            "A crow stood on the old gate while nine boys ran down to the quay and sang.",
        ]
    )

    def pairs(body: dict[str, Any]) -> str:
        return json.dumps({"pairs": [{"question": "What does the mill do?", "answer": next(answers)}]})

    rows_ = [{"messages": [{"role": "user", "content": "Go on"}, {"role": "assistant", "content":
              "Then: a crow stood on the old gate while nine boys ran down to the quay."}]}]  # fmt: skip
    (docs.parent / "eval.jsonl").write_text(json.dumps(rows_[0]) + "\n")
    filters = {"language": "en", "length": {"min_words": 3}, "evaluation": str(docs.parent / "eval.jsonl")}
    with teacher_stub() as stub:
        stub.answer = pairs
        output = generate_data(make(docs, stub, teacher={"path": stub.address, "at_once": 1}, filters=filters))
    report = json.loads((output / "generated.json").read_text())
    assert report["dropped"] == {"refusals": 1, "language": 1, "length": 1, "duplicates": 1, "evaluation": 1}
    assert report["examples"]["language"][0]["reason"] == "it is 'de'"
    assert len(rows(output)) == 1
    card = (output / "README.md").read_text()
    assert "| refusals | 1 |" in card
    assert "Die Mühle mahlt" in card


def test_judged_filters_drop_what_scores_too_little_by_their_rubrics(docs: pathlib.Path):
    (docs.parent / "mine.yaml").write_text("about: mine\nprompt: 'MINE {{ question }} {{ passage }}'\n")

    def judged(body: dict[str, Any]) -> str:
        prompt = body["messages"][-1]["content"]
        if "response_format" not in body:  # the second answer to the question about the ferry has no word of the first
            return "Nobody knows." if "ferry" in prompt else "It is open every day in summer."
        if "pairs" in body["response_format"]["json_schema"]["schema"]["properties"]:
            (title,) = (title for title in TOPICS if f"# {title}" in prompt)
            return json.dumps({"pairs": [{"question": f"{title}?", "answer": "It is open every day in summer."}]})
        bad = "The mill?" in prompt if "MINE" in prompt else "orchard" in prompt
        return json.dumps({"reason": "because", "score": 1 if bad else 5})

    filters = {"duplicates": None, "agreement": 0.5, "grounded": 4}
    filters["quality"] = {"least": 2, "rubric": str(docs.parent / "mine.yaml")}
    with teacher_stub() as stub:
        stub.answer = judged
        output = generate_data(make(docs, stub, filters=filters))
    assert {(row["filter"], pathlib.Path(row["source"]).name) for row in rows(output, "dropped.jsonl")} == {
        ("quality", "0.md"),
        ("agreement", "1.md"),
        ("grounded", "2.md"),
    }
    assert len(rows(output)) == 3
    card = (output / "README.md").read_text()
    for name in ("quality", "agreement", "grounded"):
        assert f"| {name} | 1 |" in card
        assert f"- *{name}* (" in card


@pytest.mark.parametrize(
    "text", ["I'm sorry, but no.", "As an AI language model, I think", "抱歉，我不能", "I cannot do that"]
)
def test_refusals_are_known(text: str):
    assert REFUSAL.search(text)


@pytest.mark.parametrize("text", ["The cook said: I'm sorry.", "Airlines fly.", "It is an AI company.", "Sorrel grows"])
def test_answers_are_no_refusals(text: str):
    assert not REFUSAL.search(text)


def test_general_data_have_their_share_and_their_own_provenance(docs: pathlib.Path):
    general = [{"messages": [{"role": "user", "content": f"{n}?"}, {"role": "assistant", "content": f"{n}."}]}
               for n in range(50)]  # fmt: skip
    (docs.parent / "general.jsonl").write_text("".join(json.dumps(row) + "\n" for row in general))
    mix = {"data": str(docs.parent / "general.jsonl"), "share": 0.25}
    with teacher_stub() as stub:
        output = generate_data(make(docs, stub, mix=mix, system="Be brief."))
    kinds = [row["provenance"]["kind"] for row in rows(output)]
    assert kinds.count("general") == 6
    assert kinds.count("qa") == 18
    assert json.loads((output / "generated.json").read_text())["general_share"] == 0.25
    assert rows(output)[0]["messages"][0] == {"role": "system", "content": "Be brief."}


def test_held_out_records_are_of_other_passages(docs: pathlib.Path):
    with teacher_stub() as stub:
        output = generate_data(make(docs, stub, held_out=0.3))
    places = [{(r["provenance"]["source"], r["provenance"]["place"]) for r in rows(output, name)}
              for name in ("records.jsonl", "held-out.jsonl")]  # fmt: skip
    assert [len(place) for place in places] == [4, 2]
    assert not places[0] & places[1]


def test_a_dry_run_shows_prompts_and_asks_nothing(docs: pathlib.Path, capsys: pytest.CaptureFixture[str]):
    with teacher_stub() as stub:
        show_plan(make(docs, stub, teacher={"path": stub.address, "price": {"prompt": 1, "answer": 1}}))
        assert stub.requests == []
    shown = capsys.readouterr().out
    assert "6 documents, 6 passages" in shown
    assert "Write 3 different questions" in shown
    assert "at most" in shown
    assert "$0." in shown


def test_the_output_is_shown_with_its_sources(docs: pathlib.Path, capsys: pytest.CaptureFixture[str]):
    with teacher_stub() as stub:
        output = generate_data(make(docs, stub))
    capsys.readouterr()
    show_generated(output, 2)
    shown = capsys.readouterr().out
    assert f"qa of {docs}"[:40] in shown  # long paths are cut
    assert "prompt_sha256" in shown
    assert "| qa | 18 |" in shown
