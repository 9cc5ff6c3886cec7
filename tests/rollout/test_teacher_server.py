"""Teachers behind an address: what Meshtune's own server says, and servers that misbehave."""

from __future__ import annotations

import http.server
import json
import threading
import time
from typing import ClassVar

import numpy as np
import pytest
import torch
from serving import serving
from transformers import AutoModelForCausalLM

from meshtune.config.load import load_recipe
from meshtune.config.recipe import TeacherSection
from meshtune.data.tokenizer import load_tokenizer
from meshtune.errors import UserError
from meshtune.rollout.distill import NamedRows
from meshtune.rollout.teacher_server import TeacherServer
from meshtune.serve.models import Models, load_served

TEXTS = [list(range(3, 23)), [1, 400, 7, 300]]
STARTS = [5, 1]


@pytest.fixture(scope="module")
def tokenizer(stories260k):
    return load_tokenizer(stories260k)


@pytest.fixture(scope="module")
def address(stories260k):
    models = Models(load_served(str(stories260k), "stories", {}, dtype="float32", quantize="auto"), rows=4, queue=8)
    with serving(models) as url:
        yield f"{url}/v1"


@pytest.fixture(scope="module")
def expected(stories260k):
    """The log-probabilities of transformers, of every text."""
    model = AutoModelForCausalLM.from_pretrained(stories260k, dtype=torch.float32)
    with torch.no_grad():
        return [model(torch.tensor([ids])).logits[0].log_softmax(-1).numpy() for ids in TEXTS]


def test_a_server_names_what_transformers_computes(address, tokenizer, expected):
    teacher = TeacherServer(TeacherSection(path=address, top_k=6), tokenizer, 512)
    teacher.check()
    answers = teacher.score(TEXTS * 5, STARTS * 5)  # more than one request
    for text, start, log_probs, named in zip(TEXTS * 5, STARTS * 5, expected * 5, answers, strict=True):
        assert named.ids.shape == named.log_probs.shape == (len(text) - start, 7)
        assert named.ids[:, 0].tolist() == text[start:]
        for row, ids, values in zip(log_probs[start - 1 : -1], named.ids, named.log_probs, strict=True):
            others = [id_ for id_ in np.argsort(-row) if id_ != ids[0]]
            likeliest = [id_ for id_ in np.argsort(-row)[:6] if id_ != ids[0]]
            assert ids[1:].tolist() == likeliest + [-1] * (6 - len(likeliest)), others
            np.testing.assert_allclose(values[ids >= 0], row[ids[ids >= 0]], atol=1e-4)


def test_rows_of_validation_get_the_answers_of_their_documents(address, tokenizer, expected):
    teacher = TeacherServer(TeacherSection(path=address, top_k=6), tokenizer, 512)
    rows = NamedRows(teacher)
    arrays = {name: np.zeros((1, 1, 32), np.int32) for name in ("tokens", "targets", "segment_ids")}
    arrays["weights"] = np.zeros((1, 1, 32), np.float32)
    stop = 0
    for segment, (ids, start) in enumerate(zip(TEXTS, STARTS, strict=True), start=1):
        span = slice(stop, stop := stop + len(ids) - 1)
        arrays["tokens"][..., span], arrays["targets"][..., span] = ids[:-1], ids[1:]
        arrays["segment_ids"][..., span] = segment
        arrays["weights"][..., span.start + start - 1 : span.stop] = 1
    named = rows(arrays)
    answers = teacher.score(TEXTS, STARTS)
    trained = arrays["weights"] > 0
    np.testing.assert_array_equal(named["named_ids"][trained], np.concatenate([part.ids for part in answers]))
    np.testing.assert_array_equal(
        named["named_log_probs"][trained], np.concatenate([part.log_probs for part in answers])
    )
    teacher.score = None  # a second evaluation asks nothing
    np.testing.assert_array_equal(rows(arrays)["named_ids"], named["named_ids"])


