"""Names, records, answers and messages of strangers in a real Chromium: nothing of them runs, and every page keeps its
shape."""

from __future__ import annotations

import contextlib
import http.server
import json
import os
import pathlib
import threading
from collections.abc import Iterator
from typing import Any

import pytest
from boards import request
from browsers import IMAGES, chromium, complaints, eventually, look, running, texts

from meshtune.board import queue
from meshtune.board.job import EXIT, LOG, PROCESS, identify, replace_json
from meshtune.board.kinds import TOKEN_FILE
from meshtune.board.workspace import Workspace, workspace_at

pytestmark = [pytest.mark.slow, pytest.mark.browser, pytest.mark.timeout(600)]

# What would run in a page that takes text for HTML or an address, and what turns the direction of text around.
HOSTILE = (
    "<script>window.hacked=1</script><img src=x onerror=window.hacked=1><svg onload=window.hacked=1>"
    "<a href='javascript:window.hacked=1'>here</a>\"'><iframe srcdoc='<script>parent.hacked=1</script>'></iframe>"
    "{{7*7}}${window.hacked=1}\u202e\u2066\u0007\u001b[31m"
)
# As the name of a file, which has no slash and at most 255 bytes.
FILE = "<img src=x onerror=window.hacked=1>\u202e'\"&javascript:window.hacked=1"
LONG = "x" * 100_000
FINDINGS = """
window.scrollTo(0, 0);
const inside = [...document.querySelectorAll('script, iframe, svg, img, a[href]')].filter((element) =>
  element.getAttribute('onload') || element.getAttribute('onerror') || element.getAttribute('src') === 'x'
  || element.hasAttribute('srcdoc') || /^javascript:/i.test(element.getAttribute('href') ?? '')
  || (element.tagName === 'SCRIPT' && element.textContent.includes('hacked')));
const nav = document.querySelector('nav').getBoundingClientRect();
return {
  hacked: window.hacked ?? null,
  inside: inside.map((element) => element.outerHTML.slice(0, 200)),
  wide: document.documentElement.scrollWidth - window.innerWidth,
  high: document.documentElement.scrollHeight,
  nav: nav.top >= 0 && nav.left >= 0 && nav.right <= window.innerWidth && nav.height < window.innerHeight / 2,
};
"""


class Model(http.server.BaseHTTPRequestHandler):
    """A model whose name, answers, thoughts and calls are hostile."""

    def log_message(self, *_: Any) -> None:
        pass

    def do_GET(self) -> None:
        self.answer("application/json", json.dumps({"data": [{"id": HOSTILE}, {"id": LONG}]}).encode())

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["content-length"]))
        call = {"index": 0, "id": HOSTILE, "type": "function", "function": {"name": HOSTILE, "arguments": HOSTILE}}
        deltas = [{"reasoning_content": HOSTILE}, {"content": HOSTILE + LONG}, {"tool_calls": [call]}]
        chunks = [{"choices": [{"index": 0, "delta": delta, "finish_reason": None}]} for delta in deltas]
        chunks.append({"choices": [{"index": 0, "delta": {}, "finish_reason": HOSTILE}], "usage": {"x": HOSTILE}})
        lines = [f"data: {json.dumps(chunk)}\n\n" for chunk in chunks]
        self.answer("text/event-stream", "".join([*lines, "data: [DONE]\n\n"]).encode())

    def answer(self, kind: str, content: bytes) -> None:
        self.send_response(200)
        self.send_header("content-type", kind)
        self.send_header("content-length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)


@contextlib.contextmanager
def model() -> Iterator[int]:
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Model)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield server.server_port
    finally:
        server.shutdown()
        server.server_close()


