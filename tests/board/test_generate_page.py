"""The API behind the page that makes data: documents, a recipe of data, templates, counts and records."""

from __future__ import annotations

import json
import pathlib

import pytest
from boards import READABLE, client, request
from made_documents import docx, pdf, write_documents

from meshtune.board import queue, uploads
from meshtune.board.devices import devices_of
from meshtune.board.job import EXIT, read_job
from meshtune.board.planning_work import WORK
from meshtune.board.runner import _paths_problem
from meshtune.board.workspace import Workspace, workspace_at
from meshtune.config.data_recipe import load_data_recipe, template_text
from meshtune.quickstart import MODEL
from meshtune.synth.card import COUNTS, REPORT

BYTES = {"content-type": "application/octet-stream"}
SERVER = "http://127.0.0.1:9/v1"


@pytest.fixture
def workspace(tmp_path: pathlib.Path) -> Workspace:
    workspace = workspace_at(tmp_path / "root", READABLE)
    write_documents(workspace.root / "handbook")
    return workspace


def send(board, name: str, content: bytes):
    return board.post("/api/generate/upload", params={"name": name}, content=content, headers=BYTES)


def edit(board, recipe: str, *changes: dict, **fields: object) -> dict:
    answer = board.post("/api/generate/recipe", json={"recipe": recipe, "changes": list(changes), **fields})
    assert answer.status_code == 200, answer.text
    return answer.json()


RECIPE = f"# mine\nteacher: {MODEL}\ndocuments: handbook\nkinds: [qa]\noutput: made/first\n"


def test_documents_are_uploaded_unchanged_and_never_over_another(workspace, tmp_path):
    board = client(workspace)
    docx(tmp_path / "a.docx", [("", "Words of a document.")])
    contents = {"a.pdf": pdf([["One line"]]), "ä b.md": "# Ä\n".encode(), "a.HTML": b"<p>x"}
    contents["a.docx"] = (tmp_path / "a.docx").read_bytes()
    for name, content in contents.items():
        assert send(board, name, content).json()["path"] == f"documents/{name}"
        assert (workspace.root / "documents" / name).read_bytes() == content
    assert send(board, "a.pdf", pdf([["Another"]])).json()["path"] == "documents/a-2.pdf"
    listed = [file["path"] for file in board.get("/api/generate/files").json()["files"]]
    assert {"documents/a.pdf", "documents/a-2.pdf", "handbook/0.md", "handbook/all.pdf"} <= set(listed)
    assert not [path for path in listed if ".hidden" in path]


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.pdf", b"PK\x03\x04", "no PDF"),
        ("a.docx", b"%PDF-1.4", "no DOCX"),
        ("a.md", b"%PDF-1.4", "a PDF, not text"),
        ("a.txt", b"a\0b", "null bytes"),
        ("a.md", "é".encode("latin-1"), "not UTF-8"),
        ("a.md", b"", "empty"),
        ("a.md", b"x" * 2000, "larger"),
        ("a.pdf", b"%PDF-" + b"x" * 2000, "larger"),
        ("a.xlsx", b"PK\x03\x04", "not taken"),
        ("../a.md", b"x", "not a plain file name"),
    ],
)
def test_files_of_other_types_are_refused_and_leaves_nothing(workspace, monkeypatch, name, content, message):
    monkeypatch.setattr(uploads, "MOST_BYTES", 1000)
    answer = send(client(workspace), name, content)
    assert answer.status_code == 400
    assert message in answer.json()["problems"][0]["message"]
    assert not list(workspace.root.glob("documents/*"))


def test_a_form_changes_the_recipe_and_names_an_output(workspace):
    board = client(workspace)
    first = edit(
        board, "", {"path": "documents", "value": ["handbook"]}, {"path": "kinds", "value": ["qa"]}, name_output=True
    )
    assert load_data_recipe({"teacher": "x", **first["values"]}).output == "made/handbook-1"
    assert [problem["path"] for problem in first["problems"]] == ["teacher"]
    (workspace.root / "made/handbook-1").mkdir(parents=True)
    again = edit(board, "documents: [handbook]", name_output=True)
    assert again["values"]["output"] == "made/handbook-2"
    changed = edit(board, RECIPE, {"path": "budget.tokens", "text": "5000"}, {"path": "held_out", "text": "0.1"})
    assert changed["recipe"].startswith("# mine")
    assert changed["problems"] == []
    options = edit(board, RECIPE, {"path": "kinds.0.options.count", "text": "5"})
    assert options["values"]["kinds"] == [{"template": "qa", "options": {"count": 5}}]
    template = options["templates"]["qa"]
    assert (template["of"], template["options"]["count"]) == ("passage", 3)
    assert template["text"] == template_text("qa")
    wrong = edit(board, RECIPE, {"path": "kinds.0.options.cuont", "text": "5"})
    assert "no option 'cuont'" in wrong["problems"][0]["message"]


def test_a_template_is_copied_changed_and_used(workspace):
    board = client(workspace)
    text = template_text("qa").replace("different questions", "hard questions")
    saved = board.post("/api/generate/templates", json={"name": "hard", "text": text})
    assert (saved.status_code, saved.json()["path"]) == (201, "templates/hard.yaml")
    assert board.get("/api/generate/templates").json()["files"] == ["templates/hard.yaml"]
    assert board.post("/api/generate/templates", json={"name": "hard", "text": text}).status_code == 400
    assert (
        board.post("/api/generate/templates", json={"name": "hard", "text": text, "replace": True}).status_code == 201
    )
    shown = edit(board, RECIPE.replace("qa", "templates/hard.yaml"))
    assert shown["problems"] == []
    assert shown["templates"]["templates/hard.yaml"]["text"] == text
    for name, content, message in (
        ("x", text.replace("{{ passage }}", "{{ pasage }}"), "unknown field 'pasage'"),
        ("x", "about: [", "YAML"),
        ("../x", text, "no name"),
        ("x.yaml", text, "no name"),
    ):
        answer = board.post("/api/generate/templates", json={"name": name, "text": content})
        assert answer.status_code == 400, name
        assert message in answer.text
    assert [path.name for path in (workspace.root / "templates").iterdir()] == ["hard.yaml"]
    broken = edit(board, RECIPE.replace("qa", "templates/none.yaml"))
    assert broken["templates"]["templates/none.yaml"]["problems"]


