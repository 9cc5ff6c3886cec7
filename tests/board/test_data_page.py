"""The API behind the Data page: uploads that are text or refused, and what the model will see."""

from __future__ import annotations

import base64
import gzip
import io
import json
import pathlib
import re
import zipfile

import pytest
from boards import READABLE, client, recipe
from PIL import Image

from meshtune.board import archives, uploads
from meshtune.board.catalogue import catalogue
from meshtune.board.workspace import Workspace, workspace_at
from meshtune.config.load import load_recipe, silent
from meshtune.data.loader import Loader
from meshtune.data.prepare import prepare_data
from meshtune.data.tokenizer import load_tokenizer
from meshtune.quickstart import LESSON, MODEL
from seeing_model import picture, save_seeing_model

BYTES = {"content-type": "application/octet-stream"}


@pytest.fixture
def workspace(tmp_path: pathlib.Path) -> Workspace:
    return workspace_at(tmp_path / "root", READABLE)


def send(board, name: str, content: bytes):
    return board.post("/api/data/upload", params={"name": name}, content=content, headers=BYTES)


def zip_text(text: bytes) -> bytes:
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w") as archive:
        archive.writestr("a.jsonl", text)
    return file.getvalue()


def test_an_upload_is_written_and_never_over_another(workspace):
    board = client(workspace)
    first, second = '{"text": "日本"}\n'.encode(), b'{"text": "b"}\n'
    assert send(board, "a b.jsonl", first).json()["path"] == "data/a b.jsonl"
    assert send(board, "a b.jsonl", second).json()["path"] == "data/a b-2.jsonl"
    assert (workspace.root / "data/a b.jsonl").read_bytes() == first
    assert (workspace.root / "data/a b-2.jsonl").read_bytes() == second
    listed = {file["path"]: file["bytes"] for file in board.get("/api/data/files").json()["files"]}
    assert listed["data/a b.jsonl"] == len(first)


TEXT = b'{"text": "a"}\n'


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.jsonl", zip_text(TEXT), "zip"),
        ("a.json", gzip.compress(TEXT, mtime=0), "gzip"),
        ("a.jsonl", b"PAR1" + TEXT, "Parquet"),
        ("a.txt", b"a\0b", "null bytes"),
        ("a.txt", "é".encode("latin-1"), "not UTF-8"),
        ("a.txt", "é".encode()[:1], "not UTF-8"),
        ("a.txt", b"", "empty"),
        ("a.exe", TEXT, "not taken"),
        ("a.jsonl.gz", TEXT, "not taken"),
        ("../a.jsonl", TEXT, "not a plain file name"),
        ("..\\a.jsonl", TEXT, "not a plain file name"),
        (".a.jsonl", TEXT, "not a plain file name"),
        ("", TEXT, "not a plain file name"),
        ("a\n.jsonl", TEXT, "not a plain file name"),
    ],
)
def test_what_is_not_a_text_file_is_refused_and_leaves_nothing(workspace, name, content, message):
    answer = send(client(workspace), name, content)
    assert answer.status_code == 400
    assert message in answer.json()["problems"][0]["message"]
    assert not list(workspace.root.glob("data/*"))
    assert {path.name for path in workspace.root.iterdir()} <= {"data", "meshtune-board"}


def test_an_upload_that_is_too_large_is_refused_and_leaves_nothing(workspace, monkeypatch):
    monkeypatch.setattr(uploads, "MAX_BYTES", 1000)
    answer = send(client(workspace), "a.txt", b"a" * 1001)
    assert "larger" in answer.json()["problems"][0]["message"]
    assert not list(workspace.root.glob("data/*"))