def lines(path: pathlib.Path, *rows: dict[str, Any]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


def job(workspace: Workspace, kind: str, name: str, output: pathlib.Path | None, code: int | None, log: str) -> str:
    """A job as its files would be after it has ended, or while it runs if there is no `code`; returns its id."""
    known = queue.read_jobs(workspace.jobs)
    fields = request(workspace, kind, HOSTILE, kind=kind, name=name, output=None if output is None else str(output))
    folder = queue._write(workspace, known, fields, f"model: {json.dumps(HOSTILE)}\n# {FILE}\n")
    (folder / LOG).write_text(log, encoding="utf-8")
    if code is not None:
        replace_json(folder / EXIT, {"code": code, "seconds": 1})
    else:
        runner = identify(os.getpid())
        assert runner is not None
        replace_json(folder / PROCESS, {"runner": runner.to_json()})
        (folder / TOKEN_FILE).write_text("token")
    return folder.name


def run(workspace: Workspace, name: str) -> pathlib.Path:
    """The folder of a run in which everything that is text is hostile."""
    output = workspace.root / "runs" / name
    rows = [
        {"kind": "train", "step": n, "loss": 2.0 / n, HOSTILE: n, "grad_norm": 1.0, "tokens": n, "memory": 1}
        for n in range(1, 9)
    ]
    lines(output / "metrics.jsonl", *rows, {"kind": "eval", "step": 8, "loss": 1.0, HOSTILE: 1.0, "memory": 1})
    lines(output / "samples.jsonl", {"step": 4, "prompt": HOSTILE, "text": HOSTILE + LONG})
    (output / "recipe.yaml").write_text(f"model: {json.dumps(HOSTILE)}\nseed: {len(name)}\ndata: {json.dumps(LONG)}\n")
    texts_of_run = {
        "status": HOSTILE,
        "total": 8,
        "result": HOSTILE,
        "best": {"loss": HOSTILE},
        "step": 8,
        HOSTILE: HOSTILE,
    }
    (output / "run.json").write_text(json.dumps(texts_of_run))
    (output / "checkpoints/4").mkdir(parents=True)
    return output


def evaluation(workspace: Workspace) -> pathlib.Path:
    output = workspace.root / "evaluations" / FILE
    for name in ("base", "tuned"):
        lines(output / name / "predictions.jsonl", {"prompt": HOSTILE, "reference": HOSTILE, "answer": HOSTILE + LONG})
        (output / name / "totals.json").write_text(json.dumps({HOSTILE: 1.0, LONG: 2.0}))
        tasks = {"tasks": [{"name": HOSTILE, "metrics": {HOSTILE: 0.5}}]}
        (output / name / "tasks.json").write_text(json.dumps(tasks))
    (output / f"{FILE}.txt").write_text(HOSTILE)
    (output / "report.html").write_text(f"<!doctype html><p>{HOSTILE}</p>")
    return output


@pytest.fixture(scope="module")
def hostile(tmp_path_factory):
    """(board, driver, ids): a board whose every file is hostile."""
    root = tmp_path_factory.mktemp("root")
    workspace = workspace_at(root)
    lines(root / f"data/{FILE}.jsonl", *[{HOSTILE: HOSTILE, "text": HOSTILE + LONG, LONG: 1}] * 3)
    (root / FILE).mkdir()
    (root / FILE / "config.json").write_text(json.dumps({"model_type": HOSTILE}))
    (root / FILE / "model.safetensors").write_bytes(b"")
    (root / f"{FILE}.gguf").write_bytes(b"")
    (root / f"{FILE}.yaml").write_text(f"model: {json.dumps(HOSTILE)}\n")
    with model() as port, running(root) as board, chromium() as driver:
        IMAGES.mkdir(parents=True, exist_ok=True)
        address = f"{HOSTILE}\naddress  http://127.0.0.1:{port}/v1\n"
        ids = {
            "first": job(workspace, "train", HOSTILE, run(workspace, "first"), 0, HOSTILE),
            "second": job(workspace, "train", LONG, run(workspace, FILE), 1, f"{LONG}\nerror: {HOSTILE}\n"),
            "eval": job(workspace, "eval", HOSTILE, evaluation(workspace), 0, HOSTILE),
            "export": job(workspace, "export", HOSTILE, evaluation(workspace), 1, f"error: {HOSTILE}{LONG}"),
            "serve": job(workspace, "serve", HOSTILE, None, None, address),
            "failed": job(workspace, "serve", LONG, None, 1, f"error: {HOSTILE}"),
        }
        yield board, driver, ids
        (workspace.jobs / ids["serve"] / PROCESS).unlink()  # which names this process as the runner
        replace_json(workspace.jobs / ids["serve"] / EXIT, {"code": 0, "seconds": 1})


def check(driver: Any, page: str) -> None:
    """Checks the page at two widths: nothing ran, nothing is in it that could, and it is no wider than the screen."""
    for width, height in ((1280, 900), (390, 844)):
        look(driver, width, height, dark=False)
        driver.save_screenshot(str(IMAGES / f"hostile-{page}-{width}.png"))
        findings = driver.execute_script(FINDINGS)
        assert (findings["hacked"], findings["inside"], findings["nav"]) == (None, [], True), (page, width, findings)
        assert findings["wide"] <= 0, (page, width, findings)
        assert page != "runs" or findings["high"] < 5000, "a name of 100 kB fills the page"
    look(driver, 1280, 900, dark=False)
    assert [entry for entry in complaints(driver) if "ontent Security Policy" in entry] == [], page


PAGES = ("runs", "runs/first", "runs/second", "compare", "data", "model", "recipe", "evaluate", "export", "talk")


@pytest.mark.parametrize("page", PAGES)
def test_nothing_of_a_stranger_runs_or_breaks_a_page(hostile, page):
    board, driver, ids = hostile
    name, _, run_name = page.partition("/")
    driver.get("about:blank")
    driver.get(f"{board.address}/#/{name}{f'/{ids[run_name]}' if run_name else ''}")
    eventually(lambda: texts(driver, "main h1, main h2") or texts(driver, "main"))
    shown = {"runs": "window.hacked", "compare": "window.hacked", "evaluate": "window.hacked", "talk": "window.hacked"}
    if name in shown:
        eventually(lambda: shown[name] in driver.find_element("css selector", "main").get_property("textContent"), 30)
    if name == "compare":
        for box in driver.find_elements("css selector", "main input[type=checkbox]")[:2]:
            if not box.is_selected():
                box.click()
    eventually(lambda: driver.execute_script("return document.readyState") == "complete")
    check(driver, page.replace("/", "-"))


def test_answers_of_a_model_are_text(hostile):
    board, driver, _ = hostile
    driver.get("about:blank")
    driver.get(f"{board.address}/#/talk")
    eventually(lambda: driver.find_elements("css selector", ".pick"))
    driver.find_element("id", "prompt").send_keys("hello\n")
    eventually(lambda: "window.hacked" in "".join(texts(driver, ".said")), 60)
    check(driver, "answer")


def test_a_report_and_a_download_run_nothing(hostile):
    board, driver, ids = hostile
    for path in (f"/api/results/{ids['eval']}/report", f"/api/jobs/{ids['first']}/report"):
        driver.get(board.address + path)
        assert driver.execute_script("return window.hacked ?? null") is None
        assert driver.execute_script("return self.origin") == "null", "it is in a sandbox, with no origin of its own"
    complaints(driver)  # of what the policy kept from running


def test_records_in_a_recipe_that_is_previewed_are_text(hostile):
    board, driver, _ = hostile
    driver.get("about:blank")
    driver.get(f"{board.address}/#/data")
    eventually(lambda: "window.hacked" in driver.find_element("css selector", "main").get_property("textContent"), 60)
    buttons = driver.find_elements("css selector", "main button[aria-label*='window.hacked'], main li button")
    if buttons:
        buttons[0].click()
    eventually(lambda: driver.find_elements("css selector", "main"))
    check(driver, "data-preview")
