"""A server with OpenAI's API whose answers depend on the request only, and which fails as a test tells it to."""

from __future__ import annotations

import contextlib
import hashlib
import http.server
import json
import re
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

Fault = Callable[[http.server.BaseHTTPRequestHandler], None]
KEY = "sk-secret-of-the-test"


class TeacherStub:
    """Its state: `faults` by the number of a request, `requests` that came, and how many were answered at once."""

    def __init__(self, key: str | None = None, delay: float = 0.0):
        self.key, self.delay = key, delay
        self.faults: dict[int, Fault] = {}
        self.answer: Callable[[dict[str, Any]], str] = answer
        self.requests: list[dict[str, Any]] = []
        self.running = self.most_running = 0
        self.address = ""
        self.lock = threading.Lock()


def answer(body: dict[str, Any]) -> str:
    """An answer as of a teacher: JSON where the request has a schema, other words for another seed."""
    prompt = body["messages"][-1]["content"]
    if isinstance(prompt, list):
        prompt = prompt[-1]["text"]
    words = re.findall(r"\w+", prompt.rpartition("Passage:")[2])
    digest = hashlib.sha256(f"{body['seed']} {prompt}".encode()).digest()
    picked = " ".join(words[byte % len(words)] for byte in digest[:12])
    schema = body.get("response_format", {}).get("json_schema", {}).get("schema")
    if schema is None:
        return f"It says: {picked}."
    names = set(schema["properties"])
    if names == {"reason", "score"}:
        return json.dumps({"reason": picked, "score": 1 + digest[0] % 5})
    if names == {"question"}:
        return json.dumps({"question": f"Why {picked}?"})
    if names == {"question", "answer"}:
        return json.dumps({"question": f"What about {picked}?", "answer": f"It is {picked}."})
    if names == {"turns"}:
        turns = [{"user": f"And {word}?", "assistant": f"Yes, {word} and {picked}."} for word in picked.split()[:3]]
        return json.dumps({"turns": turns})
    if names == {"request", "calls"}:
        call = schema["$defs"]["call"]["anyOf"][0]["properties"]
        return json.dumps(
            {"request": f"Do {picked}", "calls": [{"name": call["name"]["const"], "arguments": {"city": "Oslo"}}]}
        )
    if names == {"caption", "pairs"}:
        return json.dumps({"caption": f"A {picked}.", "pairs": [{"question": "Which?", "answer": "Red."}]})
    count = int(re.search(r"Write (\d+) different", prompt)[1])  # pyright: ignore[reportOptionalSubscript]
    parts = [hashlib.sha256(digest + bytes([n])).hexdigest() for n in range(count)]
    pairs = [{"question": f"What is {part[:9]} of {picked}?", "answer": f"{picked} is {part[9:20]}."} for part in parts]
    return json.dumps({"pairs": pairs})


@contextlib.contextmanager
def teacher_stub(key: str | None = None, delay: float = 0.0) -> Iterator[TeacherStub]:
    """Serves a stub until the context ends."""
    stub = TeacherStub(key, delay)

    class Handler(http.server.BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_message(self, format: str, *args: object) -> None:
            """Prints nothing."""

        def do_GET(self) -> None:
            send(self, 200, {"data": [{"id": "stub"}]})

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            if stub.key is not None and self.headers.get("Authorization") != f"Bearer {stub.key}":
                send(self, 401, {"error": {"message": f"wrong key {self.headers.get('Authorization')}"}})
                return
            with stub.lock:
                fault = stub.faults.get(len(stub.requests))
                stub.requests.append(body)
                stub.running += 1
                stub.most_running = max(stub.most_running, stub.running)
            time.sleep(stub.delay)
            with stub.lock:
                stub.running -= 1
            if fault is not None:
                fault(self)
                return
            text = stub.answer(body)
            usage = {"prompt_tokens": 100, "completion_tokens": 50}
            choice = {"index": 0, "message": {"role": "assistant", "content": text}, "finish_reason": "stop"}
            send(self, 200, {"choices": [choice], "usage": usage})

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    stub.address = f"http://127.0.0.1:{server.server_address[1]}/v1"
    thread = threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True)
    thread.start()
    try:
        yield stub
    finally:
        server.shutdown()
        server.server_close()


def send(handler: http.server.BaseHTTPRequestHandler, code: int, value: object, **headers: str) -> None:
    """Sends a response of JSON."""
    content = json.dumps(value).encode()
    handler.send_response(code)
    for name, text in {"Content-Type": "application/json", "Content-Length": str(len(content)), **headers}.items():
        handler.send_header(name.replace("_", "-"), text)
    handler.end_headers()
    handler.wfile.write(content)


def status(code: int, **headers: str) -> Fault:
    """A fault that answers with a code."""
    return lambda handler: send(handler, code, {"error": {"message": f"code {code}"}}, **headers)


def half(handler: http.server.BaseHTTPRequestHandler) -> None:
    """A fault that ends in the middle of an answer."""
    handler.send_response(200)
    handler.send_header("Content-Length", "1000")
    handler.end_headers()
    handler.wfile.write(b'{"choices": [{"message": {"conte')
    handler.wfile.flush()
    handler.close_connection = True


def wrong_json(handler: http.server.BaseHTTPRequestHandler) -> None:
    """A fault whose answer is no JSON."""
    handler.send_response(200)
    handler.send_header("Content-Length", "9")
    handler.end_headers()
    handler.wfile.write(b"<html></h")


def hang(handler: http.server.BaseHTTPRequestHandler) -> None:
    """A fault that never answers, for longer than a test waits."""
    time.sleep(3)
    handler.close_connection = True