def test_a_preview_shows_what_training_reads(workspace):
    lesson = workspace.root / "lesson.jsonl"
    lesson.write_bytes(pathlib.Path(LESSON).read_bytes()[:5000].rpartition(b"\n")[0])
    text = recipe().replace(str(LESSON), "lesson.jsonl")
    content = {
        "model": str(MODEL),
        "output": "o",
        "data": {"train": [{"path": str(lesson), "format": "prompt_completion"}]},
    }
    content["data"] |= {"max_length": 128, "validation": 8}
    content["train"] = {"steps": 6, "batch_size": 2}
    prepared = prepare_data(
        load_recipe(content, notify=silent), load_tokenizer(str(MODEL)), cache=workspace.root / "cache"
    )
    assert isinstance(prepared.train, Loader)
    with client(workspace) as board:
        answer = board.post("/api/data/preview", json={"recipe": text}).json()
        train, validation = answer["reports"]
        assert (train["tokens"], train["trained_tokens"]) == (
            prepared.report.counts.tokens,
            prepared.report.counts.trained_tokens,
        )
        assert validation["samples"] == 8
        example = prepared.train.store[0]
        document = answer["documents"][0]
        assert document["tokens"] == len(example.ids)
        trained = "".join(piece for piece, weight in document["pieces"] if weight)
        assert trained
        assert answer["sources"][0]["records"][0] == json.loads(lesson.read_text().splitlines()[0])

        (workspace.root / "odd.jsonl").write_text('{"frage": "a", "antwort": "b"}\n' * 3)
        odd = recipe().replace(str(LESSON), "odd.jsonl").replace("prompt_completion", "auto")
        source = board.post("/api/data/preview", json={"recipe": odd}).json()["sources"][0]
        assert source["fields"] == ["frage", "antwort"]
        assert "no format fits" in source["problems"][0]["message"]
        columns = "prompt_completion, columns: {prompt: frage, completion: antwort}"
        mapped = board.post("/api/data/preview", json={"recipe": odd.replace("auto", columns)}).json()
        assert mapped["sources"][0]["format"] == "prompt_completion"
        assert not mapped["sources"][0]["problems"]


def test_neither_a_source_nor_a_registry_leads_out_of_the_folders(workspace, tmp_path):
    secret = tmp_path / "secret.jsonl"
    secret.write_bytes(TEXT)
    (workspace.root / "dataset_info.json").write_text(json.dumps({"x": {"file_name": str(secret)}}))
    board = client(workspace)
    for data in (f"data: {secret}\n", "data:\n  registry: dataset_info.json\n  train: [{name: x}]\n"):
        for path, body in (("/api/data/preview", {}), ("/api/plan", {}), ("/api/check", {"kind": "train"})):
            answer = board.post(path, json={"recipe": f"model: {MODEL}\noutput: o\nstage: pt\n{data}", **body})
            assert answer.status_code == 400, (path, data)
            assert "outside" in answer.json()["problems"][0]["message"]


def test_a_folder_that_lies_in_another_is_listed_once(tmp_path):
    folder = tmp_path / "readable"
    (folder / "inner").mkdir(parents=True)
    (folder / "inner" / "a.jsonl").write_bytes(TEXT)
    workspace = workspace_at(tmp_path / "root", (folder, folder / "inner", folder))
    assert workspace.readable == (folder,)
    assert [file["path"] for file in uploads.data_files(workspace)] == [str(folder / "inner" / "a.jsonl")]


def test_a_root_inside_a_folder_to_read_is_listed_once(tmp_path):
    (tmp_path / "outer").mkdir()
    workspace = workspace_at(tmp_path / "outer/root", (tmp_path / "outer",))
    for name in ("root/own.jsonl", "beside.jsonl"):
        (tmp_path / "outer" / name).touch()
    for name in ("root/model", "other"):
        (tmp_path / "outer" / name).mkdir()
        for file in ("config.json", "model.safetensors"):
            (tmp_path / "outer" / name / file).touch()
    folder = str(tmp_path / "outer")
    assert [file["path"] for file in uploads.data_files(workspace)] == ["own.jsonl", f"{folder}/beside.jsonl"]
    assert [entry["path"] for entry in catalogue(workspace)] == ["model", f"{folder}/other"]


def test_results_of_evaluations_are_not_offered_as_data(tmp_path):
    workspace = workspace_at(tmp_path)
    (tmp_path / "evaluations/gained/base").mkdir(parents=True)  # with --compare; then of one model
    for name in ("gained/settings.json", "gained/base/metrics.json", "settings.json", "predictions.jsonl"):
        (tmp_path / "evaluations" / name).touch()
    (tmp_path / "chats").mkdir()
    for name in ("settings.json", "chats.jsonl"):
        (tmp_path / "chats" / name).touch()
    assert [file["path"] for file in uploads.data_files(workspace)] == ["chats/chats.jsonl", "chats/settings.json"]


def zipped(entries: dict[str, bytes], **attributes: int) -> bytes:
    """A zip of these files; `attributes` are Unix modes by name."""
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, content in entries.items():
            info = zipfile.ZipInfo(name)
            info.compress_type = zipfile.ZIP_DEFLATED
            info.external_attr = attributes.get(name, 0) << 16
            archive.writestr(info, content)
    return file.getvalue()


