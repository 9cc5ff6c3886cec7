"""Paths and hub ids; the hub is a small server that answers as huggingface.co does."""

from __future__ import annotations

import hashlib
import http.server
import json
import os
import subprocess
import sys
import threading
from pathlib import Path
from urllib.parse import unquote, urlparse

import pytest

from meshtune.errors import UserError
from meshtune.weights.hub import TOKENIZER, locate

SHA = "a" * 40
ASK = """
import json, sys
from meshtune.errors import UserError
from meshtune.weights.hub import TOKENIZER, locate
answers = []
for name, revision, kind in json.loads(sys.argv[1]):
    try:
        path = locate(name, revision, **({"allow": TOKENIZER} if kind == "tokenizer" else {}))
        answers.append(str(path))
    except UserError as error:
        answers.append(f"UserError: {error}")
print(json.dumps(answers))
"""


class Hub(http.server.BaseHTTPRequestHandler):
    """/api/models/<repo>/revision/<r>, /api/models/<repo>/tree/<sha> and /<repo>/resolve/<sha>/<file>."""

    model: Path
    requests: list[str]
    token: str | None
    REFUSALS = {  # noqa: RUF012
        "org/gated": (403, "GatedRepo"),
        "org/unknown": (401, "RepoNotFound"),
        "org/forbidden": (403, None),
        "org/broken": (500, None),
    }

    def log_message(self, *_):
        pass

    def do_HEAD(self):
        self.do_GET()

    def do_GET(self):
        path = unquote(urlparse(self.path).path).strip("/").split("/")
        type(self).requests.append("/".join(path))
        type(self).token = self.headers.get("authorization") or type(self).token
        repo = "/".join(path[2:4] if path[0] == "api" else path[:2])
        if repo in self.REFUSALS:
            self.refuse(*self.REFUSALS[repo])
        elif path[0] == "api" and path[4] == "revision":
            if path[5] not in ("main", "v1", SHA):
                self.refuse(404, "RevisionNotFound")
            else:
                self.answer({"id": repo, "sha": SHA, "siblings": [{"rfilename": f.name} for f in self.files()]})
        elif path[0] == "api":
            self.answer(
                [{"type": "file", "path": f.name, "size": f.stat().st_size, "oid": self.blob(f)} for f in self.files()]
            )
        else:
            file = self.model / path[-1]
            data = file.read_bytes()
            self.send(200, data, {"ETag": f'"{self.blob(file)}"', "X-Repo-Commit": SHA})

    def files(self):
        return sorted(self.model.iterdir())

    @staticmethod
    def blob(file: Path) -> str:
        return hashlib.sha1(file.read_bytes()).hexdigest()

    def answer(self, value):
        self.send(200, json.dumps(value).encode(), {"Content-Type": "application/json"})

    def refuse(self, status: int, code: str | None):
        self.send(status, b"{}", {"X-Error-Code": code, "X-Error-Message": "no"} if code else {})

    def send(self, status: int, data: bytes, headers: dict[str, str]):
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(data)


@pytest.fixture(scope="module")
def hub(make_model):
    directory = make_model("llama")
    for name in ("pytorch_model.bin", "modeling_x.py", "training_args.pt", "consolidated.safetensors"):
        (directory / name).write_bytes(b"never wanted")
    (directory / "tokenizer.json").write_text("{}")
    Hub.model, Hub.requests, Hub.token = directory, [], None
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()