class Server(http.server.BaseHTTPRequestHandler):
    """Answers as the first part of the path says."""

    calls: ClassVar[list[str]] = []

    def log_message(self, *_):
        pass

    def do_GET(self):
        names = ["a", "b"] if "/several/" in self.path else ["a"]
        self.reply(200, {"data": [{"id": name} for name in names]})

    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        kind = self.path.split("/")[1]
        self.calls.append(kind)
        if kind == "slow":
            time.sleep(3)
        if kind == "drips":
            self.send_response(200)
            self.end_headers()
            for _ in range(40):
                self.wfile.write(b" ")
                self.wfile.flush()
                time.sleep(0.1)
        if kind == "broken" or (kind == "flaky" and self.calls.count("flaky") < 3):
            return self.reply(500, {"error": "no memory"})
        if kind == "refuses":
            return self.reply(400, {"error": {"message": "token 511 is out of the vocabulary"}})
        entry = {"logprob": -1.0, "rank": 1, "decoded_token": None}
        match kind:
            case "text":
                entry["decoded_token"] = "zebra"
            case "nan":
                entry["logprob"] = float("nan")
            case "logits":
                entry["logprob"] = 12.5
        texts = body["prompt"]
        positions = [[None, *({str(id_): entry, "99999": entry} for id_ in ids[1:])] for ids in texts]
        if kind == "names":
            positions = [[None, *({"dog": entry} for _ in ids[1:])] for ids in texts]
        choices = [{"index": n, "prompt_logprobs": part} for n, part in enumerate(positions)]
        if kind == "plain":
            choices = [{"index": n, "text": ""} for n in range(len(texts))]
        return self.reply(200, {"choices": choices[:-1] if kind == "few" else choices})

    def reply(self, status, content):
        self.send_response(status)
        self.end_headers()
        self.wfile.write(json.dumps(content).encode())


@pytest.fixture(scope="module")
def misbehaving():
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Server) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_address[1]}"
        server.shutdown()


WRONG = [
    ("broken", "500: .*no memory.*3 times"),
    ("refuses", "400: .*out of the vocabulary"),
    ("slow", "timed out"),
    ("drips", "did not end in time"),
    ("text", "another vocabulary: token .* 'zebra' there"),
    ("nan", "no log-probabilities"),
    ("logits", "no log-probabilities"),
    ("names", "does not say how likely"),
    ("plain", "no prompt_logprobs"),
    ("few", "one choice for each"),
    ("several", "a, b, and one is needed"),
]


@pytest.mark.parametrize(("kind", "message"), WRONG)
def test_what_a_server_does_wrong_is_an_error_within_its_time(kind, message, misbehaving, tokenizer, monkeypatch):
    monkeypatch.setattr("meshtune.rollout.servers.PAUSE", 0.01)
    section = TeacherSection(path=f"{misbehaving}/{kind}/v1", top_k=4, timeout=0.5 if kind in ("slow", "drips") else 9)
    started = time.monotonic()
    with pytest.raises(UserError, match=message) as error:
        TeacherServer(section, tokenizer, 512).check()
    assert time.monotonic() - started < 2.5
    assert misbehaving in error.value.where
    assert error.value.fix


def test_a_server_that_fails_for_a_moment_is_asked_again(misbehaving, tokenizer, monkeypatch):
    monkeypatch.setattr("meshtune.rollout.servers.PAUSE", 0.01)
    teacher = TeacherServer(TeacherSection(path=f"{misbehaving}/flaky/v1", top_k=4), tokenizer, 512)
    (named,) = teacher.score([[5, 6, 7]], [1])
    assert named.ids.tolist() == [[6, -1, -1, -1, -1], [7, -1, -1, -1, -1]], "no token of the student has number 99999"


REFUSED = [
    ({"stage": {"kind": "distill", "temperature": 2.0}}, "at temperature 1"),
    ({"rollout": None}, "also those of the data: give rollout"),
    ({"teacher": {"path": "http://localhost:1/v1", "quantize": "nf4"}}, "quantize is an option of a model's files"),
    ({"teacher": {"path": "some/model", "top_k": 5}}, "top_k is an option of a server"),
    ({"teacher": "http://"}, "names no server"),
    ({"data": {"train": "d.jsonl", "streaming": True}}, "streaming"),
]


@pytest.mark.parametrize(("changes", "message"), REFUSED)
def test_what_a_server_cannot_do_is_refused_before_it_is_asked(changes, message):
    fields = {
        "model": "some/model", "data": {"train": "d.jsonl", "max_length": 64}, "stage": "distill", "output": "out",
        "teacher": "http://localhost:1/v1", "rollout": {"prompts": 2, "samples": 1, "max_tokens": 16},
    }  # fmt: skip
    load_recipe(fields)
    with pytest.raises(Exception, match=message):
        load_recipe(fields | changes)