def png(seed: int) -> bytes:
    file = io.BytesIO()
    picture(seed).save(file, "PNG")
    return file.getvalue()


ROW = {"messages": [{"role": "user", "content": "<image>What is it?"}, {"role": "assistant", "content": "A cat."}]}
TABLE = (json.dumps(ROW | {"images": ["small/1.png"]}) + "\n").encode()


def test_a_zip_of_pictures_with_a_table_is_unpacked_and_its_pictures_are_shown(workspace, shared):
    """The thumbnails are in the answer: the page has no way to the files."""
    model = save_seeing_model(workspace.root / "sees", shared)
    content = zipped({"cats/rows.jsonl": TABLE, "cats/small/1.png": png(1), "__MACOSX/cats/._1.png": b"?"})
    with client(workspace) as board:
        assert send(board, "cats.zip", content).json()["path"] == "data/cats/cats/rows.jsonl"
        assert send(board, "cats.zip", content).json()["path"] == "data/cats-2/cats/rows.jsonl"
        text = (
            f"model: {model}\noutput: o\nvision: {{}}\ndata: {{train: [data/cats/cats/rows.jsonl], max_length: 256}}\n"
        )
        answer = board.post("/api/data/preview", json={"recipe": text}).json()
    assert not answer["problems_of_data"]
    (address,) = answer["documents"][0]["pictures"]
    thumbnail = Image.open(io.BytesIO(base64.b64decode(address.partition(",")[2])))
    assert thumbnail.size == picture(1).size
    assert {path.name for path in (workspace.root / "data").iterdir()} == {"cats", "cats-2"}


@pytest.mark.parametrize(
    ("entries", "modes", "message"),
    [
        ({"a.jsonl": TABLE, "../1.png": b""}, {}, "no plain path"),
        ({"a.jsonl": TABLE, "/1.png": b""}, {}, "no plain path"),
        ({"a.jsonl": TABLE, ".ssh/1.png": b""}, {}, "no plain path"),
        ({"a.jsonl": TABLE, "1.png": b"/etc/passwd"}, {"1.png": 0o120777}, "a link"),
        ({"a.jsonl": TABLE, "1.exe": b""}, {}, "not taken"),
        ({"a.jsonl": TABLE, "1.png": b"no picture"}, {}, "PNG, JPEG and WEBP"),
        ({"a.jsonl": TABLE, "1.png": png(1)[:40]}, {}, "cannot be read|truncated"),
        ({"a.jsonl": TABLE, "b.jsonl": TABLE}, {}, "one table"),
        ({"1.png": png(1)}, {}, "one table"),
        ({"a.jsonl": b"\xff\xfe"}, {}, "not UTF-8"),
        ({"a.jsonl": TABLE, "b": b""}, {}, "not taken"),
    ],
)
def test_an_archive_that_holds_anything_else_is_refused_and_leaves_nothing(workspace, entries, modes, message):
    answer = send(client(workspace), "a.zip", zipped(entries, **modes))
    assert answer.status_code == 400
    assert re.search(message, answer.json()["problems"][0]["message"])
    assert not list(workspace.root.glob("data/*"))


def test_an_archive_beyond_the_bounds_is_refused_before_it_is_unpacked(workspace, monkeypatch):
    bomb = zipped({"a.jsonl": TABLE, "1.png": b"\0" * 5000})
    monkeypatch.setattr(archives, "MOST_BYTES", 4000)
    assert "of 5," in send(client(workspace), "a.zip", bomb).json()["problems"][0]["message"]
    monkeypatch.setattr(archives, "MOST_ARCHIVE", 100)
    assert "larger" in send(client(workspace), "a.zip", bomb).json()["problems"][0]["message"]
    assert "no zip archive" in send(client(workspace), "a.zip", b"PK").json()["problems"][0]["message"]
    assert not list(workspace.root.glob("data/*"))


def test_pictures_of_a_recipe_lie_inside_the_workspace(workspace):
    for fields in ("vision: {media_dir: /etc}", "vision: {}\nsample: {prompts: [[{type: image, image: /etc/passwd}]]}"):
        answer = client(workspace).post("/api/data/preview", json={"recipe": f"{recipe()}\n{fields}\n"})
        assert answer.status_code == 400
        assert "outside" in json.dumps(answer.json())