def test_a_server_is_asked_only_with_leave_and_its_key_is_never_written(workspace, tmp_path, monkeypatch):
    monkeypatch.setenv("KEY_OF_THE_TEST", "sk-secret")
    server = RECIPE.replace(str(MODEL), f"{{path: '{SERVER}', key: KEY_OF_THE_TEST}}")
    assert "without leave" in edit(client(workspace), server)["problems"][0]["message"]
    board = client(workspace_at(workspace.root, runs_code=True))
    assert edit(board, server)["problems"] == []
    pasted = server.replace("KEY_OF_THE_TEST", "sk_1234secret")  # the key in place of its variable's name
    for answer in (edit(board, pasted), board.post("/api/jobs", json={"kind": "data", "recipe": pasted}).json()):
        assert [problem["path"] for problem in answer["problems"]] == ["teacher.key"]
        assert "1234" not in json.dumps(answer["problems"])
    for path in workspace.folder.rglob("*"):
        assert not path.is_file() or b"1234" not in path.read_bytes()


def test_links_in_documents_do_not_lead_outside(workspace, tmp_path):
    (tmp_path / "secret.md").write_text("a secret of many words")
    deep = workspace.root / "handbook/a/b/c"
    deep.mkdir(parents=True)
    (deep / "x.md").symlink_to(tmp_path / "secret.md")
    answer = edit(client(workspace), RECIPE)
    assert "outside" in answer["problems"][0]["message"]


def test_a_plan_shows_prompts_and_asks_nothing(workspace, monkeypatch):
    monkeypatch.chdir(workspace.root)
    plan = WORK["generate"]({"recipe": RECIPE.replace("[qa]", "[summary, qa]")})
    assert [prompt["name"].partition(" of ")[0] for prompt in plan["prompts"]] == ["summary", "qa"]
    assert (plan["documents"], plan["requests"]) == ("9 documents, 9 passages", 18)
    assert "Write 3 different questions" in plan["prompts"][1]["messages"][1][1]
    assert plan["tokens"] > 18 * 1024


def data_job(workspace: Workspace, output: str = "made/first", recipe: str = RECIPE):
    fields = request(
        workspace, "data", "generate", "{job}/recipe.yaml", kind="data", output=str(workspace.root / output)
    )
    folder = queue._write(workspace, [], fields, recipe)
    (folder / EXIT).write_text('{"code": 1}')
    return queue.find(workspace, folder.name)


def test_records_are_shown_page_by_page_and_nothing_else(workspace):
    board, job = client(workspace), data_job(workspace)
    output = workspace.root / "made/first"
    output.mkdir(parents=True)
    rows = [{"messages": [], "provenance": {"source": f"{number}"}} for number in range(45)]
    lines = [json.dumps(row) for row in rows]
    (output / "records.jsonl").write_text("\n".join([*lines[:3], "{broken", *lines[3:]]) + "\n")
    (output / "pairs.jsonl").symlink_to(workspace.root.parent / "secret.md")
    (workspace.root.parent / "secret.md").write_text('{"a": "secret"}')
    address, collected, start = f"/api/generate/jobs/{job.id}/records", [], 0
    while start is not None:
        page = board.get(address, params={"file": "records.jsonl", "start": start}).json()
        collected, start = collected + page["rows"], page["next"]
    assert collected == rows
    for params in (
        {"file": "pairs.jsonl"},
        {"file": "journal.jsonl"},
        {"file": "../x"},
        {"file": "records.jsonl", "start": "-1"},
    ):
        answer = board.get(address, params=params)
        assert (answer.status_code, 'secret"' in answer.text) == (400, False), params
    for content in ("", "null", "[]", "{", '{"dropped": NaN}', "[" * 5000):
        for name in (COUNTS, REPORT):
            (output / name).write_text(content)
        assert board.get(f"/api/generate/jobs/{job.id}").status_code == 200
    train = queue._write(workspace, [job], request(workspace, "train"), "x")
    assert board.get(f"/api/generate/jobs/{train.name}").status_code == 400


def test_a_job_goes_on_without_asking_twice_and_a_server_takes_no_device(workspace, monkeypatch):
    started = []
    monkeypatch.setattr(queue, "_start", lambda job, secrets=None: started.append(job.request))
    job = data_job(workspace)
    queue.resume(workspace, job.id)
    assert started[0].arguments[-1] == "--resume"
    assert _paths_problem(read_job(job.folder)) is None  # pyright: ignore[reportArgumentType]
    queue.remove(workspace, job.id)
    board = client(workspace_at(workspace.root, READABLE, runs_code=True))
    for teacher, count in ((str(MODEL), 1), (SERVER, 0)):
        recipe = RECIPE.replace(str(MODEL), teacher).replace("first", f"of-{count}")
        body = {"kind": "data", "recipe": recipe, "devices": {"keys": ["cpu"]}}
        answer = board.post("/api/jobs", json=body).json()
        assert len(devices_of(answer["devices"])) == count