def ask(*questions, cache: Path, cwd: Path | None = None, **environment: str) -> list[str]:
    """Calls `locate` in a separate process: the hub's library reads its settings when it is imported."""
    settings = {key: value for key, value in os.environ.items() if not key.startswith("HF_")}
    settings |= {"HF_HOME": str(cache), "HF_HUB_DISABLE_XET": "1", "JAX_PLATFORMS": "cpu", "NO_PROXY": "127.0.0.1"}
    requests = json.dumps([(*question, None, None)[:3] for question in questions])
    done = subprocess.run(
        [sys.executable, "-c", ASK, requests], capture_output=True, text=True, env=settings | environment, cwd=cwd
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def test_a_model_is_downloaded_once_without_pickles_or_code(hub, tmp_path):
    Hub.requests.clear()
    (first,) = ask(("org/model", "v1"), cache=tmp_path, HF_ENDPOINT=hub, HF_TOKEN="hf_secret")
    expected = {"config.json", "generation_config.json", "model.safetensors", "tokenizer.json"}
    assert {path.name for path in Path(first).iterdir()} == expected
    assert (Path(first) / "model.safetensors").read_bytes() == (Hub.model / "model.safetensors").read_bytes()
    assert Hub.token == "Bearer hf_secret"
    assert {requests.split("/")[-1] for requests in Hub.requests if "resolve" in requests} == expected

    Hub.requests.clear()
    assert ask(("org/model", SHA), cache=tmp_path, HF_ENDPOINT=hub, HF_HUB_OFFLINE="1") == [first]
    assert not Hub.requests


def test_a_tokenizer_alone_is_downloaded_without_the_weights(hub, tmp_path):
    (path,) = ask(("org/model", None, "tokenizer"), cache=tmp_path, HF_ENDPOINT=hub)
    assert {file.name for file in Path(path).iterdir()} == {"config.json", "generation_config.json", "tokenizer.json"}


def test_what_the_hub_refuses_is_said_with_its_fix(hub, tmp_path):
    (tmp_path / "org/unknowm").mkdir(parents=True)
    questions = [("org/gated",), ("org/unknown",), ("org/model", "v7"), ("org/forbidden",), ("org/broken",)]
    answers = ask(*questions, cache=tmp_path / "cache", cwd=tmp_path, HF_ENDPOINT=hub)
    gated, unknown, revision, forbidden, broken = answers
    assert "'org/gated' is gated" in gated
    assert "HF_TOKEN" in gated
    assert "the hub knows no such model, or it is private (no HF_TOKEN is set)" in unknown
    assert "did you mean 'org/unknowm'?" in unknown
    assert "'org/model' has no revision 'v7'" in revision
    assert all(answer.startswith("UserError") for answer in answers)
    assert "the hub refused access to 'org/forbidden' (HTTP 403)" in forbidden
    assert "the hub could not serve 'org/broken' (HTTP 500)" in broken


def test_no_network_and_offline_mode_are_told_apart(tmp_path):
    (down,) = ask(("org/model",), cache=tmp_path, HF_ENDPOINT="http://127.0.0.1:9")
    assert "not (or not wholly) in the hub's cache, and the hub (127.0.0.1:9) cannot be reached" in down
    (offline,) = ask(("org/model",), cache=tmp_path, HF_HUB_OFFLINE="1")
    assert "HF_HUB_OFFLINE is set" in offline
    assert "hf download org/model" in offline


def refusal(path, *arguments, **options) -> str:
    with pytest.raises(UserError) as caught:
        locate(path, *arguments, **options)
    return str(caught.value)


def test_a_local_directory_is_itself(make_model):
    directory = make_model("llama")
    assert locate(str(directory)) == directory
    assert locate(directory) == directory
    assert "a local directory, which has no revisions" in refusal(directory, "main")


def test_a_path_that_does_not_exist_suggests_its_neighbours(tmp_path, monkeypatch):
    (tmp_path / "SmolLM2-135M").mkdir()
    assert f"did you mean '{tmp_path / 'SmolLM2-135M'}'?" in refusal(tmp_path / "smollm-135m")
    assert f"the folder '{tmp_path / 'modles'}' does not exist either" in refusal(tmp_path / "modles/a/b")
    monkeypatch.chdir(tmp_path)
    message = refusal("SmolLM2-135")
    assert "model path 'SmolLM2-135' does not exist" in message
    assert "did you mean 'SmolLM2-135M'?" in message
    assert "organisation/name" in message
    assert "did you mean 'SmolLM2-135M'?" in refusal("./SmolLM2-135")


def test_a_file_where_a_directory_is_expected_is_refused(tmp_path):
    (tmp_path / "model.safetensors").write_bytes(b"")
    message = refusal(tmp_path / "model.safetensors")
    assert "is a file" in message
    assert f"give the folder: {tmp_path}" in message


def test_a_directory_that_is_no_model_is_refused(tmp_path, make_model):
    assert "no config.json" in refusal(tmp_path)
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "pytorch_model.bin").write_bytes(b"x")
    assert "only pickled weights are here" in refusal(tmp_path)
    assert locate(tmp_path, allow=TOKENIZER) == tmp_path


def test_a_misspelt_path_is_not_taken_for_an_id_of_the_hub(tmp_path, monkeypatch):
    (tmp_path / "runs/bruno").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(UserError, match="there is no 'brun' in the folder 'runs' here; as an id of the hub") as error:
        locate("runs/brun")
    assert (error.value.fix or "").startswith("did you mean 'runs/bruno'?")
